# All targets run in a virtual environment, which the first call creates. `make help` lists them.

VENV ?= .venv
# The first interpreter that is new enough, unless one is given: make PYTHON=python3.12
PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
PIP_ARGS ?=
DEMO_ARGS ?=
PYTEST_ARGS ?=
# For `make gpu`: names of steps, and options, such as --minutes 9. With WHEELS=folder, nothing is
# downloaded: the steps run with $(PYTHON), and missing packages come from the wheels in that folder.
STEPS ?=
GPU_ARGS ?=
WHEELS ?=
# Number of processes that run tests. Files are not divided, and those with slow tests come first.
TEST_WORKERS ?= 2
BENCHMARKS ?= unit_scale_overhead monitor_overhead same_training operator_bits architectures architecture_steps rule_coverage rule_transform_cost best_rates lr_transfer low_precision_gradients low_precision_training fp8_roofline zero_at_first memory_prediction remat_pareto offload planning_time pipeline_bubble pipeline_balance pipeline_scale

# Some images set this variable. Each process would then compile the whole package again.
export PYTHONDONTWRITEBYTECODE :=

BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder
# A stamp file is newer than the files that it was installed from, so a second call installs nothing.
INSTALLED_DEMO := $(VENV)/.installed-demo
INSTALLED_ALL := $(VENV)/.installed-all
INSTALLED_GPU := $(if $(WHEELS),,$(INSTALLED_ALL))
ON_A_GPU := $(if $(WHEELS),$(PYTHON),$(BIN)/python) benchmarks/on_a_gpu.py $(if $(WHEELS),--wheels $(WHEELS)) $(GPU_ARGS)
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) -c constraints.txt

.PHONY: help demo demo-baseline demo-pipeline test test-slow test-all test-engine-thread gpu test-gpu bench-gpu browser mutations lint format types docs tensorboard bench clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-20s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo 'make test PYTEST_ARGS="-k gauge"          run some of the tests'
	@echo 'make demo DEMO_ARGS="--trainer.max_steps 20"'
	@echo 'make demo PIP_ARGS="--index-url <url>"    options for pip, e.g. an index of CPU-only wheels'

demo: $(INSTALLED_DEMO) ## train the byte-level GPT, unit-scaled
	$(BIN)/python -m lightning_unitscale fit --config configs/gpt_unit_scaled.yaml $(DEMO_ARGS)

demo-baseline: $(INSTALLED_DEMO) ## train the same model unscaled
	$(BIN)/python -m lightning_unitscale fit --config configs/gpt_baseline.yaml $(DEMO_ARGS)

demo-pipeline: $(INSTALLED_DEMO) ## train it as a pipeline on two processes
	$(BIN)/python -m lightning_unitscale fit --config configs/gpt_pipeline.yaml $(DEMO_ARGS)

tensorboard: $(INSTALLED_DEMO) ## show the runs of the demo
	$(BIN)/tensorboard --logdir logs

test: $(INSTALLED_ALL) ## run the fast tests, in minutes
	$(PYTEST) -m "not slow" $(PYTEST_ARGS)

test-slow: $(INSTALLED_ALL) ## run the slow tests, which `make test` leaves out
	$(PYTEST) -m slow $(PYTEST_ARGS)

test-all: $(INSTALLED_ALL) ## run all tests; those of the dashboard need `make browser` first
	$(PYTEST) $(PYTEST_ARGS)

test-engine-thread: $(INSTALLED_ALL) ## run all tests with backward passes on threads of autograd's engine
	$(PYTEST) --engine-thread $(PYTEST_ARGS)

gpu: $(INSTALLED_GPU) ## run the GPU tests and benchmarks in short steps; STEPS="bits demo" for some
	$(ON_A_GPU) $(STEPS)

test-gpu: $(INSTALLED_GPU) ## run the tests that need a GPU
	$(ON_A_GPU) tests --pytest-args='$(PYTEST_ARGS)'

bench-gpu: $(INSTALLED_GPU) ## benchmark on the GPU: tables and JSON files
	$(ON_A_GPU) benchmarks

browser: $(INSTALLED_ALL) ## install the npm packages that drive Chromium in the tests of the dashboard
	$(BIN)/python -m tests.browser.browser

mutations: $(INSTALLED_ALL) ## check that the tests find faults in a copy of the code
	$(BIN)/python tests/mutations.py

lint: $(INSTALLED_ALL) ## check the code with ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(INSTALLED_ALL) ## fix and format the code with ruff
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(INSTALLED_ALL) ## check the types with mypy --strict
	$(BIN)/mypy

docs: $(INSTALLED_ALL) ## build the documentation in build/site
	$(BIN)/mkdocs build --strict

bench: $(INSTALLED_ALL) ## measure the tables of the docs; BENCHMARKS="unit_scale_overhead ..." for some
	@for name in $(BENCHMARKS); do echo "== $$name"; $(BIN)/python benchmarks/$$name.py || exit 1; done

clean: ## remove the virtual environment and the files of tools
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed, and none was found; name one with make PYTHON=..." >&2; exit 1; }
	@# On Debian, venv is a separate package. An incomplete environment would hide that next time.
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(INSTALLED_DEMO): pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e '.[cli]'
	@touch $@

# This includes the packages of the demo.
$(INSTALLED_ALL): pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e '.[cli,dev,docs,bench]'
	@touch $(INSTALLED_DEMO) $@
