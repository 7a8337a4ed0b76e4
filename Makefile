# `make check` is what a change must pass; CI runs `make ci`. Tools come from the environment of $(PYTHON): activate one,
# or say PYTHON=.venv/bin/python.
PYTHON ?= python
BIN := $(dir $(shell command -v $(PYTHON)))
RECIPE ?= gym-ppo

.PHONY: help install check ci lint types imports docs test test-slow prove chaos wheel extras format

help:  ## List what can be made.
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */\1\t/' | expand -t 12

install:  ## Install this checkout, its extras and the tools, with the versions CI uses.
	$(PYTHON) -m pip install -c .ci/constraints.txt -e '.[all,dev,docs]'

# Three jobs at a time, so that two cores have work while processes are waited for, and the longest parts first.
define together
	@echo "Three at a time, each shown when it has ended: $(1)"
	@+$(MAKE) --no-print-directory --keep-going -j3 $(if $(filter output-sync,$(.FEATURES)),-O) $(1)
endef
# Faults are three parts: files that are hostile, launchers and hosts that fail, and the rest.
HOSTILE := $(wildcard tests/fault/test_hostile*.py tests/fault/test_fuzz.py)
LAUNCHERS := foreign_directory hangs hosts job_schemas local_users preemption restarts slurm standstill
LAUNCHERS := $(LAUNCHERS:%=tests/fault/test_%.py)
LONGEST := gpu unit fault launchers contract
OTHERS := hostile $(filter-out $(LONGEST) __pycache__ emulated_cuda,$(notdir $(patsubst %/,%,$(wildcard tests/*/))))
PARTS := $(OTHERS:%=test-%)
FIRST := $(LONGEST:%=test-%)

check: lint  ## Everything a change must pass.
	$(call together,$(FIRST) types imports docs $(PARTS))

ci: lint  ## The same, and beside it a proof, faults, and the wheel in a clean environment: what CI runs.
	$(call together,$(FIRST) chaos prove wheel types imports docs $(PARTS))

lint:  ## Lint, and check the formatting.
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

types:  ## Check the types.
	$(PYTHON) -m mypy

imports:  ## Check who may import whom.
	$(BIN)lint-imports

docs:  ## Build the pages into site/, and stop at a warning, such as a link that leads nowhere.
	$(PYTHON) .ci/reference.py
	$(BIN)zensical build --strict

TESTS = tests/$*
test-fault: TESTS = tests/fault $(HOSTILE:%=--ignore=%) $(LAUNCHERS:%=--ignore=%)
test-launchers: TESTS = $(LAUNCHERS)
test-hostile: TESTS = $(HOSTILE)

test:  ## Run the tests, but for the slow ones.
	$(call together,$(FIRST) $(PARTS))

test-%:
	$(PYTHON) -m pytest -m "not slow" $(PYTEST) $(TESTS)

test-slow:  ## Run the slow tests, and damage four times as many files.
	$(PYTHON) -m pytest -m slow
	LOCKSTEP_EXAMPLES=1000 $(PYTHON) -m pytest tests/fault/test_fuzz.py

prove:  ## Prove one recipe (RECIPE=gym-ppo): the same agent on 1 to 4 processes, killed or not.
	$(PYTHON) -m lockstep prove $(RECIPE) --procs 1 2 3 4 --kill

chaos:  ## Hurt a recipe on the real command line (RECIPE=gym-ppo); the run must end as the one left in peace.
	$(PYTHON) benchmarks/chaos.py --recipe $(RECIPE) --faults 6 --seed 2

wheel:  ## The wheel in a clean environment of its own, with one recipe that needs nothing else.
	.ci/extras none:snake-ppo

extras:  ## Every recipe and extra in a clean environment of its own: install, doctor, train, eval, play, report, export.
	.ci/extras

format:  ## Format, and mend what can be mended.
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .
