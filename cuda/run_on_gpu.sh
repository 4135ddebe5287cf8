#!/usr/bin/env bash
# On a machine with a GPU and no network: build, check, measure and sanitize in one call of under
# 9 minutes, against the Python that is there with its torch, CMake, ninja and pybind11.
#
#   bash cuda/run_on_gpu.sh [seconds in all, default 530]
#
# Into $OUT (default: benchmarks/results) go gpu.json, which benchmarks.speed.gpu writes row by row,
# and at most 7 logs. What matters is printed last: the failures and the table.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-benchmarks/results}
total=${1:-530}
python=${PYTHON:-python3}
mkdir -p "$out" && out=$(cd "$out" && pwd)
work=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null; rm -rf "$work"' EXIT
summary=()
left() { echo $((total - SECONDS)); }
# Where CUDA's own packages put what is not always on PATH.
for folder in /usr/local/cuda/bin /opt/nvidia/nsight-compute/*; do PATH=$PATH:$folder; done

# step NAME LOG LIMIT COMMAND...: bounded by its limit and by the time left, its output to the log,
# the end of that to the terminal.
step() {
  local name=$1 log=$out/$2 limit=$3 start=$SECONDS status
  shift 3
  [ "$limit" -lt "$(left)" ] || limit=$(left)
  printf '\n==> %s (at %s s, at most %s s)\n' "$name" "$SECONDS" "$limit"
  if [ "$limit" -lt 5 ]; then
    summary+=("$name: no time left")
    return 1
  fi
  printf '\n==> %s\n' "$name" >>"$log"
  timeout -k 10 "$limit" "$@" >"$work/step" 2>&1
  status=$?
  cat "$work/step" >>"$log"
  tail -n "${SHOWN:-3}" "$work/step" | cut -c 1-180
  [ "$status" -ne 124 ] && [ "$status" -ne 137 ] || status="$status (out of time)"
  summary+=("$name: status $status after $((SECONDS - start)) s")
  [ "$status" = 0 ]
}

nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm,clocks.max.sm --format=csv,noheader ||
  exit 77
"$python" -c 'import sys, torch, pybind11; print(sys.version, torch.__version__, pybind11.__version__)'

# ---------------------------------------------------------------- build
# Every compiler error of every file: nobody is there to run it again. Machine code for this GPU
# alone halves the time.
architecture=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)
build() {
  cmake -S . -B "$work/build" -G Ninja -DLSHKIT_CUDA="${LSHKIT_CUDA:-ON}" \
    -DPython_EXECUTABLE="$("$python" -c 'import sys; print(sys.executable)')" \
    -Dpybind11_DIR="$("$python" -m pybind11 --cmakedir)" \
    -DCMAKE_CUDA_ARCHITECTURES="${architecture}-real" ${CMAKE_OPTIONS:-} &&
    cmake --build "$work/build" -- -k 0
}
export -f build
export work python architecture
if ! step build build.log 240 bash -c build; then
  grep -n -E 'error|FAILED' "$out/build.log" | head -n 40
  exit 1
fi
mkdir "$work/path"
cp -r lshkit "$work/path/" && cp "$work"/build/_C*.so "$work/path/lshkit/"
export PYTHONPATH=$work/path${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
# conftest.py asks torch for deterministic algorithms, and cuBLAS asks for this then.
export CUBLAS_WORKSPACE_CONFIG=:4096:8
# Not from here, where lshkit/ has no compiled module.
step import build.log 60 bash -c 'cd "$work" && "$python" -c "import lshkit; lshkit.show_versions()"' ||
  exit 1

# ---------------------------------------------------------------- each kernel once, then speed
benchmark() {  # NAME SECONDS PARTS
  step "benchmark: $3" benchmark.log "$(($2 + 25))" "$python" -m benchmarks.speed.gpu --more \
    --out "$out/gpu.json" --seconds "$2" --parts "$3"
}
rm -f "$out/gpu.json"
SHOWN=14 benchmark quick 30 ceilings,errors
export LSHKIT_TEST_FAILURES=$work/failures
options=(-q --tb=short --maxfail=30 -p no:cacheprovider -m cuda)
"$python" -c 'import pytest_timeout' 2>/dev/null && options+=(--timeout 60 --timeout-method thread)
pytest_help=$("$python" -m pytest --help 2>&1)
within() {  # SECONDS: what lets pytest end before it is stopped, which would cost it its summary
  local seconds=$1
  [ "$seconds" -lt "$(left)" ] || seconds=$(left)
  [[ $pytest_help != *--session-timeout* ]] || echo "--session-timeout=$((seconds / 10 * 8))"
}
workers=()
"$python" -c 'import xdist' 2>/dev/null && workers=(-n 8 --dist loadfile --max-worker-restart 20)
# shellcheck disable=SC2046
step "kernels' tests" kernels.log 80 "$python" -m pytest "${options[@]}" "${workers[@]}" \
  $(within 80) tests/cuda/test_cuda*.py
SHOWN=70 benchmark hard 110 hard,pieces

# ---------------------------------------------------------------- all tests, beside the sanitizers
# Nothing is timed here. torch's cache would hide what is beyond a tensor; the filter leaves torch's
# own kernels alone. The help is kept whole: piped to grep -q the tool fails, and pipefail says so.
sanitizer_help=$(compute-sanitizer --help 2>&1)
sanitize() {  # TOOL SELECTION FILES...
  local tool=$1 selection=$2 log=$work/sanitize.$1.$RANDOM filter=() status
  shift 2
  [[ $sanitizer_help != *--kernel-regex* ]] || filter=(--kernel-regex kns=lshkit)
  for filters in "${filter[*]}" ""; do
    # shellcheck disable=SC2046,SC2086
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout -k 5 "$sanitize_seconds" compute-sanitizer \
      --tool "$tool" --error-exitcode 9 --print-limit 20 --target-processes all $filters \
      "$python" -m pytest -q --tb=line -p no:cacheprovider -m cuda -k "$selection" \
      $(within "$sanitize_seconds") "$@" \
      >"$log" 2>&1
    status=$?
    grep -q -E 'passed|failed|skipped|ERROR SUMMARY' "$log" || [ "$status" -eq 124 ] || continue
    break
  done
  {
    printf '\n==> %s %s: status %s\n' "$tool" "$*" "$status"
    cat "$log"
  } >>"$out/sanitizers.log"
  printf '%s %s: status %s: %s\n' "$tool" "$(basename "$1")" "$status" \
    "$(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY|passed|failed' "$log" | tail -n 2 | tr '\n' ' ')" \
    >>"$work/sanitized"
}
sanitize_seconds=$(($(left) - 55))
[ "$sanitize_seconds" -lt 100 ] || sanitize_seconds=100
jobs=()
if ! command -v compute-sanitizer >/dev/null; then
  summary+=("sanitizers: no compute-sanitizer here")
elif [ "$sanitize_seconds" -lt 20 ]; then
  summary+=("sanitizers: no time left")
else
  printf '\n==> sanitizers (at %s s, at most %s s)\n' "$SECONDS" "$sanitize_seconds"
  for file in tests/cuda/test_cuda*.py; do
    sanitize memcheck 'not streams and not graph and not compile' "$file" & jobs+=($!)
  done
  # Of every kernel that has shared memory, some; tests/benchmarks/test_gpu_benchmark.py has these be there.
  few='codes and 70-3 or bucket_sum and 8-1 or is_a_bucket_sum and 40-256-33'
  few="$few or collisions and 130-17-33 and True or sampled_attention and shape1 and True"
  few="$few or lower_bound and sum and shape2 or window and l2 or grouped or soft and True"
  few="$few or soft_hash and 64-12 or soft_hash and 20-5 or steps_equal and l2"
  for tool in racecheck synccheck; do
    sanitize $tool "($few) and not graph and not compile" tests/cuda/test_cuda*.py & jobs+=($!)
  done
fi
# shellcheck disable=SC2046
step "all tests on CUDA tensors" pytest.log 100 "$python" -m pytest "${options[@]}" "${workers[@]}" \
  $(within 100) tests --ignore-glob='*/test_cuda*.py'
[ "${#jobs[@]}" = 0 ] || wait "${jobs[@]}"
cat "$work/sanitized" 2>/dev/null
SHOWN=40 benchmark soft 60 soft

# ---------------------------------------------------------------- inside the kernels
if command -v ncu >/dev/null; then
  sections=()
  for section in SpeedOfLight LaunchStats Occupancy ComputeWorkloadAnalysis MemoryWorkloadAnalysis \
    WarpStateStats; do sections+=(--section "$section"); done
  # Of hard codes: forward, and backward up to the first sums of contributions.
  for codes in hard soft; do
    SHOWN=0 step "hardware counters: $codes" counters.log 45 ncu --clock-control none \
      "${sections[@]}" --kernel-name-base mangled --kernel-name regex:lshkit --launch-count 24 \
      "$python" -m benchmarks.speed.gpu --once "$codes"
  done
fi

# ---------------------------------------------------------------- what matters, last
printf '\n==> hardware counters\n'
"$python" - "$out/counters.log" <<'END'
import pathlib, re, sys

path = pathlib.Path(sys.argv[1])
text = path.read_text(errors="replace") if path.exists() else ""
shown = {
    **{"Duration": "took", "Compute (SM) Throughput": "SM %", "DRAM Throughput": "DRAM %"},
    **{"Issue Slots Busy": "issue %", "Achieved Occupancy": "occupancy %"},
    **{"Registers Per Thread": "registers"},
}
for kernel in re.split(r"\n(?=  \S.*Context \d)", text)[1:]:
    name = re.sub(r"void |\([\w:]+\)|lshkit::(cuda::)?", "", kernel.splitlines()[0]).split("(")[0]
    numbers = [name.strip()[:40]]
    for line in kernel.splitlines():
        words = re.split(r"  +", line.strip())
        if words[0] in shown and words[-1] != words[0]:
            unit = words[1] + " " if words[0] == "Duration" else ""
            numbers.append(f"{shown[words[0]]} {unit}{words[-1]}")
    print(", ".join(numbers)[:150])
END
printf '\n==> failures\n'
cat "$work/failures" >>"$out/pytest.log" 2>/dev/null
cut -c 1-180 "$work/failures" 2>/dev/null | head -n 20
grep -h -E '^========= (Invalid|Error|Race|Barrier|Program hit|Uninit)' "$out/sanitizers.log" 2>/dev/null |
  sort | uniq -c | sort -rn | cut -c 1-160 | head -n 10
grep -h -E ' (passed|failed)' "$out/kernels.log" "$out/pytest.log" 2>/dev/null
cat "$work/sanitized" 2>/dev/null
printf '\n==> table\n'
"$python" -m benchmarks.speed.gpu --table "$out/gpu.json"
"$python" - "$out/gpu.json" <<'END'
import json, sys
for error in json.load(open(sys.argv[1])).get("errors", [])[:10]:
    print("benchmark:", error[:200])
END
printf '\n==> steps\n'
printf '%s\n' "${summary[@]}"
printf 'in all %s s\n' "$SECONDS"
! printf '%s\n' "${summary[@]}" | grep -q -v 'status 0 '
