# `make demo` and `make test` do all their setup. They need Python 3.11 or newer.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DOCS_READY := $(VENV)/.ready-docs
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable

.PHONY: help demo test test-all check format docs wheel clean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is too old: tcnca needs Python 3.11 or newer; try make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) '.[all,dev]'
	@touch $@

$(DOCS_READY): $(READY)
	$(INSTALL) '.[docs]'
	@touch $@

demo: $(READY)  ## Continue a text, train a small model to recall and query it: about a minute
	$(BIN)/tcnca demo

test: $(READY)  ## Run the tests: a few minutes
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal -m "not slow"

test-all: $(READY)  ## Run all tests, including the slow ones
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal

check: $(READY)  ## Lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)  ## Format the code and fix what the linter can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(DOCS_READY)  ## Build the documentation site; open site/index.html
	$(BIN)/python docs/build.py

wheel: $(READY)  ## Build the wheel and the source distribution in dist/
	rm -rf build dist
	$(BIN)/python -m build --no-isolation

clean:  ## Remove the virtual environment, caches and what was built
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist site
