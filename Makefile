# `make train` and `make test` are all that a fresh machine needs; `make help` lists the rest.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=
# Several tests share the cores: a thread that waits for another one must not spin.
TEST_THREADS := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive

.DEFAULT_GOAL := help
.PHONY: help venv train test test-fast test-slow lint type format bench chaos docs lock clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  %-12s %s\n", $$1, $$2}'

venv: $(STAMP) ## create .venv and install the pinned packages (once)

$(STAMP): requirements/cpu.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "rlx needs Python 3.11 or newer; set PYTHON=…"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing the pinned packages into $(VENV) (about two minutes, 4 GB) …"
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install -qq --no-deps -r requirements/cpu.lock
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install -qq --no-deps --no-build-isolation -e .
	@touch $(STAMP)

train: venv ## post-train the embedded model (ARGS="--steps 20 …" are passed on)
	@$(BIN)/rlx train $(ARGS)

test: lint type test-fast test-slow ## everything that CI runs

test-fast: venv ## the default suite
	$(TEST_THREADS) $(BIN)/python -m pytest -q -n auto --maxprocesses 4 --dist loadfile $(ARGS)

test-slow: venv ## the rest: whole runs, several processes
	$(TEST_THREADS) $(BIN)/python -m pytest -q -m slow -n auto --maxprocesses 2 --dist loadfile $(ARGS)

lint: venv ## ruff: style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: venv ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

type: venv ## mypy, strict on rlx/core and rlx/plugins
	$(BIN)/mypy rlx

bench: venv ## benchmarks; each prints a table (an otherwise idle machine)
	$(BIN)/python -m benchmarks $(ARGS)

chaos: venv ## kill, stop and starve runs, and print what became of them (Linux; root for the disks)
	$(BIN)/python -m benchmarks.chaos $(ARGS)

docs: venv ## regenerate the tables and references in docs/
	$(BIN)/python scripts/docs.py

lock: venv ## refresh requirements/cpu.lock
	$(BIN)/python scripts/lock.py

clean: ## remove the environment and caches
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
