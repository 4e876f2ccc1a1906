"""Further columns of files come out of a stream with the documents they belong to, also past a stop."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.corpora import random_ids, write_arrow, write_jsonl
from neatpack import PackedStream
from neatpack.data import pack

CAPACITY = 40
DOCUMENTS = random_ids(1, 90, 30)
SMALL = {"open_rows": 3, "lookahead": 4}


def further_columns(row):
    """Each document of a row: its tokens, its weights, its score and its source."""
    ends = row["seq_lengths"].cumsum()
    for nth, (length, end) in enumerate(zip(row["seq_lengths"], ends, strict=True)):
        tokens = (row[name][end - length : end].tolist() for name in ("input_ids", "weights"))
        yield (*map(tuple, tokens), row["score"][nth], row["source"][nth])


@pytest.mark.parametrize("form", ["jsonl", "parquet", "arrow", "packed"])
def test_further_columns_of_files_come_with_their_documents(form, tmp_path):
    records = [
        {"input_ids": ids, "weights": [token / 4 for token in ids], "score": at, "source": f"text {at}"}
        for at, ids in enumerate(DOCUMENTS)
        if ids
    ]
    expected = sorted((tuple(r["input_ids"]), tuple(r["weights"]), r["score"], r["source"]) for r in records)
    path = tmp_path / f"a.{form}"
    table = pa.Table.from_pylist(records)
    if form == "jsonl":
        write_jsonl(path, records)
    elif form == "parquet":
        pq.write_table(table, path, row_group_size=5)
    elif form == "arrow":
        write_arrow(path, table, batch_rows=7)
    else:
        pq.write_table(table, tmp_path / "a.parquet")
        columns = {"token_columns": ("weights",), "document_columns": ("score", "source")}
        pack(tmp_path / "a.parquet", path, 50, **columns)
    stream = PackedStream(path, CAPACITY, shuffle_buffer=9, **SMALL)
    rows = iter(stream)
    found = [document for _ in range(3) for document in further_columns(next(rows))]
    resumed = PackedStream(path, CAPACITY, shuffle_buffer=9, **SMALL)
    resumed.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    found += [document for row in resumed for document in further_columns(row)]
    assert sorted(found) == expected


def test_documents_of_text_files_keep_what_is_said_of_them(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": text, "url": f"at {text}"} for text in ("one", "two", "three")])
    (row,) = PackedStream(path, 100, eos=False)
    ends = row["seq_lengths"].cumsum()
    texts = [
        bytes(row["input_ids"][end - length : end].tolist()).decode()
        for length, end in zip(row["seq_lengths"], ends, strict=True)
    ]
    assert row["url"] == [f"at {text}" for text in texts]
    assert sorted(texts) == ["one", "three", "two"]
