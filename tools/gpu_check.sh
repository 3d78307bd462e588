#!/usr/bin/env bash
# Checks refattn on a machine with an NVIDIA GPU: certifies the CuPy backend, runs the test suite on it, trains a model,
# and times softmax attention there beside PyTorch's. Needs CuPy, what refattn and its tests need (array-api-compat,
# click, rich, safetensors, threadpoolctl, pytest, hypothesis), and PyTorch if it is to be timed. Run from the repository's root:  bash tools/gpu_check.sh [PYTHON]
set -u
python=${1:-python3}
export PYTHONPATH=. PYTHONUNBUFFERED=1
failed=0

echo "== device and versions"
"$python" - <<'PY' || exit 1
import importlib.metadata as metadata
import cupy

properties = cupy.cuda.runtime.getDeviceProperties(0)
print(properties["name"].decode(), f"{properties['totalGlobalMem'] >> 30} GiB", "CUDA", cupy.cuda.runtime.runtimeGetVersion())
for name in ("numpy", "array-api-compat", "torch"):
    try:
        print(name, metadata.version(name))
    except metadata.PackageNotFoundError:
        print(name, "not installed")
print("cupy", cupy.__version__)
PY

echo "== refattn check --backend cupy"
"$python" -m refattn check --backend cupy || failed=1

echo "== test suite on CuPy"
REFATTN_TEST_BACKENDS=cupy "$python" -m pytest -q -p no:cacheprovider tests/mechanisms tests/model tests/ops tests/train tests/backends tests/test_xp.py || failed=1

echo "== training on CuPy"
out=$(mktemp -d)
"$python" -m refattn train softmax --backend cupy --steps 50 --set score_bytes=16384 --set sample_bytes=40 --out "$out/run" || failed=1
rm -rf "$out"

echo "== timings"
"$python" tools/gpu_timings.py || failed=1

exit "$failed"
