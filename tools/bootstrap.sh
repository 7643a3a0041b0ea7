#!/bin/sh
# Brings a checkout to the point where torch_mesh imports: system packages, .venv, torch, requirements, extension.
# Usage: tools/bootstrap.sh [--test | --gpu | --dev | --wheel]. --test adds the packages for the Python tests, --gpu
# those for tests and benchmarks on a GPU, --dev also those for the engine's tests, style checks and the site, --wheel
# those for making a wheel.
# TORCH=system uses torch and all other packages from where $PYTHON finds them. .venv then holds only torch_mesh.
# Other packages have the versions in the last line of tools/tested.txt; LATEST=1 takes the newest.
# Each step leaves a stamp in .venv with a hash of its inputs, so a second run does nothing.
set -eu

cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
pins=$(tail -n 1 tools/tested.txt | tr ' ' '\n')
torch=${TORCH:-$(printf '%s\n' "$pins" | grep '^torch==')}
latest=${LATEST:-}
cxx=${CXX:-g++}
venv_python=.venv/bin/python
stamps=.venv/stamps

groups='build run'
case "${1-}" in
  '') ;;
  --test) groups='build run test' ;;
  --gpu) groups='build run gpu' ;;
  --dev) groups='build run test style docs' ;;
  --wheel) groups='build run wheel' ;;
  *) echo "usage: $0 [--test | --gpu | --dev | --wheel]" >&2; exit 2 ;;
esac

say() { printf 'torch_mesh: %s\n' "$*" >&2; }
die() { say "$@"; exit 1; }

check_python() {
  command -v "$python" >/dev/null || die "there is no '$python'; install Python 3.10 or newer, or name it: make PYTHON=/path/to/python3"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    die "'$python' is $("$python" --version 2>&1), torch_mesh needs 3.10 or newer; name another: make PYTHON=/path/to/python3"
}

# CXX may have arguments, such as those of ccache, quoted if they contain spaces. setup.py parses it the same way.
compiler() { eval "$cxx" '"$@"'; }
compiler_is_there() ( eval "set -- $cxx" && command -v "$1" >/dev/null )
has_header() { printf '#include <%s>\n' "$1" | compiler -std=c++20 -x c++ -E - >/dev/null 2>&1; }

# Debian's Python lacks its headers and ensurepip; other builds include both.
python_package() {
  "$python" -c 'import sys; print("python%d.%d-%s" % (*sys.version_info[:2], sys.argv[1]))' "$1"
}

required_packages() {
  compiler_is_there || echo g++
  has_header xxhash.h || echo libxxhash-dev
  "$python" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' ||
    python_package dev
  [ "$torch" = system ] || "$python" -c 'import ensurepip, venv' 2>/dev/null || python_package venv
  case "$groups" in *style*) has_header gtest/gtest.h || echo libgtest-dev ;; esac
}

optional_packages() { has_header liburing.h || echo liburing-dev; }

apt_install() {
  DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@"
}

install_system_packages() {
  required=$(required_packages | tr '\n' ' ')
  optional=$(optional_packages | tr '\n' ' ')
  [ -n "$required$optional" ] || return 0
  if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
    say "installing system packages: $required$optional"
    apt-get update -q || say "apt-get update failed; going on with the package lists that are there"
    # shellcheck disable=SC2086  # a list of names
    if [ -n "$required" ]; then apt_install $required || die "could not install: $required"; fi
    # shellcheck disable=SC2086
    if [ -n "$optional" ]; then apt_install $optional || say "could not install: $optional"; fi
    # g++ may have been installed just now, so check the missing packages again.
    required=$(required_packages | tr '\n' ' ')
    optional=$(optional_packages | tr '\n' ' ')
  fi
  [ -z "$required" ] ||
    die "these system packages are missing: $required- install them with: sudo apt-get install $required$optional"
  [ -z "$optional" ] ||
    say "building without io_uring: reads will go through a pool of threads; to have it: sudo apt-get install $optional"
}

# The folders where $python finds packages, pip included, if .venv uses these too.
system_folders() {
  [ "$torch" = system ] || return 0
  "$python" -c 'import sys; print("\n".join(p for p in sys.path if p.endswith(("site-packages", "dist-packages"))))'
}

make_venv() {
  folders=$(system_folders)
  if "$venv_python" -m pip --version >/dev/null 2>&1 && [ "$(cat "$stamps/system" 2>/dev/null)" = "$folders" ]; then
    ours=$("$venv_python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    asked=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    [ "$ours" = "$asked" ] || say ".venv stays with Python $ours although $python is $asked; remove .venv to change over"
    mkdir -p "$stamps"
  elif [ -z "$folders" ]; then
    say "creating .venv"
    "$python" -m venv --clear .venv
    mkdir -p "$stamps"
  else
    say "creating .venv beside $folders"
    "$python" -m venv --clear --without-pip .venv
    mkdir -p "$stamps"
    printf '%s\n' "$folders" >"$("$venv_python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/system.pth"
    stamp system "$folders"
  fi
}

hash_of() { sha256sum | cut -d ' ' -f 1; }
is_stamped() { [ "$(cat "$stamps/$1" 2>/dev/null)" = "$2" ]; }
stamp() { printf '%s\n' "$2" >"$stamps/$1"; }
torch_version() { "$venv_python" -c 'from importlib.metadata import version; print(version("torch"))'; }

# torch alone and first: with other requirements in the same command pip may choose another build of it.
install_torch() {
  if [ "$torch" = system ]; then
    torch_version >/dev/null 2>&1 || die "TORCH=system, but '$python' has no torch; name the Python that has: make PYTHON=/path/to/python3"
    return
  fi
  if is_stamped torch "$torch"; then return; fi
  say "installing $torch"
  # shellcheck disable=SC2086  # TORCH may carry options of pip, such as an index
  "$venv_python" -m pip install $torch
  stamp torch "$torch"
}

install_requirements() {
  wanted=$(for group in $groups; do "$venv_python" tools/requirements.py "$group"; done)
  tested=$(if [ "$torch" != system ] && [ -z "$latest" ]; then printf '%s\n' "$pins" | grep -v '^torch=='; fi)
  key=$(printf '%s\n%s\n%s\n' "$torch" "$wanted" "$tested" | hash_of)
  name="requirements-$(printf '%s' "$groups" | tr ' ' '-')"
  if [ -n "$latest" ]; then
    rm -f "$stamps"/requirements-*  # what is newest changes from day to day, and is not what others want
  elif is_stamped "$name" "$key"; then
    return
  fi
  say "installing requirements"
  # Name the installed torch too, so that a conflict with it is an error and never replaces it.
  printf '%s\n' "$wanted" "torch==$(torch_version)" >.venv/requirements.txt
  printf '%s\n' "$tested" >.venv/tested.txt
  "$venv_python" -m pip install ${latest:+--upgrade --upgrade-strategy eager} -r .venv/requirements.txt -c .venv/tested.txt
  if [ -z "$latest" ]; then stamp "$name" "$key"; fi
}

# While pip unpacks torch on one core, the others compile the parts that need no torch. If that fails, build_extension
# reports why.
engine=
begin_engine() {
  if [ "$torch" = system ] || ls torch_mesh/_C*.so >/dev/null 2>&1; then return; fi
  say "compiling the engine beside the next steps"
  "$venv_python" tools/requirements.py build >.venv/requirements.txt
  "$venv_python" -m pip install -q -r .venv/requirements.txt
  setsid nice -n 19 "$venv_python" setup.py -q engine_objects >.venv/engine.log 2>&1 &
  engine=$!
  trap 'kill -- "-$engine" 2>/dev/null || :' EXIT
  trap 'exit 130' INT TERM
}

end_engine() {
  [ -n "$engine" ] || return 0
  wait "$engine" || true
  trap - EXIT INT TERM
}

build_extension() {
  key=$({
    find csrc setup.py pyproject.toml requirements.txt torch_mesh/version.py -type f -exec sha256sum {} + | LC_ALL=C sort -k 2
    torch_version
    compiler --version
    has_header liburing.h && echo liburing
  } | hash_of)
  if is_stamped extension "$key" && ls torch_mesh/_C*.so torch_mesh/_testing*.so >/dev/null 2>&1; then return; fi
  say "building the extension; the first time this takes some minutes"
  "$venv_python" -m pip install --no-build-isolation --no-deps -e .
  stamp extension "$key"
}

check_python
install_system_packages
make_venv
begin_engine
install_torch
install_requirements
end_engine
build_extension
