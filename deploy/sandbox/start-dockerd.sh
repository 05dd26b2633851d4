#!/bin/sh
# Starts a Docker engine in the background if none answers. Its process id is written to $1 (default: /tmp/tangram-dockerd.pid)
# only if it was started here; end it with: kill "$(cat /tmp/tangram-dockerd.pid)". Needs root.
set -eu
pid_file=${1:-/tmp/tangram-dockerd.pid}
answers() { docker version >/dev/null 2>&1; }

if answers; then
  echo "an engine answers already" >&2
  exit 0
fi
command -v dockerd >/dev/null || { echo "dockerd is not installed (Debian: apt-get install docker.io)" >&2; exit 1; }
# After a crash the file is still there, and dockerd refuses to start if anything else has its number by now.
old=/var/run/docker.pid
if [ -f "$old" ] && ! grep -qs dockerd "/proc/$(cat "$old")/comm"; then rm -f "$old"; fi
log=${pid_file%.pid}.log
# Both streams go to a file: an engine that shares a terminal or pipe with its caller would hold it open.
nohup dockerd >"$log" 2>&1 </dev/null &
pid=$!
echo "$pid" >"$pid_file"
tries=0
until answers; do
  tries=$((tries + 1))
  if [ "$tries" -gt 120 ] || ! kill -0 "$pid" 2>/dev/null; then
    kill "$pid" 2>/dev/null || true
    rm -f "$pid_file"
    echo "dockerd did not start:" >&2
    tail -5 "$log" >&2
    exit 1
  fi
  sleep 0.25
done
echo "started, pid $pid, log $log" >&2
