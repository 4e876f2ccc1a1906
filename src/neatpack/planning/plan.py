"""PackPlan: which slice of which document lies in which row, as three flat arrays and row offsets (CSR)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from neatpack.errors import PlanError


class Slice(NamedTuple):
    """A run of tokens of one document: `document[start : start + length]`."""

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
        dropped: documents left out by `overflow="drop"`, and `dropped_tokens` their tokens.
        truncated: documents cut by `overflow="truncate"`, and `truncated_tokens` the tokens cut off.
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
        start: `[N]` first token of the slice; all zero, and then no memory, where no document was split.
        length: `[N] int32` tokens of the slice.
        lower_bound: fewest rows that any plan of these pieces can have (Martello and Toth's L2 where documents stay
            whole, tokens over capacity where they are cut).
        counts: what the overflow policy did.
        strategy: how the rows were planned.
        overflow: what was done with documents over capacity.
        seed: what shuffled the rows and ties, or None.

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
        if not self.num_rows:
            return np.zeros(0, np.int64)
        return np.add.reduceat(self.length, self.row_offsets[:-1], dtype=np.int64)

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


def check_lengths(lengths: object) -> np.ndarray:
    """Return document lengths as a 1-D integer array, copying nothing that already is one.

    Raises:
        PlanError: not 1-D, not integers, or a negative length.
    """
    array = np.asarray(lengths)
    if array.size == 0 and array.ndim == 1:
        return np.zeros(0, np.int32)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise PlanError(
            f"lengths must be a 1-D sequence of integers, one a document; got shape {array.shape} of dtype {array.dtype}. "
            "Pass [len(ids) for ids in documents]."
        )
    if len(array) >= 2**31:
        raise PlanError(f"{len(array)} documents: a plan counts at most 2**31 - 1. Plan them in parts.")
    if array.dtype.kind == "i" and int(array.min()) < 0:
        first = int(np.argmax(array < 0))
        raise PlanError(f"document {first} has length {int(array[first])}: a length is zero or more tokens.")
    return array
