"""How many pieces have each length, and the fewest rows that follow from it: all that best-fit decreasing looks at."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

BLOCK = 1 << 16
"""Pieces handled at a time: enough to hide NumPy's cost a call, few enough that temporaries stay in the cache."""

_DENSE = 1 << 22  # a longer axis than this is counted by sorting: its memory must not depend on the capacity


class Histogram(NamedTuple):
    """Distinct lengths `[K] int64`, ascending and above zero, and how many pieces have each, `[K] int64`."""

    lengths: np.ndarray
    counts: np.ndarray

    @property
    def num_pieces(self) -> int:
        """Pieces that are not empty."""
        return int(self.counts.sum())


def count_lengths(lengths: np.ndarray) -> Histogram:
    """Count the lengths that are not zero; memory and time do not depend on the capacity."""
    longest = int(lengths.max(initial=0))
    if longest > max(_DENSE, len(lengths)):
        distinct, counts = np.unique(lengths[lengths > 0], return_counts=True)
        return Histogram(distinct.astype(np.int64), counts.astype(np.int64))
    dense = np.zeros(longest + 1, np.int64)
    step = max(BLOCK, longest + 1)  # bincount copies what it counts to int64: in blocks
    for begin in range(0, len(lengths), step):
        dense += np.bincount(lengths[begin : begin + step], minlength=longest + 1)
    dense[0] = 0
    distinct = np.flatnonzero(dense)
    return Histogram(distinct, dense[distinct])


def fewest_rows(histogram: Histogram, capacity: int, max_docs_per_row: int | None = None) -> int:
    """Rows that no plan of whole pieces can do without: Martello and Toth's lower bound L2.

    For every threshold `a` up to half the capacity: pieces over `capacity - a` fill a row each, pieces over half the
    capacity need a row each and leave some room, and the pieces between `a` and half the capacity that this room cannot
    hold need rows of their own. The best threshold counts, and the lengths that occur are thresholds enough: between two
    of them only the room shrinks. The smallest gives tokens over capacity, or better.

    Args:
        histogram: the lengths, none over `capacity`.
        capacity: tokens a row holds.
        max_docs_per_row: pieces a row holds, if that is limited too.

    Source: S. Martello and P. Toth, Lower bounds and reduction procedures for the bin packing problem (1990).
    """
    by_number = _fewest_by_number(histogram, capacity, max_docs_per_row) if max_docs_per_row else 0
    pieces = np.concatenate(([0], np.cumsum(histogram.counts)))  # pieces[k]: how many are shorter than lengths[k]
    tokens = np.concatenate(([0], np.cumsum(histogram.counts * histogram.lengths)))
    half = int(np.searchsorted(histogram.lengths, capacity // 2, side="right"))
    if not half:
        return max(by_number, int(pieces[-1]))
    alone = np.searchsorted(histogram.lengths, capacity - histogram.lengths[:half], side="right")
    room = (pieces[alone] - pieces[half]) * capacity - (tokens[alone] - tokens[half])
    small = tokens[half] - tokens[:half]
    extra = np.maximum(-(-(small - room) // capacity), 0)
    return max(by_number, int((pieces[-1] - pieces[half] + extra).max()))


def _fewest_by_number(histogram: Histogram, capacity: int, max_docs_per_row: int) -> int:
    """Rows that pieces need by their number: for each length, of those at least as long.

    Those that leave no room for another of them have a row each, and of the others a row takes so many.
    """
    longer = np.concatenate((np.cumsum(histogram.counts[::-1])[::-1], [0]))  # longer[k]: how many are lengths[k] or longer
    ranks = np.arange(len(histogram.lengths))
    alone = longer[np.maximum(np.searchsorted(histogram.lengths, capacity - histogram.lengths, side="right"), ranks)]
    return int((alone - (alone - longer[:-1]) // max_docs_per_row).max(initial=0))
