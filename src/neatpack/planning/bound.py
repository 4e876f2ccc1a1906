"""The fewest rows that any plan can have: Martello and Toth's lower bound L2, from the histogram of lengths."""

from __future__ import annotations

import numpy as np


def fewest_rows(histogram: np.ndarray) -> int:
    """Rows that no plan of whole pieces can do without.

    For every threshold `a` up to half the capacity: pieces over `capacity - a` fill a row each, pieces over half the
    capacity need a row each and leave some room, and the pieces between `a` and half the capacity that this room cannot
    hold need rows of their own. The best threshold counts; with `a = 0` it is tokens over capacity, or better.

    Args:
        histogram: `[capacity + 1]` how many pieces have each length; empty ones do not count.

    Source: S. Martello and P. Toth, Lower bounds and reduction procedures for the bin packing problem (1990).
    """
    capacity = len(histogram) - 1
    pieces = np.cumsum(histogram)  # pieces[x]: how many have length x or less
    tokens = np.cumsum(histogram * np.arange(capacity + 1))
    half = capacity // 2
    threshold = np.arange(half + 1)
    alone = pieces[-1] - pieces[capacity - threshold]
    large = pieces[capacity - threshold] - pieces[half]
    room = large * capacity - (tokens[capacity - threshold] - tokens[half])
    below = np.maximum(threshold - 1, 0)
    small = tokens[half] - tokens[below]
    extra = np.maximum(-(-(small - room) // capacity), 0)
    return int((alone + large + extra).max())
