"""Sources without random access, read in order: an iterable, a streamed dataset, or files; one share a lane.

A lane reads every `lanes`-th record, or whole shards or files where the source has enough of them to go round. What a lane
reads depends on its number alone, never on the worker that reads it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from neatpack.data.columns import UNREADABLE, Documents, list_parts
from neatpack.data.documents import DocumentReader
from neatpack.data.in_memory import Document, documents_of
from neatpack.data.options import PackOptions
from neatpack.data.readers import first_record
from neatpack.data.records import ATTENTION_MASK, IDS, LABELS, LISTS, MASKS, SEQ_LENGTHS, Chunk, Problems
from neatpack.data.sources import Part, SourceList, find_parts
from neatpack.data.table import is_list
from neatpack.errors import SourceError

BATCH_RECORDS = 256
"""Records of a streamed dataset that are read at once."""

_NOT_CARRIED = (SEQ_LENGTHS, ATTENTION_MASK)  # rows have lengths of their own, and no padding


class Given(NamedTuple):
    """A document, a mark of where reading can start again (documents since then come again), and what its record is called.

    A mark is of JSON values, or None for the beginning. The name is a call: counting lines costs, and only errors need it.
    """

    document: Document
    mark: Any
    name: Callable[[], str]


class Feed(Protocol):
    """A source that is read in order.

    Attributes:
        fingerprint: another one means that the source changed; empty where nobody can tell.
    """

    fingerprint: str

    def read(self, lane: int, lanes: int, epoch: int, mark: Any = None) -> Iterator[Given]:
        """The lane's documents in order, from the last mark on."""


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

    def read(self, lane: int, lanes: int, epoch: int, mark: Any = None) -> Iterator[Given]:
        """See `Feed.read`; there are no marks: reading starts at the beginning."""
        records = self._source() if callable(self._source) else self._source
        columns: set[str] = set()
        for index, record in enumerate(records):
            if not index:
                columns = _names(record, self._ignore)
            if index % lanes == lane:
                if (own := _names(record, self._ignore)) != columns:
                    raise SourceError(
                        f"record {index} has columns {', '.join(sorted(own))}; the first has {', '.join(sorted(columns))}. "
                        "Give every record the same, or leave some out with ignore_columns=[...]."
                    )
                yield from _given(record, f"record {index}", self._ignore)


def _given(record: Any, where: str, ignore: Collection[str]) -> Iterator[Given]:
    """The documents of a record, without marks."""
    for document in documents_of(record, where, ignore):
        yield Given(document, None, partial(str, where))


def _names(record: Any, ignore: Collection[str]) -> set[str]:
    """The columns of a record that rows carry, or may refuse."""
    return set(record).difference(_NOT_CARRIED, ignore) if isinstance(record, Mapping) else {IDS}


class DatasetFeed:
    """A `datasets.IterableDataset`: whole shards a lane, where there are as many; its own shuffling is kept."""

    def __init__(self, dataset: Any, ignore: Collection[str]) -> None:
        self._dataset, self._ignore = dataset, ignore
        self.fingerprint = f"{dataset.num_shards} shards"

    def read(self, lane: int, lanes: int, epoch: int, mark: Any = None) -> Iterator[Given]:
        """See `Feed.read`; there are no marks: a shuffled dataset cannot go on exactly, so reading starts at the beginning."""
        by_shard = self._dataset.num_shards >= lanes
        dataset = self._dataset.shard(lanes, lane, contiguous=False) if by_shard else self._dataset
        dataset.set_epoch(epoch)
        of_lane = f" of the shards of lane {lane} of {lanes}" if by_shard and lanes > 1 else ""
        index = 0
        # `iter`, not `__iter__`: the latter shares the records out among DataLoader workers a second time.
        tables = dataset.with_format("arrow").iter(BATCH_RECORDS)
        while True:
            try:
                table = next(tables, None)
            except UNREADABLE as error:
                reason = " ".join(str(error).split())
                raise SourceError(
                    f"the streamed dataset cannot be read on from record {index} ({reason}). Where its records have different "
                    "columns, give every one the same."
                ) from error
            if table is None:
                return
            for record in _records(table):
                if by_shard or index % lanes == lane:
                    yield from _given(record, f"record {index}{of_lane}", self._ignore)
                index += 1


class FileFeed:
    """Files and folders, as `neatpack pack` reads them: whole files (or parts of them) a lane, where there are as many.

    Further columns are carried as the first record of a file shows them: a list as long as `input_ids` has a value a token.
    Files of other columns than the first one, and JSON lines with a column that the first one lacks, are refused by name.
    """

    def __init__(self, path: str, options: PackOptions, ignore: Collection[str]) -> None:
        self._path, self._ignore = path, frozenset(ignore)
        self._options = replace(options, ignore_columns=("*",))  # what is not carried, and not ignored, is refused here
        self.fingerprint = self._find().fingerprint()

    def _find(self) -> SourceList:
        return find_parts([self._path], self._options.include)

    def read(self, lane: int, lanes: int, epoch: int, mark: Any = None) -> Iterator[Given]:
        """See `Feed.read`; a mark is a part, and how many documents came before it."""
        found = self._find()
        if found.fingerprint() != self.fingerprint:
            raise SourceError(f"{self._path}: its files changed since the stream was made. Make it anew, and start again.")
        by_part = len(found.parts) >= lanes
        parts = found.parts[lane::lanes] if by_part else found.parts
        shown = ((part, self._columns(part)) for part in found.parts)
        expected = next((both for both in shown if both[1] is not None), (None, None))
        first, index = mark or (0, 0)
        readers: dict[PackOptions, DocumentReader] = {}
        problems = Problems(offered=False)
        for number in range(first, len(parts)):
            here = [number, index]
            columns = self._columns(parts[number])
            _check_same((parts[number], columns), expected)
            options = self._carrying(columns or {})
            reader = readers.setdefault(options, DocumentReader(options))
            for chunk in reader.chunks(parts[number], problems):
                self._refuse_late(chunk)
                documents = reader.documents(chunk, problems)
                for nth, document in enumerate(_documents(documents)):
                    if by_part or index % lanes == lane:
                        yield Given(document, here, partial(documents.places.name, nth))
                    index += 1

    def _columns(self, part: Part) -> dict[str, str] | None:
        """The columns of a file beside its ids or text, and what each holds; None for a file without a record."""
        record = first_record(part)
        if not record and part.format != "text":
            return None
        text = self._options.text_column or ("text" if IDS not in record else None)
        chosen = {*self._options.token_columns, *self._options.document_columns}
        own = {text} if text else {*LISTS}
        kinds = {
            name: _kind(name, value, record, text)
            for name, value in record.items()
            if name not in own and name not in chosen and name not in self._ignore
        }
        refused = [f"{name!r} ({kind})" for name, kind in kinds.items() if kind not in (_TOKENS, _DOCUMENTS)]
        if refused:
            raise SourceError(
                f"{part.files[0]}: columns that packed rows cannot carry: {', '.join(refused)}. Leave them out with "
                "ignore_columns=[...]."
            )
        return kinds if text or record.keys().isdisjoint((LABELS, *MASKS)) else {**kinds, LABELS: _TOKENS}

    def _carrying(self, columns: Mapping[str, str]) -> PackOptions:
        """The options, with the further columns of a file to be carried."""
        further = {name: kind for name, kind in columns.items() if name != LABELS}  # read anyway, and masks with them
        tokens, documents = ([name for name in further if further[name] == kind] for kind in (_TOKENS, _DOCUMENTS))
        return replace(
            self._options,
            token_columns=(*self._options.token_columns, *tokens),
            document_columns=(*self._options.document_columns, *documents),
        )

    def _refuse_late(self, chunk: Chunk) -> None:
        """Refuse columns that the first record of a file did not show, unless they are to be ignored."""
        for name, index in chunk.late.items():
            if name not in self._ignore:
                raise SourceError(
                    f"{chunk.places.name(index)}: a column {name!r}, which the first record of the file does not have. Give it "
                    f"to every record, or leave it out with ignore_columns=[{name!r}]."
                )


def _check_same(one: tuple[Part, dict[str, str] | None], first: tuple[Part | None, dict[str, str] | None]) -> None:
    """Refuse a file of other columns than the first one's."""
    (part, columns), (first_part, expected) = one, first
    if first_part is not None and columns is not None and columns != expected:
        got, wanted = (
            ", ".join(f"{name} ({kind})" for name, kind in (some or {}).items()) or "none" for some in (columns, expected)
        )
        raise SourceError(
            f"{part.files[0]}: has columns beside its tokens: {got}; expected {wanted}, as in {first_part.files[0]}. Bring the "
            "files to the same columns, or leave some out with ignore_columns=[...]."
        )


_TOKENS, _DOCUMENTS = "a value a token", "a value a document"


def _kind(name: str, value: Any, record: Mapping[str, Any], text: str | None) -> str:
    """What a further column of a record holds, or why it cannot be carried."""
    ids, packed = (None if text else record.get(column) for column in (IDS, SEQ_LENGTHS))
    if name in (*LISTS, "text"):
        return "tokens, where text is read" if name in LISTS else "text, where tokens are read"
    if isinstance(value, list) and isinstance(ids, list) and len(value) == len(ids):
        return _TOKENS
    single = not isinstance(value, list | dict)
    of_pieces = isinstance(packed, list) and isinstance(value, list) and len(value) == len(packed)
    if of_pieces or (single and packed is None):
        return _DOCUMENTS
    return "neither one value a token nor one a document"


def _documents(documents: Documents) -> Iterator[Document]:
    """Documents one by one: each column an array (a value a token) or one value."""
    ends = np.cumsum(documents.lengths)
    tokens: dict[str, np.ndarray] = {IDS: documents.ids, **documents.tokens}
    if documents.labels is not None:
        tokens[LABELS] = documents.labels
    values = {name: column.to_pylist() for name, column in documents.values.items()}
    for index, (begin, end) in enumerate(zip((ends - documents.lengths).tolist(), ends.tolist(), strict=True)):
        document: Document = {name: column[begin:end] for name, column in tokens.items()}
        document.update((name, column[index]) for name, column in values.items())
        yield document


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
