"""Virtual rows: a source that stays as it is, and a plan that says which slices of it make which row.

Nothing is stored. A new epoch, or another row length, is a new plan over the same source, made in seconds; a worker gets
paths and the plan, and maps the source into its own memory.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from neatpack.data.in_memory import check_mask
from neatpack.data.opening import OpenedSource, open_source
from neatpack.data.records import ATTENTION_MASK, SEQ_LENGTHS
from neatpack.errors import PlanError
from neatpack.planning import PackPlan, PlanCounts
from neatpack.planning.lengths import fingerprint_lengths

Row = dict[str, Any]

_BLOCK = 1 << 16  # slices checked at a time, so that temporaries stay small


def lengths_of(source: Any) -> np.ndarray:
    """Tokens of each document of a source, `[D] int32` (int64 where one is longer): what `plan_rows` plans.

    Lengths come from offsets, not from tokens. In rows that are packed already, every piece of `seq_lengths` is a document.

    Args:
        source: as for `PackedDataset`.

    Raises:
        SourceError: a source without usable `input_ids`.
        StoreError: a folder of `neatpack pack` whose manifest is damaged.

    Example:
        >>> lengths_of([[11, 12], [21, 22, 23], [31]]).tolist()
        [2, 3, 1]
    """
    return open_source(source).table.lengths()


class PackedDataset:
    """Packed rows over an untouched source: a map-style dataset that torch's DataLoader takes as it is.

    A row is a dict: `input_ids` in the source's dtype, `seq_lengths [documents] int32`, every other column with a value a
    token (`labels`, masks) packed alike, and every column with a value a document as one value for each of `seq_lengths`.
    `PackedCollator` makes batches of such rows. An `attention_mask` must be 1 everywhere, and is left out.

    Args:
        source: a `datasets.Dataset` (also one that was selected from or shuffled); an Arrow table; the path of an Arrow or
            Parquet file, of a folder of them, or of one that `neatpack pack` or `datasets` wrote; or a sequence of documents,
            each its token ids or a mapping with `input_ids` and further columns.
        plan: rows of the documents of `source`, as `plan_rows(lengths_of(source), capacity)` makes them. None takes the rows
            as they lie: those of a packed source, or one document a row. The rows of a plan with `align` hold no padding
            either; `PackedCollator(align=dataset.align)` lays their documents out in slots.
        ignore_columns: columns to leave out knowingly; any other is carried, or refused by name.

    Raises:
        SourceError: a source that has no usable `input_ids`, or a column that rows cannot carry.
        PlanError: a plan that was made for another source.
        StoreError: a folder of `neatpack pack` whose manifest is damaged.

    Example:
        >>> documents = [[11, 12], [21, 22, 23], [31], [41, 42], [51, 52, 53]]
        >>> from neatpack import plan_rows
        >>> dataset = PackedDataset(documents, plan_rows(lengths_of(documents), 6, strategy="in_order"))
        >>> len(dataset), dataset[0]["input_ids"].tolist(), dataset[0]["seq_lengths"].tolist()
        (2, [11, 12, 21, 22, 23, 31], [2, 3, 1])
    """

    def __init__(self, source: Any, plan: PackPlan | None = None, *, ignore_columns: Collection[str] = ()) -> None:
        self._bind(open_source(source), plan, frozenset(ignore_columns))

    def _bind(self, opened: OpenedSource, plan: PackPlan | None, ignore: frozenset[str]) -> None:
        opened.table.check_columns(ignore)
        lengths = opened.table.lengths()
        if plan is None:
            plan = _plan_as_stored(lengths, opened.table.records, opened.align)
        else:
            _check_plan(plan, lengths)
        self._restore(opened, plan, ignore)

    def _restore(self, opened: OpenedSource, plan: PackPlan, ignore: frozenset[str]) -> None:
        self._opened, self._plan, self._ignore = opened, plan, ignore
        self._tokens = {name: column for name, column in opened.table.tokens.items() if name not in ignore}
        self._values = {name: column for name, column in opened.table.values.items() if name not in ignore}
        self._firsts, self._stops, self._token_counts = plan.row_offsets[:-1], plan.row_offsets[1:], plan.row_lengths()

    def __getstate__(self) -> dict[str, Any]:
        return {"opened": self._opened, "plan": self._plan, "ignore": self._ignore}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._restore(**state)

    @property
    def plan(self) -> PackPlan:
        """The plan."""
        return self._plan

    @property
    def align(self) -> int:
        """What slots are rounded up to, by the plan or as the folder was packed: `PackedCollator(align=dataset.align)`."""
        return self._plan.align

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document of the source, to plan anew: `dataset.with_plan(plan_rows(dataset.lengths, capacity))`."""
        return self._opened.table.lengths()

    @property
    def column_names(self) -> list[str]:
        """Columns of a row."""
        return [*(name for name in self._tokens if name != ATTENTION_MASK), SEQ_LENGTHS, *self._values]

    def with_plan(self, plan: PackPlan | None) -> PackedDataset:
        """Rows of another plan over the same source, which is not opened again: the next epoch.

        Raises:
            PlanError: a plan that was made for another source.
        """
        dataset = PackedDataset.__new__(PackedDataset)
        dataset._bind(self._opened, plan, self._ignore)
        return dataset

    def __len__(self) -> int:
        return self._plan.num_rows

    def __getitem__(self, row: int) -> Row:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: Sequence[int]) -> list[Row]:
        """Rows by number, gathered together: what DataLoader calls for a batch."""
        numbers = _row_numbers(rows)
        if not numbers.size:
            return []
        plan, table = self._plan, self._opened.table
        slices, value_ends, token_ends = self._slices_of(numbers)
        documents, lengths = table.where(plan.doc.take(slices)), plan.length.take(slices)
        starts = table.starts.take(documents)
        if plan.start.strides != (0,):
            starts += plan.start.take(slices)
        found: list[Row] = [{} for _ in range(len(numbers))]
        for name, column in self._tokens.items():
            tokens = column.take(starts, lengths)
            if name == ATTENTION_MASK:
                check_mask(tokens, f"one of the rows {', '.join(map(str, numbers[:5].tolist()))}")
            else:
                _deal(found, name, tokens, token_ends)
        _deal(found, SEQ_LENGTHS, lengths, value_ends)
        for name, values in self._values.items():
            _deal(found, name, values.take(documents), value_ends)
        return found

    def _slices_of(self, numbers: np.ndarray) -> tuple[np.ndarray, list[int], list[int]]:
        """The slices of rows, one after the other, and how many slices and tokens there are up to the end of each row."""
        try:
            stops, token_counts = self._stops.take(numbers), self._token_counts.take(numbers)
        except IndexError as error:
            outside = numbers[(numbers < -len(self)) | (numbers >= len(self))]
            raise IndexError(f"row {outside[0]} of a dataset of {len(self)} rows") from error
        counts = stops - self._firsts.take(numbers)
        ends = counts.cumsum()
        slices = (stops - ends).repeat(counts)
        slices += np.arange(len(slices))
        return slices, ends.tolist(), token_counts.cumsum().tolist()

    def __repr__(self) -> str:
        return f"PackedDataset({len(self)} rows of {self._plan.capacity}, columns {', '.join(self.column_names)})"


def _row_numbers(rows: Sequence[int]) -> np.ndarray:
    numbers = np.asarray(rows)
    if not numbers.size and numbers.ndim == 1:
        return np.empty(0, np.int64)
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        raise TypeError(f"row numbers must be integers, got {rows!r}; for several rows at once use __getitems__([...])")
    return numbers.astype(np.int64, copy=False)


def _deal(rows: list[Row], name: str, values: Any, ends: list[int]) -> None:
    """Give each row its part of a column, up to where the row ends; a view where the column is an array."""
    begin = 0
    for row, end in zip(rows, ends, strict=True):
        row[name] = values[begin:end]
        begin = end


def _check_plan(plan: PackPlan, lengths: np.ndarray) -> None:
    """Refuse a plan that was not made for documents of these lengths."""
    if not isinstance(plan, PackPlan):
        raise PlanError(f"plan must be a PackPlan, got {type(plan).__name__}. A BalancedPlan has one in its .plan.")
    plan.check_source(lengths)
    for begin in range(0, len(plan.doc), _BLOCK):
        block = slice(begin, begin + _BLOCK)
        if (plan.start[block].astype(np.int64) + plan.length[block] > lengths[plan.doc[block]]).any():
            raise PlanError("the plan has slices that reach beyond their documents: it was altered. Plan the rows anew.")


def _plan_as_stored(lengths: np.ndarray, records: np.ndarray | None, align: int) -> PackPlan:
    """The rows of a packed source as they lie, or a row a document; records and documents without tokens make no row."""
    kept = np.flatnonzero(lengths)
    before = np.arange(len(lengths) + 1) if records is None else records
    row_offsets = np.unique(np.searchsorted(kept, before))
    tokens = int(lengths.sum(dtype=np.int64))
    length = lengths[kept].astype(np.int32)
    slots = -(-length.astype(np.int64) // align) * align
    longest = int(np.add.reduceat(slots, row_offsets[:-1]).max()) if len(kept) else align
    return PackPlan(
        capacity=longest,
        row_offsets=row_offsets.astype(np.int64),
        doc=kept.astype(np.int32),
        start=np.broadcast_to(np.int32(0), kept.shape),
        length=length,
        lower_bound=-(-int(slots.sum()) // longest),
        counts=PlanCounts(documents=len(lengths), tokens=tokens, empty=len(lengths) - len(kept)),
        strategy="in_order",
        overflow="error",
        align=align,
        fingerprint=fingerprint_lengths(lengths),
    )
