#!/usr/bin/env bash
# On a machine with a GPU and no network: build, check, measure and sanitize against the Python that
# is there with its torch, CMake, ninja and pybind11. Each stage is a call with a limit of its own:
#
#   bash cuda/run_on_gpu.sh STAGE [seconds]
#
#   build       240 s  the extension; each kernel once, waited for, so that a fault names its kernel;
#                      errors of output and gradients against the CPU
#   speed       420 s  hard codes, then soft ones, against flash attention and cuDNN's
#   counters    180 s  hardware counters, a kernel at a time
#   tests       480 s  all tests on CUDA tensors, those of the kernels waiting for each kernel
#   sanitizers  420 s  memcheck, racecheck and synccheck, once they have found planted errors
#
# Every stage first builds into build/gpu, where a later call on the same machine finds it done. It
# writes STAGE.log, as it goes, and for speed gpu.json, row by row, to $OUT (default:
# build/gpu/results), and touches nothing of another stage: what came before a failure stays. What
# matters is printed last.
set -uo pipefail
cd "$(dirname "$0")/.."
declare -A limits=([build]=240 [speed]=420 [counters]=180 [tests]=480 [sanitizers]=420)
stage=${1:-} total=${2:-${limits[${1:-none}]:-}}
if [ -z "$stage" ] || [ -z "${limits[$stage]:-}" ]; then
  sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0" >&2
  exit 2
fi
out=${OUT:-build/gpu/results}
python=${PYTHON:-python3}
build=$PWD/build/gpu
mkdir -p "$out" "$build" && out=$(cd "$out" && pwd)
work=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null; rm -rf "$work"' EXIT
log=$out/$stage.log
: >"$log"
summary=()
left() { echo $((total - SECONDS)); }
# Where CUDA's own packages put what is not always on PATH.
for folder in /usr/local/cuda/bin /opt/nvidia/nsight-compute/*; do PATH=$PATH:$folder; done

# step NAME LIMIT COMMAND...: bounded by its limit and by the time left. Its output goes to the log
# as it comes, the end of that to the terminal.
step() {
  local name=$1 limit=$2 start=$SECONDS before status
  shift 2
  [ "$limit" -lt "$(left)" ] || limit=$(left)
  printf '\n==> %s (at %s s, at most %s s)\n' "$name" "$SECONDS" "$limit" | tee -a "$log"
  if [ "$limit" -lt 5 ]; then
    summary+=("$name: no time left")
    return 1
  fi
  before=$(wc -l <"$log")
  timeout -k 10 "$limit" "$@" >>"$log" 2>&1
  status=$?
  tail -n "+$((before + 1))" "$log" | tail -n "${SHOWN:-3}" | cut -c 1-180
  [ "$status" -ne 124 ] && [ "$status" -ne 137 ] || status="$status (out of time)"
  summary+=("$name: status $status after $((SECONDS - start)) s")
  [ "$status" = 0 ]
}

finish() {
  printf '\n==> steps of %s\n' "$stage" | tee -a "$log"
  printf '%s\n' "${summary[@]}" "in all $SECONDS s" | tee -a "$log"
  ! printf '%s\n' "${summary[@]}" | grep -q -v -E 'status 0( |:|$)'
  exit
}

nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm,clocks.max.sm --format=csv,noheader ||
  exit 77
"$python" -c 'import sys, torch, pybind11; print(sys.version, torch.__version__, pybind11.__version__)'

# ---------------------------------------------------------------- build
# Every compiler error of every file: nobody is there to run it again. Machine code for this GPU
# alone halves the time.
architecture=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)
# Hopper's own instructions are sm_90a's.
[ "$architecture" != 90 ] || architecture=90a
build() {
  cmake -S . -B "$build" -G Ninja -DLSHKIT_CUDA="${LSHKIT_CUDA:-ON}" \
    -DPython_EXECUTABLE="$("$python" -c 'import sys; print(sys.executable)')" \
    -Dpybind11_DIR="$("$python" -m pybind11 --cmakedir)" \
    -DCMAKE_CUDA_ARCHITECTURES="${architecture}-real" ${CMAKE_OPTIONS:-} &&
    cmake --build "$build" -- -k 0
}
export -f build
export build python architecture
# By what the sources hold, not by their times: a copy of the tree may have new ones in each call.
sources=$(find CMakeLists.txt cpp cuda -type f -print0 | sort -z | xargs -0 sha256sum | sha256sum)
if [ "$(cat "$build/built" 2>/dev/null)" != "$sources" ]; then
  if ! step compile 220 bash -c build; then
    grep -n -E 'error|FAILED' "$log" | head -n 40
    finish
  fi
  echo "$sources" >"$build/built"
fi
rm -rf "$build/path" && mkdir "$build/path"
cp -r lshkit "$build/path/" && rm -f "$build"/path/lshkit/_C*.so
cp "$build"/_C*.so "$build/path/lshkit/"
export PYTHONPATH=$build/path${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
# conftest.py asks torch for deterministic algorithms, and cuBLAS asks for this then.
export CUBLAS_WORKSPACE_CONFIG=:4096:8
# Not from here, where lshkit/ has no compiled module.
step import 60 bash -c 'cd "$build" && "$python" -c "import lshkit; lshkit.show_versions()"' || finish

# ---------------------------------------------------------------- the stages
benchmark() {  # NAME LIMIT OPTIONS...
  local name=$1 limit=$2
  shift 2
  step "$name" "$limit" "$python" -m benchmarks.speed.gpu "$@"
}

stage_build() {
  SHOWN=30 CUDA_LAUNCH_BLOCKING=1 benchmark "each kernel once" 100 --quick --parts errors,pieces \
    --out "$out/once.json"
  SHOWN=20 benchmark "errors" 100 --parts errors --out "$out/errors.json"
}

stage_speed() {
  rm -f "$out/gpu.json"
  local json=(--more --out "$out/gpu.json")
  SHOWN=3 benchmark ceilings 40 "${json[@]}" --seconds 30 --parts ceilings
  SHOWN=90 benchmark hard 220 "${json[@]}" --seconds 200 --parts hard
  SHOWN=12 benchmark pieces 40 "${json[@]}" --seconds 30 --parts pieces
  SHOWN=60 benchmark soft 150 "${json[@]}" --seconds 130 --parts soft
  SHOWN=60 step table 20 "$python" -m benchmarks.speed.gpu --table "$out/gpu.json"
}

# In the order of what one wants to know: what takes most of the time first.
hard_kernels='bucket_linear bucket_pairs sum_contributions byte_sum_kernel hash_registers group_sort'
hard_kernels="$hard_kernels turn_codes pack_rows normalize_kernel normalize_backward finish_gradient"
soft_kernels='weighted_segment weighted_gather weighted_sort expand_probes reduce_probes'
soft_kernels="$soft_kernels soft_hash_registers soft_hash_back_registers"
stage_counters() {
  if ! command -v ncu >/dev/null; then
    summary+=("counters: no ncu here")
    return
  fi
  local section sections=() codes kernel kernels
  for section in SpeedOfLight LaunchStats Occupancy ComputeWorkloadAnalysis MemoryWorkloadAnalysis \
    WarpStateStats; do sections+=(--section "$section"); done
  for codes in hard soft; do
    kernels=${codes}_kernels
    for kernel in ${!kernels}; do
      [ "$(left)" -gt 15 ] || break
      SHOWN=0 step "counters of $codes: $kernel" 40 ncu --clock-control none "${sections[@]}" \
        --kernel-name-base mangled --kernel-name "regex:lshkit.*$kernel" --launch-count 2 \
        "$python" -m benchmarks.speed.gpu --once "$codes"
    done
  done
  SHOWN=60 step "counters in short" 20 "$python" -m benchmarks.speed.gpu --counters "$log"
}

options=(-q --tb=short --maxfail=30 -p no:cacheprovider -m cuda)
workers=()
stage_tests() {
  "$python" -c 'import pytest_timeout' 2>/dev/null && options+=(--timeout 60 --timeout-method thread)
  # Not by file: that of the graphs alone would keep one worker to the end.
  "$python" -c 'import xdist' 2>/dev/null && workers=(-n 8 --dist worksteal --max-worker-restart 20)
  export LSHKIT_TEST_FAILURES=$work/failures
  # Waiting for each kernel, so that a fault is the failure of the test that caused it.
  CUDA_LAUNCH_BLOCKING=1 step "tests of kernels" 150 "$python" -m pytest "${options[@]}" \
    "${workers[@]}" $(within 150) tests/cuda --ignore-glob='*_graphs.py'
  step "tests of graphs" 120 "$python" -m pytest "${options[@]}" "${workers[@]}" $(within 120) \
    tests/cuda/test_cuda_graphs.py
  step "all other tests" 240 "$python" -m pytest "${options[@]}" "${workers[@]}" $(within 240) \
    tests --ignore tests/cuda
  printf '\n==> failures\n'
  cat "$work/failures" >>"$log" 2>/dev/null
  cut -c 1-180 "$work/failures" 2>/dev/null | head -n 20
}
pytest_help=
within() {  # SECONDS: what lets pytest end before it is stopped, which would cost it its summary
  local seconds=$1
  [ -n "$pytest_help" ] || pytest_help=$("$python" -m pytest --help 2>&1)
  [ "$seconds" -lt "$(left)" ] || seconds=$(left)
  [[ $pytest_help != *--session-timeout* ]] || echo "--session-timeout=$((seconds / 10 * 8))"
}

# The filter leaves torch's own kernels alone, which are slow to check. The tool has named it
# differently over the years, so that the first one counts by which it finds what is planted.
filter_of() {  # TOOL PROGRAM: prints the filter; fails where nothing is found even without one
  local filter
  for filter in '--kernel-regex kns=lshkit' '--kernel-name kernel_substring=lshkit' \
    '--filter kernel_substring=lshkit' ''; do
    # shellcheck disable=SC2086
    timeout -k 5 30 compute-sanitizer --tool "$1" --error-exitcode 9 $filter "$2" "$1" \
      >>"$work/planted.log" 2>&1
    if [ $? -eq 9 ]; then
      echo "$filter"
      return
    fi
  done
  return 1
}
# Of every kernel that has shared memory, some, and of the graphs those of each kind of attention's
# kernels; tests/benchmarks/test_gpu_benchmark.py has these be there.
few='codes and 70-3 or bucket_sum and 8-1 or is_a_bucket_sum and 40-256-33'
few="$few or collisions and 130-17-33 and True or sampled_attention and shape1 and True"
few="$few or lower_bound and sum and shape2 or grouped or soft and True"
few="$few or soft_hash and 64-12 or soft_hash and 20-5 or steps_equal and l2"
graphs='attention_reads_nothing or hashing_and_bucket_sums or of_attention and sampled'
graphs="$graphs or of_attention and soft or of_attention and causal or without_a_warm_up"
sanitize() {  # TOOL SECONDS SELECTION FILES...
  local tool=$1 seconds=$2 selection=$3 own status caching=1
  shift 3
  [[ $* != *_graphs.py || $# -gt 1 ]] || caching=  # a capture cannot call cudaMalloc
  own=$work/$tool.$(basename "$1")
  # torch's cache would hide what is beyond a tensor. The filters are words.
  # shellcheck disable=SC2046,SC2086
  env ${caching:+PYTORCH_NO_CUDA_MEMORY_CACHING=1} timeout -k 5 "$seconds" compute-sanitizer --tool "$tool" \
    --error-exitcode 9 --print-limit 20 --target-processes all ${filters[$tool]} \
    "$python" -m pytest -q --tb=line -p no:cacheprovider -m cuda -k "$selection" \
    $(within "$seconds") "$@" >"$own" 2>&1
  status=$?
  {
    printf '\n==> %s %s: status %s\n' "$tool" "$*" "$status"
    cat "$own"
  } >>"$log"
  printf '%s %s: status %s: %s\n' "$tool" "$(basename "$1")" "$status" \
    "$(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY|passed|failed' "$own" | tail -n 2 | tr '\n' ' ')" \
    >>"$work/sanitized"
}
declare -A filters=()
stage_sanitizers() {
  if ! command -v compute-sanitizer >/dev/null; then
    summary+=("sanitizers: no compute-sanitizer here")
    return
  fi
  local tool file jobs=() seconds
  step "planted errors" 60 nvcc -arch="sm_$architecture" -o "$work/planted" \
    cuda/tests/planted_errors.cu || return
  for tool in memcheck racecheck; do
    if filters[$tool]=$(filter_of "$tool" "$work/planted"); then
      summary+=("$tool finds what is planted, with '${filters[$tool]}': status 0 ")
    else
      summary+=("$tool does not find what is planted")
      cat "$work/planted.log" >>"$log"
    fi
  done
  filters[synccheck]=${filters[racecheck]:-}
  seconds=$(($(left) - 20))
  [ "$seconds" -ge 30 ] || return
  pytest_help=$("$python" -m pytest --help 2>&1)
  for file in tests/cuda/test_cuda*.py; do
    [[ $file != *_fakes.py ]] || continue  # it calls nothing of CUDA, which the tool takes as a failure
    if [[ $file == *_graphs.py ]]; then  # -k looks at the names of files too
      sanitize memcheck "$seconds" "$graphs" "$file" & jobs+=($!)
    else
      sanitize memcheck "$seconds" 'not streams and not compile and not graph' "$file" & jobs+=($!)
    fi
  done
  for tool in racecheck synccheck; do
    sanitize $tool "$seconds" "($few) and not graph and not compile" tests/cuda/test_cuda*.py &
    jobs+=($!)
  done
  wait "${jobs[@]}"
  grep -h -E '^========= (Invalid|Error|Race|Barrier|Program hit|Uninit)' "$log" |
    sort | uniq -c | sort -rn | cut -c 1-160 | head -n 10
  while read -r line; do summary+=("$line"); done <"$work/sanitized"
}

"stage_$stage"
finish
