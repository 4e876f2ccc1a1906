"""Bad input gets one error that says where, what was got, what was expected and the way out; `skip_bad` counts instead."""

from __future__ import annotations

import gzip
from pathlib import Path

import pyarrow as pa
import pytest

from data.corpora import encoded, pieces, same_documents, write_arrow, write_jsonl, write_parquet
from neatpack.data import pack
from neatpack.errors import SourceError

LIST = pa.list_(pa.int64())


def raw(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def ids_table(ids: list, **columns: list) -> pa.Table:
    arrays = {name: values if isinstance(values, pa.Array) else pa.array(values, LIST) for name, values in columns.items()}
    return pa.table({"input_ids": ids if isinstance(ids, pa.Array) else pa.array(ids, LIST), **arrays})


def arrow(path: Path, ids: list, **columns: list) -> Path:
    return write_arrow(path, ids_table(ids, **columns), batch_rows=3)


# Each bad record stands between two good ones, "ab" (or [1, 2]) before and "cd" (or [3]) after.
BAD_LINES = {
    "broken JSON": (b'{"text": "x', r"line 2: broken JSON \([^)]* at column 10\), expected one JSON object"),
    "not an object": (b'["x"]', r"line 2: got a JSON list, expected one JSON object a line"),
    "missing column": (b'{"body": "x"}', r"line 2: no column 'text' \(got 'body'\)"),
    "null text": (b'{"text": null}', r"line 2: 'text' is null, expected a string"),
    "number for text": (b'{"text": 5}', r"line 2: 'text' is 5, expected a string"),
    "invalid UTF-8": (b'{"text": "a\xff"}', r"line 2: invalid UTF-8 at byte 11"),
    "half a pair": (b'{"text": "\\ud800"}', r"line 2: 'text' holds half of a surrogate pair"),
}
BAD_IDS_LINES = {
    "float": ("[1, 2.5]", r"line 2: 'input_ids'\[1\] is 2.5, expected an integer"),
    "string": ('[1, "2"]', r"line 2: 'input_ids'\[1\] is \"2\", expected an integer"),
    "null token": ("[null]", r"line 2: 'input_ids'\[0\] is null, expected an integer"),
    "true": ("[true]", r"line 2: 'input_ids'\[0\] is true, expected an integer"),
    "not a list": ("7", r"line 2: 'input_ids' is 7, expected a list of integers"),
    "negative": ("[1, -7]", r"line 2: 'input_ids'\[1\] is -7, expected 0 to 999 \(the vocabulary\)"),
    "past the vocabulary": ("[1000]", r"line 2: 'input_ids'\[0\] is 1000, expected 0 to 999"),
    "past 64 bits": ("[36893488147419103232]", r"line 2: .*does not fit 64 bits"),
}
BAD_COLUMNS = {
    "null list": ({"ids": [[1, 2], None, [3]]}, r"row 1: 'input_ids' is null"),
    "null token": ({"ids": [[1, 2], [4, None], [3]]}, r"row 1: 'input_ids'\[1\] is null, expected an integer"),
    "negative": ({"ids": [[1, 2], [4, -3], [3]]}, r"row 1: 'input_ids'\[1\] is -3, expected 0 to 2147483647"),
    "labels too short": (
        {"ids": [[1, 2], [4, 5], [3]], "labels": [[1, 2], [4], [3]]},
        r"row 1: 'labels' has 1 values, expected 2, one for each of 'input_ids'",
    ),
    "strange label": (
        {"ids": [[1, 2], [4, 5], [3]], "labels": [[1, 2], [4, -7], [3]]},
        r"row 1: 'labels'\[1\] is -7, expected -100 or an id",
    ),
    "strange mask": (
        {"ids": [[1, 2], [4, 5], [3]], "loss_mask": [[1, 1], [1, 2], [0]]},
        r"row 1: 'loss_mask'\[1\] is 2, expected 0 or 1",
    ),
    "padded record": (
        {"ids": [[1, 2], [4, 0], [3]], "attention_mask": [[1, 1], [1, 0], [1]]},
        r"row 1: 'attention_mask'\[1\] is 0, expected 1 everywhere",
    ),
    "lengths that do not add up": (
        {"ids": [[1, 2], [4, 5], [3]], "seq_lengths": [[2], [1], [1]]},
        r"row 1: 'seq_lengths' sums to 1, expected 2",
    ),
}


def check(source: Path, tmp_path: Path, message: str, good: list[list[int]], **options) -> None:
    with pytest.raises(SourceError, match=message) as caught:
        pack(source, tmp_path / "out", 8, **options)
    assert source.name in str(caught.value)
    assert "skip-bad" in str(caught.value)
    assert not list(tmp_path.glob("out*"))
    summary = pack(source, tmp_path / "out", 8, skip_bad=True, **options)
    assert sum(summary.skipped.values()) == 1
    assert source.name in next(iter(summary.skipped_examples.values()))
    assert same_documents(tmp_path / "out", good)


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_named_or_skipped(tmp_path, name):
    line, message = BAD_LINES[name]
    source = raw(tmp_path / "a.jsonl", b'{"text": "ab"}\n' + line + b'\n{"text": "cd"}\n')
    check(source, tmp_path, message, [encoded("ab"), encoded("cd")])


@pytest.mark.parametrize("name", BAD_IDS_LINES)
def test_a_bad_token_line_is_named_or_skipped(tmp_path, name):
    ids, message = BAD_IDS_LINES[name]
    source = raw(tmp_path / "a.jsonl", f'{{"input_ids": [1, 2]}}\n{{"input_ids": {ids}}}\n{{"input_ids": [3]}}\n'.encode())
    check(source, tmp_path, message, [[1, 2], [3]], vocab_size=1000)


@pytest.mark.parametrize("name", BAD_COLUMNS)
@pytest.mark.parametrize("form", ["arrow", "parquet"])
def test_a_bad_row_is_named_or_skipped(tmp_path, name, form):
    columns, message = BAD_COLUMNS[name]
    table = ids_table(columns["ids"], **{key: values for key, values in columns.items() if key != "ids"})
    if form == "arrow":
        source = write_arrow(tmp_path / "a.arrow", table, batch_rows=3)
    else:
        source = write_parquet(tmp_path / "a.parquet", dict(zip(table.column_names, table.columns, strict=True)))
    check(source, tmp_path, message, [[1, 2], [3]])


def test_the_bad_record_is_found_behind_many_good_ones(tmp_path):
    ids = [[index % 9] * (index % 5) for index in range(1000)]
    ids[777] = [1, -1]
    source = write_arrow(tmp_path / "a.arrow", ids_table(ids), batch_rows=100)
    check(source, tmp_path, r"a\.arrow row 777: 'input_ids'\[1\] is -1", ids[:777] + ids[778:])


def test_blank_lines_do_not_shift_the_line_that_is_named(tmp_path):
    source = raw(tmp_path / "a.jsonl", b'\n{"text": "ab"}\n\n \n{"text": 1}\n')
    check(source, tmp_path, "line 5: 'text' is 1", [encoded("ab")])


def test_a_label_column_that_starts_late_is_not_dropped_in_silence(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", [{"input_ids": [1, 2]}, {"input_ids": [3], "labels": [-100]}])
    check(source, tmp_path, r"line 2: a column 'labels', which the first record of the file does not have", [[1, 2]])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (pa.array([[1.0], [2.5]]), "'input_ids' holds double values, expected integers"),
        (pa.array([["a"], ["b"]]), "'input_ids' holds string values, expected integers"),
        (pa.array([1, 2]), "'input_ids' has type int64, expected lists of integers"),
        (pa.array([[True], [False]]), "'input_ids' holds bool values, expected integers"),
    ],
)
def test_a_column_of_another_type_is_refused_by_type(tmp_path, values, message):
    with pytest.raises(SourceError, match=rf"a\.arrow row 0: {message}"):
        pack(write_arrow(tmp_path / "a.arrow", pa.table({"input_ids": values})), tmp_path / "out", 8)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl", b"", r"a\.jsonl: the file is empty"),
        ("a.parquet", b"", r"a\.parquet: the file is empty"),
        ("a.parquet", b"PAR1 no parquet at all PAR1", r"a\.parquet: not readable as parquet"),
        ("a.arrow", b"ARROW1 is all that it has", r"a\.arrow: not readable as arrow"),
        ("a.arrow", b"\x00" * 40 + b"nothing", r"a\.arrow: not readable as arrow"),
        ("a.jsonl.gz", b'{"text": "not compressed"}\n', r"a\.jsonl\.gz: not readable as jsonl"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "cut"}\n' * 999)[:-20], r"a\.jsonl\.gz: not readable as jsonl"),
        ("a.jsonl.zst", b'{"text": "not compressed"}\n', r"a\.jsonl\.zst: not readable as jsonl"),
        ("a.jsonl", b"\n\n", r"a\.jsonl: no line holds a record"),
        ("a.txt", b"caf\xe9", r"a\.txt: invalid UTF-8 at byte 3"),
    ],
)
def test_a_file_that_is_not_what_its_name_says_is_named_or_skipped(tmp_path, name, data, message):
    bad = raw(tmp_path / name, data)
    good = raw(tmp_path / "z.txt", b"good")
    with pytest.raises(SourceError, match=message):
        pack([bad, good], tmp_path / "out", 20)
    summary = pack([bad, good], tmp_path / "out", 20, skip_bad=True)
    assert sum(summary.skipped.values()) == 1
    assert same_documents(tmp_path / "out", [encoded("good")])


def test_a_truncated_arrow_file_is_an_error_and_not_a_short_corpus(tmp_path):
    source = arrow(tmp_path / "a.arrow", [[1] * 50] * 300)
    data = source.read_bytes()
    raw(source, data[: len(data) // 2])
    with pytest.raises(SourceError, match=r"a\.arrow: not readable as arrow"):
        pack(source, tmp_path / "out", 64)


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({"body": ["x"]}, {}, r"expected a column 'text' or 'input_ids', got 'body'.*--text-column"),
        ({"messages": ["x"]}, {}, r"got 'messages'.*'messages' may be a chat: make input_ids.*apply_chat_template"),
        ({"text": ["x"]}, {"text_column": "body"}, r"expected the column 'body', got 'text'"),
    ],
)
@pytest.mark.parametrize("form", ["parquet", "arrow", "jsonl"])
def test_a_missing_column_names_the_columns_that_are_there(tmp_path, columns, options, message, form):
    source = tmp_path / f"a.{form}"
    if form == "jsonl":
        write_jsonl(source, [{name: values[0] for name, values in columns.items()}])
    elif form == "arrow":
        write_arrow(source, pa.table(columns))
    else:
        write_parquet(source, columns)
    with pytest.raises(SourceError, match=message):
        pack(source, tmp_path / "out", 8, **options)


def test_an_unreadable_source_is_named(tmp_path):
    with pytest.raises(SourceError, match=r"nowhere: no such file or folder"):
        pack(tmp_path / "nowhere", tmp_path / "out", 8)
    with pytest.raises(SourceError, match="no source was given"):
        pack([], tmp_path / "out", 8)


def test_a_folder_with_nothing_to_read_says_what_it_has(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.bin").write_bytes(b"x")
    with pytest.raises(SourceError, match=r"no readable files .*found 1 x \.bin"):
        pack(tmp_path / "in", tmp_path / "out", 8)


def test_a_source_of_empty_documents_has_nothing_to_pack(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": ""}] * 3)
    with pytest.raises(SourceError, match=r"nothing to pack: 1 files .* hold 3 documents, all of them empty"):
        pack(source, tmp_path / "out", 8)


def test_the_first_bad_record_in_source_order_is_the_one_named_for_any_number_of_workers(tmp_path):
    for number in range(4):
        arrow(tmp_path / f"{number}.arrow", [[1]] * 5 + [[-1 - number]] * (number > 0))
    for workers in (1, 3):
        with pytest.raises(SourceError, match=r"1\.arrow row 5: .* is -2"):
            pack([tmp_path / f"{number}.arrow" for number in range(4)], tmp_path / "out", 8, workers=workers)


def test_many_bad_records_are_counted_by_reason(tmp_path):
    lines = [b'{"text": "ok"}', b"{", b'{"text": null}', b"[]", b'{"text": "fine"}', b"{"]
    summary = pack(raw(tmp_path / "a.jsonl", b"\n".join(lines)), tmp_path / "out", 8, skip_bad=True)
    assert summary.skipped == {"broken JSON": 3, "null text": 1}
    assert len(pieces(tmp_path / "out")) == 2
