# Everything from nothing: `make demo` and `make test` make the virtual environment, install torch
# and the rest, build the extension, and do their work.
#
#   PYTHON=python3.12   the interpreter that .venv is made from (3.10 or newer)
#   TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
#                       what `pip install` gets for torch, here the CPU build from PyTorch's own index
#   WORKERS=2           processes that share the tests; 0 runs them in one
#   PYTEST_ARGS=...     more arguments for pytest, for instance PYTEST_ARGS="tests/core -x"
#   DEMO_ARGS=...       arguments for scripts/demo.py

SHELL := /bin/bash
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
PYTEST_ARGS ?=
WORKERS ?= 2
DEMO_ARGS ?=

BIN := $(VENV)/bin
# Modules are compiled when they are first imported: most of what is installed never is.
INSTALL := $(BIN)/python -m pip --disable-pip-version-check --quiet install --no-compile
BUILD_INPUTS := setup.py pyproject.toml $(wildcard csrc/*.cpp csrc/*.h csrc/*/*.cpp csrc/*/*.h)
CXX_FILES := $(wildcard csrc/*.cpp csrc/*.h csrc/*/*.cpp csrc/*/*.h tests/support/*/*.cpp tests/support/*/*.h)

# No model or dataset is downloaded, and no budget of the caller's shell leaks into what is measured.
export HF_HUB_OFFLINE := 1
unexport DELTA_BUDGET DELTA_POLICY DELTA_DEVICE DELTA_HOST_BUDGET DELTA_DISK_BUDGET DELTA_SPILL_DIR
unexport DELTA_VERIFY DELTA_MIN_BYTES DELTA_STRICT DELTA_TRACE DELTA_REPORT DELTA_CHECK DELTA_PLANNING
unexport DELTA_LIMIT_RESERVED
# Each worker and child of the tests would compile our modules for itself.
unexport PYTHONDONTWRITEBYTECODE

.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test bench lint format clean venv

help:
	@echo "make demo    train two models inside half of the memory they need"
	@echo "make test    lint, types and tests (not those marked slow)"
	@echo "make bench   the benchmarks, short: 15 minutes on an idle machine"
	@echo "make lint    ruff, clang-format and mypy, changing nothing"
	@echo "make format  ruff and clang-format, in place"
	@echo "make venv    only the environment for working on the code, in $(VENV)"
	@echo "make clean   remove what was built, and $(VENV)"

demo: $(VENV)/.stamp-demo
	$(BIN)/python scripts/demo.py $(DEMO_ARGS)

# Threads that wait for others without spinning: two processes share the cores.
test: export OMP_WAIT_POLICY := passive
test: lint
	$(BIN)/python -m pytest -q -m "not slow" -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

# Results go to build/bench; the full commands stand in docs/benchmarks.md.
bench: $(VENV)/.stamp-dev
	rm -f build/bench/peers.json
	$(BIN)/python -m benchmarks.peers --models vit,llama --rounds 1 --steps 2 --compiled 0 --json build/bench/peers.json
	$(BIN)/python scripts/stress_max_batch.py --models unet --contenders ordinary,accumulation,recompute
	$(BIN)/python -m benchmarks.scaling --sizes 100,1000,10000 --json build/bench/scaling.json
	$(BIN)/python -m benchmarks.overhead

lint: $(VENV)/.stamp-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(if $(CXX_FILES),$(BIN)/clang-format --dry-run --Werror $(CXX_FILES))
	$(BIN)/mypy

format: $(VENV)/.stamp-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(if $(CXX_FILES),$(BIN)/clang-format -i $(CXX_FILES))

venv: $(VENV)/.stamp-dev

clean:
	rm -rf $(VENV) build dist *.egg-info delta_runtime/*.so
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path "./.git/*" -prune -exec rm -rf {} +

# --- the environment, one stamp per stage ---------------------------------------------------------

$(VENV)/.stamp-venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "$(PYTHON) is missing or older than 3.10; name another: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' \
	  || { echo "$(PYTHON) has no venv module (Debian, Ubuntu: apt install python3-venv)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# torch goes first and alone: what comes later must find it, and must not choose another one.
$(VENV)/.stamp-torch: $(VENV)/.stamp-venv
	@echo "installing $(TORCH)"
	$(INSTALL) $(TORCH)
	$(INSTALL) "setuptools>=77" wheel ninja
	@touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp-torch $(BUILD_INPUTS)
	@echo "building the extension and installing what the tests need (a few minutes)"
	PATH="$(CURDIR)/$(BIN):$$PATH" $(INSTALL) --no-build-isolation -e ".[dev]"
	@touch $@

$(VENV)/.stamp-demo: $(VENV)/.stamp-torch $(BUILD_INPUTS)
	@echo "building the extension and installing what the demo needs (a few minutes)"
	PATH="$(CURDIR)/$(BIN):$$PATH" $(INSTALL) --no-build-isolation -e ".[demo]"
	@touch $@
