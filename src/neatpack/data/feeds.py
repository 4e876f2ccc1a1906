"""Sources without random access, read in order: an iterable, a streamed dataset, or files; one share a lane.

A lane reads every `lanes`-th record, or whole shards or files where the source has enough of them to go round. What a lane
reads depends on its number alone, never on the worker that reads it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from neatpack.data.columns import list_parts
from neatpack.data.documents import DocumentReader
from neatpack.data.in_memory import Document, documents_of
from neatpack.data.options import PackOptions
from neatpack.data.records import IDS, LABELS, Chunk, Problems
from neatpack.data.sources import SourceList, find_parts
from neatpack.data.table import is_list
from neatpack.errors import SourceError

BATCH_RECORDS = 256
"""Records of a streamed dataset that are read at once."""


class Feed(Protocol):
    """A source that is read in order.

    Attributes:
        fingerprint: another one means that the source changed; empty where nobody can tell.
    """

    fingerprint: str

    def read(self, lane: int, lanes: int, epoch: int, mark: Any = None) -> Iterator[tuple[Document, Any]]:
        """The lane's documents in order, each with a mark of where reading can start again.

        Documents since that mark then come again. A mark is of JSON values, or None for the beginning.
        """


def open_feed(source: Any, capacity: int, ignore: Collection[str], reading: Mapping[str, Any]) -> Feed:
    """How to read a source; see `PackedStream` for what it may be.

    Raises:
        SourceError: a source that can be read only once, or options of reading for one that is read already.
    """
    if isinstance(source, str | os.PathLike):
        return FileFeed(os.fspath(source), PackOptions(seq_len=capacity, **reading), ignore)
    if reading:
        raise SourceError(f"{', '.join(reading)}: options of reading files, but the source is a {type(source).__name__}.")
    datasets = sys.modules.get("datasets")
    if datasets is not None and isinstance(source, datasets.IterableDataset):
        return DatasetFeed(source, ignore)
    if not callable(source) and (not isinstance(source, Iterable) or iter(source) is source):
        raise SourceError(
            f"a {type(source).__name__} cannot be read from the start again, which every epoch, worker and resumption does. "
            "Pass something that can (a list, a datasets.IterableDataset, a path, an object whose __iter__ starts anew), or a "
            "function that returns a new iterator."
        )
    return IterableFeed(source, ignore)


class IterableFeed:
    """Any iterable of documents, or a function that returns one; every lane iterates over all of it."""

    fingerprint = ""

    def __init__(self, source: Iterable[Any] | Callable[[], Iterable[Any]], ignore: Collection[str]) -> None:
        self._source, self._ignore = source, ignore

    def read(self, lane: int, lanes: int, epoch: int, mark: Any = None) -> Iterator[tuple[Document, Any]]:
        """See `Feed.read`; there are no marks: reading starts at the beginning."""
        records = self._source() if callable(self._source) else self._source
        for index, record in enumerate(records):
            if index % lanes == lane:
                for document in documents_of(record, f"record {index}", self._ignore):
                    yield document, None


class DatasetFeed:
    """A `datasets.IterableDataset`: whole shards a lane, where there are as many; its own shuffling is kept."""

    def __init__(self, dataset: Any, ignore: Collection[str]) -> None:
        self._dataset, self._ignore = dataset, ignore
        self.fingerprint = f"{dataset.num_shards} shards"

    def read(self, lane: int, lanes: int, epoch: int, mark: Any = None) -> Iterator[tuple[Document, Any]]:
        """See `Feed.read`; there are no marks: a shuffled dataset cannot go on exactly, so reading starts at the beginning."""
        by_shard = self._dataset.num_shards >= lanes
        dataset = self._dataset.shard(lanes, lane, contiguous=False) if by_shard else self._dataset
        dataset.set_epoch(epoch)
        index = 0
        # `iter`, not `__iter__`: the latter shares the records out among DataLoader workers a second time.
        for table in dataset.with_format("arrow").iter(BATCH_RECORDS):
            for record in _records(table):
                if by_shard or index % lanes == lane:
                    for document in documents_of(record, f"record {index}", self._ignore):
                        yield document, None
                index += 1


class FileFeed:
    """Files and folders, as `neatpack pack` reads them: whole files (or parts of them) a lane, where there are as many."""

    def __init__(self, path: str, options: PackOptions, ignore: Collection[str]) -> None:
        self._path, self._options, self._ignore = path, options, frozenset(ignore)
        self.fingerprint = self._find().fingerprint()

    def _find(self) -> SourceList:
        return find_parts([self._path], self._options.include)

    def read(self, lane: int, lanes: int, epoch: int, mark: Any = None) -> Iterator[tuple[Document, Any]]:
        """See `Feed.read`; a mark is a part, and how many documents came before it."""
        found = self._find()
        if found.fingerprint() != self.fingerprint:
            raise SourceError(f"{self._path}: its files changed since the stream was made. Make it anew, and start again.")
        by_part = len(found.parts) >= lanes
        parts = found.parts[lane::lanes] if by_part else found.parts
        first, index = mark or (0, 0)
        reader, problems = DocumentReader(self._options), Problems()
        for number in range(first, len(parts)):
            here = [number, index]
            for chunk in reader.chunks(parts[number], problems):
                self._refuse_other_columns(chunk)
                documents = reader.documents(chunk, problems)
                ends = np.cumsum(documents.lengths)
                for begin, end in zip((ends - documents.lengths).tolist(), ends.tolist(), strict=True):
                    if by_part or index % lanes == lane:
                        document = {IDS: documents.ids[begin:end]}
                        if documents.labels is not None:
                            document[LABELS] = documents.labels[begin:end]
                        yield document, here
                    index += 1

    def _refuse_other_columns(self, chunk: Chunk) -> None:
        refused = [name for name in chunk.layout.ignored if name not in self._ignore]
        if refused:
            raise SourceError(
                f"{chunk.places.files[0]}: columns that are not read from files: {', '.join(map(repr, refused))}. Leave them "
                f"out with ignore_columns={refused!r}, or stream the files as a datasets.IterableDataset, which carries them."
            )


def _records(table: pa.Table) -> Iterator[dict[str, Any]]:
    """Records of an Arrow table as Python values, lists of numbers as arrays."""
    table = table.combine_chunks()
    columns = [_values(table.column(name).combine_chunks()) for name in table.column_names]
    for values in zip(*columns, strict=True):
        yield dict(zip(table.column_names, values, strict=True))


def _values(array: Any) -> list[Any]:
    if isinstance(array, pa.ChunkedArray):
        array = array.chunk(0) if array.num_chunks else pa.array([], array.type)
    kind = array.type
    numbers = is_list(kind) and (pa.types.is_integer(kind.value_type) or pa.types.is_floating(kind.value_type))
    if not numbers or array.null_count or array.flatten().null_count:
        values: list[Any] = array.to_pylist()
        return values
    flat, offsets = list_parts(array)
    return [flat[begin:end] for begin, end in pairwise(offsets.tolist())]
