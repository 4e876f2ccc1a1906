"""Best-fit decreasing on the histogram of lengths.

Textbook best-fit decreasing takes documents from long to short and puts each into the fullest row that still holds it.
Lengths are integers up to the capacity C, so documents of one length are placed together: open rows are kept as ranges
of row numbers by the room they have left, and a range takes as many documents as fit in one step. The work in Python
depends on C and on the distinct lengths, not on the number of documents. What is left per document is one sort of
64-bit keys (length and index in one number, so that NumPy's vectorised sort is stable) and one scatter into row order,
in blocks so that temporaries stay small; the sort takes most of the time and of the memory (8 bytes a document).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple

import numpy as np

from neatpack.planning.plan import Rows

_BLOCK = 1 << 16


class _Range(NamedTuple):
    """Open rows `first .. first + num`, alike: the same room left, the same number of documents in each."""

    first: int
    num: int
    depth: int


class _Placements(NamedTuple):
    """Pieces from long to short, in runs.

    Run `i` is `num[i]` pieces of `length[i]` tokens, one a row from row `first[i]` on, each the `depth[i]`-th of its row.

    """

    first: np.ndarray
    num: np.ndarray
    depth: np.ndarray
    length: np.ndarray
    num_rows: int


def plan_best_fit(lengths: np.ndarray, histogram: np.ndarray, capacity: int, rng: np.random.Generator | None) -> Rows:
    """Pack pieces into rows, best-fit decreasing.

    Args:
        lengths: `[P]` tokens of each piece, 0 to `capacity`; zeros are placed in no row.
        histogram: `[capacity + 1]` how many pieces have each length.
        capacity: tokens a row holds.
        rng: shuffles ties and the order of rows; None keeps ties in the order given and rows in the order opened.
    """
    placements = _place(histogram, capacity)
    labels = None if rng is None else rng.permutation(placements.num_rows)
    order = _longest_first(lengths, capacity, len(lengths) - int(histogram[0]), rng)
    return _scatter(order, placements, labels)


def _longest_first(lengths: np.ndarray, capacity: int, nonempty: int, rng: np.random.Generator | None) -> np.ndarray:
    """Indices of the non-empty pieces from long to short; ties as given, or shuffled."""
    ranks = np.arange(len(lengths), dtype=np.uint32)
    if rng is not None:
        rng.shuffle(ranks)
    keys = np.empty(len(lengths), np.uint64)
    for begin in range(0, len(lengths), _BLOCK):
        block = slice(begin, begin + _BLOCK)
        room_left = (capacity - lengths[block].astype(np.int64)).view(np.uint64)
        keys[block] = (room_left << np.uint64(32)) | ranks[block]
    keys.sort()
    order = keys[:nonempty].astype(np.uint32)
    if rng is not None:
        del keys
        index = np.empty_like(ranks)
        index[ranks] = np.arange(len(ranks), dtype=np.uint32)
        order = index[order]
    return order.view(np.int32)


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
    taken: list[int] = []  # flat: first row, rows, depth, pieces a row, their length; again and again
    num_rows = 0
    for length in (np.flatnonzero(histogram[1:])[::-1] + 1).tolist():
        left = int(histogram[length])
        while left:
            found = open_rows.take_tightest(length)
            if found is None:
                found = capacity, _Range(num_rows, -(-left // (capacity // length)), 0)
                num_rows += found[1].num
            room, rows = found
            # A row that takes one of these stays the tightest, so it takes them until no more fit.
            per_row = room // length
            full = min(left // per_row, rows.num)
            rest = left - full * per_row if full < rows.num else 0
            first = rows.first
            for count, fits in ((full, per_row), (int(rest > 0), rest), (rows.num - full - (rest > 0), 0)):
                if count:
                    taken += (first, count, rows.depth, fits, length)
                    open_rows.put(_Range(first, count, rows.depth + fits), room - fits * length)
                    first += count
            left -= full * per_row + rest
    return _one_piece_a_row(np.array(taken, np.int64).reshape(-1, 5), num_rows)


def _one_piece_a_row(taken: np.ndarray, num_rows: int) -> _Placements:
    """Spread "three pieces a row" over three placements of one piece a row."""
    first, count, depth, fits, length = taken.T
    within = np.arange(fits.sum()) - np.repeat(np.cumsum(fits) - fits, fits)
    first, count, depth, length = (np.repeat(column, fits) for column in (first, count, depth, length))
    return _Placements(first, count, depth + within, length, num_rows)


def _scatter(order: np.ndarray, placements: _Placements, labels: np.ndarray | None) -> Rows:
    """Move pieces from placement order to row order; `labels[r]` is the place that row `r` gets."""
    row_offsets = _row_offsets(placements, labels)
    row_start = row_offsets[:-1] if labels is None else row_offsets[labels]
    pieces = np.empty_like(order)
    lengths = np.empty(len(order), np.int32)
    ends = np.cumsum(placements.num)
    starts = ends - placements.num
    for begin in range(0, len(order), _BLOCK):
        end = min(begin + _BLOCK, len(order))
        low, high = np.searchsorted(ends, (begin, end - 1), side="right")
        block = slice(low, high + 1)
        count = np.minimum(ends[block], end) - np.maximum(starts[block], begin)
        rows = np.arange(begin, end) + np.repeat(placements.first[block] - starts[block], count)
        slots = row_start[rows] + np.repeat(placements.depth[block], count)
        pieces[slots] = order[begin:end]
        lengths[slots] = np.repeat(placements.length[block], count)
    return Rows(pieces, lengths, row_offsets)


def _row_offsets(placements: _Placements, labels: np.ndarray | None) -> np.ndarray:
    """Offsets `[R+1]` of the rows in the output."""
    rows = placements.num_rows
    starts = np.bincount(placements.first, minlength=rows + 1)
    ends = np.bincount(placements.first + placements.num, minlength=rows + 1)
    per_row = np.cumsum(starts - ends)[:rows]
    if labels is not None:
        per_row[labels] = per_row.copy()
    return np.concatenate(([0], np.cumsum(per_row, dtype=np.int64)))
