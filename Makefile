PYTHON  ?= python3
VENV    ?= .venv
WORKERS ?= 2
ARGS    ?=

BIN     := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt

# One torch thread per process: test workers share the cores, and results repeat.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test quick lint format check bench clean distclean

help:  ## Show this list
	@echo "splitgrow: grow neural networks by splitting neurons"
	@echo
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo "Settings: PYTHON=$(PYTHON)  VENV=$(VENV)  WORKERS=$(WORKERS)  ARGS='-k name' (passed to pytest, demo, bench)"

demo: $(VENV)/.demo  ## Grow a small CNN on handwritten digits, beside random splitting and nets from scratch
	$(BIN)/splitgrow demo $(ARGS)

test: $(VENV)/.dev  ## Run all tests, the examples in the README among them
	$(ONE_THREAD) HYPOTHESIS_PROFILE=$${HYPOTHESIS_PROFILE:-ci} $(BIN)/python -m pytest -n $(WORKERS) $(ARGS)

quick: $(VENV)/.dev  ## Run the tests that are not marked slow
	$(ONE_THREAD) HYPOTHESIS_PROFILE=$${HYPOTHESIS_PROFILE:-dev} $(BIN)/python -m pytest -n $(WORKERS) -m "not slow" $(ARGS)

lint: $(VENV)/.dev  ## Check style, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev  ## Apply the formatter and the safe fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

check: lint test  ## Everything that CI runs: lint and test

bench: $(VENV)/.demo  ## Measure scoring as a multiple of a training step (time and memory)
	$(BIN)/python benchmarks/scoring.py $(ARGS)

clean:  ## Remove caches and builds, keep the virtual environment
	rm -rf build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis .coverage htmlcov
	find src tests benchmarks tools -type d -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean  ## Remove the virtual environment too
	rm -rf $(VENV)

# The virtual environment. bin/pip is the last file that venv writes, so a creation that was
# interrupted is repeated. The stamps make a second call free until the requirements change.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "splitgrow needs Python 3.11 or later, got $$($(PYTHON) --version 2>&1). Name another: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml constraints.txt | $(BIN)/pip
	@echo "Installing splitgrow[demo] into $(VENV); torch is a large download the first time."
	@$(INSTALL) -e '.[demo]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/pip
	@echo "Installing splitgrow[dev] into $(VENV); torch is a large download the first time."
	@$(INSTALL) -e '.[dev]'
	@touch $@ $(VENV)/.demo
