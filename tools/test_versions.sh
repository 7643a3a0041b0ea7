#!/bin/sh
# Runs the quick Python tests with each combination of releases in tools/tested.txt, oldest first, and fails if any of them fails.
# Each has a copy of the checkout in build/versions, with a .venv of its own. A second run installs and compiles there what has changed.
set -eu

cd "$(dirname "$0")/.."
failed=
mkdir -p build
grep '^torch==' tools/tested.txt >build/tested.txt
while read -r releases <&3; do
  # Such as torch2.15.0-transformers5.24.0-peft0.21.2.
  name=$(printf '%s\n' "$releases" | tr ' ' '\n' | sed -n 's/^\(torch\|transformers\|peft\)==/\1/p' | paste -s -d -)
  folder=build/versions/$name
  mkdir -p "$folder"
  find "$folder" -mindepth 1 -maxdepth 1 ! -name .venv ! -name build -exec rm -rf {} +
  git ls-files -z --cached --others --exclude-standard | tar -c --null --ignore-failed-read -T - | tar -x -C "$folder"
  printf '%s\n' "$releases" >"$folder/tools/tested.txt"
  printf 'torch_mesh: testing with %s\n' "$releases" >&2
  # Settings given to make here, such as another torch, do not apply there; PYTHON and PYTEST do.
  env -u TORCH -u LATEST -u MAKEFLAGS -u MFLAGS -u MAKEOVERRIDES make -C "$folder" test-python || failed="$failed $name"
done 3<build/tested.txt
[ -z "$failed" ] || { printf 'torch_mesh: tests fail with:%s\n' "$failed" >&2; exit 1; }
