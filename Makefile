# Each target sets up what it needs in .venv and runs from nothing: Python 3.10+, git and make are enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
BENCH := .venv-bench

.PHONY: demo test lint bench docs dist clean

$(READY): pyproject.toml constraints.txt compat/nemo-automodel-packed-seq/pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch numpy
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]' -e compat/nemo-automodel-packed-seq
	touch $(READY)

demo: $(READY)  ## pack Python's own standard library, train a small Llama on it, prove that it does not leak
	$(BIN)/python examples/demo.py

test: $(READY)  ## every test
	$(BIN)/python -m pytest

lint: $(READY)  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(BENCH)/.ready: pyproject.toml constraints.txt benchmarks/peers.py
	test -x $(BENCH)/bin/python || $(PYTHON) -m venv $(BENCH)
	$(BENCH)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch numpy
	$(BENCH)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[hf]' trl lightbinpack
	$(BENCH)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps nemo-automodel
	$(BENCH)/bin/python benchmarks/peers.py
	touch $(BENCH)/.ready

bench: $(BENCH)/.ready  ## every benchmark, peers side by side, into benchmarks/RESULTS.md (three hours and more, most of it attention; ONLY="metadata leaks" runs some)
	$(BENCH)/bin/python benchmarks/run.py $(ONLY)

docs: $(READY)  ## the documentation, in site/; a warning is an error
	$(BIN)/python -m mkdocs build --strict

dist: $(READY)  ## sdist and wheel in dist/, checked
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m twine check --strict dist/*

clean:  ## remove everything that the other targets made
	rm -rf $(VENV) $(BENCH) demo-out dist build .pytest_cache .mypy_cache .ruff_cache
