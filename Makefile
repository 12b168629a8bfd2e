# Needs python3 (3.11 or newer) with venv, and make. Everything else goes into .venv.

PYTHON ?= python3
WORKERS ?= auto
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq

.DEFAULT_GOAL := help
.PHONY: help setup demo test check lint format types layers spelling clean

help:
	@echo "make demo      train on handwritten digits over 4 virtual CPU devices"
	@echo "make test      install and run the tests"
	@echo "make check     lint, types, layers and spelling"
	@echo "make format    rewrite the code in the house style"
	@echo "make setup     install everything for development"
	@echo "make clean     remove the environment, caches and runs"

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
	@$(PIP) install -c constraints.txt -e '.[examples,tensorboard]'
	@touch $@

.venv/dev-installed: .venv/demo-installed
	@echo "Installing the development tools ..."
	@$(PIP) install -c constraints.txt --group dev
	@touch $@

setup: .venv/dev-installed

demo: .venv/demo-installed
	@$(BIN)/python examples/digits.py --devices 4 --run-dir runs/digits
	@echo "(TensorBoard is installed as $(BIN)/tensorboard.)"

test: .venv/dev-installed
	$(BIN)/python -m pytest -n $(WORKERS)

check: lint types layers spelling

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

clean:
	rm -rf .venv runs build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
