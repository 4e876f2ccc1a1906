"""Sources with random access, opened: saved and in-memory datasets, Arrow and Parquet, lists; and opened again elsewhere.

A worker gets the recipe, not the tokens: paths and a `datasets.Dataset` are memory-mapped anew in the worker's own process.
What is in memory (lists, in-memory tables) travels as it is when workers are spawned; forked ones share it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from neatpack.data.columns import UNREADABLE, column_names
from neatpack.data.flat import Column, NumberColumn, ValueColumn
from neatpack.data.in_memory import Document, documents_of
from neatpack.data.manifest import align_of
from neatpack.data.records import IDS
from neatpack.data.sources import Part, find_parts
from neatpack.data.table import DocumentTable, table_of_arrow
from neatpack.errors import SourceError


@dataclass(frozen=True)
class OpenedSource:
    """A source and its documents; pickles as the source alone.

    Attributes:
        source: what the user gave; a path as the files below it.
        files: files that the documents lie in, with size and time of change.
        table: the documents.
        align: what `neatpack pack` rounded slots up to, where the source is a folder that it wrote; else 1.
    """

    source: Any
    files: tuple[tuple[str, int, int], ...]
    table: DocumentTable
    align: int = 1

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return _open_again, (self.source, self.files, self.align)


def open_source(source: Any) -> OpenedSource:
    """Open a source for random access.

    Args:
        source: a `datasets.Dataset`; an Arrow table; a path of an Arrow or Parquet file, a folder of those, or one that
            `neatpack pack` or `datasets` wrote; or a sequence of documents, each a sequence or array of token ids or a
            mapping with `input_ids` and further columns. Parquet is decoded into memory, in every process that opens it.

    Raises:
        SourceError: a source of another kind, or without usable `input_ids`.
        StoreError: a folder of `neatpack pack` whose manifest is damaged.
    """
    align = 1
    if isinstance(source, str | os.PathLike):
        align, found = align_of(Path(source)), find_parts([os.fspath(source)])
        source = _Files(os.fspath(source), _one_format(os.fspath(source), found.parts), tuple(file[0] for file in found.files))
    return OpenedSource(source, _stamps(source), _table_of(source), align)


def _open_again(source: Any, files: tuple[tuple[str, int, int], ...], align: int) -> OpenedSource:
    """Open in another process what `open_source` opened, unless its files changed since."""
    for before, now in zip(files, _stamps(source), strict=True):
        if before != now:
            raise SourceError(
                f"{now[0]}: changed since the dataset was opened ({now[1]} bytes, expected {before[1]}; or written again). "
                "Open the source anew, and plan its rows anew if its documents are others."
            )
    return OpenedSource(source, files, _table_of(source), align)


@dataclass(frozen=True)
class _Files:
    """Arrow or Parquet files below a path that the user gave."""

    given: str
    format: str
    paths: tuple[str, ...]


def _one_format(given: str, parts: Sequence[Part]) -> str:
    formats = {part.format for part in parts}
    if len(formats) > 1 or not formats <= {"arrow", "parquet"}:
        raise SourceError(
            f"{given}: rows are drawn at random from Arrow or Parquet files, got {', '.join(sorted(formats))}. Pack text and "
            "JSON Lines with `neatpack pack` first, or read them in order with PackedStream."
        )
    return formats.pop()


def _stamps(source: Any) -> tuple[tuple[str, int, int], ...]:
    """The files that a source lies in, with size and time of change."""
    paths: Iterable[str] = ()
    if isinstance(source, _Files):
        paths = source.paths
    elif _is_dataset(source):
        paths = (entry["filename"] for entry in source.cache_files)
    stamps = []
    for path in dict.fromkeys(paths):
        try:
            status = Path(path).stat()
        except OSError as error:
            raise SourceError(f"{path}: cannot be read ({error.strerror}). Restore it, or open another source.") from error
        stamps.append((path, status.st_size, status.st_mtime_ns))
    return tuple(stamps)


def _table_of(source: Any) -> DocumentTable:
    if isinstance(source, _Files):
        return table_of_arrow(_read_files(source), source.given)
    if isinstance(source, pa.Table):
        return table_of_arrow(source, "the Arrow table")
    if isinstance(source, pa.RecordBatch):
        return table_of_arrow(pa.Table.from_batches([source]), "the Arrow record batch")
    if _is_dataset(source):
        return _table_of_dataset(source)
    if isinstance(source, Sequence) or (isinstance(source, np.ndarray) and source.ndim == 2):
        return _table_of_list(source)
    raise SourceError(
        f"a source of type {type(source).__name__} has no rows that can be drawn at random. Pass a datasets.Dataset, an Arrow "
        "table, a path, or a list of documents; read anything else in order with PackedStream."
    )


def _is_dataset(source: Any) -> bool:
    datasets = sys.modules.get("datasets")  # whoever has a Dataset has imported it
    return datasets is not None and isinstance(source, datasets.Dataset)


def _table_of_dataset(dataset: Any) -> DocumentTable:
    if dataset.format["type"] == "custom":
        raise SourceError(
            "the dataset transforms its records on the fly (set_transform), which is not what lies in its columns. Store the "
            "result with dataset.map(...), or read it in order with PackedStream."
        )
    # `data` and `_indices` are what select, shuffle and the like leave: the records as stored, and which of them there are.
    table, indices = dataset.data.table, dataset._indices
    order = None if indices is None else indices.column(0).to_numpy()
    return table_of_arrow(table.select(dataset.format["columns"]), "the dataset", order)


def _read_files(files: _Files) -> pa.Table:
    tables = []
    for path in files.paths:
        try:
            tables.append(_read_parquet(path) if files.format == "parquet" else _map_arrow(path))
            column_names(tables[-1].schema)
        except UNREADABLE as error:
            raise SourceError(f"{path}: not readable as {files.format} ({error}). Write it anew.") from error
        if not tables[-1].schema.equals(tables[0].schema):
            raise SourceError(
                f"{path}: has {_columns(tables[-1])}; expected {_columns(tables[0])}, as in {files.paths[0]}. "
                "Open them one by one, or bring them to one schema."
            )
    return pa.concat_tables(tables)


def _columns(table: pa.Table) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in table.schema)


def _map_arrow(path: str) -> pa.Table:
    """An Arrow file of either IPC format, memory-mapped."""
    file = pa.memory_map(path)
    if file.read(6) == b"ARROW1":
        return pa.ipc.open_file(file).read_all()
    file.seek(0)
    return pa.ipc.open_stream(file).read_all()


def _read_parquet(path: str) -> pa.Table:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        return file.read()


def _table_of_list(source: Sequence[Any] | np.ndarray) -> DocumentTable:
    """Documents in memory: every document is a chunk of its own, so arrays stay where they are."""
    documents: list[Document] = []
    records = [0]
    for index, record in enumerate(source):
        documents += documents_of(record, f"record {index}")
        records.append(len(documents))
        if documents[-1:] and documents[-1].keys() != documents[0].keys():
            raise SourceError(
                f"record {index} has columns {', '.join(documents[-1])}; the first has {', '.join(documents[0])}. Give every "
                "document the same."
            )
    tokens: dict[str, Column] = {}
    values: dict[str, ValueColumn] = {}
    for name in documents[0] if documents else [IDS]:
        column = [document[name] for document in documents]
        if all(isinstance(value, np.ndarray) for value in column):
            tokens[name] = NumberColumn(column)
        else:
            values[name] = ValueColumn([column])
    starts = np.concatenate(([0], np.cumsum([len(document[IDS]) for document in documents], dtype=np.int64)))
    return DocumentTable(starts=starts, tokens=tokens, values=values, records=np.array(records))
