"""Rows that are limited in documents as well as in tokens.

Best-fit decreasing fills rows with long documents first; the short ones are left for rows of their own, which are then full by
number and nearly empty by tokens. Here every row is filled on its own instead: the longest piece that is left, then again and
again the longest that leaves room for as many of the shortest pieces as the row should still take. How many it should take is
what the pieces that are left need on average, so that both budgets run out together. A row's pattern of lengths is repeated
for as long as there are pieces for it, and every pattern uses up a length: the work depends on the distinct lengths, not on
the number of documents.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from fractions import Fraction

import numpy as np

from neatpack.planning.histogram import Histogram

SHARES = (Fraction(1), Fraction(17, 20), Fraction(9, 10), Fraction(7, 10))
"""Which parts of the average number of pieces a row are tried: fewer pieces leave more room for filling up at the end."""

CLOSE_ENOUGH = Fraction(1002, 1000)
"""Rows over the lower bound at which nothing further is tried."""


def place_capped(histogram: Histogram, capacity: int, max_docs_per_row: int, bound: int, enough: int) -> np.ndarray | None:
    """Rows of at most `max_docs_per_row` pieces, as few as several tries give.

    Args:
        histogram: the lengths, none over `capacity`.
        capacity: tokens a row holds.
        max_docs_per_row: pieces a row holds.
        bound: rows that no plan can do without.
        enough: rows of the plan that is there already.

    Returns:
        Placements `[E, 5] int64` from long to short, each "first row, rows, pieces there before, pieces each takes, their
        length"; or None where no try needs fewer rows than `enough`.
    """
    best = None
    for share in SHARES:
        if enough <= bound * CLOSE_ENOUGH:
            break
        taken, rows = _try(histogram, capacity, max_docs_per_row, share)
        if rows < enough:
            best, enough = taken, rows
    if best is None:
        return None
    placements = np.frombuffer(best, np.int64).reshape(-1, 5)
    return placements[np.argsort(-placements[:, 4], kind="stable")]


def _try(histogram: Histogram, capacity: int, most: int, share: Fraction) -> tuple[array[int], int]:
    """Placements, flat, and the number of rows."""
    lengths, counts = histogram.lengths.tolist(), histogram.counts.tolist()
    pieces = sum(counts)
    tokens = sum(length * count for length, count in zip(lengths, counts, strict=True))
    taken, rows = array("q"), 0
    while lengths:
        wanted = -(-share.numerator * pieces * capacity // (share.denominator * tokens))
        pattern = _fill_row(lengths, counts, capacity, most, min(wanted, most))
        repeats = min(counts[index] // copies for index, copies in pattern.items())
        depth = 0
        for index, copies in pattern.items():
            taken.extend((rows, repeats, depth, copies, lengths[index]))
            depth += copies
            counts[index] -= repeats * copies
            tokens -= repeats * copies * lengths[index]
        for index in pattern:  # from high to low, so that those to come keep their place
            if not counts[index]:
                del lengths[index], counts[index]
        pieces -= repeats * depth
        rows += repeats
    return taken, rows


def _fill_row(lengths: list[int], counts: list[int], capacity: int, most: int, wanted: int) -> dict[int, int]:
    """How many pieces of which lengths (by index, from long to short) make the next row."""
    reserve, reserved = _shortest(lengths, counts, wanted - 1)
    pattern: dict[int, int] = {}
    room, free, high = capacity, most, len(lengths)
    while free and high and lengths[0] <= room:
        index = max(bisect_right(lengths, room - reserved, 0, high) - 1, 0) if pattern else high - 1
        length, left = lengths[index], counts[index] - pattern.get(index, 0)
        copies = min(left, free, room // length)
        if reserve:  # while pieces of one length are given up for it, it may be taken again
            shortest, spare = reserve[-1]
            slack = room - reserved - length
            again = spare if length <= shortest else min(spare, max(slack, 0) // (length - shortest))
            copies = min(copies, 1 + again)
        pattern[index] = pattern.get(index, 0) + copies
        room -= copies * length
        free -= copies
        high = index + (copies < left)
        reserved -= _give_up(reserve, copies)
    return pattern


def _shortest(lengths: list[int], counts: list[int], number: int) -> tuple[list[list[int]], int]:
    """The `number` shortest pieces, as lengths and how many of each, and their tokens."""
    found: list[list[int]] = []
    tokens = index = 0
    while number and index < len(lengths):
        count = min(counts[index], number)
        found.append([lengths[index], count])
        tokens += lengths[index] * count
        number -= count
        index += 1
    return found, tokens


def _give_up(reserve: list[list[int]], number: int) -> int:
    """Take the `number` longest pieces out of the reserve; returns their tokens."""
    tokens = 0
    while number and reserve:
        length, count = reserve[-1]
        some = min(count, number)
        tokens += some * length
        number -= some
        reserve[-1][1] -= some
        if some == count:
            reserve.pop()
    return tokens
