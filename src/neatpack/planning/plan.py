"""PackPlan: which slice of which document lies in which row, as three flat arrays and row offsets (CSR)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from neatpack.errors import PlanError
from neatpack.planning.lengths import check_lengths, fingerprint_lengths

_BLOCK = 1 << 13  # rows copied at a time, so that temporaries stay small


class Slice(NamedTuple):
    """A run of tokens of one document: `document[start : start + length]`.

    Attributes:
        doc: number of the document in the lengths given.
        start: its first token within the document.
        length: its tokens.
    """

    doc: int
    start: int
    length: int


class Rows(NamedTuple):
    """Pieces in row order `[N]`, their lengths `[N] int32`, and the rows' offsets into both `[R+1] int64`."""

    pieces: np.ndarray
    lengths: np.ndarray
    row_offsets: np.ndarray


@dataclass(frozen=True, kw_only=True)
class PlanCounts:
    """What became of the documents: nothing is lost without a number here.

    Attributes:
        documents: documents given.
        tokens: tokens given.
        empty: documents of length zero; they are placed in no row.
        dropped: documents left out by `overflow="drop"`.
        dropped_tokens: their tokens.
        truncated: documents cut by `overflow="truncate"`.
        truncated_tokens: the tokens cut off.
        split: documents that lie in more than one piece (`overflow="split"`, or cut at a row end by `wrapped`).
    """

    documents: int = 0
    tokens: int = 0
    empty: int = 0
    dropped: int = 0
    dropped_tokens: int = 0
    truncated: int = 0
    truncated_tokens: int = 0
    split: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class PackPlan:
    """Rows of at most `capacity` tokens, each a run of document slices.

    Row `r` holds the slices `row_offsets[r]` to `row_offsets[r + 1]`; slice `i` is the `length[i]` tokens of document
    `doc[i]` from `start[i]` on. Every token given is in exactly one slice or counted in `counts`.

    Attributes:
        capacity: tokens a row can hold.
        row_offsets: `[R+1] int64`.
        doc: `[N] int32` index into the lengths given.
        start: `[N]` integer, first token of the slice; all zero, and then no memory, where no document was split.
        length: `[N] int32` tokens of the slice.
        lower_bound: fewest rows that any plan of these pieces can have (Martello and Toth's L2 where documents stay
            whole, tokens over capacity where they are cut).
        counts: what the overflow policy did.
        strategy: how the rows were planned.
        overflow: what was done with documents over capacity.
        seed: what shuffled the rows and ties, or None.
        align: every slice takes a multiple of this many tokens of its row; see `slot_lengths` and `slot_starts`.
        max_docs_per_row: the most slices that a row may hold, or None.
        fingerprint: of the lengths given, for `check_source`; empty where they were never all known.

    Iterating gives a row at a time, as a list of `Slice`; `plan[r]` gives one row.
    """

    capacity: int
    row_offsets: np.ndarray
    doc: np.ndarray
    start: np.ndarray
    length: np.ndarray
    lower_bound: int
    counts: PlanCounts
    strategy: str
    overflow: str
    seed: int | None = None
    align: int = 1
    max_docs_per_row: int | None = None
    fingerprint: str = ""

    @property
    def num_rows(self) -> int:
        """Rows in the plan."""
        return len(self.row_offsets) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens placed in rows."""
        return int(self.length.sum(dtype=np.int64))

    @property
    def efficiency(self) -> float:
        """Placed tokens over row slots, 0 to 1: what is left is padding. A plan without rows wastes nothing: 1.0."""
        slots = self.num_rows * self.capacity
        return self.num_tokens / slots if slots else 1.0

    def row_lengths(self) -> np.ndarray:
        """Tokens in each row, `[R] int64`."""
        return self.sum_rows(self.length)

    def slot_lengths(self) -> np.ndarray:
        """Tokens of its row that each slice takes, `[N] int32`: its length rounded up to a multiple of `align`."""
        if self.align == 1:
            return self.length
        slots: np.ndarray = -(-self.length // self.align) * self.align
        return slots

    def slot_starts(self) -> np.ndarray:
        """Where in its row each slice starts, `[N] int32`, a multiple of `align`: copy slice `i` to there.

        Example:
            >>> plan_rows([3, 2], capacity=8, align=4).slot_starts().tolist()
            [0, 4]
        """
        slots = self.slot_lengths()
        before = np.cumsum(slots, dtype=np.int64) - slots
        rows = np.diff(self.row_offsets)
        starts: np.ndarray = before - np.repeat(before[self.row_offsets[:-1]], rows)
        return starts.astype(np.int32)

    def take_rows(self, rows: object) -> PackPlan:
        """The plan with just these rows, in this order: `rows [K]` are row numbers, and may name a row twice.

        `counts`, `lower_bound` and `fingerprint` stay those of the whole plan.

        Raises:
            IndexError: a row number below zero or past the last row.
        """
        order = np.asarray(rows, np.int64)
        if order.size and not 0 <= order.min() <= order.max() < self.num_rows:
            raise IndexError(f"rows {order.min()} to {order.max()} of a plan of {self.num_rows} rows")
        firsts, sizes = self.row_offsets[:-1], np.diff(self.row_offsets)
        row_offsets = np.concatenate(([0], np.cumsum(sizes[order], dtype=np.int64)))
        doc, length = (np.empty(row_offsets[-1], column.dtype) for column in (self.doc, self.length))
        whole = self.start.strides == (0,)
        start = np.broadcast_to(self.start.dtype.type(0), doc.shape) if whole else np.empty(doc.shape, self.start.dtype)
        for begin in range(0, len(order), _BLOCK):
            taken = order[begin : begin + _BLOCK]
            out = slice(row_offsets[begin], row_offsets[begin + len(taken)])
            shift = firsts[taken] - row_offsets[begin : begin + len(taken)]
            take = np.arange(out.start, out.stop) + np.repeat(shift, sizes[taken])
            doc[out], length[out] = self.doc[take], self.length[take]
            if not whole:
                start[out] = self.start[take]
        return replace(self, row_offsets=row_offsets, doc=doc, start=start, length=length)

    def check_source(self, lengths: object) -> None:
        """Refuse a source that this plan was not made for.

        Args:
            lengths: tokens of each document of the source, as for `plan_rows`.

        Raises:
            PlanError: what is given are no lengths, or the plan was made from others, or from lengths never all known.
        """
        array = check_lengths(lengths)
        if not self.fingerprint:
            raise PlanError("this plan carries no fingerprint of its source: make it with plan_rows, which sees all lengths.")
        planned = f"{self.counts.documents} documents, {self.counts.tokens} tokens, {self.fingerprint}"
        given = f"{len(array)} documents, {int(array.sum(dtype=np.int64))} tokens, {fingerprint_lengths(array)}"
        if planned != given:
            raise PlanError(f"the plan does not fit its source: made for {planned}; got {given}. Plan the rows anew.")

    def sum_rows(self, values: np.ndarray) -> np.ndarray:
        """Sums of `values [N]` over each row, `[R]`; 64 bits wide."""
        sums: np.ndarray = np.add.reduceat(values, self.row_offsets[:-1], dtype=np.result_type(values, np.int64))
        return sums

    def __getstate__(self) -> dict[str, Any]:
        whole = self.start.strides == (0,)  # pickled as they are, starts that take no memory would take 4 bytes a slice
        return {**self.__dict__, "start": self.start.dtype if whole else self.start}

    def __setstate__(self, state: dict[str, Any]) -> None:
        start = state["start"]
        if isinstance(start, np.dtype):
            start = np.broadcast_to(start.type(0), state["doc"].shape)
        self.__dict__.update(state, start=start)

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, row: int) -> list[Slice]:
        if not -self.num_rows <= row < self.num_rows:
            raise IndexError(f"row {row} of a plan of {self.num_rows} rows")
        row %= self.num_rows
        first, last = self.row_offsets[row : row + 2].tolist()
        columns = (self.doc[first:last], self.start[first:last], self.length[first:last])
        return [Slice(*slice_) for slice_ in zip(*(column.tolist() for column in columns), strict=True)]

    def __iter__(self) -> Iterator[list[Slice]]:
        return (self[row] for row in range(self.num_rows))

    def __repr__(self) -> str:
        return (
            f"PackPlan({self.num_rows} rows of {self.capacity}, {len(self.doc)} slices, "
            f"{self.efficiency:.2%} full, lower bound {self.lower_bound} rows, strategy={self.strategy!r})"
        )
