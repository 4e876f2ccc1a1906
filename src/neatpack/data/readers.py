"""Parts in, chunks of records out: text files, Parquet and Arrow. JSONL has a file of its own."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from neatpack.data.columns import UNREADABLE, check_offsets, column_names
from neatpack.data.jsonl import read_jsonl, records_of
from neatpack.data.records import Chunk, ColumnChoice, Layout, Places, Problems, choose_layout
from neatpack.data.sources import Part
from neatpack.errors import SourceError

CHUNK_BYTES = 1 << 24
"""Records are handed on in chunks of about this size, so that memory does not depend on a file's own batches."""


def read_part(part: Part, choice: ColumnChoice, problems: Problems) -> Iterator[Chunk]:
    """Read a part of the source, chunk by chunk, in order.

    Args:
        part: what to read.
        choice: the columns the user named.
        problems: takes records and files that cannot be read.

    Raises:
        SourceError: a record or file cannot be read, and problems are not to be skipped.
    """
    if part.format == "text":
        if choice.tokens or choice.documents:
            named = ", ".join(map(repr, (*choice.tokens, *choice.documents)))
            raise SourceError(f"{part.files[0]}: a text file has no columns, but {named} are to be carried.")
        yield from _read_text_files(part, problems)
        return
    path = part.files[0]
    try:
        if not Path(path).stat().st_size:
            problems.report(path, "empty file", f"the file is empty, expected {part.format} data.")
        elif part.format == "jsonl":
            yield from read_jsonl(part, choice, problems)
        else:
            yield from _read_table(part, choice)
    except UNREADABLE as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        problems.report(path, "unreadable file", f"not readable as {part.format} ({reason}).", cause=error)
    except SourceError as error:
        if not problems.skip:
            raise
        problems.counts["unusable file"] = problems.counts.get("unusable file", 0) + 1
        problems.examples.setdefault("unusable file", str(error))


def first_record(part: Part) -> dict[str, Any]:
    """The first record of a part's file as Python values, to see what its columns hold.

    Empty where there is none, or where the file cannot be read: reading it reports what is wrong.
    """
    if part.format == "text":
        return {}
    path = part.files[0]
    try:
        if part.format == "jsonl":
            return next(records_of(path), {})
        for batch in _arrow_batches(path) if part.format == "arrow" else _first_of_parquet(path):
            if batch.num_rows:
                return dict(batch.slice(0, 1).to_pylist()[0])
    except (*UNREADABLE, SourceError):
        return {}
    return {}


def _first_of_parquet(path: str) -> Iterator[pa.RecordBatch]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        yield from file.iter_batches(1)


def count_blocks(path: str, format_: str) -> int:
    """Row groups of a Parquet file or record batches of an Arrow file; 1 where the file cannot be read.

    An unreadable file becomes one part, so that reading it reports what is wrong in the usual way.
    """
    try:
        if format_ == "parquet":
            import pyarrow.parquet as pq

            with pq.ParquetFile(path) as file:
                return max(1, int(file.metadata.num_row_groups))
        return max(1, sum(1 for _ in _arrow_batches(path)))
    except UNREADABLE:
        return 1


def _read_text_files(part: Part, problems: Problems) -> Iterator[Chunk]:
    layout = Layout("text")
    texts: list[bytes] = []
    numbers: list[int] = []
    size = 0
    for number, path in enumerate(part.files):
        try:
            text = Path(path).read_bytes().removeprefix(codecs.BOM_UTF8)
        except OSError as error:
            problems.report(path, "unreadable file", f"cannot be read ({error.strerror}).", cause=error)
            continue
        texts.append(text)
        numbers.append(number)
        size += len(text)
        if size >= CHUNK_BYTES:
            yield _text_chunk(layout, texts, numbers, part.files)
            texts, numbers, size = [], [], 0
    if texts:
        yield _text_chunk(layout, texts, numbers, part.files)


def _text_chunk(layout: Layout, texts: list[bytes], numbers: list[int], files: tuple[str, ...]) -> Chunk:
    return Chunk(layout, {"text": pa.array(texts, pa.large_binary())}, Places(files, np.array(numbers)))


def _read_table(part: Part, choice: ColumnChoice) -> Iterator[Chunk]:
    path = part.files[0]
    layout: Layout | None = None
    for row, batch in _batches(part, path, choice):
        if layout is None:
            layout = _layout(part, path, batch, choice)
        chosen = batch.select(list(layout.columns))
        check_offsets(*chosen.columns)
        for begin, piece in _bounded(chosen):
            numbers = np.arange(row + begin, row + begin + piece.num_rows)
            columns = dict(zip(piece.schema.names, piece.columns, strict=True))
            yield Chunk(layout, columns, Places((path,), numbers, "row"))


def _layout(part: Part, path: str, batch: pa.RecordBatch, choice: ColumnChoice) -> Layout:
    if part.format == "parquet":  # the batch holds the chosen columns only
        import pyarrow.parquet as pq

        return _layout_of(pq.read_schema(path), choice, path)
    return _layout_of(batch.schema, choice, path)


def _layout_of(schema: pa.Schema, choice: ColumnChoice, path: str) -> Layout:
    names = column_names(schema)
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise SourceError(f"{path}: the column {twice[0]!r} is there more than once. Rename one of them.")
    return choose_layout(names, choice, path, [field.name for field in schema if _is_number_list(field.type)])


def _is_number_list(kind: pa.DataType) -> bool:
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        return False
    inner = kind.value_type
    return bool(pa.types.is_integer(inner) or pa.types.is_floating(inner) or pa.types.is_boolean(inner))


def _batches(part: Part, path: str, choice: ColumnChoice) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Record batches of the part, each with the number of its first row in the file."""
    if part.format == "parquet":
        yield from _parquet_batches(part, path, choice)
        return
    row = 0
    for index, batch in enumerate(_arrow_batches(path)):
        if part.stop is not None and index >= part.stop:
            return
        if index >= part.start:
            yield row, batch
        row += batch.num_rows


def _arrow_batches(path: str) -> Iterator[pa.RecordBatch]:
    """Record batches of an Arrow file in either IPC format, memory-mapped."""
    with pa.memory_map(path) as file:
        if file.read(6) == b"ARROW1":
            reader = pa.ipc.open_file(file)
            yield from (reader.get_batch(index) for index in range(reader.num_record_batches))
        else:
            file.seek(0)
            yield from pa.ipc.open_stream(file)


def _parquet_batches(part: Part, path: str, choice: ColumnChoice) -> Iterator[tuple[int, pa.RecordBatch]]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        layout = _layout_of(file.schema_arrow, choice, path)
        groups = range(file.metadata.num_row_groups)[part.start : part.stop]
        row = sum(file.metadata.row_group(index).num_rows for index in range(part.start))
        for group in groups:
            metadata = file.metadata.row_group(group)
            rows = max(16, metadata.num_rows * CHUNK_BYTES // max(metadata.total_byte_size, 1))
            for batch in file.iter_batches(min(rows, 8192), row_groups=[group], columns=list(layout.columns)):
                yield row, batch
                row += batch.num_rows


def _bounded(batch: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Slices of about `CHUNK_BYTES` each, with the row each starts at."""
    pieces = max(1, -(-batch.nbytes // CHUNK_BYTES))
    step = max(1, -(-batch.num_rows // pieces))
    for begin in range(0, batch.num_rows, step):
        yield begin, batch.slice(begin, step)
