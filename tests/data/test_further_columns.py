"""Further columns: carried with their documents if asked for, left out by name, refused where that could be a mistake."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest
from typer.testing import CliRunner

from data.corpora import packed_rows, random_ids, write_arrow, write_jsonl, write_parquet
from data.test_pipeline import folder_bytes
from neatpack.cli import app
from neatpack.data import PackedDataset, pack, verify
from neatpack.errors import SourceError, StoreError
from neatpack.train import PackedCollator

FORMS = ["arrow", "parquet", "jsonl", "skip_bad"]


def records(count: int = 120, longest: int = 50) -> list[dict]:
    """Documents whose further columns say which document, and which token of it, they belong to."""
    return [
        {
            "input_ids": ids,
            "weights": [number + position / 1000 for position in range(len(ids))],
            "flags": [position % 2 == 0 for position in range(len(ids))],
            "id": number,
            "name": f"document {number}" if number % 3 else None,
            "score": number / 7,
        }
        for number, ids in enumerate(random_ids(7, count, longest))
    ]


CARRIED = {"token_columns": ("weights", "flags"), "document_columns": ("id", "name", "score")}


def write(folder: Path, form: str, rows: list[dict]) -> Path:
    table = pa.Table.from_pylist(rows)
    if form == "parquet":
        return write_parquet(folder / "a.parquet", dict(zip(table.column_names, table.columns, strict=True)))
    if form == "jsonl":
        return write_jsonl(folder / "a.jsonl", rows)
    return write_arrow(folder / "a.arrow", table, batch_rows=9)


def check_rows(rows: list[dict], given: list[dict], *, whole: bool = True) -> int:
    """Every piece of every row has the values of the document that it comes from; returns the pieces seen."""
    seen = 0
    for row in rows:
        assert len(row["id"]) == len(row["name"]) == len(row["score"]) == len(row["seq_lengths"])
        end = 0
        for index, length in enumerate(row["seq_lengths"]):
            begin, end = end, end + length
            document = given[row["id"][index]]
            assert (row["name"][index], row["score"][index]) == (document["name"], document["score"])
            start = round((row["weights"][begin] - row["id"][index]) * 1000)
            for name in ("input_ids", "weights", "flags"):
                assert row[name][begin:end] == document[name][start : start + length]
            assert not whole or length == len(document["input_ids"])
            seen += 1
    return seen


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("unit_tokens", [None, 300])
def test_values_stay_with_their_tokens_and_documents(tmp_path, form, unit_tokens):
    given = records()
    source = write(tmp_path, form, given)
    summary = pack(source, tmp_path / "out", 64, unit_tokens=unit_tokens, skip_bad=form == "skip_bad", **CARRIED)
    assert check_rows(packed_rows(tmp_path / "out"), given) == sum(bool(row["input_ids"]) for row in given)
    assert summary.columns == ("input_ids", "seq_lengths", "weights", "flags", "id", "name", "score")
    assert verify(tmp_path / "out", [source]).rows == summary.rows


def test_values_that_were_shuffled_would_be_noticed(tmp_path):
    given = records()
    pack(write(tmp_path, "arrow", given), tmp_path / "out", 64, **CARRIED)
    with pytest.raises(AssertionError):
        check_rows(packed_rows(tmp_path / "out"), [given[0], *given[:0:-1]])


@pytest.mark.parametrize(("strategy", "overflow"), [("best_fit", "split"), ("best_fit", "truncate"), ("wrapped", "error")])
def test_every_piece_of_a_cut_document_has_its_values(tmp_path, strategy, overflow):
    given = records(60, 100)
    pack(write(tmp_path, "arrow", given), tmp_path / "out", 40, strategy=strategy, overflow=overflow, **CARRIED)
    pieces = check_rows(packed_rows(tmp_path / "out"), given, whole=False)
    assert (pieces > 60) == (overflow != "truncate")


def test_all_sources_and_workers_give_the_same_shards(tmp_path):
    given = records()
    for form in FORMS[:3]:
        (tmp_path / form).mkdir()
        source = write(tmp_path / form, form, given)
        pack(source, tmp_path / f"out-{form}", 64, unit_tokens=300, workers=2 if form == "arrow" else 1, **CARRIED)
    shards = [folder_bytes(tmp_path / f"out-{form}") for form in FORMS[:3]]
    for other in shards[1:]:
        assert {name: data for name, data in other.items() if name != "manifest.json"} == {
            name: data for name, data in shards[0].items() if name != "manifest.json"
        }


def test_packed_rows_are_packed_again_with_their_values(tmp_path):
    given = records()
    pack(write(tmp_path, "arrow", given), tmp_path / "first", 200, **CARRIED)
    with pytest.raises(
        SourceError, match=r"lists of numbers beside 'input_ids': weights, flags, id, score\..*--document-columns"
    ):
        pack(tmp_path / "first", tmp_path / "second", 64)
    pack(tmp_path / "first", tmp_path / "second", 64, unit_tokens=300, **CARRIED)
    check_rows(packed_rows(tmp_path / "second"), given)


def test_text_carries_document_columns_and_leaves_out_the_rest_by_name(tmp_path):
    lines = [{"text": "a" * number, "id": number, "url": "u", "meta": {"a": [1]}} for number in range(1, 30)]
    source = write_jsonl(tmp_path / "a.jsonl", lines)
    summary = pack(source, tmp_path / "out", 64, document_columns=("id",))
    assert summary.ignored_columns == ("url", "meta")
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["counts"]["ignored_columns"] == ["url", "meta"]
    for row in packed_rows(tmp_path / "out"):
        assert row["seq_lengths"] == [number + 1 for number in row["id"]]  # with the end of the sequence


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"lists of numbers beside 'input_ids': weights, flags\..*--token-columns.*--ignore-columns"),
        ({"token_columns": ("weights", "lost")}, r"no column 'lost', got 'input_ids'"),
        (
            {"token_columns": ("weights", "name"), "ignore_columns": ("*",)},
            r"'name' has type string, expected lists of numbers",
        ),
        (
            {"document_columns": ("weights",), "ignore_columns": ("f*",)},
            r"'weights' has values of type list<.*expected numbers or text",
        ),
        ({"token_columns": ("labels",)}, r"labels: neatpack reads these columns itself"),
        ({"token_columns": ("id",), "document_columns": ("id",)}, r"more than once to be carried: id"),
    ],
)
def test_columns_that_cannot_be_what_was_asked_are_refused_by_name(tmp_path, options, message):
    source = write(tmp_path, "arrow", records())
    with pytest.raises(SourceError, match=message):
        pack(source, tmp_path / "out", 64, **options)
    assert not list(tmp_path.glob("out*"))


def test_lists_of_numbers_may_be_left_out_knowingly(tmp_path):
    summary = pack(write(tmp_path, "arrow", records()), tmp_path / "out", 64, ignore_columns=("weights", "fl*"))
    assert summary.ignored_columns == ("weights", "flags", "id", "name", "score")


@pytest.mark.parametrize("form", ["arrow", "parquet", "jsonl"])
def test_a_value_too_few_is_named_by_record_or_skipped(tmp_path, form):
    given = records(20)
    given[12]["weights"] = given[12]["weights"][:-1]
    source = write(tmp_path, form, given)
    where = "line 13" if form == "jsonl" else "row 12"
    count = len(given[12]["input_ids"])
    assert count
    with pytest.raises(SourceError, match=rf"{where}: 'weights' has {count - 1} values, expected {count}, one a token"):
        pack(source, tmp_path / "out", 64, **CARRIED)
    assert pack(source, tmp_path / "out", 64, skip_bad=True, **CARRIED).skipped == {"length mismatch": 1}
    check_rows(packed_rows(tmp_path / "out"), given)


def test_json_numbers_widen_where_fractions_come_late(tmp_path):
    rows = [{"input_ids": [1, 2], "w": [1, 2], "score": 1 if number < 2000 else 0.5} for number in range(2500)]
    rows[2400]["w"] = [0.25, 2]
    source = write_jsonl(tmp_path / "a.jsonl", rows)
    pack(source, tmp_path / "out", 8, seed=None, strategy="in_order", token_columns=("w",), document_columns=("score",))
    data = datasets.load_from_disk(str(tmp_path / "out"))
    assert [score for row in data for score in row["score"]] == [row["score"] for row in rows]
    assert [weight for row in data for weight in row["w"]] == [weight for row in rows for weight in row["w"]]


def test_a_column_that_turns_fractional_between_blocks_is_rewritten(tmp_path, monkeypatch):
    monkeypatch.setattr("neatpack.data.jsonl.BLOCK_BYTES", 200)
    rows = [{"input_ids": [1, 2], "w": [1, 2], "score": 1} for _ in range(40)]
    rows[30] = {"input_ids": [1, 2], "w": [0.25, 2], "score": None}
    rows[35]["score"] = 0.5
    source = write_jsonl(tmp_path / "a.jsonl", rows)
    pack(source, tmp_path / "out", 8, seed=None, strategy="in_order", token_columns=("w",), document_columns=("score",))
    data = datasets.load_from_disk(str(tmp_path / "out"))
    assert [score for row in data for score in row["score"]] == [row["score"] for row in rows]
    assert [weight for row in data for weight in row["w"]] == [weight for row in rows for weight in row["w"]]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"score": "high"}, r"line 3: 'score' is \"high\", expected a number, as before"),
        ({"score": [1]}, r"line 3: 'score' is \[1\], expected a number, true, false or text"),
        ({"w": [1, "x"]}, r"line 3: 'w'\[1\] is \"x\", expected a number"),
        ({"w": 7}, r"line 3: 'w' is 7, expected a list of numbers"),
        ({"w": [1, None]}, r"line 3: 'w'\[1\] is null, expected a number"),
        ({"score": 2**70}, r"line 3: 'score' is 1180591620717411303424, which does not fit 64 bits"),
    ],
)
def test_a_json_value_of_another_kind_is_named_by_line_or_skipped(tmp_path, bad, message):
    good = {"input_ids": [1, 2], "w": [1, 2], "score": 1}
    source = write_jsonl(tmp_path / "a.jsonl", [good, good, {**good, **bad}, good])
    options = {"token_columns": ("w",), "document_columns": ("score",)}
    with pytest.raises(SourceError, match=message):
        pack(source, tmp_path / "out", 8, **options)
    assert sum(pack(source, tmp_path / "out", 8, skip_bad=True, **options).skipped.values()) == 1


def test_types_of_files_are_joined_or_refused_by_file(tmp_path):
    def table(kind: pa.DataType, value: object) -> pa.Table:
        return pa.table({"input_ids": [[1], [2]], "v": pa.array([value, value], kind)})

    narrow = write_arrow(tmp_path / "a.arrow", table(pa.int8(), 3))
    wide = write_arrow(tmp_path / "b.arrow", table(pa.float32(), 0.5))
    text = write_arrow(tmp_path / "c.arrow", table(pa.string(), "x"))
    pack([narrow, wide], tmp_path / "out", 8, document_columns=("v",))
    features = datasets.load_from_disk(str(tmp_path / "out")).features
    assert features["v"].feature.dtype == "float32"
    assert sorted(value for row in packed_rows(tmp_path / "out") for value in row["v"]) == [0.5, 0.5, 3, 3]
    with pytest.raises(SourceError, match=r"column 'v' has int8 values in .*a\.arrow and string values in .*c\.arrow"):
        pack([narrow, text], tmp_path / "other", 8, document_columns=("v",))


def test_text_files_and_token_columns_of_text_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(SourceError, match=r"a\.txt: a text file has no columns, but 'id' are to be carried"):
        pack(tmp_path / "a.txt", tmp_path / "out", 8, document_columns=("id",))
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": "hello", "w": [1]}])
    with pytest.raises(SourceError, match=r"holds text, so the columns 'w' cannot have a number a token"):
        pack(source, tmp_path / "out", 8, token_columns=("w",))


def test_verify_finds_a_row_whose_values_are_too_few(tmp_path):
    given = records()
    pack(write(tmp_path, "arrow", given), tmp_path / "out", 64, **CARRIED)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    manifest["options"].update(token_columns=["id"], document_columns=[])
    (tmp_path / "out" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(StoreError, match=r"row 0: id has \d+ values, expected \d+"):
        verify(tmp_path / "out")


def test_the_command_line_takes_names_with_commas_or_one_by_one(tmp_path):
    source = write(tmp_path, "arrow", records())
    arguments = ["pack", str(source), "--out", str(tmp_path / "out"), "--seq-len", "64", "--token-columns", "weights,flags"]
    result = CliRunner().invoke(app, [*arguments, "--document-columns", "id", "--document-columns", "score", "--json"])
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert summary["columns"] == ["input_ids", "seq_lengths", "weights", "flags", "id", "score"]
    assert summary["ignored_columns"] == ["name"]


def test_the_dataset_and_the_collator_take_them(tmp_path):
    given = records()
    options = {"token_columns": ("weights",), "document_columns": ("id", "score"), "ignore_columns": ("flags",)}
    pack(write(tmp_path, "arrow", given), tmp_path / "out", 64, **options)
    collator = PackedCollator(token_columns=["weights"], document_columns=["id", "score"])
    stored = datasets.load_from_disk(str(tmp_path / "out"))
    virtual = PackedDataset(tmp_path / "out")
    for rows in ([stored[index] for index in range(4)], virtual.__getitems__(range(4))):
        batch = collator(rows)
        numbers = [number for row in rows for number in row["id"]]
        assert batch["id"].tolist() == numbers
        np.testing.assert_allclose(batch["score"].numpy(), np.array(numbers) / 7, rtol=1e-6)
        first = next(iter(rows))
        assert batch["weights"][0, : len(first["input_ids"])].tolist() == pytest.approx(list(first["weights"]))
