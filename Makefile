# Needs Linux, make, and python3 (3.11 or newer) with venv. Everything else goes into .venv.

PYTHON ?= python3
# One more than cores: some tests wait for processes that they have started.
WORKERS ?= $(shell expr 1 + $$(nproc))
KILLS ?= 1000
SEED ?= 0
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
OLDEST := .venv-oldest/bin
OLDEST_PIP = $(OLDEST)/python -m pip --disable-pip-version-check -qq install \
  -c .venv-oldest/constraints.txt
# JAX 0.11 and later need Python 3.12, so the newest releases are two sets: one for
# Python 3.11, one for later ones. The other set is tested with the other Python.
OTHER := .venv-other/bin
OTHER_PIP = $(OTHER)/python -m pip --disable-pip-version-check -qq install \
  -c constraints.txt
OTHER_PYTHON ?= $(shell $(BIN)/python tests/versions/find_python.py other)
NEWEST_PYTHON ?= $(shell $(BIN)/python tests/versions/find_python.py newest)
# An index with builds of the day, which JAX's guide to installing names.
NIGHTLY_INDEX ?=
NIGHTLY_PIP = .venv-nightly/bin/python -m pip --disable-pip-version-check -q install \
  --upgrade

# The tests start some hundred processes: none should compile the sources again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo clean \
  test test-all test-slow coverage busy soak differential libraries plan-wheels plans \
  versions versions-short compare-sets oldest other test-other nightly \
  check lint format types layers spelling size \
  docs dist bench bench-peers bench-ps

help:
	@echo "For every change:"
	@echo "make demo         train on handwritten digits over 4 virtual CPU devices"
	@echo "make test         install, and test every promise once; 5 minutes on 2 cores"
	@echo "make test-all     run every test; about 60 minutes on 2 cores"
	@echo "make test-slow    run the tests that make test leaves out"
	@echo "make check        lint, types, layers, spelling, and a count of phrases; a minute or two"
	@echo "make lint         one part of make check; also types, layers, spelling"
	@echo "make format       format the code, and fix what ruff can"
	@echo "make docs         build the documentation site in docs/_build; about a minute"
	@echo "make setup        install everything for development"
	@echo "make clean        remove the environment, caches and runs"
	@echo ""
	@echo "For one subject, or before a release:"
	@echo "make versions     make test with the oldest and the newest JAX; 20 minutes"
	@echo "make nightly      make test with the JAX of today, for a scheduled job"
	@echo "make libraries    test tf.data, PyTorch, Hugging Face, gs:// (installs 2 GB)"
	@echo "make plans        compile for TPUs and GPUs that are not there (installs 0.4 GB)"
	@echo "make differential compare 700 constructs with plain JAX; about an hour"
	@echo "make coverage     list the lines that make test does not run"
	@echo "make soak         inject 1,000 faults into jobs; hours (KILLS=60: ten minutes)"
	@echo "make busy         make test three times and make test-all once, under load; hours"
	@echo "make dist         build a wheel and an sdist in dist/, and use them; under a minute"
	@echo ""
	@echo "Figures:"
	@echo "make bench        measure against hand-written loops; about 45 minutes"
	@echo "make bench-peers  install other libraries for make bench (9 GB)"
	@echo "make bench-ps     measure parameter servers; about 7 minutes"
	@echo "make size         print how large and how dense each package is"

.venv/made:
	@echo "Creating .venv ..."
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Armillary needs Python 3.11 or newer: make PYTHON=python3.11 ..."; exit 1; }
	@$(PYTHON) -m venv .venv
	@$(PIP) install -c constraints.txt pip
	@touch $@

# A stamp is newer than the files it was installed from, so that a second call is quick.
.venv/demo-installed: .venv/made pyproject.toml constraints.txt
	@echo "Installing Armillary (a few minutes the first time) ..."
	@$(PIP) install -c constraints.txt -e '.[examples,report,tensorboard]'
	@touch $@

.venv/dev-installed: .venv/demo-installed
	@echo "Installing the development tools ..."
	@$(PIP) install -c constraints.txt --group dev
	@touch $@

setup: .venv/dev-installed

demo: .venv/demo-installed
	@$(BIN)/python examples/digits.py --devices 4 --run-dir runs/digits
	@echo "(TensorBoard is installed as $(BIN)/tensorboard.)"

# The suite, then one command for each further figure; all add to one document. Grain is
# among the development tools.
bench: .venv/dev-installed
	$(BIN)/python -m benchmarks --json bench.json
	$(BIN)/python -m benchmarks.host_work --json bench.json
	$(BIN)/python -m benchmarks.start_time --json bench.json
	$(BIN)/python -m benchmarks.memory --json bench.json
	$(BIN)/python -m benchmarks.sources --json bench.json
	$(BIN)/python -m benchmarks.checkpoint_cost --json bench.json
	$(BIN)/python -m benchmarks.joint_saves --json bench.json
	$(BIN)/python -m benchmarks.boundary_cost --json bench.json
	$(BIN)/python -m benchmarks.sharded --json bench.json
	$(BIN)/python -m benchmarks.scaling --topologies 4 16 64 256 512 --json bench.json

# Other libraries, each in its own environment: their requirements differ.
bench-peers: $(foreach peer,keras orbit lightning kauldron tunix,.venv-bench-$(peer)/installed)

# The lists are complete. Orbit's package asks for much that Orbit itself does not use, so
# that nothing else is installed.
.venv-bench-%/installed: benchmarks/peers/%.txt
	@echo "Installing the peer $* (a few minutes) ..."
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip --disable-pip-version-check -qq install --no-deps -r $<
	@touch $@

# Ray is among the development tools.
bench-ps: .venv/dev-installed
	$(BIN)/python -m benchmarks.parameter_server --json bench.json

# After the crash of a worker pytest-xdist may wait forever, so such a run ends immediately.
SHARED := -n $(WORKERS) --dist loadgroup --max-worker-restart=0

TESTS := -m pytest $(SHARED)
# The tests that touch every promise once. The marker `slow` is the only selection.
SHORT_TESTS := $(TESTS) -m "not slow"

# The oldest releases that the bounds allow, and the newest ones of everything else.
.venv-oldest/made: constraints.txt constraints-oldest.txt
	@echo "Creating .venv-oldest ..."
	@$(PYTHON) -m venv $(@D)
	@awk -F== 'NR == FNR { old[$$1] } NR == FNR || !($$1 in old)' \
	  constraints-oldest.txt constraints.txt > $(@D)/constraints.txt
	@$(OLDEST_PIP) pip
	@touch $@

.venv-oldest/demo-installed: .venv-oldest/made pyproject.toml
	@echo "Installing the oldest set (a minute the first time) ..."
	@$(OLDEST_PIP) -e '.[examples,keras]'
	@touch $@

.venv-oldest/dev-installed: .venv-oldest/demo-installed
	@echo "Installing the development tools ..."
	@$(OLDEST_PIP) -e '.[report,tensorboard]' --group dev
	@touch $@

oldest: .venv-oldest/demo-installed

# The newest releases for the Python that `.venv` does not have, if there is one.
.venv-other/made: .venv/made constraints.txt
	@echo "Creating .venv-other with $(OTHER_PYTHON) ..."
	@"$(OTHER_PYTHON)" -m venv $(@D)
	@$(OTHER_PIP) pip
	@touch $@

.venv-other/demo-installed: .venv-other/made pyproject.toml
	@echo "Installing the newest set for the other Python (a minute the first time) ..."
	@$(OTHER_PIP) -e '.[examples,keras]'
	@touch $@

.venv-other/dev-installed: .venv-other/demo-installed
	@echo "Installing the development tools ..."
	@$(OTHER_PIP) -e '.[report,tensorboard]' --group dev
	@touch $@

NO_OTHER := No Python was found on the other side of 3.12, so one set of the newest \
  releases is not tested. Name a Python: make OTHER_PYTHON=python3.13 ...

other: .venv/made
	@if [ -n "$(OTHER_PYTHON)" ]; then $(MAKE) .venv-other/demo-installed; \
	else echo "$(NO_OTHER)"; fi

test-other: .venv/made
	@if [ -n "$(OTHER_PYTHON)" ]; then \
	  $(MAKE) .venv-other/dev-installed && $(OTHER)/python $(SHORT_TESTS); \
	else echo "$(NO_OTHER)"; fi

# The sets that are installed.
SETS = $$(for folder in .venv-oldest .venv .venv-other; do \
  if [ -e $$folder/demo-installed ]; then echo $$folder/bin/python; fi; done)
FEW_STEPS := --steps 60 --steps-per-loop 20

versions: test .venv-oldest/dev-installed
	$(OLDEST)/python $(SHORT_TESTS)
	@$(MAKE) test-other
	$(BIN)/python -m tests.versions.across $(SETS)

compare-sets: .venv/demo-installed
	$(BIN)/python -m tests.versions.across $(FEW_STEPS) $(SETS)

versions-short: .venv/dev-installed oldest other compare-sets

# For a scheduled job. The environment is created again, because it has no pins.
nightly: .venv/made
	@[ -n "$(NEWEST_PYTHON)" ] || { echo "Name a Python: make nightly NEWEST_PYTHON=..."; exit 1; }
	@rm -rf .venv-nightly nightly
	@"$(NEWEST_PYTHON)" -m venv .venv-nightly
	@echo "Installing the JAX of today (a few minutes) ..."
	@$(NIGHTLY_PIP) -e '.[examples,report,tensorboard]' --group dev
	@$(NIGHTLY_PIP) --pre $(addprefix --extra-index-url ,$(NIGHTLY_INDEX)) jax jaxlib flax
	@mkdir nightly
	@.venv-nightly/bin/python -m pip list --format=freeze > nightly/releases.txt
	@grep -E '^(jax|jaxlib|flax)==' nightly/releases.txt
	@.venv-nightly/bin/python $(SHORT_TESTS) -rfE > nightly/tests.txt 2>&1; status=$$?; \
	  grep -E '^(FAILED|ERROR)' nightly/tests.txt; tail -n 1 nightly/tests.txt; \
	  echo "nightly/tests.txt has the failures, nightly/releases.txt the releases."; \
	  exit $$status

test: .venv/dev-installed
	$(BIN)/python $(SHORT_TESTS) --durations=10

test-all: .venv/dev-installed
	$(BIN)/python $(TESTS) --durations=20

# The lines that `make test` runs. They show where a test is missing, and are no gate: a
# step is traced, so a line that ran once may still compute a wrong number.
.venv/coverage-installed: .venv/dev-installed
	@$(PIP) install -c constraints.txt --group coverage
	@touch $@

coverage: .venv/coverage-installed
	$(BIN)/python -m coverage erase
	$(BIN)/python -m coverage run $(SHORT_TESTS)
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage html --quiet
	$(BIN)/python -m coverage report --skip-covered --sort=cover

# The tests that `make test` leaves out.
test-slow: .venv/dev-installed
	$(BIN)/python $(TESTS) -m slow --durations=20

# Not in the environment of the tests: these are large, and PyTorch for GPUs does not go
# with the pins of JAX for GPUs. The emulator is a local server that acts as Google's
# object store.
.venv-libraries/installed: pyproject.toml constraints.txt
	@echo "Installing TensorFlow, PyTorch, transformers, datasets and gcsfs (a few minutes) ..."
	@$(PYTHON) -m venv $(@D)
	@grep -v '^nvidia' constraints.txt > $(@D)/constraints.txt
	@$(@D)/bin/python -m pip --disable-pip-version-check -qq install -c constraints.txt pip
	@$(@D)/bin/python -m pip --disable-pip-version-check -qq install \
	  -c $(@D)/constraints.txt -e '.[tfdata,torch,huggingface,gcs]' --group dev \
	  gcp-storage-emulator transformers
	@touch $@

libraries: .venv-libraries/installed
	.venv-libraries/bin/python -m pytest -n 0 -m "" tests/data/test_libraries.py \
	  tests/checkpoint/test_object_store.py tests/pretrained/test_transformers.py

# The compilers for TPUs and GPUs are not in the environment of the tests: they are large,
# and with them `import jax` is slow. The versions are those that the pins of JAX ask for.
.venv-plans/installed: .venv/made constraints.txt
	@echo "Installing the compilers for TPUs and GPUs (a few minutes) ..."
	@$(PIP) install --no-deps -c constraints.txt --target $(@D) \
	  libtpu jax-cuda13-plugin jax-cuda13-pjrt
	@touch $@

plan-wheels: .venv/made .venv-plans/installed

plans: .venv/dev-installed .venv-plans/installed
	ARMILLARY_PLAN_WHEELS=.venv-plans $(BIN)/python -m pytest -n 0 \
	  tests/plan/test_compiled.py tests/plan/test_compiled_sharded.py \
	  tests/plan/test_compiled_examples.py

# Each construct on 0, 1, 2 and 4 replicas; then docs/internals/compatibility.md is written again.
differential: .venv/dev-installed
	$(BIN)/python $(TESTS) tests/differential/all_cases.py \
	  tests/differential/test_*.py \
	  --deselect tests/differential/test_complete.py::test_the_page_lists_the_cases
	$(BIN)/python -m tests.differential.page

# Three times `make test` and once `make test-all`, next to eight busy loops.
busy: .venv/dev-installed
	$(BIN)/python -m tests.busy

# Any fault at any moment; a table of how long each took. Fewer: make soak KILLS=60.
soak: .venv/dev-installed
	$(BIN)/python -m tests.recovery.soak --faults $(KILLS) --seed $(SEED)

# The packages that a maintainer uploads. The wheel is built from the sdist, and both are checked.
.venv/release-installed: .venv/made constraints.txt
	@echo "Installing what builds packages ..."
	@$(PIP) install -c constraints.txt --group release
	@touch $@

dist: .venv/release-installed
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .
	$(BIN)/python -m tests.versions.package dist

.venv/docs-installed: .venv/dev-installed
	@echo "Installing Sphinx ..."
	@$(PIP) install -c constraints.txt --group docs
	@touch $@

# Links of pages to files and names are resolved again each time, because a change of the
# sources is a change of many pages.
docs: .venv/docs-installed
	JAX_PLATFORMS=cpu $(BIN)/python -m sphinx -q -W --keep-going -E -b html \
	  -c docs/site . docs/_build
	@echo "The site is docs/_build/index.html."

check: lint types layers spelling
	@$(BIN)/python tests/meta/voice.py

lint: .venv/dev-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: .venv/dev-installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: .venv/dev-installed
	$(BIN)/pyright --pythonpath $(BIN)/python

layers: .venv/dev-installed
	$(BIN)/lint-imports

spelling: .venv/dev-installed
	$(BIN)/typos

# Figures to compare, and no gate.
size: .venv/made
	@$(BIN)/python tests/meta/size.py

clean:
	rm -rf .venv .venv-oldest .venv-other .venv-nightly .venv-bench-* .venv-libraries .venv-plans
	rm -rf .pytest_cache .ruff_cache .hypothesis .import_linter_cache .coverage .coverage.*
	rm -rf runs build dist nightly htmlcov docs/_build docs/reference/api
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
