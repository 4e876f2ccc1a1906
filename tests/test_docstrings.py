"""Every example in a docstring runs and prints what it says."""

import doctest
import importlib
import pkgutil

import pytest
import torch

import neatpack

MODULES = [
    module.name for module in pkgutil.walk_packages(neatpack.__path__, "neatpack.") if not module.name.endswith("__main__")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_are_true(name):
    module = importlib.import_module(name)
    results = doctest.testmod(module, extraglobs={"torch": torch}, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert results.failed == 0


def test_there_are_examples_to_run():
    assert doctest.testmod(importlib.import_module("neatpack.packed_seq"), extraglobs={"torch": torch}).attempted > 0
