"""Best-fit decreasing on the histogram of lengths.

Textbook best-fit decreasing takes documents from long to short and puts each into the fullest row that still holds it.
Lengths are integers up to the capacity C, so documents of one length are placed together: open rows are kept as ranges
of row numbers by the room they have left, and a range takes as many documents as fit in one step. The work in Python
depends on the distinct lengths, not on the number of documents. What is left per document is a sort by length and a
scatter into row order, both in blocks that stay in the cache: a block is sorted as 32-bit keys (length and place in the
block in one number, so that NumPy's vectorised sort is stable), and its runs of one length are written behind those of
the blocks before it. Beyond the plan itself (8 bytes a document) that takes 4 bytes a document.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple

import numpy as np

from neatpack.planning.histogram import BLOCK, Histogram
from neatpack.planning.plan import Rows


class _Range(NamedTuple):
    """Open rows `first .. first + num`, alike: the same room left, the same number of pieces in each."""

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


def plan_best_fit(
    lengths: np.ndarray,
    histogram: Histogram,
    capacity: int,
    max_docs_per_row: int | None,
    rng: np.random.Generator | None,
) -> Rows:
    """Pack pieces into rows, best-fit decreasing.

    Args:
        lengths: `[P]` tokens of each piece, 0 to `capacity`; zeros are placed in no row.
        histogram: how many pieces have each length.
        capacity: tokens a row holds.
        max_docs_per_row: pieces a row holds; None for as many as fit.
        rng: shuffles ties and the order of rows; None keeps ties in the order given and rows in the order opened.
    """
    placements = _place(histogram, capacity, max_docs_per_row or capacity)
    labels = None if rng is None else rng.permutation(placements.num_rows)
    order = _longest_first(lengths, histogram, rng)
    return _scatter(order, placements, labels)


def _longest_first(lengths: np.ndarray, histogram: Histogram, rng: np.random.Generator | None) -> np.ndarray:
    """Indices `[num_pieces] int32` of the non-empty pieces from long to short; ties as given, or shuffled."""
    shuffled = None
    if rng is not None:
        shuffled = np.arange(len(lengths), dtype=np.int32)
        rng.shuffle(shuffled)
    longest = int(histogram.lengths[-1]) if len(histogram.lengths) else 0
    key_type = np.uint32 if longest < 1 << 16 else np.uint64
    place_in_block = np.arange(BLOCK, dtype=key_type)
    filled_to = np.cumsum(histogram.counts[::-1])[::-1] - histogram.counts  # per length: its next place in the order
    order = np.empty(histogram.num_pieces, np.int32)
    for begin in range(0, len(lengths), BLOCK):
        block = slice(begin, begin + BLOCK)
        taken = lengths[block] if shuffled is None else lengths[shuffled[block]]
        keys = np.subtract(longest, taken, dtype=np.int64).astype(key_type)
        keys <<= key_type(16)
        keys |= place_in_block[: len(keys)]
        keys.sort()
        by_length = keys >> key_type(16)
        starts = np.concatenate(([0], np.flatnonzero(by_length[1:] != by_length[:-1]) + 1, [len(keys)]))
        run_lengths = longest - by_length[starts[:-1]].astype(np.int64)
        if run_lengths[-1] == 0:  # the empty ones, placed nowhere
            starts, run_lengths = starts[:-1], run_lengths[:-1]
        which = np.searchsorted(histogram.lengths, run_lengths)
        sizes = np.diff(starts)
        places = np.arange(starts[-1]) + np.repeat(filled_to[which] - starts[:-1], sizes)
        filled_to[which] += sizes
        places_in_block = (keys[: starts[-1]] & key_type(BLOCK - 1)).astype(np.int32)
        order[places] = places_in_block + np.int32(begin) if shuffled is None else shuffled[block][places_in_block]
    return order


class _OpenRows:
    """Rows with room left, as ranges by that room, tightest first."""

    def __init__(self) -> None:
        self._by_room: dict[int, list[_Range]] = {}
        self._rooms: list[int] = []  # sorted: each room that some row has left

    def take_tightest(self, length: int) -> tuple[int, _Range] | None:
        """Remove and return the fullest range of rows that holds `length` more tokens, with its room."""
        at = bisect_left(self._rooms, length)
        if at == len(self._rooms):
            return None
        room = self._rooms[at]
        ranges = self._by_room[room]
        rows = ranges.pop()
        if not ranges:
            del self._rooms[at], self._by_room[room]
        return room, rows

    def put(self, rows: _Range, room: int) -> None:
        """Give rows back with the room they have now."""
        if room not in self._by_room:
            insort(self._rooms, room)
            self._by_room[room] = []
        self._by_room[room].append(rows)


def _place(histogram: Histogram, capacity: int, max_docs_per_row: int) -> _Placements:
    open_rows = _OpenRows()
    taken: list[int] = []  # flat: first row, rows, depth, pieces a row, their length; again and again
    num_rows = 0
    for length, left in zip(histogram.lengths[::-1].tolist(), histogram.counts[::-1].tolist(), strict=True):
        while left:
            found = open_rows.take_tightest(length)
            if found is None:
                found = capacity, _Range(num_rows, -(-left // min(capacity // length, max_docs_per_row)), 0)
                num_rows += found[1].num
            room, rows = found
            # A row that takes one of these stays the tightest, so it takes them until no more fit.
            per_row = min(room // length, max_docs_per_row - rows.depth)
            full = min(left // per_row, rows.num)
            rest = left - full * per_row if full < rows.num else 0
            first = rows.first
            for count, fits in ((full, per_row), (int(rest > 0), rest), (rows.num - full - (rest > 0), 0)):
                if count:
                    taken += (first, count, rows.depth, fits, length)
                    depth, room_left = rows.depth + fits, room - fits * length
                    if room_left and depth < max_docs_per_row:
                        open_rows.put(_Range(first, count, depth), room_left)
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
    for begin in range(0, len(order), BLOCK):
        end = min(begin + BLOCK, len(order))
        low, high = np.searchsorted(ends, (begin, end - 1), side="right")
        runs = slice(low, high + 1)
        count = np.minimum(ends[runs], end) - np.maximum(starts[runs], begin)
        rows = np.arange(begin, end) + np.repeat(placements.first[runs] - starts[runs], count)
        slots = row_start[rows] + np.repeat(placements.depth[runs], count)
        pieces[slots] = order[begin:end]
        lengths[slots] = np.repeat(placements.length[runs], count)
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
