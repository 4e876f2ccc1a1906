"""Pre-tokenised Arrow data is packed from where it lies, and comes out as it does through token files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from data.corpora import packed_rows, random_ids, same_documents, write_arrow
from data.test_pipeline import write_ids
from data.test_resume import KilledError, stop_at
from neatpack.data import pack, verify
from neatpack.data.job import PackJob
from neatpack.errors import SourceError

STRATEGIES = ("best_fit", "in_order", "wrapped")


def labels_of(documents: list[list[int]], *, every: int) -> pa.Array:
    """Labels that repeat the ids, but for the first token of one document in `every`."""
    labels = [[-100, *ids[1:]] if ids and every and not number % every else ids for number, ids in enumerate(documents)]
    return pa.array(labels, pa.list_(pa.int64()))


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("data-*")}


@pytest.mark.parametrize("every", [None, 0, 7])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rows_are_those_that_token_files_give(tmp_path, strategy, every):
    documents = random_ids(1, 400, 90)
    columns = {} if every is None else {"labels": labels_of(documents, every=every)}
    source = write_ids(tmp_path / "a.arrow", documents, **columns)
    options = {"strategy": strategy, "overflow": "split", "unit_tokens": 1500}
    pack(source, tmp_path / "in_place", 60, **options)
    pack(source, tmp_path / "by_files", 60, skip_bad=True, **options)  # bad records are left out on the way into files
    assert len(shards(tmp_path / "in_place")) > 5
    assert shards(tmp_path / "in_place") == shards(tmp_path / "by_files")
    assert verify(tmp_path / "in_place", [source]).content == verify(tmp_path / "by_files").content


@pytest.mark.parametrize(("skip_bad", "kinds"), [(False, {".lengths", ".json"}), (True, {".lengths", ".json", ".ids"})])
def test_no_token_file_is_written(tmp_path, skip_bad, kinds):
    source = write_ids(tmp_path / "a.arrow", random_ids(2, 50, 40))
    with pytest.raises(KilledError):
        pack(source, tmp_path / "out", 64, progress=stop_at("pack", 2), skip_bad=skip_bad)
    assert {path.suffix for path in (tmp_path / "out.partial" / "work").glob("part-*")} == kinds


def test_packed_rows_are_packed_again_from_the_middle_of_a_row(tmp_path):
    documents = random_ids(3, 300, 40)
    source = write_ids(tmp_path / "a.arrow", documents, labels=labels_of(documents, every=5))
    pack(source, tmp_path / "first", 200)
    pack(tmp_path / "first", tmp_path / "second", 64, unit_tokens=300)
    assert max(len(row["seq_lengths"]) for row in packed_rows(tmp_path / "first")) > 5
    assert same_documents(tmp_path / "second", documents)
    assert verify(tmp_path / "second", [source]).content == verify(tmp_path / "first").content


def test_a_bad_token_is_named_though_lengths_were_taken_without_looking_at_it(tmp_path):
    documents = random_ids(4, 300, 40)
    documents[217] = [5, -5]
    source = write_ids(tmp_path / "a.arrow", documents)
    with pytest.raises(SourceError, match=r"a\.arrow row 217: 'input_ids'\[1\] is -5"):
        pack(source, tmp_path / "out", 64, unit_tokens=500)
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("change", ["longer", "shorter"])
def test_a_source_that_changes_while_it_is_packed_is_refused(tmp_path, monkeypatch, change):
    documents = random_ids(5, 300, 40)
    source = write_ids(tmp_path / "a.arrow", documents)
    load = PackJob._load

    def change_and_load(self, task, content):
        other = [[1], *documents[1:]] if change == "longer" else documents[:100]
        write_ids(source, other)
        return load(self, task, content)

    monkeypatch.setattr(PackJob, "_load", change_and_load)
    with pytest.raises(SourceError, match=r"a\.arrow: changed while it was packed"):
        pack(source, tmp_path / "out", 64)


@pytest.mark.parametrize(
    ("kinds", "vocab_size", "stored"),
    [
        (["uint8"], None, "uint8"),
        (["uint16"], None, "uint16"),
        (["uint16", "uint8"], None, "uint16"),
        (["uint16", "int64"], None, "int32"),
        (["uint16"], 200, "uint8"),
        (["int32"], 60_000, "uint16"),
        (["uint32"], None, "int32"),
    ],
)
def test_ids_are_stored_in_the_narrowest_type_that_the_vocabulary_or_the_source_shows(tmp_path, kinds, vocab_size, stored):
    documents = random_ids(6, 40, 30, vocab_size=200)
    for kind in kinds:
        table = pa.table({"input_ids": pa.array(documents, pa.list_(pa.from_numpy_dtype(np.dtype(kind))))})
        write_arrow(tmp_path / f"{kind}.arrow", table)
    summary = pack([tmp_path / f"{kind}.arrow" for kind in kinds], tmp_path / "out", 64, vocab_size=vocab_size)
    assert summary.dtype == stored
    assert same_documents(tmp_path / "out", documents * len(kinds))
