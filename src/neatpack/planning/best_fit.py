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

from bisect import insort
from typing import NamedTuple

import numpy as np

from neatpack.planning.capped import place_capped
from neatpack.planning.histogram import BLOCK, Histogram, fewest_rows
from neatpack.planning.plan import Rows


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
    """Pack pieces into rows, best-fit decreasing; where a limit on pieces makes that wasteful, by `capped`.

    Args:
        lengths: `[P]` tokens of each piece, 0 to `capacity`; zeros are placed in no row.
        histogram: how many pieces have each length.
        capacity: tokens a row holds.
        max_docs_per_row: pieces a row holds; None for as many as fit.
        rng: shuffles ties and the order of rows; None keeps ties in the order given and rows in the order opened.
    """
    most = max_docs_per_row or capacity
    taken, num_rows = _place(histogram, capacity, most)
    if int((taken[:, 2] + taken[:, 3]).max(initial=0)) == most < capacity:  # rows were closed by number
        bound = fewest_rows(histogram, capacity, most)
        capped = place_capped(histogram, capacity, most, bound, num_rows)
        if capped is not None:
            taken, num_rows = capped, int((capped[:, 0] + capped[:, 1]).max())
    placements = _one_piece_a_row(taken, num_rows)
    labels = None if rng is None else rng.permutation(placements.num_rows)
    order = _longest_first(lengths, histogram, rng)
    return _scatter(order, placements, labels)


def _longest_first(lengths: np.ndarray, histogram: Histogram, rng: np.random.Generator | None) -> np.ndarray:
    """Indices `[num_pieces] int32` of the non-empty pieces from long to short; ties as given, or shuffled."""
    group_ends = np.cumsum(histogram.counts[::-1])[::-1]  # in the order, for each length
    filled_to = group_ends - histogram.counts
    order = np.empty(histogram.num_pieces, np.int32)
    iota = np.arange(BLOCK)
    longest = int(histogram.lengths[-1]) if len(histogram.lengths) else 0
    key_type = np.uint32 if longest < 1 << 16 else np.uint64
    top_keys = (iota + (longest << 16)).astype(key_type)
    for begin in range(0, len(lengths), BLOCK):
        block = lengths[begin : begin + BLOCK]
        keys = np.left_shift(block, 16, dtype=key_type, casting="unsafe")
        np.subtract(top_keys[: len(keys)], keys, out=keys)
        keys.sort()
        starts, run_lengths = _runs(keys, longest)
        which = np.searchsorted(histogram.lengths, run_lengths)
        sizes = np.diff(starts)
        places = np.repeat(filled_to[which] - starts[:-1], sizes)
        places += iota[: len(places)]
        filled_to[which] += sizes
        order[places] = np.add(keys[: len(places)].astype(np.uint16), begin, dtype=np.int32)
    if rng is not None:
        for end, count in zip(group_ends.tolist(), histogram.counts.tolist(), strict=True):
            rng.shuffle(order[end - count : end])
    return order


def _runs(keys: np.ndarray, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Where runs of one length start in sorted keys, with the end of the last, and their lengths; without the empty ones."""
    by_length = keys >> keys.dtype.type(16)
    starts = np.concatenate(([0], np.flatnonzero(by_length[1:] != by_length[:-1]) + 1, [len(keys)]))
    run_lengths = longest - by_length[starts[:-1]].astype(np.int64)
    nonempty = len(run_lengths) - int(run_lengths[-1] == 0)
    return starts[: nonempty + 1], run_lengths[:nonempty]


def _place(histogram: Histogram, capacity: int, max_docs_per_row: int) -> tuple[np.ndarray, int]:
    """Placements `[E, 5]`, as `place_capped` has them, and the number of rows.

    Rows with room for the length at hand are a stack, the tightest on top: a row that takes a piece and holds another is the
    tightest still, and one that holds no more waits until a length comes that its room fits. For few documents nearly all of
    a plan's time is spent in this loop, a microsecond or so a placement, so it calls nothing of its own.
    """
    fitting: list[tuple[int, int, int, int]] = []  # room, first row, how many rows, pieces in each
    waiting: dict[int, list[tuple[int, int, int, int]]] = {}  # by their room
    rooms: list[int] = []  # sorted: those of `waiting`
    taken: list[int] = []  # flat: first row, rows, pieces there before, pieces each takes, their length; again and again
    num_rows = 0
    for length, left in zip(histogram.lengths[::-1].tolist(), histogram.counts[::-1].tolist(), strict=True):
        while rooms and rooms[-1] >= length:
            fitting += waiting.pop(rooms.pop())
        while left:
            if fitting:
                room, first, rows, depth = fitting.pop()
            else:
                room, first, depth = capacity, num_rows, 0
                rows = -(-left // min(capacity // length, max_docs_per_row))
                num_rows += rows
            # A row that takes one of these stays the tightest, so it takes them until no more fit.
            per_row = room // length
            if depth + per_row > max_docs_per_row:
                per_row = max_docs_per_row - depth
            if left >= rows * per_row:
                left -= rows * per_row
                taken.extend((first, rows, depth, per_row, length))
            else:  # these rows take the last of this length
                full, rest = divmod(left, per_row)
                used, left = full + (rest > 0), 0
                if used < rows:
                    fitting.append((room, first + used, rows - used, depth))
                if full:
                    taken.extend((first, full, depth, per_row, length))
                if rest:
                    taken.extend((first + full, 1, depth, rest, length))
                    fitting.append((room - rest * length, first + full, 1, depth + rest))
                if not full:
                    continue
                rows = full
            room -= per_row * length
            depth += per_row
            if not room or depth == max_docs_per_row:
                continue
            if room in waiting:
                waiting[room].append((room, first, rows, depth))
            else:
                waiting[room] = [(room, first, rows, depth)]
                insort(rooms, room)
    return np.array(taken, np.int64).reshape(-1, 5), num_rows


def _one_piece_a_row(taken: np.ndarray, num_rows: int) -> _Placements:
    """Spread "three pieces a row" over three placements of one piece a row."""
    first, count, depth, fits, length = taken.T
    within = np.arange(fits.sum()) - np.repeat(np.cumsum(fits) - fits, fits)
    first, count, depth, length = (np.repeat(column, fits) for column in (first, count, depth, length))
    return _Placements(first, count, depth + within, length.astype(np.int32), num_rows)


def _scatter(order: np.ndarray, placements: _Placements, labels: np.ndarray | None) -> Rows:
    """Move pieces from placement order to row order; `labels[r]` is the place that row `r` gets."""
    row_offsets = _row_offsets(placements, labels)
    row_start = row_offsets[:-1] if labels is None else row_offsets[labels]
    pieces = np.empty_like(order)
    lengths = np.empty(len(order), np.int32)
    iota = np.arange(BLOCK)
    ends = np.cumsum(placements.num)
    starts = ends - placements.num
    for begin in range(0, len(order), BLOCK):
        end = min(begin + BLOCK, len(order))
        low, high = np.searchsorted(ends, (begin, end - 1), side="right")
        runs = slice(low, high + 1)
        count = np.minimum(ends[runs], end) - np.maximum(starts[runs], begin)
        rows = np.repeat(placements.first[runs] - starts[runs] + begin, count)
        rows += iota[: end - begin]
        slots = row_start[rows]
        slots += np.repeat(placements.depth[runs], count)
        pieces[slots] = order[begin:end]
        lengths[slots] = np.repeat(placements.length[runs], count)
    return Rows(pieces, lengths, row_offsets)


def _row_offsets(placements: _Placements, labels: np.ndarray | None) -> np.ndarray:
    """Offsets `[R+1]` of the rows in the output."""
    per_row = np.zeros(placements.num_rows + 1, np.int64)
    np.add.at(per_row, placements.first, 1)
    np.subtract.at(per_row, placements.first + placements.num, 1)
    np.cumsum(per_row, out=per_row)
    offsets = np.zeros_like(per_row)
    if labels is None:
        np.cumsum(per_row[:-1], out=offsets[1:])
    else:
        offsets[labels + 1] = per_row[:-1]
        np.cumsum(offsets, out=offsets)
    return offsets
