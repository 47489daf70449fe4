# On a machine with Python, pip and make: `make demo` shows the whole story, `make test` checks what every change must keep.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0
REQUIREMENTS := requirements-test.txt requirements-oracles.txt requirements-frameworks.txt \
	requirements-bench.txt
SEED := $(or $(SEED),$(shell date +%s))
# What is imported is compiled then, and once, whatever the environment says; to compile all takes most of a minute.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
PARALLEL := --numprocesses=3 --dist=loadfile --no-loadscope-reorder

.PHONY: demo test test-all lint types unit further soak mutate frameworks bench gpu dist docs clean

demo: $(VENV)/.installed
	$(BIN)/meshfeed demo --out demo-out

# types are checked by one process while the tests start and wait
test: lint
	$(MAKE) --no-print-directory --jobs=2 types unit

# and every page, example, adapter and engine, and the packages that are built
test-all: test
	$(MAKE) --no-print-directory further

lint: $(VENV)/.tested
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(VENV)/.tested
	$(BIN)/pyright --pythonpath $(BIN)/python

unit: $(VENV)/.tested
	$(BIN)/python -m pytest $(PARALLEL) -m "not further"

further: $(VENV)/.tested
	$(BIN)/python -m pytest $(PARALLEL) -m further

# the long form of every law, with examples that are new each time; about an hour on two idle cores; SEED=N repeats it
soak: $(VENV)/.tested
	@echo "make soak SEED=$(SEED)"
	MESHFEED_SOAK=1 MESHFEED_SEED=$(SEED) $(BIN)/python -m pytest $(PARALLEL) --timeout=7200 \
		--hypothesis-seed=$(SEED) $(TESTS) || { echo "to repeat it: make soak SEED=$(SEED)"; exit 1; }
	@echo "passed: make soak SEED=$(SEED)"

# whether the tests notice changes to the code; make mutate PACKAGES="plan sequence" for some
mutate: $(VENV)/.tested
	$(INSTALL) cosmic-ray==8.7.0 coverage==7.17.4
	nice $(BIN)/python tests/mutate.py $(PACKAGES)

# The integration tests with the newest version of each framework, and with the checkouts in $(FRAMEWORK_SOURCES), in an
# environment of its own: new versions of Megatron-core need Python >= 3.12. Writes the table in docs/frameworks.md.
FRAMEWORKS ?= .frameworks
NEWER_PYTHON ?= $(shell for python in $(PYTHON) python3.13 python3.12 $(wildcard $(HOME)/.pyenv/versions/*/bin/python3); \
	do $$python -c "import sys; sys.exit(sys.version_info < (3, 12))" 2>/dev/null && echo $$python && break; done)
NEWER_INSTALL := $(FRAMEWORKS)/env/bin/python -m pip install --quiet --disable-pip-version-check --no-compile

frameworks: $(FRAMEWORKS)/.installed
	$(NEWER_INSTALL) --no-deps --upgrade $$($(FRAMEWORKS)/env/bin/python tests/frameworks.py --packages)
	$(FRAMEWORKS)/env/bin/python tests/frameworks.py $(FRAMEWORKS) --rows "$(ROWS)"

$(FRAMEWORKS)/.installed: pyproject.toml $(REQUIREMENTS) requirements-sources.txt
	$(if $(NEWER_PYTHON),,$(error no Python >= 3.12 found: make frameworks NEWER_PYTHON=/path/to/python3.12))
	$(NEWER_PYTHON) -m venv $(FRAMEWORKS)/env
	$(NEWER_INSTALL) "$(TORCH)"
	$(NEWER_INSTALL) --requirement requirements-test.txt
	$(NEWER_INSTALL) --no-deps --requirement requirements-oracles.txt --requirement requirements-frameworks.txt
	$(NEWER_INSTALL) --requirement requirements-sources.txt
	$(FRAMEWORKS)/env/bin/python -m pip uninstall --quiet --yes nvidia-resiliency-ext  # Megatron-LM refuses to import beside it
	$(NEWER_INSTALL) --no-deps --target $(FRAMEWORKS)/pinned $(shell grep megatron-core== requirements-oracles.txt)
	$(NEWER_INSTALL) --editable ".[demo]"
	touch $@

# about 20 minutes on two idle cores; continued where it was interrupted; writes the tables of figures
bench: $(VENV)/.tested
	$(BIN)/python benchmarks/run.py

# what only a GPU can show, into docs/gpu/; nothing is installed where $(PYTHON) has meshfeed; MEGATRON= is a checkout
# of Megatron-LM, whose pretrain runs then, too
gpu:
	@if $(PYTHON) -c "import meshfeed" 2>/dev/null; then python=$(PYTHON); \
	else $(MAKE) $(VENV)/.tested && python=$(BIN)/python; fi; \
	PYTHONPATH=$(CURDIR)/src$(if $(PYTHONPATH),:$(PYTHONPATH)) $$python benchmarks/gpu.py $(if $(MEGATRON),--megatron $(abspath $(MEGATRON)))

# the wheel and the sdist, into dist/; CC=aarch64-linux-gnu-gcc for a wheel of that machine
dist: $(VENV)/.tested
	$(BIN)/python -c "from hatchling import build; build.build_sdist('dist'); build.build_wheel('dist')"

docs: $(VENV)/.tested
	$(BIN)/mkdocs build

# torch comes first and by itself: a free choice of version would bring gigabytes for a GPU.
$(VENV)/.installed: pyproject.toml hatch_build.py $(wildcard src/meshfeed/*/loops.c src/meshfeed/*/*/loops.c src/meshfeed/native/heap.h)
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --upgrade pip
	$(INSTALL) "$(TORCH)"
	$(INSTALL) --editable ".[demo]"
	touch $@

$(VENV)/.tested: $(VENV)/.installed $(REQUIREMENTS)
	$(INSTALL) --requirement requirements-test.txt
	$(INSTALL) --no-deps --requirement requirements-oracles.txt --requirement requirements-frameworks.txt \
		--requirement requirements-bench.txt
	touch $@

clean:
	rm -rf $(VENV) $(FRAMEWORKS) bench-out demo-out dist site
