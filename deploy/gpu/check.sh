#!/bin/sh
# The GPU tests and `tangram bench gpu` on a machine with a GPU, in under 8 minutes. From a checkout:
#   sh deploy/gpu/check.sh [PYTHON] [FOLDER]
# PYTHON has torch with CUDA; what else is needed is installed beside it, into FOLDER/venv, which sees its packages. What is found
# is written into FOLDER (default: gpu-check): device.txt, tests.txt, bench.json.
set -eu
cd "$(dirname "$0")/../.."
python=${1:-python3}
folder=${2:-gpu-check}
mkdir -p "$folder"
"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available() and "torch finds no GPU")'
"$python" -m venv --system-site-packages "$folder/venv"
"$folder/venv/bin/pip" install -q -e '.[local]' pytest pytest-asyncio pytest-timeout hypothesis nvidia-ml-py httpx
own="$folder/venv/bin/python"
"$own" -m tangram doctor --json > "$folder/device.txt" || true
status=0
timeout 240 "$own" -m pytest -q -p no:cacheprovider tests/gpu/test_weights.py tests/gpu/test_cuda.py \
  > "$folder/tests.txt" 2>&1 || status=$?
tail -n 15 "$folder/tests.txt"
timeout 180 "$own" -m tangram bench gpu --weights 4096 --rounds 5 --seconds 10 --json > "$folder/bench.json" || status=$?
cat "$folder/bench.json"
exit $status
