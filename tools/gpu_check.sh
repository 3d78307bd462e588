#!/usr/bin/env bash
# Checks refattn on a machine with an NVIDIA GPU: stages in the order of what they decide, each with a time limit and a log,
# and no more in all than SECONDS_IN_ALL (420). The last lines are the tables of docs/benchmarks/gpu.md. Needs CuPy, what
# refattn and its tests need, and PyTorch with CUDA for what is compared with it. From the repository's root:
#   bash tools/gpu_check.sh [FOLDER FOR LOGS] [PYTHON]
# SHORT=1 runs a little of each stage: with tests/backends/double in PYTHONPATH it tests this script without a GPU.
set -u
logs=${1:-$(mktemp -d)}
python=${2:-python3}
here=$(dirname "$0")
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
export CUPY_CACHE_DIR=${CUPY_CACHE_DIR:-$logs/cache} TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$logs/cache}
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$logs/cache}
short=${SHORT:+--short}
small=${SHORT:+--steps 2 --set width=8 --set layers=1 --set context=16 --set batch=2 --set score_bytes=64}
mkdir -p "$logs/cache"
start=$(date +%s)
share=${SECONDS_IN_ALL:-420}
: >"$logs/rows"

stage() { # NAME LIMIT COMMAND...: a log, and a row of the table; no more than what is left of the time
    local name=$1 limit=$2 left=$((share - $(date +%s) + start)) began code result
    shift 2
    [ "$left" -lt "$limit" ] && limit=$left
    [ "$limit" -lt 5 ] && { echo "| $name | not run | 0 | no time left |" >>"$logs/rows"; return; }
    began=$(date +%s)
    timeout -k 5 "$limit" "$@" >"$logs/$name.txt" 2>&1
    code=$?
    result=$(grep -aE ' passed|: agrees:|: disagrees:|^result:|stopped after|^step [0-9]+' "$logs/$name.txt" | tail -1)
    [ -n "$result" ] || result=$(tail -1 "$logs/$name.txt")
    case $code in 0) code=yes ;; 124 | 137) code="out of time" ;; *) code="no ($code)" ;; esac
    echo "| $name | $code | $(($(date +%s) - began)) | $(tr '|' '/' <<<"$result" | cut -c1-150) |" >>"$logs/rows"
}

# 1. What CuPy answers, and every implementation beside NumPy's. Alone, so that what follows finds its kernels compiled.
stage first 90 "$python" "$here/gpu_first.py"
cat "$logs/first.txt"
# 2. Times, alone on the device.
stage timings 130 "$python" "$here/gpu_timings.py" $short
cat "$logs/timings.txt"
# 3. Side by side: kernels that are no part of refattn; what certifies refattn, by mechanism; the tests over libraries;
# trainings. What is longest starts first.
for group in "efficient" "math cupy" "flash triton" "cudnn torch" "flex" "fla sage"; do
    # shellcheck disable=SC2086  # a group is several words
    [ -n "$short" ] && [ "$group" != "math cupy" ] || stage "verify-${group// /-}" 200 "$python" "$here/gpu_verify.py" $short $group &
done
for m in graph_energy koopman softmax delta growing higher_order sympformer; do
    [ -n "$short" ] && [ "$m" != growing ] || stage "check-$m" 280 "$python" -m refattn check "$m" --backend cupy &
done
tests=(tests/mechanisms tests/model tests/ops tests/train tests/backends tests/test_xp.py)
[ -n "$short" ] && tests=(tests/test_xp.py)
# A plug-in that times benchmarks does not go with several workers.
REFATTN_TEST_BACKENDS=cupy stage tests 240 "$python" -m pytest -q -p no:cacheprovider -p no:benchmark -n 3 --timeout=100 \
    -k cupy "${tests[@]}" &
for m in koopman softmax delta; do
    # shellcheck disable=SC2086  # several words
    [ -n "$short" ] && [ "$m" != softmax ] || stage "train-$m" 150 "$python" -m refattn train "$m" --backend cupy \
        --steps 20 --set score_bytes=4096 --set sample_bytes=20 $small --out "$logs/run-$m" &
done
wait

rm -rf "$logs"/run-* "$logs/cache"
{
    echo "$(sed -n 's/^device: //p' "$logs/first.txt"). $(date +%F), $(($(date +%s) - start)) s in all."
    echo
    cat "$logs/timings.txt"
    echo
    echo "### Implementations beside NumPy's, float64"
    echo
    grep '^|' "$logs/first.txt"
    echo
    echo "### Kernels on the device, verified with gradients"
    echo
    cat "$logs"/verify-*.txt | grep -a '^|' | awk '!seen[$0]++'
    echo
    echo "### Stages"
    echo
    echo "| stage | passed | s | result |"
    echo "| --- | --- | --- | --- |"
    cat "$logs/rows"
} >"$logs/tables.md"
echo "== what disagrees"
grep -ahE '^[a-z]+, (float|bfloat)[0-9]+, ' "$logs"/verify-*.txt | head -60
grep -ahE ' disagrees |^(FAILED|ERROR) ' "$logs"/check-*.txt "$logs/tests.txt" | head -40
echo "== tables"
cat "$logs/tables.md"
tar -czf "$logs/all.tgz" -C "$logs" --exclude=all.tgz . 2>/dev/null # what comes back may be few files
! grep -qvE '^\| [^|]* \| yes \|' "$logs/rows" # by the second column: a result may say "0 not run"
