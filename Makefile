# `make check` is for every change while you work; `make ci` is complete. `.ci/run` runs `make ci` on a clean machine; the
# workflows run the same targets in jobs.
# Tools come from the environment of $(PYTHON): activate one, or set PYTHON=.venv/bin/python.
PYTHON ?= python
BIN := $(dir $(shell command -v $(PYTHON)))
RECIPE ?= gym-ppo
# Tests that run.
MARKERS ?= not slow

.PHONY: help install check ci kernels lint types imports docs test test-slow simulate prove chaos wheel extras format

help:  ## List the targets.
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */\1\t/' | expand -t 12

install:  ## Install this checkout, its extras and the tools, with the versions CI uses.
	$(PYTHON) -m pip install -c .ci/constraints.txt -e '.[all,dev,docs]'

# Another version of torch: `make install-torch-2.10.0`. torch chooses the version of triton.
install-torch-%:
	grep -vE '^(torch|triton)==' .ci/constraints.txt | \
		$(PYTHON) -m pip install -c /dev/stdin torch==$* -e '.[all,dev,docs]'

# Four jobs at a time keep two cores busy while tests wait for processes. The longest parts start first.
define together
	@echo "Four at a time; the output of each is shown when it ends: $(1)"
	@+$(MAKE) --no-print-directory --keep-going -j4 $(if $(filter output-sync,$(.FEATURES)),-O) $(1)
endef
# The fault tests are three parts: untrusted files, failing launchers and hosts, and the rest.
HOSTILE := $(wildcard tests/fault/test_untrusted*.py tests/fault/test_fuzz.py)
LAUNCHERS := foreign_directory hangs hosts job_schemas local_users preemption restarts slurm progress_deadlines
LAUNCHERS := $(LAUNCHERS:%=tests/fault/test_%.py)
# The unit tests are five parts: environments, tools, applications and algorithms, commands, and the rest.
APPS := tests/unit/apps tests/unit/algorithms
COMMANDS := tests/unit/cli tests/unit/loggers $(wildcard tests/unit/test_*.py)
UNIT := test-tasks test-commands test-tools test-core test-apps
FIRST := test-gpu test-fault test-launchers $(UNIT) test-distributed test-contract test-docs
OTHERS := hostile $(filter-out $(FIRST:test-%=%) unit __pycache__ emulated_cuda helpers,\
	$(notdir $(patsubst %/,%,$(wildcard tests/*/))))
PARTS := $(OTHERS:%=test-%)

check: export MARKERS := not slow and not distributed
check: lint  ## Lint, types, import contracts, text of the pages, unit tests of one process: minutes.
	$(call together,$(UNIT) types docs test-pages imports test-architecture)

# Kernels are compiled before the tests: parts that start together with an empty cache would each compile them.
ci: lint  ## Everything a change must pass: all tests, a proof, random faults, and the wheel in a clean environment.
	$(call together,kernels types imports docs)
	$(call together,$(FIRST) chaos prove wheel $(PARTS))

kernels:  ## Compile the numba kernels into the cache.
	$(PYTHON) -m lockstep warmup

lint:  ## Lint, and check the format.
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

types:  ## Check the types.
	$(PYTHON) -m mypy

imports:  ## Check the import contracts.
	$(BIN)lint-imports

docs:  ## Build the pages into site/. Warnings, such as broken links, are errors.
	$(PYTHON) .ci/reference.py
	$(BIN)zensical build --strict

TESTS = tests/$*
test-fault: TESTS = tests/fault $(HOSTILE:%=--ignore=%) $(LAUNCHERS:%=--ignore=%)
test-launchers: TESTS = $(LAUNCHERS)
test-core: TESTS = tests/unit $(patsubst %,--ignore=%,tests/unit/tasks tests/unit/tools $(APPS) $(COMMANDS))
test-tasks: TESTS = tests/unit/tasks
test-tools: TESTS = tests/unit/tools
test-commands: TESTS = $(COMMANDS)
test-apps: TESTS = $(APPS)
test-hostile: TESTS = $(HOSTILE)
# Part of test-docs: the text of the pages. The rest executes their commands and code.
test-pages: TESTS = tests/docs/test_plain_english.py tests/docs/test_spelling.py tests/docs/test_api_reference.py
# Parts of test-unit and test-launchers that need a browser and SLURM. nightly.yml runs them, check.yml does not.
test-browser: TESTS = tests/unit/tools/test_report_browser.py
test-slurm: TESTS = tests/fault/test_slurm.py

test:  ## Run all tests except the slow ones.
	$(call together,$(FIRST) $(PARTS))

test-%:
	$(PYTHON) -m pytest -m "$(MARKERS)" $(PYTEST) $(TESTS)

test-slow:  ## Run the slow tests, and the fuzz tests with four times as many examples.
	$(PYTHON) -m pytest -m slow
	LOCKSTEP_EXAMPLES=1000 $(PYTHON) -m pytest tests/fault/test_fuzz.py

simulate:  ## Run a million schedules of the checkpoint simulator: about an hour of one core.
	LOCKSTEP_SCHEDULES=1000000 $(PYTHON) -m pytest --timeout 18000 tests/simulation/test_schedules.py

prove:  ## Prove one recipe (RECIPE=gym-ppo): the same agent on 1 to 4 processes, also after kills.
	$(PYTHON) -m lockstep prove $(RECIPE) --procs 1 2 3 4 --kill

chaos:  ## Inject random faults into a run (RECIPE=gym-ppo). It must end like the uninterrupted run.
	$(PYTHON) benchmarks/chaos.py --recipe $(RECIPE) --faults 2 --seed 2

wheel:  ## Build the wheel (or take WHEEL=FILE), install it in a clean environment, and run one recipe.
	.ci/extras $(if $(WHEEL),--wheel $(WHEEL)) none:snake-ppo

extras:  ## Run every recipe and extra in a clean environment: doctor, train, eval, play, report, export.
	.ci/extras

format:  ## Format, and apply the automatic fixes of the linter.
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .
