"""Every example in a docstring runs and prints what it says; the public names, numpy and torch are at hand."""

import doctest
import importlib
import pkgutil

import numpy as np
import pytest
import torch

import neatpack

MODULES = [
    module.name for module in pkgutil.walk_packages(neatpack.__path__, "neatpack.") if not module.name.endswith("__main__")
]


def run_examples(name: str) -> doctest.TestResults:
    public = {name: getattr(neatpack, name) for name in neatpack.__all__}
    module = importlib.import_module(name)
    return doctest.testmod(module, extraglobs={"np": np, "torch": torch, **public}, optionflags=doctest.NORMALIZE_WHITESPACE)


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_are_true(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_examples(name).failed == 0


def test_there_are_examples_to_run():
    assert run_examples("neatpack.packed_seq").attempted > 0
