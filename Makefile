# From a bare checkout: `make demo`, `make test`. Needs Python 3.11+ and pip's usual package source, nothing else.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Most tests wait for something most of the time, so several run at once; not those that fill the machine, or measure what it
# gives them. `pytest` alone runs all of them one after the other.
WORKERS ?= 3
MACHINE := tests/docker tests/executors

.PHONY: demo test lint types bench clean

demo: $(STAMP)
	$(BIN)/tangram demo

test: $(STAMP)
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(MACHINE:%=--ignore=%)
	$(BIN)/python -m pytest -q $(MACHINE)

lint: $(STAMP)
	$(BIN)/ruff check tangram tests examples
	$(BIN)/ruff format --check tangram tests examples

types: $(STAMP)
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/tangram bench pipeline

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps 'mini-swe-agent==2.4.6'
	touch $@

clean:
	rm -rf $(VENV) dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
