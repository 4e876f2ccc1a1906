from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import neatpack.planning

MODULES = ["neatpack.planning", *(f"neatpack.planning.{m.name}" for m in pkgutil.iter_modules(neatpack.planning.__path__))]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_are_true(name, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)  # one example writes a file
    public = {name: getattr(neatpack.planning, name) for name in neatpack.planning.__all__}
    assert doctest.testmod(importlib.import_module(name), extraglobs=public).failed == 0


def test_there_are_examples() -> None:
    found = doctest.DocTestFinder()
    assert sum(len(test.examples) for name in MODULES for test in found.find(importlib.import_module(name))) >= 8
