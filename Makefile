# On a machine with Python, pip and make: `make demo` shows the whole story, `make test` checks everything.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0

.PHONY: demo test lint types unit fuzz bench dist docs clean

demo: $(VENV)/.installed
	$(BIN)/meshfeed demo --out demo-out

test: lint types unit

lint: $(VENV)/.tested
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(VENV)/.tested
	$(BIN)/pyright --pythonpath $(BIN)/python

unit: $(VENV)/.tested
	$(BIN)/python -m pytest --numprocesses=3 --dist=loadfile --no-loadscope-reorder

fuzz: $(VENV)/.tested
	$(BIN)/python tests/fuzz/fuzzing.py --count 100000

bench: $(VENV)/.tested
	for each in benchmarks/bench_*.py; do $(BIN)/python $$each || exit 1; done

# the wheel and the sdist, into dist/
dist: $(VENV)/.tested
	$(BIN)/python -c "from hatchling import build; build.build_sdist('dist'); build.build_wheel('dist')"

docs: $(VENV)/.tested
	$(BIN)/mkdocs build

# torch comes first and by itself: a free choice of version would bring gigabytes for a GPU.
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[demo]"
	touch $@

REQUIREMENTS := requirements-test.txt requirements-oracles.txt requirements-frameworks.txt

$(VENV)/.tested: $(VENV)/.installed $(REQUIREMENTS)
	$(BIN)/python -m pip install --quiet --requirement requirements-test.txt
	$(BIN)/python -m pip install --quiet --no-deps --requirement requirements-oracles.txt
	$(BIN)/python -m pip install --quiet --no-deps --requirement requirements-frameworks.txt
	touch $@

clean:
	rm -rf $(VENV) demo-out dist site
