# Each target sets up what it needs in .venv and runs from nothing: Python 3.10+, git and make are enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test lint clean

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

clean:  ## remove everything that the other targets made
	rm -rf $(VENV) demo-out dist build .pytest_cache .mypy_cache .ruff_cache
