"""Histograms with edges that people read: powers of two and the halves between them, and fill by its nines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

_EACH = 24  # up to so many values, each has a bar of its own
_FILLS = (0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999)


@dataclass(frozen=True)
class Histogram:
    """Counts of integers: bar `i` counts values from `edges[i]` up to, not including, `edges[i + 1]`.

    Attributes:
        edges: `[K+1]` ascending integers.
        counts: `[K]` how many values.
        sums: `[K]` their sum: tokens, where values are lengths.
    """

    edges: tuple[int, ...]
    counts: tuple[int, ...]
    sums: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"edges": list(self.edges), "counts": list(self.counts), "sums": list(self.sums)}


def count_values(values: np.ndarray) -> Histogram:
    """Histogram of positive integers `[N]`, such as lengths.

    Example:
        >>> count_values(np.array([2, 2, 3])).to_dict()
        {'edges': [2, 3, 4], 'counts': [2, 1], 'sums': [4, 3]}
    """
    return _count(values, _edges(int(values.max(initial=1))))


def count_fill(row_lengths: np.ndarray, capacity: int) -> Histogram:
    """Histogram of row lengths `[R]`, finer the fuller the rows; the last bar is rows without any padding."""
    edges = sorted({*(-int(-fill * capacity // 1) for fill in _FILLS), capacity, capacity + 1})
    return _count(row_lengths, np.array(edges))


def _edges(longest: int) -> np.ndarray:
    if longest <= _EACH:
        return np.arange(1, longest + 2)
    powers = [2**power for power in range(longest.bit_length())]
    edges = {*powers, *(power + power // 2 for power in powers), longest + 1}
    return np.array(sorted(edge for edge in edges if edge <= longest + 1))


def _count(values: np.ndarray, edges: np.ndarray) -> Histogram:
    """Counts and sums by bar, without the empty bars at both ends."""
    bars = np.searchsorted(edges, values, side="right") - 1
    counts = np.bincount(bars, minlength=len(edges) - 1)
    sums = np.bincount(bars, weights=values, minlength=len(edges) - 1)
    filled = np.flatnonzero(counts)
    first, last = (int(filled[0]), int(filled[-1])) if len(filled) else (0, 0)
    kept = slice(first, last + 1)
    return Histogram(
        tuple(edges[first : last + 2].tolist()), tuple(counts[kept].tolist()), tuple(sums[kept].astype(np.int64).tolist())
    )
