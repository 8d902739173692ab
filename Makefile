# Needs only make and Python >= 3.11. PYTHON picks the interpreter and, by its version suffix, the
# virtual environment: `make test` uses .venv, `make test PYTHON=python3.12` uses .venv-3.12.
PYTHON ?= python3
# JAX picks a version between: `make test PYTHON=python3.12 JAX=0.11.2` (jax 0.11 needs Python 3.12).
JAX ?=
VENV ?= .venv$(patsubst %,-%,$(filter-out 3,$(patsubst python%,%,$(notdir $(PYTHON)))))$(addprefix -jax-,$(JAX))
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check
# torch_compat has an environment of its own: torch_xla and the torch it was built for, pinned.
TORCH_VENV ?= .venv-torch$(patsubst .venv%,%,$(VENV))
TORCH_PY := $(TORCH_VENV)/bin/python
# And torch_compat.on_jax one with a newer torch, torchax and jax.
TORCHAX_VENV ?= .venv-torchax$(patsubst .venv%,%,$(VENV))
TORCHAX_PY := $(TORCHAX_VENV)/bin/python
# And the compilers for TPUs and GPUs that are only described.
AOT_VENV ?= .venv-aot$(patsubst .venv%,%,$(VENV))
AOT_PY := $(AOT_VENV)/bin/python
# And MaxText, which needs Python 3.12, at the versions that its losses were recorded with.
MAXTEXT_VENV ?= .venv-maxtext
MAXTEXT_PY := $(MAXTEXT_VENV)/bin/python
MAXTEXT_PYTHON ?= python3.12

DLRM ?=
DEMO ?=
TEST_WORKERS ?= 2
TEST_ARGS ?=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo dlrm test test-all test-exhaustive test-torch test-torchax test-aot test-maxtext test-wheel test-cluster test-failures torch-env torchax-env lint lint-torch lint-torchax format docs bench-env clean distclean

help: ## Show the targets.
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' Makefile

demo: $(VENV)/.stamp-examples ## Compare rare communication to that of every step, where slow momentum pays.
	$(PY) benchmarks/study/demo.py $(DEMO)

dlrm: $(VENV)/.stamp-examples ## Train sharded embeddings on flights, and compare to boosted trees; DLRM="--mode exact" passes options on.
	$(PY) examples/dlrm/train.py $(DLRM)

# In the order of the files, neighbours of which share what they compile.
test: $(VENV)/.stamp-test ## Run the tests of jaxslowmo on 8 CPU devices; TEST_ARGS="-k slowmo" passes arguments on.
	$(PY) -m pytest -n $(TEST_WORKERS) --dist loadgroup --no-loadscope-reorder $(TEST_ARGS)

test-all: test ## Also read programs for TPUs and GPUs, and run torch_compat: Linux on x86-64, 8 GB more.
	@if $(AOT_WHEELS); then $(MAKE) --no-print-directory test-aot; \
	else echo "test-all: programs for TPUs and GPUs were NOT read: $(NO_AOT_WHEELS)"; fi
	@if $(TORCH_WHEELS); then $(MAKE) --no-print-directory test-torch; \
	else echo "test-all: the torch suite was NOT run: $(NO_TORCH_WHEELS)"; fi

# In processes of their own: two compilers' libraries are not loaded into one.
test-aot: ## Read programs compiled for TPUs and for GPUs, without having any, in .venv-aot (2 GB).
	@$(AOT_WHEELS) || { echo "test-aot: not run, and not passed: $(NO_AOT_WHEELS)"; exit 1; }
	@$(MAKE) --no-print-directory $(AOT_VENV)/.stamp
	$(AOT_PY) -m pytest -n $(TEST_WORKERS) --dist loadgroup --no-loadscope-reorder tests/tpu_aot $(TEST_ARGS)
	$(AOT_PY) -m pytest -n $(TEST_WORKERS) --dist loadgroup --no-loadscope-reorder tests/gpu_aot $(TEST_ARGS)

test-exhaustive: ## Run the tests of jaxslowmo and of its programs with the sweeps that are left out else.
	@$(MAKE) --no-print-directory test TEST_ARGS='-m "not hardware" $(TEST_ARGS)'
	@$(MAKE) --no-print-directory test-aot TEST_ARGS='-m "not hardware" $(TEST_ARGS)'

test-torch: torch-env ## Run the tests of torch_compat on XLA's CPU devices, in .venv-torch (6 GB).
	cd tests/torch_compat && $(abspath $(TORCH_PY)) -m pytest -m "not without_xla" $(TEST_ARGS)

# TEST_ARGS goes to tests/on_jax (`sweep -m exhaustive` makes all of torch's own samples); without it those of TPUManager run, too, as they do on torch_xla.
# Of tests/torch_compat what needs no torch_xla: TPUManager on jax, SlowMo over gloo.
test-torchax: torchax-env ## Run the tests of torch_compat.on_jax, and those without torch_xla, in .venv-torchax.
	cd tests/on_jax && $(abspath $(TORCHAX_PY)) -m pytest $(TEST_ARGS)
	$(if $(TEST_ARGS),,cd tests/on_jax && $(abspath $(TORCHAX_PY)) -m pytest sweep)
	$(if $(TEST_ARGS),,cd tests/torch_compat && $(abspath $(TORCHAX_PY)) -m pytest manager)
	$(if $(TEST_ARGS),,cd tests/torch_compat && $(abspath $(TORCHAX_PY)) -m pytest -m without_xla --ignore slowmo/xla slowmo peers test_meeting.py examples/test_train_torchrun.py)

# Not in .ci/run: with its set-up it takes more than four minutes.
test-maxtext: $(MAXTEXT_VENV)/.stamp ## Compare MaxText's trainer with jaxslowmo's exchanges to recorded losses of its own, in .venv-maxtext (1.3 GB).
	cd tests/maxtext && $(abspath $(MAXTEXT_PY)) -m pytest $(TEST_ARGS)

test-wheel: $(VENV)/.stamp-test ## Build the source distribution, of it the wheel, and train with the wheel in an empty environment.
	rm -rf build/wheel
	$(PY) -m build --outdir build/wheel .
	$(PYTHON) -m venv build/wheel/env
	build/wheel/env/bin/python -m pip install --quiet --disable-pip-version-check build/wheel/*.whl
	cd build/wheel && env/bin/python -W error $(CURDIR)/tests/wheel.py $(CURDIR)/pyproject.toml

test-cluster: ## Run the tests on network namespaces with shaped links; needs Linux, root and iproute2.
	@$(PYTHON) tests/cluster/namespaces.py
	@$(MAKE) --no-print-directory $(VENV)/.stamp-test
	cd tests/cluster && $(abspath $(PY)) -m pytest $(TEST_ARGS)

test-failures: $(VENV)/.stamp-test ## Try every failure that is no death five times; needs Linux and root, takes an hour.
	$(PY) tests/cluster/failures.py --times 5

torch-env: ## Set up .venv-torch: torch 2.9.0 and torch_xla 2.9.0, without what they can do without.
	@$(TORCH_WHEELS) || { echo "test-torch: not run, and not passed: $(NO_TORCH_WHEELS)"; exit 1; }
	@$(MAKE) --no-print-directory $(TORCH_VENV)/.stamp

torchax-env: $(TORCHAX_VENV)/.stamp ## Set up .venv-torchax: torch 2.13, torchax and jax.

lint: $(VENV)/.stamp-dev ## Check formatting, lint rules and types; print advice, which never fails.
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyright --pythonpath $(PY)
	-@$(PY) tools/advice.py

lint-torch: $(VENV)/.stamp-dev torch-env ## Check the types of torch_compat.
	$(PY) -m pyright --pythonpath $(TORCH_PY) torch_compat

lint-torchax: $(VENV)/.stamp-dev torchax-env ## Check the types of torch_compat.on_jax.
	$(PY) -m pyright --pythonpath $(TORCHAX_PY) torch_compat/on_jax

format: $(VENV)/.stamp-dev ## Format the code and mend what ruff can mend.
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

docs: $(VENV)/.stamp-docs ## Build the documentation into site/ and try its search; a warning fails.
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict
	$(PY) tools/check_site.py

bench-env: .venv-bench/.stamp ## Set up .venv-bench, with the torch that benchmarks/bench_reducer.py compares with.

clean: ## Remove what builds and tools leave behind.
	rm -rf build dist site .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

distclean: clean ## Also remove the virtual environments.
	rm -rf .venv .venv-*

# torch_xla 2.9.0 is published for these alone.
TORCH_WHEELS := $(PYTHON) -c 'import platform, sys; sys.exit(not ((3, 10) <= sys.version_info[:2] <= (3, 13) \
	and platform.system() == "Linux" and platform.machine() == "x86_64" and sys.implementation.name == "cpython"))'
NO_TORCH_WHEELS := torch_xla 2.9.0 has wheels for Linux on x86-64 with Python 3.10 to 3.13 only.
AOT_WHEELS := $(PYTHON) -c 'import platform; exit((platform.system(), platform.machine()) != ("Linux", "x86_64"))'
NO_AOT_WHEELS := libtpu and the plugin of jax for CUDA have wheels for Linux on x86-64 only.

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

$(TORCH_VENV)/.stamp: requirements/torch.txt requirements/torch-test.txt pyproject.toml
	@echo "Setting up $(TORCH_VENV) ..."
	$(PYTHON) -m venv $(TORCH_VENV)
	$(TORCH_PY) -m pip install --quiet --disable-pip-version-check -r requirements/torch-test.txt
	$(TORCH_PY) -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/torch.txt
	$(TORCH_PY) -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

$(AOT_VENV)/.stamp: pyproject.toml
	@echo "Setting up $(AOT_VENV) ..."
	$(PYTHON) -m venv $(AOT_VENV)
	$(AOT_PY) -m pip install --quiet --disable-pip-version-check --editable '.[train,aot]'
	@touch $@

$(MAXTEXT_VENV)/.stamp: requirements/maxtext.txt requirements/maxtext-test.txt pyproject.toml
	@echo "Setting up $(MAXTEXT_VENV) ..."
	$(MAXTEXT_PYTHON) -m venv $(MAXTEXT_VENV)
	$(MAXTEXT_PY) -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/maxtext-test.txt
	$(MAXTEXT_PY) -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

$(TORCHAX_VENV)/.stamp: requirements/torchax.txt requirements/torchax-test.txt pyproject.toml
	@echo "Setting up $(TORCHAX_VENV) ..."
	$(PYTHON) -m venv $(TORCHAX_VENV)
	$(TORCHAX_PY) -m pip install --quiet --disable-pip-version-check -r requirements/torchax-test.txt
	$(TORCHAX_PY) -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

$(VENV)/.stamp-train: $(VENV)/.stamp-venv pyproject.toml
	$(PIP) --editable '.[train]'
	@touch $@

$(VENV)/.stamp-examples: $(VENV)/.stamp-venv pyproject.toml
	$(PIP) --editable '.[train,examples]'
	@touch $@ $(VENV)/.stamp-train

$(VENV)/.stamp-test: $(VENV)/.stamp-venv pyproject.toml
	$(PIP) --editable '.[train,test]' $(addprefix jax==,$(JAX))
	@touch $@ $(VENV)/.stamp-train $(VENV)/.stamp-examples

$(VENV)/.stamp-dev: $(VENV)/.stamp-venv pyproject.toml
	$(PIP) --editable '.[train,test,dev]'
	@touch $@ $(VENV)/.stamp-test $(VENV)/.stamp-train $(VENV)/.stamp-examples

$(VENV)/.stamp-docs: $(VENV)/.stamp-venv pyproject.toml
	$(PIP) --editable '.[docs]'
	@touch $@
