#!/bin/sh
# Runs the tests marked smoke under compute-sanitizer. Usage: tools/gpu_sanitizer.sh PYTHON [arguments of pytest ...]
# Exit status: 0; 1 if a tool found something or a test failed; 2 without compute-sanitizer or a GPU.
set -eu

cd "$(dirname "$0")/.."
python=${1:?usage: tools/gpu_sanitizer.sh PYTHON [arguments of pytest ...]}
shift

say() { printf 'torch_mesh: %s\n' "$*" >&2; }

sanitizer=$(command -v compute-sanitizer || command -v /usr/local/cuda/bin/compute-sanitizer) || sanitizer=
missing=
[ -n "$sanitizer" ] || missing='there is no compute-sanitizer; it comes with the CUDA toolkit and has to be on PATH'
"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || missing="${missing:+$missing; }torch sees no CUDA device"
if [ -n "$missing" ]; then
  say "$missing: nothing was checked"
  exit 2
fi

failed=
check() {
  name=$1
  shift
  say "$name"
  # A tool that found something exits with 9, whatever pytest's status. With host backtraces a tool keeps the Python
  # frames of each allocation, and so the models whose files have to be closed at a test's end.
  "$sanitizer" --error-exitcode 9 --show-backtrace device "$@" || failed="$failed, $name ($?)"
}

# Errors that the driver returns are not reported: torch_mesh raises its own as exceptions, and torch probes addresses
# that are not the device's.
smoke="$python -m pytest -q -m smoke -p no:cacheprovider"
models=tests/models/test_gpu_experts.py
# shellcheck disable=SC2086  # a list of words
{
  # torch's allocator hands out parts of large blocks, and no tool knows where such a part ends: without it each tensor is an
  # allocation. A capture may not allocate in that way: its test is skipped then, and has a run of its own.
  export PYTORCH_NO_CUDA_MEMORY_CACHING=1
  check memcheck --tool memcheck --report-api-errors no $smoke tests/gpu $models "$@"
  check initcheck --tool initcheck $smoke tests/gpu "$@" # without models, whose kernels are other libraries'
  unset PYTORCH_NO_CUDA_MEMORY_CACHING
  check 'memcheck, captured' --tool memcheck --report-api-errors no $smoke -k replayed $models "$@"
  check racecheck --tool racecheck $smoke tests/gpu $models "$@"
  check synccheck --tool synccheck $smoke tests/gpu $models "$@"
}
if [ -n "$failed" ]; then
  say "failed: ${failed#, }"
  exit 1
fi
say 'all tools found nothing'
