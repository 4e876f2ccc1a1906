"""A column that appears late, or in some files only, is carried, refused or reported by name; never dropped in silence."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import pyarrow as pa
import pytest
from typer.testing import CliRunner

from data.corpora import pieces, write_arrow, write_jsonl, write_parquet
from neatpack import PackedStream
from neatpack.cli import app
from neatpack.data import pack, verify
from neatpack.errors import SourceError

CAPACITY = 40
PLAIN = {"input_ids": [1, 2]}


def rows_of(source, **options) -> list[dict]:
    return list(PackedStream(source, CAPACITY, **options))


def tokens_of(rows: list[dict]) -> int:
    return sum(len(row["input_ids"]) for row in rows)


FIRST_RECORDS = {
    "nothing else": {},
    "an ignored number": {"left": 1},
    "an ignored text": {"left": "x"},
    "an ignored object": {"left": {"a": [1, {"b": "c"}]}},
    "an ignored null": {"left": None},
}
LATE_VALUES = {
    "number": 0.5,
    "text": "x",
    "object": {"a": 1},
    "list of text": ["a"],
    "list of numbers": [3, 4, 5],
    "null": None,
}


@pytest.mark.parametrize("first", FIRST_RECORDS)
@pytest.mark.parametrize("late", LATE_VALUES)
@pytest.mark.parametrize("base", [PLAIN, {"text": "ab"}], ids=["ids", "text"])
def test_a_stream_refuses_a_column_of_later_lines_by_line_and_name(first, late, base, tmp_path):
    common = {**base, **FIRST_RECORDS[first]}
    records = [common] * 1500 + [{**common, "late": LATE_VALUES[late]}] + [common] * 3
    path = write_jsonl(tmp_path / "a.jsonl", records)
    known = ["left"] if FIRST_RECORDS[first] else []
    with pytest.raises(
        SourceError, match=r"a\.jsonl line 1501: a column 'late', which the first record .*ignore_columns=\['late'"
    ):
        rows_of(path, ignore_columns=known)
    assert tokens_of(rows_of(path, ignore_columns=[*known, "late"], eos=False)) == 2 * len(records)


def test_a_stream_names_the_line_in_a_later_block_and_behind_lines_of_other_shapes(tmp_path, monkeypatch):
    monkeypatch.setattr("neatpack.data.jsonl.BLOCK_BYTES", 200)
    odd = [{**PLAIN, "left": value} for value in (1, "x", {"a": 1}, [1, [2]], None)]
    records = [*odd * 20, {**PLAIN, "left": 1, "late": 2}]
    path = write_jsonl(tmp_path / "a.jsonl", records)
    with pytest.raises(SourceError, match=r"line 101: a column 'late'"):
        rows_of(path, ignore_columns=["left"])
    assert tokens_of(rows_of(path, ignore_columns=["left", "late"])) == 2 * len(records)


def test_an_ignored_column_nested_deeper_than_any_stack_is_passed_over(tmp_path):
    deep = b'{"input_ids": [1, 2], "left": ' + b"[" * 500 + b"]" * 500 + b"}\n"
    path = tmp_path / "a.jsonl"
    path.write_bytes(deep * 3 + b'{"input_ids": [1, 2], "left": 1}\n')
    assert tokens_of(rows_of(path, ignore_columns=["left"])) == 8
    pack(path, tmp_path / "out", 8)


def test_packing_reports_late_columns_among_those_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr("neatpack.data.jsonl.BLOCK_BYTES", 200)
    records = [{**PLAIN, "score": 1}] * 30 + [{**PLAIN, "score": 1, "url": "x"}] + [{**PLAIN, "meta": {"a": [1]}}]
    path = write_jsonl(tmp_path / "a.jsonl", records)
    assert pack(path, tmp_path / "out", 8).ignored_columns == ("score", "url", "meta")
    counts = json.loads((tmp_path / "out" / "manifest.json").read_text())["counts"]
    assert counts["ignored_columns"] == ["score", "url", "meta"]
    assert verify(tmp_path / "out", [path]).rows
    shown = CliRunner().invoke(app, ["pack", str(path), "--out", str(tmp_path / "cli"), "--seq-len", "8"]).output
    assert "score, url, meta" in " ".join(shown.split())


@pytest.mark.parametrize("others", [{}, {"left": "x"}])
def test_packing_refuses_a_late_list_of_numbers_by_line_or_skips_its_record(others, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{**PLAIN, **others}] * 5 + [{**PLAIN, **others, "weights": [0.5, 1.0]}])
    with pytest.raises(SourceError, match=r"line 6: a column 'weights', which the first .*--ignore-columns"):
        pack(path, tmp_path / "out", 8)
    assert pack(path, tmp_path / "skipped", 8, skip_bad=True).skipped == {"unexpected column": 1}
    left_out = pack(path, tmp_path / "out", 8, ignore_columns=("w*",))
    assert (sum(map(len, pieces(tmp_path / "out"))), left_out.ignored_columns) == (12, (*others, "weights"))


def test_packing_carries_a_late_document_column_that_was_named(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{**PLAIN, "id": 0}, PLAIN, {**PLAIN, "id": 2}])
    pack(path, tmp_path / "out", 8, document_columns=("id",), seed=None, strategy="in_order")
    assert datasets.load_from_disk(str(tmp_path / "out"))["id"][:] == [[0, None, 2]]


def two_files(folder: Path, form: str, first: dict, second: dict) -> Path:
    for name, record in (("a", first), ("b", second)):
        if form == "jsonl":
            write_jsonl(folder / f"{name}.jsonl", [record])
        elif form == "arrow":
            write_arrow(folder / f"{name}.arrow", pa.Table.from_pylist([record]))
        else:
            write_parquet(folder / f"{name}.parquet", {column: [value] for column, value in record.items()})
    return folder


@pytest.mark.parametrize("form", ["jsonl", "arrow", "parquet"])
@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("extra", [{"late": 1}, {"labels": [-100, 2]}, {"weights": [0.5, 1.0]}])
def test_files_of_one_stream_must_have_the_same_columns_in_every_lane(form, lanes, extra, tmp_path):
    for first, second in ((PLAIN, {**PLAIN, **extra}), ({**PLAIN, **extra}, PLAIN)):
        source = two_files(tmp_path, form, first, second)
        with pytest.raises(SourceError, match=rf"b\.{form}.*has columns beside its tokens: .*as in .*a\.{form}"):
            rows_of(source, lanes=lanes)


def test_a_column_of_one_file_may_be_left_out_knowingly(tmp_path):
    source = two_files(tmp_path, "parquet", PLAIN, {**PLAIN, "late": 1})
    assert tokens_of(rows_of(source, ignore_columns=["late"])) == 4


@pytest.mark.parametrize("lanes", [1, 2, 3])
@pytest.mark.parametrize("records", [[PLAIN, PLAIN, {**PLAIN, "late": 1}], [{**PLAIN, "late": 1}, PLAIN]])
def test_records_in_memory_must_have_the_columns_of_the_first_in_every_lane(records, lanes):
    number = len(records) - 1
    with pytest.raises(SourceError, match=rf"record {number} has columns input_ids.*; the first has input_ids"):
        rows_of(records, lanes=lanes)
    assert tokens_of(rows_of([record for record in records if "late" not in record])) == 2 * (len(records) - 1)


def test_a_streamed_dataset_whose_records_differ_is_refused_as_a_source():
    def records():
        yield PLAIN
        yield {**PLAIN, "late": 1}

    with pytest.raises(SourceError, match=r"the streamed dataset cannot be read on from record 0 .*late"):
        rows_of(datasets.IterableDataset.from_generator(records))
