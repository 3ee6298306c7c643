# make verify | test | power | check | wheel      each does all of its set-up the first time and reuses it afterwards
#   make test ARGS="-k retention -x"      passes options on to pytest
#   make verify TORCH=                    without PyTorch and Triton: what needs them is reported as not run
#   make test PY=python3.12 VENV=env      another interpreter, another place
#   make test JOBS=                       in one process (for --pdb); otherwise one on each core

PY    ?= python3
VENV  ?= .venv
ARGS  ?=
JOBS  ?= auto
# one process a core, not one of all cores each
export OMP_NUM_THREADS ?= 1
# The exact PyTorch of this checkout (pyproject.toml has the range). Triton stays free: PyTorch from the default index
# asks for one version of it, a CPU-only PyTorch for none, so pinning both cannot be satisfied everywhere.
TORCH ?= torch==2.13.0 'triton; sys_platform == "linux"'

BIN   := $(VENV)/bin
READY := $(VENV)/.ready
# loadgroup keeps cells that share oracle values on one process
SPREAD = $(if $(JOBS),-n $(JOBS) --dist loadgroup)
TYPED := build/typed/mixproof

.PHONY: verify test power check format wheel setup clean

verify: $(READY)
	$(BIN)/pytest verify $(SPREAD) $(ARGS)

test: $(READY)
	$(BIN)/pytest tests $(SPREAD) $(ARGS)

power: $(READY)
	$(BIN)/mixproof power $(ARGS)

# Pyright does not see through an editable install that maps folders, so it gets the installed layout as two links.
check: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	@mkdir -p $(TYPED)
	@ln -sfn ../../../reference $(TYPED)/reference
	@ln -sfn ../../../verify $(TYPED)/verify
	@test -e $(TYPED)/reference/__init__.py -a -e $(TYPED)/verify/__init__.py   # pyright finds no fault in nothing
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(READY)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# A stale build/lib would ship files that are no longer in the tree.
wheel: $(READY)
	rm -rf build/lib build/bdist.*
	$(BIN)/python -m build --wheel

setup: $(READY)

# --no-compile halves the time: most of PyTorch and SymPy is never imported, the rest is compiled when it is.
$(READY): pyproject.toml Makefile
	@$(PY) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo 'mixproof needs Python 3.11 or later: make PY=python3.11 ...' >&2; exit 1; }
	$(PY) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[dev]' $(TORCH)
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
