"""What the fuzzer found, and a few of its trials, read again: only errors of neatpack come out."""

import random
import shutil
from pathlib import Path

import fuzz_readers
import pytest

from neatpack.errors import PackError

KEPT = sorted(Path(__file__).with_name("kept").glob("*/*"))


def readers_of(name):
    return [reader for reader, names in fuzz_readers.READERS if name in names]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", KEPT, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_what_was_found_is_refused_by_every_reader(tmp_path, path):
    refused = []
    for number, reader in enumerate(readers_of(path.name)):
        (work := tmp_path / str(number)).mkdir()
        (shutil.copytree if path.is_dir() else shutil.copy)(path, work / path.name)
        try:
            reader(work / path.name, work, random.Random(number))
        except PackError as error:
            refused.append(len(str(error)))
    assert refused
    assert max(refused) < 4000


@pytest.mark.filterwarnings("ignore")
def test_a_few_trials_find_nothing_and_an_error_of_anyone_else_would_be_found(tmp_path, monkeypatch):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    fuzz_readers.make_corpus(corpus)
    results = []
    for number in range(60):
        (work := tmp_path / str(number)).mkdir()
        results.append(fuzz_readers.trial(number, corpus, work))
    assert not [result for result in results if "\n" in result or " " in result]
    assert "read" in results
    assert "SourceError" in results
    monkeypatch.setattr(fuzz_readers, "READERS", [(lambda *_: 1 / 0, ["ids.parquet"])] * len(fuzz_readers.READERS))
    (work := tmp_path / "broken").mkdir()
    assert "ZeroDivisionError" in fuzz_readers.trial(0, corpus, work)
