# `make serve` starts a server from nothing but Python; `make test` checks everything.
#
#   make serve [MODEL=/path/to/hf/folder] [EMBEDDING_MODEL=/path/or/none] [ARGS="--max-num-seqs 32 ..."]
#
# All that is installed goes into .venv; the second time nothing is, and the server starts at once.

PYTHON ?= python3
EMBEDDING_MODEL ?= default
VENV := .venv
BIN := $(VENV)/bin
PROJECTS := pyproject.toml client/pyproject.toml
PACKAGES := -p trident_llm -p trident_kernels -p trident_client

# The tested version. "==" also takes a CPU-only build that pip finds, "===" only the CUDA build.
TORCH := torch$(if $(wildcard /proc/driver/nvidia/version),===,==)2.13.0

# Where no tritonserver is installed, the one of this package serves. Its other parts, and the numpy
# it pins for them, are not needed; but its Python backend reads numpy's arrays as numpy 1 lays them out.
SERVER := $(if $(shell command -v tritonserver),,nvidia-pytriton==0.7.0)
NUMPY := $(if $(SERVER),'numpy<2')

PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input

# The browser that tests of the web page use; only root can install it, and only from Debian.
BROWSER = { command -v chromium && command -v chromedriver; } >/dev/null || { \
  test "$$(id -u)" = 0 && command -v apt-get && timeout 120 apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
  timeout 400 apt-get install -y -qq --no-install-recommends chromium chromium-driver fonts-dejavu-core; \
  } >$(VENV)/browser.log 2>&1 </dev/null

# $(call phase,NAME,COMMANDS): runs COMMANDS with their output in a log and tells how long they took.
define phase
@mkdir -p $(VENV); began=$$(date +%s%N); log=$(VENV)/$(1).log; \
if ($(2)) >"$$log" 2>&1 </dev/null; then \
  took=$$((($$(date +%s%N) - began) / 100000000)); \
  printf '  %-12s %4d.%d s\n' $(1) $$((took / 10)) $$((took % 10)); \
else \
  tail -n 15 "$$log" >&2; \
  echo "error: $(1) failed; the lines above are the end of $$log" >&2; exit 1; \
fi
endef

.PHONY: help serve test check audit soak fuzz-core fuzz-requests format kernels-aot install venv clean

help:
	@echo 'make serve [MODEL=DIR] [ARGS="..."]   start a server that answers (ARGS: .venv/bin/trident serve --help);'
	@echo '  EMBEDDING_MODEL=DIR or none           the model that embeds (default: all-MiniLM-L6-v2)'
	@echo 'make test                             lint, types and all tests'
	@echo 'make check                            lint and types'
	@echo 'make audit                            known faults in what is installed, as pip-audit knows them'
	@echo 'make soak                             half an hour of mixed load on a real server (MINUTES=...)'
	@echo 'make fuzz-core                        a million random operations on the scheduler (OPERATIONS=...)'
	@echo 'make fuzz-requests                    a hundred thousand malformed requests read (REQUESTS=...)'
	@echo 'make format                           format the code'
	@echo 'make kernels-aot                      compile the GPU kernels for sm_80, sm_90 and sm_100; needs no GPU'
	@echo 'make install                          only make .venv and install into it'
	@echo 'make clean                            remove .venv'

# A repository of the user's own is served as it is.
EMBEDDINGS = $(if $(findstring --model-repository,$(ARGS)),,--embedding-model '$(EMBEDDING_MODEL)')

# exec: the command takes the place of the shell, so that Ctrl-C and make's own signals reach it.
serve: $(VENV)/.kernels
	@exec $(BIN)/trident serve --openai-port 9000 $(EMBEDDINGS) $(if $(MODEL),--model '$(MODEL)') $(ARGS)

# Threads that wait sleep soon: tests run beside servers on the same cores, where spinning costs most.
test: check
	GOMP_SPINCOUNT=1000 $(BIN)/python -m pytest -q

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(PACKAGES)
	$(BIN)/hadolint Dockerfile

kernels-aot: $(VENV)/.dev
	$(BIN)/python -m trident_kernels.triton.aot

# Asks a public list of advisories: without a network there is nothing to ask, which is no failure.
audit: $(VENV)/.dev
	@if ! $(PIP) pip-audit; then \
	  echo 'skipped: pip-audit cannot be installed here'; \
	elif ! $(BIN)/pip-audit --skip-editable --progress-spinner off --timeout 15 >$(VENV)/audit.log 2>&1 \
	    && grep -qE 'ConnectionError|ServiceError|Timeout|Max retries' $(VENV)/audit.log \
	    || grep -q '^numpy .* not found on PyPI' $(VENV)/audit.log; then \
	  echo 'skipped: the list of advisories cannot be reached'; \
	else \
	  cat $(VENV)/audit.log; ! grep -q '^Found ' $(VENV)/audit.log; \
	fi

soak: $(VENV)/.dev
	GOMP_SPINCOUNT=1000 $(BIN)/python -m perf.soak --minutes $(or $(MINUTES),30)

fuzz-core: $(VENV)/.dev
	$(BIN)/python -m tests.core.fuzz --operations $(or $(OPERATIONS),1000000)

fuzz-requests: $(VENV)/.dev
	$(BIN)/python -m tests.serving.fuzz --requests $(or $(REQUESTS),100000)

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

install: $(VENV)/.kernels

venv: $(VENV)/.python

clean:
	rm -rf $(VENV)

$(VENV)/.python:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "error: $(PYTHON) was not found; Trident needs Python 3.10 or later (make PYTHON=/path/to/python)" >&2; \
	  exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "error: Trident needs Python 3.10 or later, and $(PYTHON) is $$($(PYTHON) -V 2>&1); name another with make PYTHON=/path/to/python" >&2; \
	  exit 1; }
	@test -z "$(SERVER)" || $(PYTHON) -c 'import sys; sys.exit(sys.version_info >= (3, 13))' || { \
	  echo "error: without an installed tritonserver Trident needs Python 3.10, 3.11 or 3.12, and $(PYTHON) is $$($(PYTHON) -V 2>&1); name another with make PYTHON=/path/to/python" >&2; \
	  exit 1; }
	$(call phase,venv,$(PYTHON) -m venv $(VENV))
	@touch $@

$(VENV)/.installed: $(VENV)/.python $(PROJECTS)
	@echo 'installing into $(VENV): torch, Trident$(if $(SERVER), and a Triton server); this is done once'
	$(call phase,install,set -e; \
	  $(PIP) $(TORCH) $(NUMPY); \
	  $(PIP) -e . -e './client[openai]' $(NUMPY); \
	  $(if $(SERVER),$(PIP) --no-deps $(SERVER)))
	@touch $@

# The CPU kernels are compiled once, into a cache beside them; without it the first start would.
$(VENV)/.kernels: $(VENV)/.installed $(wildcard kernels/trident_kernels/cpu/*.py)
	$(call phase,kernels,test ! -f kernels/trident_kernels/cpu/compile.py || $(BIN)/python -m trident_kernels.cpu.compile)
	@touch $@

$(VENV)/.dev: $(VENV)/.kernels
	$(call phase,tools,$(PIP) -e '.[dev]' $(NUMPY))
	@$(BROWSER) || echo 'note: chromium and chromedriver are not here, so the tests of the web page are skipped'
	@touch $@
