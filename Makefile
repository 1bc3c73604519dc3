# Everything runs in a virtual environment of its own, made on the first call.
#
#   make demo                                 train the byte-level GPT, unit-scaled
#   make demo-pipeline                        train it on two processes, as a pipeline
#   make test                                 run every test
#   make test PYTEST_ARGS="-k gauge"          run some of them
#   make demo PIP_ARGS="--index-url <url>"    pass options to pip, e.g. an index of CPU-only wheels
#   make demo DEMO_ARGS="--trainer.max_steps 20"

VENV ?= .venv
# The first interpreter that is new enough, unless one is given: make PYTHON=python3.12
PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
PIP_ARGS ?=
DEMO_ARGS ?=
PYTEST_ARGS ?=
# Processes that run tests side by side; files are not divided.
TEST_WORKERS ?= 2
BENCHMARKS ?= unit_scale_overhead monitor_overhead same_training operator_bits architectures rule_coverage rule_transform_cost best_rates lr_transfer low_precision_gradients low_precision_training memory_prediction remat_pareto planning_time pipeline_bubble pipeline_balance pipeline_scale

BIN := $(VENV)/bin
# A stamp is younger than what it was installed from, so that a second call installs nothing.
INSTALLED_DEMO := $(VENV)/.installed-demo
INSTALLED_ALL := $(VENV)/.installed-all
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) -c constraints.txt

.PHONY: help demo demo-baseline demo-pipeline test lint format types tensorboard bench clean

help:
	@sed -n 's/^#   //p' Makefile

demo: $(INSTALLED_DEMO)
	$(BIN)/python -m lightning_unitscale fit --config configs/gpt_unit_scaled.yaml $(DEMO_ARGS)

demo-baseline: $(INSTALLED_DEMO)
	$(BIN)/python -m lightning_unitscale fit --config configs/gpt_baseline.yaml $(DEMO_ARGS)

demo-pipeline: $(INSTALLED_DEMO)
	$(BIN)/python -m lightning_unitscale fit --config configs/gpt_pipeline.yaml $(DEMO_ARGS)

test: $(INSTALLED_ALL)
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile $(PYTEST_ARGS)

lint: $(INSTALLED_ALL)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(INSTALLED_ALL)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(INSTALLED_ALL)
	$(BIN)/mypy

tensorboard: $(INSTALLED_DEMO)
	$(BIN)/tensorboard --logdir logs

bench: $(INSTALLED_ALL)
	@for name in $(BENCHMARKS); do echo "== $$name"; $(BIN)/python benchmarks/$$name.py || exit 1; done

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed, and none was found; name one with make PYTHON=..." >&2; exit 1; }
	@# Debian packages venv apart from Python; a half-made environment would hide that next time.
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(INSTALLED_DEMO): pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e '.[cli,dev]'
	@touch $@

# Everything includes what the demo needs.
$(INSTALLED_ALL): pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e '.[cli,dev,bench]'
	@touch $(INSTALLED_DEMO) $@
