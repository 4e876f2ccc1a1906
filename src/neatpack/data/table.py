"""Documents by number, over columns that stay where they are: where each begins, and what a slice of it holds.

The documents of a plain source are its records; those of rows that are packed already are the pieces of `seq_lengths`.
Lengths come from offsets, so counting tokens reads none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from neatpack.data.columns import check_offsets, list_parts
from neatpack.data.flat import BitColumn, Column, NumberColumn, ValueColumn
from neatpack.data.records import IDS, LABELS, SEQ_LENGTHS
from neatpack.errors import SourceError


@dataclass(frozen=True, kw_only=True, eq=False)
class DocumentTable:
    """A source's documents.

    Attributes:
        starts: `[P+1]` positions where documents begin in the token columns, before `order` is applied.
        order: `[D]` which of those documents the source's document `d` is; None where it is `d` itself.
        records: `[R+1]` documents before each record of rows that are packed already; None where each is a document.
        tokens: columns with a value a token, `input_ids` among them.
        values: columns with a value a document.
        unusable: columns that are neither, and why.
    """

    starts: np.ndarray
    tokens: Mapping[str, Column]
    values: Mapping[str, ValueColumn] = field(default_factory=dict)
    unusable: Mapping[str, str] = field(default_factory=dict)
    order: np.ndarray | None = None
    records: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.starts) - 1 if self.order is None else len(self.order)

    def lengths(self) -> np.ndarray:
        """Tokens of each document, `[D] int32`, or int64 where one is longer than that counts."""
        lengths = np.diff(self.starts)
        if lengths.dtype != np.int32 and int(lengths.max(initial=0)) < 2**31:
            lengths = lengths.astype(np.int32)
        return lengths if self.order is None else lengths[self.order]

    def where(self, documents: np.ndarray) -> np.ndarray:
        """The source's documents `[N]` as documents of the columns."""
        return documents if self.order is None else self.order[documents].astype(np.int64, copy=False)

    def check_columns(self, ignore: Collection[str]) -> None:
        """Refuse columns that rows cannot carry, unless they are to be ignored.

        Raises:
            SourceError: names the columns, and why each cannot be carried; or a column to ignore that is not there.
        """
        names = {*self.tokens, *self.values, *self.unusable}
        absent = [name for name in ignore if name not in names or name == IDS]
        if absent:
            raise SourceError(f"ignore_columns names {', '.join(absent)}; the source has {', '.join(sorted(names - {IDS}))}.")
        refused = [f"{name!r} ({why})" for name, why in self.unusable.items() if name not in ignore]
        if refused:
            raise SourceError(
                f"columns that packed rows cannot carry: {', '.join(refused)}. A column is packed if it has one value a token "
                "or one value a document; leave others out with ignore_columns=[...]."
            )


class FilledLabels:
    """Labels of rows that are packed already: null lists repeat the ids, and take no room."""

    dtype = np.dtype(np.int32)

    def __init__(self, chunks: Sequence[pa.Array], ids: Column, record_starts: np.ndarray) -> None:
        self._ids = ids
        self._record_starts = record_starts
        self._valid = np.concatenate([chunk.is_valid().to_numpy(zero_copy_only=False) for chunk in chunks])
        parts = [list_parts(chunk.drop_null()) if chunk.null_count else list_parts(chunk) for chunk in chunks]
        self._labels = NumberColumn([values for values, _ in parts])
        stored = np.where(self._valid, np.diff(record_starts), 0)
        # What to take from a position among the ids for the position among the labels that are stored.
        self._shift = record_starts[:-1] - (np.cumsum(stored) - stored)
        self.size = ids.size
        if int(stored.sum()) != self._labels.size:
            raise SourceError(f"{LABELS!r} has other lengths than {IDS!r}. Pack the rows again.")

    def take(self, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """See `Column.take`."""
        records = np.searchsorted(self._record_starts, starts, side="right") - 1
        stored = self._valid[records]
        labels = self._ids.take(starts, lengths).astype(np.int32)
        if stored.any():
            values = self._labels.take((starts - self._shift[records])[stored], lengths[stored])
            labels[np.repeat(stored, lengths)] = values
        return labels


def table_of_arrow(table: pa.Table, where: str, order: np.ndarray | None = None) -> DocumentTable:
    """The documents of an Arrow table.

    Args:
        table: has a list column `input_ids`, and `seq_lengths` if its rows are packed already.
        where: what messages call it.
        order: `[K]` which records of the table the source has, in its order; None for all as they lie.

    Raises:
        SourceError: no usable `input_ids`, or `seq_lengths` that do not fit them.
    """
    if IDS not in table.column_names:
        raise SourceError(
            f"{where}: expected a column {IDS!r}, got {', '.join(map(repr, table.column_names)) or 'none'}. Tokenise the text "
            "first: with `neatpack pack`, or by mapping a tokenizer over it."
        )
    twice = sorted({name for name in table.column_names if table.column_names.count(name) > 1})
    if twice:
        raise SourceError(f"{where}: the column {twice[0]!r} is there more than once. Rename one of them.")
    ids = _Lists.read(table, IDS)
    _refuse(where, IDS, ids.fault or ids.not_integers())
    starts, records = ids.starts, None
    if SEQ_LENGTHS in table.column_names:
        pieces = _Lists.read(table, SEQ_LENGTHS)
        _refuse(where, SEQ_LENGTHS, pieces.fault or pieces.not_integers())
        records = pieces.starts
        starts = _piece_starts(pieces, ids.starts, where)
    sorter = _Sorter(table, ids, records)
    for name in table.column_names:
        if name not in (IDS, SEQ_LENGTHS):
            sorter.sort(name)
    if order is not None and records is not None:
        order, records = _order_pieces(records, order)
    return DocumentTable(
        starts=starts, tokens=sorter.tokens, values=sorter.values, unusable=sorter.unusable, order=order, records=records
    )


@dataclass(frozen=True, eq=False)
class _Lists:
    """A list column: its chunks, where each record's list begins `[R+1]`, or why it is no list of numbers."""

    chunks: list[pa.Array]
    starts: np.ndarray
    column: Column | None
    fault: str | None

    @classmethod
    def read(cls, table: pa.Table, name: str) -> _Lists:
        chunks = table.column(name).chunks or [pa.array([], table.column(name).type)]
        if not is_list(chunks[0].type):
            return cls(chunks, np.zeros(1, np.int64), None, f"it has type {chunks[0].type}, not lists of numbers")
        try:
            check_offsets(*chunks)
        except pa.ArrowInvalid as error:
            return cls(chunks, np.zeros(1, np.int64), None, f"it is damaged ({error})")
        parts = [_list_values(chunk) for chunk in chunks]
        starts = parts[0][1] if len(parts) == 1 else _concatenate([offsets for _, offsets in parts])
        kind = chunks[0].type.value_type
        fault = None
        if any(chunk.null_count for chunk in chunks):
            fault = "it has null lists"
        elif not (
            pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind) or pa.types.is_null(kind)
        ):
            fault = f"its lists hold {kind}, not numbers"
        elif not pa.types.is_null(kind) and any(values.null_count for values, _ in parts):
            fault = "its lists hold nulls"
        if fault:
            return cls(chunks, starts, None, fault)
        if pa.types.is_boolean(kind):
            return cls(chunks, starts, BitColumn([values for values, _ in parts]), None)
        if pa.types.is_null(kind):  # only empty lists
            return cls(chunks, starts, NumberColumn([np.empty(0, np.int64)]), None)
        return cls(chunks, starts, NumberColumn([values.to_numpy() for values, _ in parts]), None)

    def not_integers(self) -> str | None:
        """Why a list column without a fault is none of integers, or None if it is."""
        kind = self.chunks[0].type.value_type
        return None if pa.types.is_integer(kind) or pa.types.is_null(kind) else f"its lists hold {kind}, not integers"


class _Sorter:
    """Sorts further columns into those with a value a token, those with a value a document, and the rest."""

    def __init__(self, table: pa.Table, ids: _Lists, records: np.ndarray | None) -> None:
        self._table, self._ids, self._records = table, ids, records
        self.tokens: dict[str, Column] = {IDS: ids.column} if ids.column else {}
        self.values: dict[str, ValueColumn] = {}
        self.unusable: dict[str, str] = {}

    def sort(self, name: str) -> None:
        kind = self._table.schema.field(name).type
        if not is_list(kind):
            self._sort_values(name, kind)
            return
        lists = _Lists.read(self._table, name)
        if self._records is not None and name == LABELS and any(chunk.null_count for chunk in lists.chunks):
            self.tokens[name] = FilledLabels(lists.chunks, self.tokens[IDS], self._ids.starts)
        elif lists.column is not None and np.array_equal(lists.starts, self._ids.starts):
            self.tokens[name] = lists.column
        elif self._records is not None and np.array_equal(lists.starts, self._records):
            self.values[name] = ValueColumn([chunk.flatten() for chunk in lists.chunks])
        else:
            self.unusable[name] = lists.fault or _other_lengths(lists.starts, self._ids.starts)

    def _sort_values(self, name: str, kind: pa.DataType) -> None:
        if self._records is not None:
            self.unusable[name] = "it has one value a row, and the rows are packed already: of which document?"
        elif pa.types.is_nested(kind):
            self.unusable[name] = f"it has type {kind}"
        else:
            self.values[name] = ValueColumn(self._table.column(name).chunks or [pa.array([], kind)])


def is_list(kind: pa.DataType) -> bool:
    """Whether a column of this type has a list a record."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _list_values(array: pa.Array) -> tuple[pa.Array, np.ndarray]:
    """Values of a list array as an Arrow array, and offsets `[R+1]` into them from 0; slices included, nothing copied."""
    if isinstance(array, pa.FixedSizeListArray):
        array = array.cast(pa.large_list(array.type.value_type))
    offsets = array.offsets.to_numpy()
    first, last = int(offsets[0]), int(offsets[-1])
    return array.values.slice(first, last - first), offsets - first if first else offsets


def _concatenate(offsets: Sequence[np.ndarray]) -> np.ndarray:
    """Offsets of consecutive chunks, each from 0, as the offsets of all, `[R+1] int64`."""
    starts = np.zeros(1 + sum(len(part) - 1 for part in offsets), np.int64)
    at = 0
    for part in offsets:
        np.add(part[1:], starts[at], out=starts[at + 1 : at + len(part)])
        at += len(part) - 1
    return starts


def _piece_starts(pieces: _Lists, token_starts: np.ndarray, where: str) -> np.ndarray:
    """Where the documents of packed rows begin, `[P+1]`."""
    assert isinstance(pieces.column, NumberColumn)
    lengths = pieces.column.whole().astype(np.int64)
    starts = np.concatenate(([0], np.cumsum(lengths)))
    wrong = starts[pieces.starts] != token_starts
    if wrong.any() or (lengths < 0).any():
        record = max(int(np.argmax(wrong)) - 1, 0)
        raise SourceError(f"{where}: record {record}: {SEQ_LENGTHS!r} does not add up to its {IDS!r}. Pack the rows again.")
    return starts


def _order_pieces(records: np.ndarray, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The documents of packed rows, rows in `order`: which document each is, and documents before each row."""
    order = order.astype(np.int64)
    firsts, counts = records[order].astype(np.int64), (records[order + 1] - records[order]).astype(np.int64)
    before = np.concatenate(([0], np.cumsum(counts)))
    return np.arange(before[-1]) + np.repeat(firsts - before[:-1], counts), before


def _other_lengths(starts: np.ndarray, expected: np.ndarray) -> str:
    lengths, wanted = np.diff(starts), np.diff(expected)
    record = int(np.argmax(lengths != wanted))
    return f"record {record} has {lengths[record]} values for {wanted[record]} tokens"


def _refuse(where: str, name: str, fault: str | None) -> None:
    if fault:
        raise SourceError(f"{where}: {name!r} cannot be used: {fault}. Expected a list of integers a record.")
