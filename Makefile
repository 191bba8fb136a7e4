# Two commands matter: `make demo` shows the whole path on this machine, `make test` proves the code.
# Each makes .venv by itself, with every version pinned, and keeps it until the requirements change.

PYTHON ?= python3
JOBS ?= 2
TORCH ?= 2.13.0

BIN := .venv/bin
# Triton has a folder of its own: only the tests that interpret its kernels are to see it.
KERNELS := .venv/kernels
# Not compiled: of 11,000 files some 3,000 are ever imported, and each is then compiled once, for that is kept.
INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-input --no-compile
export PYTHONDONTWRITEBYTECODE :=
LOCK := build/lock
# What pip resolved, without the name of a torch build and without the libraries that a GPU build brings along.
PINS = $(LOCK)/bin/pip freeze --exclude triweave | sed 's/+.*//' | grep -vE '^(nvidia-|cuda-|triton=)'

.PHONY: help demo test lint requirements clean
.DELETE_ON_ERROR:
.SILENT:

help: ## show this list
	awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile

demo: .venv/.demo ## plan, verify, train and report on this machine, with a real checkpoint and real text
	$(BIN)/triweave demo

test: lint .venv/.kernels ## every check, the cheap ones first
	echo "tests"
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/pytest -n $(JOBS) --dist worksteal -m "not gpu"
	echo "tests of the kernels, in Triton's interpreter"
	PYTHONPATH=$(CURDIR)/$(KERNELS) TRITON_INTERPRET=1 OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/pytest -n $(JOBS) --dist worksteal \
		tests/test_kernel*.py tests/test_fp8.py -k "test_kernels or test_kernel_steps or triton"

lint: .venv/.test ## style, imports and types, without the tests
	echo "style"
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --quiet --check .
	echo "imports"
	report=$$($(BIN)/lint-imports) || { echo "$$report"; exit 1; }
	echo "types"
	$(BIN)/mypy --no-error-summary --num-workers $(JOBS)

requirements: ## resolve the newest versions anew and pin them in requirements/
	rm -rf $(LOCK) && $(PYTHON) -m venv $(LOCK)
	$(LOCK)/bin/python -m pip install -qq --upgrade pip
	$(LOCK)/bin/pip install -qq torch==$(TORCH) '.[train,demo]' hatchling editables
	{ echo "# What \`make demo\` installs. Made by \`make requirements\`; do not edit."; $(PINS); } > requirements/demo.txt
	$(LOCK)/bin/pip install -qq --group dev
	{ echo "# What \`make test\` adds. Made by \`make requirements\`; do not edit."; echo "-r demo.txt"; \
		$(PINS) | grep -vxFf requirements/demo.txt; } > requirements/test.txt
	$(LOCK)/bin/pip install -qq --no-deps --target $(LOCK)/kernels triton
	{ echo "# What interprets the kernels in \`make test\`. Made by \`make requirements\`; do not edit."; \
		$(LOCK)/bin/pip freeze --path $(LOCK)/kernels | sed 's/$$/; sys_platform == "linux"/'; } > requirements/kernels.txt
	rm -rf $(LOCK)

clean: ## remove .venv and every cache; runs/ stays
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("triweave needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv

.venv/.demo: requirements/demo.txt pyproject.toml | $(BIN)/python
	echo "installing requirements/demo.txt into .venv (once)"
	$(INSTALL) -r requirements/demo.txt
	$(INSTALL) --no-deps --no-build-isolation -e .
	touch $@

.venv/.kernels: requirements/kernels.txt | $(BIN)/python
	echo "installing requirements/kernels.txt into $(KERNELS) (once)"
	$(INSTALL) --no-deps --upgrade --target $(KERNELS) -r requirements/kernels.txt
	touch $@

.venv/.test: requirements/test.txt .venv/.demo
	echo "installing requirements/test.txt into .venv (once)"
	$(INSTALL) -r requirements/test.txt
	touch $@
