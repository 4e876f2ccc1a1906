"""Corpora that the data tests pack, in every format, and the documents that come out of a packed folder."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

TEXTS = ["alpha", "", "βeta and more of it", "gamma " * 9, "δ", "epsilon\nwith a line", "zeta" * 5, "eta", "🙂" * 3]


def encoded(text: str, *, eos: bool = True) -> list[int]:
    """What the bytes tokenizer makes of a text."""
    return [*text.encode(), 256] if eos and text else list(text.encode())


def random_ids(seed: int, count: int, longest: int, vocab_size: int = 50_000) -> list[list[int]]:
    """Token lists, some of them empty."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, length).tolist() for length in rng.integers(0, longest + 1, count)]


def write_jsonl(path: Path, records: list[dict], *, ending: str = "\n") -> Path:
    data = "\n".join(json.dumps(record, ensure_ascii=False) for record in records) + ending
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(data.encode()))
    elif path.suffix == ".zst":
        with pa.output_stream(path, compression="zstd") as stream:
            stream.write(data.encode())
    else:
        path.write_text(data, encoding="utf-8")
    return path


def write_parquet(path: Path, columns: dict, *, row_group_size: int = 3) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=row_group_size)
    return path


def write_arrow(path: Path, table: pa.Table, *, batch_rows: int = 2, stream: bool = True) -> Path:
    make = pa.ipc.new_stream if stream else pa.ipc.new_file
    with path.open("wb") as file, make(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=batch_rows)
    return path


def packed_rows(out: Path) -> list[dict]:
    """The rows of a packed folder, by the real datasets library."""
    return datasets.load_from_disk(str(out)).to_list()


def pieces(out: Path, column: str = "input_ids") -> list[tuple[int, ...]]:
    """The documents in the rows of a packed folder, cut by `seq_lengths`."""
    found = []
    for row in packed_rows(out):
        row = {**row, "labels": row.get("labels") or row["input_ids"]}  # null labels repeat the ids
        assert sum(row["seq_lengths"]) == len(row[column])
        ends = np.cumsum(row["seq_lengths"]).tolist()
        found += [tuple(row[column][end - length : end]) for end, length in zip(ends, row["seq_lengths"], strict=True)]
    return found


def same_documents(out: Path, documents: list[list[int]], column: str = "input_ids") -> bool:
    """Whether the packed folder holds exactly these documents, in any order, empty ones left out."""
    return Counter(pieces(out, column)) == Counter(tuple(document) for document in documents if document)


def token_counts(documents: list) -> Counter:
    """The multiset of tokens."""
    return Counter(token for document in documents for token in document)
