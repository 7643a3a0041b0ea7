#!/bin/sh
# Installs torch_mesh's peers into a virtual environment of their own, so that no peer can change the project's.
# llama-cpp-python has no wheel for every machine; its source distribution takes about seven CPU minutes.
# Usage: benchmarks/peers.sh [FOLDER]      JOBS=1 and a low priority unless JOBS says otherwise.
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
venv=${1:-"$root/build/peers-venv"}
python=${PYTHON:-"$root/.venv/bin/python"}

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
# GGML_NATIVE is llama.cpp's own default: the peer gets every instruction set this machine has. GCC 12 drops stores of
# its AMX configuration as dead, after which the first prompt ends the process with SIGSEGV.
CMAKE_ARGS="-DGGML_NATIVE=ON -DCMAKE_CXX_FLAGS='-fno-tree-dse -fno-dse'" CMAKE_BUILD_PARALLEL_LEVEL=${JOBS:-1} \
  nice -n 19 "$venv/bin/pip" install "llama-cpp-python==0.3.36" "gguf==0.19.0" "onnxruntime==1.31.1" "onnx==1.23.2" numpy rich
"$venv/bin/python" -c "import gguf, llama_cpp, onnxruntime; print('llama-cpp-python', llama_cpp.__version__, 'onnxruntime', onnxruntime.__version__)"

# Only its raw extension is used, which needs none of what the package asks for. Not every machine has a wheel.
nice -n 19 "$venv/bin/pip" install --no-deps --only-binary :all: "kt-kernel==0.7.2" ||
  echo "kt-kernel cannot be installed here; layer_peers.py goes without it" >&2
