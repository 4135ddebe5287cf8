#!/usr/bin/env bash
# On a machine with a GPU and no network: build, test, sanitize and benchmark in one call of under
# 9 minutes, against the Python that is there with its torch, CMake, ninja, pybind11 and
# scikit-build-core. Results and logs go to $OUT (default: benchmarks/results), gpu.json last.
#
#   bash cuda/run_on_gpu.sh [seconds for the benchmark, default 200]
set -uo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-benchmarks/results}
seconds=${1:-200}
python=${PYTHON:-python3}
mkdir -p "$out"
failed=()
begin=$SECONDS
step() {  # NAME LIMIT COMMAND...: its output to a log, its end to the terminal
  local name=$1 limit=$2 start=$SECONDS
  shift 2
  printf '\n==> %s (at %s s)\n' "$name" "$((SECONDS - begin))"
  timeout "$limit" "$@" >"$out/$name.log" 2>&1
  local status=$?
  tail -n "${LINES_SHOWN:-12}" "$out/$name.log"
  printf '%s: status %s after %s s\n' "$name" "$status" "$((SECONDS - start))"
  [ "$status" -eq 0 ] || failed+=("$name")
}

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || exit 77
packages=$(mktemp -d)
step build 240 "$python" -m pip install --no-build-isolation --no-deps --no-index --target "$packages" \
  -C cmake.define.LSHKIT_CUDA=ON .
export PYTHONPATH=$packages${PYTHONPATH:+:$PYTHONPATH}
"$python" -c 'import lshkit; lshkit.show_versions()' || exit 1
# From elsewhere: the source tree has no compiled module.
step pytest 150 "$python" -m pytest -q -x tests/test_cuda.py
if command -v compute-sanitizer >/dev/null; then
  small='test_codes and 70-3-hadamard or test_bucket_sum and float32-8 or test_grouped or test_bad_rows'
  for tool in memcheck racecheck; do
    step "$tool" 90 compute-sanitizer --tool "$tool" --error-exitcode 1 \
      "$python" -m pytest -q -x -p no:cacheprovider tests/test_cuda.py -k "$small"
  done
else
  echo "no compute-sanitizer here: not run"
fi
LINES_SHOWN=60 step benchmark "$((seconds + 60))" "$python" benchmarks/gpu.py --seconds "$seconds" \
  --out "$out/gpu.json"
printf '\nin all %s s; failed: %s\n' "$((SECONDS - begin))" "${failed[*]:-none}"
[ ${#failed[@]} -eq 0 ]
