# Every target makes the virtual environment on first use; afterwards that is a no-op.
MODEL ?= raft
ARGS ?=
WORKERS ?= 3
MINUTES ?= 60
PYTHON ?= python3
PIP_ARGS ?=
VENV ?= .venv
RUN := $(VENV)/bin/python

.DEFAULT_GOAL := help
.PHONY: help setup convert test torture lint docs bench bench-engines clean

help: ## Show this help
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

setup: $(VENV)/.installed ## Make the virtual environment (every other target does it when needed)

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[export,zoo,rtx,runtime,metrics,triton,bench,dev,docs]'
	@touch $@

convert: setup ## Convert MODEL (default raft; all: the whole zoo) into artifacts/MODEL; more words in ARGS
	$(RUN) -m pipeline convert $(if $(filter all,$(MODEL)),--all,$(MODEL)) $(ARGS)

test: setup ## Run all tests, in WORKERS processes (ARGS for pytest)
	@# waiting OpenMP threads leave the core to the other processes; many processes import torch,
	@# and compiled modules halve their time, so Python keeps them whatever the shell says
	OMP_WAIT_POLICY=PASSIVE PYTHONDONTWRITEBYTECODE= $(RUN) -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

torture: setup ## Attack the pipeline for MINUTES (default 60): kills, damaged files, hostile models, operators
	$(RUN) tests/torture/campaign.py --minutes $(MINUTES) $(ARGS)

lint: setup ## Check style, types, and which room imports which
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(RUN) -m mypy --platform win32
	$(VENV)/bin/lint-imports

docs: setup ## Build the docs as a site in build/site; a broken link or anchor is an error
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet
	@echo "build/site: $$(find build/site -name index.html | wc -l) pages"

bench: setup ## Measure the stages of a conversion (ARGS: models, default raft raft_small)
	$(RUN) benchmarks/conversion/stages.py $(ARGS)

bench-engines: setup ## Measure engines beside torch on a GPU (ARGS: artifacts, --torch-python)
	$(RUN) benchmarks/engines/engines.py run $(ARGS)

clean: ## Remove caches and build leftovers (the environment and artifacts stay)
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
