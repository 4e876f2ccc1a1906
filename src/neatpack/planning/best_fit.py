"""Best-fit decreasing on the histogram of lengths.

Textbook best-fit decreasing takes documents from long to short and puts each into the fullest row that still holds it.
Lengths are integers up to the capacity C, so documents of one length are placed together: open rows are kept as ranges
of row numbers by the room they have left, and a range takes as many documents as fit in one step. The work in Python
depends on C and on the distinct lengths, not on the number of documents; what is left per document is one radix sort
(16-bit keys), one gather and one scatter, done in blocks so that temporaries stay small.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple

import numpy as np

from neatpack.planning.overflow import index_dtype

_BLOCK = 1 << 20


class _Range(NamedTuple):
    """Open rows `first .. first + count`, alike: the same room left, the same number of documents in each."""

    first: int
    count: int
    depth: int


class _Placements(NamedTuple):
    """Documents in descending order of length, in runs: `count[i]` of them, one a row from row `first[i]` on."""

    first: np.ndarray
    count: np.ndarray
    depth: np.ndarray
    num_rows: int


def best_fit(lengths: np.ndarray, capacity: int, rng: np.random.Generator | None) -> tuple[np.ndarray, np.ndarray]:
    """Pack pieces into rows, best-fit decreasing.

    Args:
        lengths: `[P]` tokens of each piece, 0 to `capacity`; zeros are placed in no row.
        capacity: tokens a row holds.
        rng: shuffles ties and the order of rows; None keeps ties in the order given and rows in the order opened.

    Returns:
        The pieces in row order `[N]`, and `row_offsets [R+1] int64` into them.
    """
    order = _longest_first(lengths, capacity, rng)
    histogram = np.bincount(lengths, minlength=capacity + 1)
    histogram[0] = 0
    placements = _place(histogram, capacity)
    labels = None if rng is None else rng.permutation(placements.num_rows)
    row_offsets = _row_offsets(placements, labels)
    return _scatter(order, placements, row_offsets, labels), row_offsets


def _longest_first(lengths: np.ndarray, capacity: int, rng: np.random.Generator | None) -> np.ndarray:
    """Indices of the non-empty pieces from long to short; ties as given, or shuffled."""
    key = (capacity - lengths).astype(np.uint16 if capacity < 2**16 else np.uint64, copy=False)
    narrow = index_dtype(len(lengths))
    if rng is None:
        order = _stable_argsort(key, capacity).astype(narrow)
    else:
        shuffled = rng.permutation(len(lengths)).astype(narrow)
        order = shuffled[_stable_argsort(key[shuffled], capacity)]
    return order[: np.count_nonzero(lengths)]


def _stable_argsort(key: np.ndarray, largest: int) -> np.ndarray:
    """Stable argsort; NumPy has a radix sort for 16-bit keys only, so wider keys are sorted 16 bits at a time."""
    if key.dtype.itemsize <= 2:
        return np.argsort(key, kind="stable")
    order = np.argsort((key & 0xFFFF).astype(np.uint16), kind="stable")
    shift = 16
    while largest >> shift:
        digit = (key >> np.uint64(shift)).astype(np.uint16)
        order = order[np.argsort(digit[order], kind="stable")]
        shift += 16
    return order


class _OpenRows:
    """Rows with room left, as ranges by that room, tightest first."""

    def __init__(self, capacity: int) -> None:
        self._by_room: list[list[_Range]] = [[] for _ in range(capacity + 1)]
        self._rooms: list[int] = []  # sorted: each room that some row has left

    def take_tightest(self, length: int) -> tuple[int, _Range] | None:
        """Remove and return the fullest range of rows that holds `length` more tokens, with its room."""
        at = bisect_left(self._rooms, length)
        if at == len(self._rooms):
            return None
        room = self._rooms[at]
        rows = self._by_room[room].pop()
        if not self._by_room[room]:
            del self._rooms[at]
        return room, rows

    def put(self, rows: _Range, room: int) -> None:
        """Give rows back with the room they have now; full rows are done with."""
        if not room:
            return
        if not self._by_room[room]:
            insort(self._rooms, room)
        self._by_room[room].append(rows)


def _place(histogram: np.ndarray, capacity: int) -> _Placements:
    open_rows = _OpenRows(capacity)
    placed: list[_Range] = []
    num_rows = 0
    for length in np.flatnonzero(histogram)[::-1].tolist():
        left = int(histogram[length])
        while left:
            found = open_rows.take_tightest(length)
            if found is None:
                found = capacity, _Range(num_rows, -(-left // (capacity // length)), 0)
                num_rows += found[1].count
            room, rows = found
            # A row that takes one of these stays the tightest, so it takes them until no more fit.
            per_row = room // length
            full = min(left // per_row, rows.count)
            rest = left - full * per_row if full < rows.count else 0
            first = rows.first
            for count, fits in ((full, per_row), (int(rest > 0), rest), (rows.count - full - (rest > 0), 0)):
                if count:
                    placed += [_Range(first, count, rows.depth + i) for i in range(fits)]
                    open_rows.put(_Range(first, count, rows.depth + fits), room - fits * length)
                    first += count
            left -= full * per_row + rest
    first_row, count, depth = np.array(placed, np.int64).reshape(-1, 3).T
    return _Placements(first_row, count, depth, num_rows)


def _row_offsets(placements: _Placements, labels: np.ndarray | None) -> np.ndarray:
    """Offsets `[R+1]` of the rows in the output; `labels[r]` is the place of row `r`."""
    rows = placements.num_rows
    starts = np.bincount(placements.first, minlength=rows + 1)
    ends = np.bincount(placements.first + placements.count, minlength=rows + 1)
    per_row = np.cumsum(starts - ends)[:rows]
    if labels is not None:
        per_row[labels] = per_row.copy()
    return np.concatenate(([0], np.cumsum(per_row, dtype=np.int64)))


def _scatter(order: np.ndarray, placements: _Placements, row_offsets: np.ndarray, labels: np.ndarray | None) -> np.ndarray:
    """Move pieces from placement order to row order, a block of placements at a time."""
    out = np.empty_like(order)
    row_start = row_offsets[:-1] if labels is None else row_offsets[labels]
    ends = np.cumsum(placements.count)
    block_starts = np.searchsorted(ends, np.arange(0, len(order), _BLOCK), side="right")
    for low, high in zip(block_starts, [*block_starts[1:], len(ends)], strict=True):
        count = placements.count[low:high]
        first_piece = ends[low:high] - count
        begin, end = int(ends[low] - placements.count[low]), int(ends[high - 1])
        rows = np.arange(begin, end) + np.repeat(placements.first[low:high] - first_piece, count)
        out[row_start[rows] + np.repeat(placements.depth[low:high], count)] = order[begin:end]
    return out
