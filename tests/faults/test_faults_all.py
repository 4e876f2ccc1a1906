"""Every case is run by exactly one runner, or argued away in one line; and how many of each there are."""

import importlib
from collections import Counter
from pathlib import Path

from fault_cases import all_cases

from report import table

CASES = all_cases()


def run_ids():
    """The ids of the cases that the runners of this folder are parametrized with, once for every test."""
    for path in sorted(Path(__file__).parent.glob("test_faults_*.py")):
        if path.stem == Path(__file__).stem:
            continue
        module = importlib.import_module(path.stem)
        for name, test in vars(module).items():
            if name.startswith("test_"):
                for mark in getattr(test, "pytestmark", ()):
                    if mark.name == "parametrize" and mark.args[0] == "case":
                        yield from (parameters.id for parameters in mark.args[1])


def test_every_case_is_run_once_or_argued():
    ran = Counter(run_ids())
    assert {case.id for case in CASES if case.not_applicable is None} == set(ran)
    assert set(ran.values()) == {1}


def test_ids_are_unique_and_every_case_names_its_source():
    assert len({case.id for case in CASES}) == len(CASES) == 131
    for case in CASES:
        owner, _, number = case.source.partition("#")
        assert owner.count("/") == 1, case.id
        assert number.isdigit(), case.id
        assert case.input, case.id
        assert case.expected, case.id


def test_every_case_has_one_verdict():
    for case in CASES:
        assert (case.found in ("right", "mended")) == (case.not_applicable is None), case.id
        assert (case.check is not None) == (case.not_applicable is None), case.id


def test_an_argument_is_a_sentence():
    for case in CASES:
        if case.not_applicable is not None:
            assert len(case.not_applicable.split()) > 8, case.id
            assert "\n" not in case.not_applicable, case.id


def test_the_table_counts_every_case():
    last = table(CASES)[-1]
    assert last[0] == "all"
    assert sum(last[1:]) == len(CASES)
