# Every target makes the environment it needs; nothing has to be installed by hand but Python 3.11 and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt
MINUTES ?=
OUT ?= runs/demo
WORKERS ?= 2

# One thread a test process: two processes with two threads each would wait for each other.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev demo test test-full check format bench docs clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

$(VENV)/base.stamp: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "pellucid needs Python 3.11 or newer, but $(PYTHON) is " + sys.version.split()[0] + "; run make with PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable .
	@touch $@

$(VENV)/dev.stamp: $(VENV)/base.stamp
	$(PIP) --editable '.[dev]'
	@touch $@

setup: $(VENV)/base.stamp ## make .venv with Pellucid in it

setup-dev: $(VENV)/dev.stamp ## the same with everything that tests and checks need

demo: setup ## train on this machine's Python library, audit, complete code: runs/demo (MINUTES=60 learns more)
	$(BIN)/pellucid demo $(if $(MINUTES),--minutes $(MINUTES)) --out $(OUT)

test: setup-dev ## the tests of every change (at most 8 minutes on two cores)
	$(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS)

test-full: setup-dev ## all tests, the slow ones too (at most 60 minutes)
	$(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) -m 'not gpu'

check: setup-dev ## style, types and the rules of the house
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: setup-dev ## put style right
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup-dev ## every benchmark, interleaved with its peers
	for script in benchmarks/bench_*.py; do $(BIN)/python $$script || exit 1; done

docs: setup-dev ## run the code in the documentation and write the command line's help into it
	$(BIN)/python docs/build.py

clean: ## remove the environment and caches (runs stay)
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
