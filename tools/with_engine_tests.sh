#!/bin/sh
# Runs a command, and beside it the engine's C++ tests, whose output follows. Fails if either fails.
# Usage: tools/with_engine_tests.sh COMMAND [ARGUMENT...]
set -u

cd "$(dirname "$0")/.."
folder=build/engine-tests
"$folder/engine_tests" --gtest_brief=1 >"$folder/log" 2>&1 &
engine=$!
trap 'kill "$engine" 2>/dev/null; exit 130' INT TERM
"$@"
status=$?
wait "$engine"
engine_status=$?
cat "$folder/log"
[ "$status" -ne 0 ] || status=$engine_status
exit "$status"
