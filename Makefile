# `make demo` and `make test` need a Python from 3.11 to 3.14 and nothing else: they make .venv themselves.

SHELL := /bin/bash
BIN := .venv/bin
export PYTHON
# The embedded redis-server and the tools lie there.
export PATH := $(CURDIR)/$(BIN):$(PATH)
# With this set every process would compile torch anew: seconds of each trainer's start.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
# How many tests run at the same time. With 2, one lane has what needs a cluster and the other the rest
# (tests/lanes.py); 0 is one process, whose output is seen at once.
LANES ?= 2
.PHONY: help setup demo quick test chaos cluster sim fuzz bench lint verify crd manifests images format lock clean

help: ## This list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Make .venv at the locked versions (the others do it when needed)
	@scripts/bootstrap.sh

demo: setup ## Train, kill a pod and a trainer with -9, go on, compare the bits with an undisturbed run
	@$(BIN)/mainstay local demo

quick: setup ## Tests for the edit loop: no cluster, no trainer processes (LANES=0: one at a time)
	@$(BIN)/python -m pytest -ra -n $(LANES) --quick $(ARGS)

test: setup ## All tests, a quick share of the fault matrix included (LANES=0: one at a time)
	@$(BIN)/python -m pytest -ra -n $(LANES) $(ARGS)

chaos: setup ## The whole fault matrix; 40 faults and 2,000 wrong bits drawn from seeds (ARGS for pytest)
	@$(BIN)/python -m pytest -ra -v -m chaos tests $(ARGS)

cluster: setup ## A real Kubernetes to play with, until Ctrl-C (NODES=3; nodes need root; IMAGES=1: with ours)
	@$(BIN)/python -m tests.cluster up $(NODES) $(if $(IMAGES),images)

sim: setup ## 10,000 jobs in simulated time, each with faults drawn from its seed (SEEDS=0:100 for fewer)
	@$(BIN)/mainstay sim --seeds $(or $(SEEDS),0:10000) $(ARGS)

fuzz: setup ## Inputs for all that reads what strangers write, for a minute (SECONDS=600, ARGS='--seed 7')
	@$(BIN)/python -m tests.fuzz --seconds $(or $(SECONDS),60) $(ARGS)

bench: setup ## The benchmarks: ratios measured within one run
	@for file in benchmarks/*.py; do echo "== $$file"; $(BIN)/python "$$file" $(ARGS) || exit 1; done

lint: setup ## Style, types, import rules, what nothing uses, lock
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p mainstay_core -p mainstay_net -p mainstay_fork -p mainstay_api -p mainstay_agent -p mainstay_train -p mainstay_cli -p mainstay_operator
	cd benchmarks && ../$(BIN)/mypy --config-file mypy.ini *.py support
	$(BIN)/lint-imports
	$(BIN)/vulture
	$(BIN)/python scripts/lock.py --check
	$(BIN)/python scripts/crd.py --check
	$(BIN)/python scripts/chart_readme.py --check
	$(BIN)/python scripts/check_tree.py
	$(BIN)/python scripts/check_reasons.py

verify: setup ## Make what is generated again, and show what drifted from its source
	$(BIN)/python scripts/crd.py
	$(BIN)/python scripts/chart_readme.py
	$(BIN)/python scripts/manifests.py
	git diff --exit-code -- charts manifests docs/trainingjob.md

manifests: setup ## Render manifests/ from the chart (needs helm)
	$(BIN)/python scripts/manifests.py

images: setup ## Build the images mainstay-operator, -api and -agent (ENGINE: docker, podman, buildah; which works)
	$(BIN)/python scripts/images.py $(ARGS)

crd: setup ## Write the CRD and the reference that the model describes
	$(BIN)/python scripts/crd.py

format: setup ## Format, and mend what ruff can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lock: setup ## Compile requirements/ again from pyproject.toml
	$(BIN)/python scripts/lock.py

clean: ## Remove .venv and caches
	rm -rf .venv .cache .bootstrap.lock .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
