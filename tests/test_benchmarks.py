"""Every script in `benchmarks/` says what it is when asked, before it measures or installs anything."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SCRIPTS = sorted(path.name for path in BENCHMARKS.glob("*.py"))


@pytest.fixture
def alone(monkeypatch):
    """Scripts find each other, start no process, and leave no module behind."""

    def refused(*arguments, **options):
        raise AssertionError(f"started {arguments}")

    before = set(sys.modules)
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(subprocess, "run", refused)
    yield
    for name in set(sys.modules) - before:
        if str(BENCHMARKS) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_says_what_a_script_is_and_runs_nothing(script, alone, monkeypatch, capsys):
    """In this process, which has loaded torch already."""
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(BENCHMARKS / script), run_name="__main__")
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: {script}")
    first_words = " ".join((BENCHMARKS / script).read_text().removeprefix('"""').split()[:3])
    assert first_words in " ".join(shown.split())
