# Everything runs in .venv, which tools/bootstrap.sh fills; second runs only check that nothing has changed.
#   make TORCH='torch==2.12.1'     another torch (any requirement that pip takes, with options if need be)
#   make TORCH=system              torch and all else as PYTHON has them: for a machine's own CUDA build, or one without a network
#   make LATEST=1                  the newest releases of what the last line of tools/tested.txt pins
#   make PYTHON=python3.12         another interpreter for a new .venv
#   make PYTEST='-k reader -x'     further arguments for pytest
PYTHON ?= python3
TORCH ?= $(shell tail -n 1 tools/tested.txt | cut -d " " -f 1)
LATEST ?=
PYTEST ?=
export PYTHON TORCH LATEST

RUN := .venv/bin/python
# Most tests keep one core busy. A module stays in one process, for the sake of its fixtures; tests/conftest.py orders
# the modules. PYTEST='-n 0' undoes it, for a debugger.
IN_TWO := -n 2 --dist loadfile --no-loadscope-reorder
QUICK := -m 'not slow and not thorough'
# Other tests need packages that a machine with a card and without a network may lack.
ON_A_CARD := tests/gpu tests/models/test_gpu_experts.py
BESIDE_ENGINE := tools/with_engine_tests.sh
BOOTSTRAP := tools/bootstrap.sh
# ThreadSanitizer needs its shadow memory where address space randomisation of more than 28 bits may put other things.
FIXED_ADDRESSES := $(shell [ "$$(cat /proc/sys/vm/mmap_rnd_bits 2>/dev/null || echo 28)" -le 28 ] || echo setarch "$$(uname -m)" -R)

# Kernels and packing run on one thread, where ThreadSanitizer has nothing to find and takes half an hour. It stops a
# forked child whose thread gets the id of one of the parent's, as in LockedMemoryLimitOfAnotherUser.
NOT_FOR_TSAN := Accuracy.*:Activations.*:ExpertFfn.*:KernelTables.*:Linear.*:Pack*.*:RecordLayout.*:Unpack.*:ExactProducts.*:*.LockedMemoryLimitOfAnotherUser/*

.NOTPARALLEL:
.PHONY: help build build-test build-gpu build-dev wheel engine-tests docs notebooks demo test test-python test-thorough test-all test-versions test-engine test-tsan test-asan test-gpu test-gpu-sanitizer style bench bench-peers bench-gpu clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 20

build: ## .venv with torch, the requirements and the extension
	@$(BOOTSTRAP)

build-test:
	@$(BOOTSTRAP) --test

build-gpu:
	@$(BOOTSTRAP) --gpu

build-dev:
	@$(BOOTSTRAP) --dev

wheel: ## dist/ with an sdist, and a wheel for this Python and torch that needs no system package
	@$(BOOTSTRAP) --wheel
	$(RUN) tools/wheel.py dist

demo: build ## generate text with a quarter of a small model's experts resident
	$(RUN) examples/demo.py

notebooks: build-test ## execute the notebooks in examples/ and store their outputs in them
	$(RUN) tools/run_notebooks.py

test: build-dev engine-tests ## the quick Python tests, in two processes, and the engine's C++ tests
	$(BESIDE_ENGINE) $(RUN) -m pytest $(QUICK) $(IN_TWO) $(PYTEST)

test-python: build-test ## its Python tests alone
	$(RUN) -m pytest $(QUICK) $(IN_TWO) $(PYTEST)

test-thorough: build-dev ## the Python tests that repeat with other values what those show
	$(RUN) -m pytest -m 'thorough and not slow' $(IN_TWO) $(PYTEST)

test-all: build-dev engine-tests ## all of them, the slow ones too
	@$(BOOTSTRAP) --wheel
	$(BESIDE_ENGINE) $(RUN) -m pytest $(IN_TWO) $(PYTEST)

test-versions: ## test-python with each combination of releases in tools/tested.txt: 6 GB and a build each, in build/versions
	PYTEST="$(PYTEST)" tools/test_versions.sh

test-engine: build-dev engine-tests ## the engine's C++ tests alone
	build/engine-tests/engine_tests --gtest_brief=1

engine-tests:
	$(RUN) setup.py engine_tests

test-tsan: build-dev ## the engine's C++ tests of what has several threads under ThreadSanitizer
	$(RUN) setup.py engine_tests --sanitize thread
	TSAN_OPTIONS="halt_on_error=1 die_after_fork=0 $$TSAN_OPTIONS" $(FIXED_ADDRESSES) build/engine-tests-thread/engine_tests --gtest_brief=1 --gtest_filter='-$(NOT_FOR_TSAN)'

test-asan: build-dev ## the engine's C++ tests under AddressSanitizer
	$(RUN) setup.py engine_tests --sanitize address
	build/engine-tests-address/engine_tests --gtest_brief=1

test-gpu: build-gpu ## the Python tests that need a CUDA device
	$(RUN) -m pytest -m gpu $(ON_A_CARD) tests/ops/test_cuda_handover.py tests/docs $(PYTEST)

test-gpu-sanitizer: build-gpu ## a few of them under compute-sanitizer's tools
	tools/gpu_sanitizer.sh $(RUN) $(PYTEST)

docs: build-dev ## the pages of docs/ as a site, build/docs/index.html, which opens without a network
	$(RUN) -m sphinx -W --keep-going -q -b html -d build/docs-trees docs build/docs

style: build-dev ## ruff, mypy on the public package, clang-format
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy torch_mesh ops
	git ls-files '*.h' '*.cpp' | xargs .venv/bin/clang-format --dry-run -Werror

bench: build-dev ## what this machine's kernels reach of its limits, in under 15 minutes
	$(RUN) benchmarks/run_all.py

bench-peers: build-dev ## the same beside other systems, which it installs; writes 20 GB into the cache folder; needs root
	$(RUN) benchmarks/run_all.py --peers

bench-gpu: build-gpu ## on a CUDA device: a layer, a prompt's way up, decode with half of the experts there
	$(RUN) benchmarks/run_all.py --gpu

clean: ## remove what was built; .venv stays
	rm -rf build dist *.egg-info torch_mesh/_C*.so torch_mesh/_testing*.so .venv/stamps/extension .mypy_cache .ruff_cache .pytest_cache .hypothesis
