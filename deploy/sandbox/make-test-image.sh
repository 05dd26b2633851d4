#!/bin/sh
# Makes the image of tests/docker (Debian with Python, `tangram-test:latest`) without a registry: debootstrap, docker
# import. Does nothing if it is there. About 45 s; needs root, a Debian mirror and an engine (start-dockerd.sh).
# TANGRAM_TEST_ROOTFS names a root file system that was made before.
set -eu
image=${1:-tangram-test:latest}
suite=${SUITE:-bookworm}

if docker image inspect "$image" >/dev/null 2>&1; then
  echo "$image is there already" >&2
  exit 0
fi
docker version >/dev/null || exit 1
root=${TANGRAM_TEST_ROOTFS:-}
if [ -z "$root" ]; then
  command -v debootstrap >/dev/null || { echo "debootstrap is not installed (apt-get install debootstrap)" >&2; exit 1; }
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  root=$work/root
  debootstrap --variant=minbase --include=python3 "$suite" "$root" ${MIRROR:-} >"$work/log" 2>&1 || { tail -5 "$work/log" >&2; exit 1; }
fi
tar -C "$root" -c --exclude='./var/cache/apt/*' --exclude='./var/lib/apt/lists/*' --exclude='./dev/*' --exclude='./proc/*' \
  --exclude='./sys/*' . | docker import --change 'CMD ["/bin/sh"]' - "$image" >/dev/null
echo "made $image" >&2
