# Everything happens in .venv; nothing needs to be installed beforehand but Python >= 3.11 and make.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test check format clean help

help:
	@echo "make demo     two teachers, two services, one student: the whole path in minutes, on a CPU"
	@echo "make test     lint and run the tests"
	@echo "make check    the tests, pyright in strict mode, and a wheel imported in a clean environment"
	@echo "make format   format the code"
	@echo "make clean    remove .venv and caches; runs/ stays"

demo: .venv/.demo
	$(BIN)/mopd demo

test: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest

check: test
	$(BIN)/pyright
	$(BIN)/python -m pytest -m packaging

format: .venv/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch first and by version: a range alone may bring several GB for accelerators that are not here.
.venv/.torch:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "mopd needs Python 3.11 or newer; run make PYTHON=/path/to/python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing torch into .venv (once)"
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install --quiet "torch==2.13.0"
	@touch $@

.venv/.demo: pyproject.toml | .venv/.torch
	@echo "installing mopd into .venv (once)"
	@$(BIN)/python -m pip install --quiet --editable ".[server,trainer]"
	@touch $@

.venv/.dev: pyproject.toml | .venv/.torch
	@echo "installing mopd and its development tools into .venv (once)"
	@$(BIN)/python -m pip install --quiet --editable ".[dev]"
	@touch $@ .venv/.demo
