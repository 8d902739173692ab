# Needs only make and Python >= 3.11. PYTHON picks the interpreter and, by its version suffix, the
# virtual environment: `make test` uses .venv, `make test PYTHON=python3.12` uses .venv-3.12.
PYTHON ?= python3
VENV ?= .venv$(patsubst %,-%,$(filter-out 3,$(patsubst python%,%,$(notdir $(PYTHON)))))
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check

DEMO ?= compare --preset demo --out runs/demo
TEST_WORKERS ?= 2
TEST_ARGS ?=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test lint format docs bench-env clean distclean

help: ## Show the targets.
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' Makefile

demo: $(VENV)/.stamp-train ## Train replicas that rarely talk beside replicas that talk every step.
	$(PY) -m jaxslowmo $(DEMO)

test: $(VENV)/.stamp-test ## Run the tests on 8 CPU devices; TEST_ARGS="-k slowmo" passes arguments on.
	$(PY) -m pytest -n $(TEST_WORKERS) --dist loadgroup $(TEST_ARGS)

lint: $(VENV)/.stamp-dev ## Check formatting, lint rules and types.
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyright --pythonpath $(PY)

format: $(VENV)/.stamp-dev ## Format the code and mend what ruff can mend.
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

docs: $(VENV)/.stamp-docs ## Build the documentation into site/; a warning fails.
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet

bench-env: .venv-bench/.stamp ## Set up .venv-bench, with the torch that benchmarks/bench_reducer.py compares with.

clean: ## Remove what builds and tools leave behind.
	rm -rf build dist site .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

distclean: clean ## Also remove the virtual environments.
	rm -rf .venv .venv-*

# A stamp stands for "these extras are installed as pyproject.toml asks"; it is touched last, so an
# interrupted set-up starts again.
$(VENV)/.stamp-venv:
	@echo "Setting up $(VENV) ..."
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "jaxslowmo needs Python >= 3.11, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	@touch $@

.venv-bench/.stamp:
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy
	@touch $@

$(VENV)/.stamp-train: $(VENV)/.stamp-venv pyproject.toml
	$(PIP) --editable '.[train]'
	@touch $@

$(VENV)/.stamp-test: $(VENV)/.stamp-venv pyproject.toml
	$(PIP) --editable '.[train,test]'
	@touch $@ $(VENV)/.stamp-train

$(VENV)/.stamp-dev: $(VENV)/.stamp-venv pyproject.toml
	$(PIP) --editable '.[train,test,dev]'
	@touch $@ $(VENV)/.stamp-test $(VENV)/.stamp-train

$(VENV)/.stamp-docs: $(VENV)/.stamp-venv pyproject.toml
	$(PIP) --editable '.[docs]'
	@touch $@
