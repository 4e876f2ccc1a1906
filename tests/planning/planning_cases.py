"""Lengths to plan, and what must hold of every plan: shared by the tests of this folder."""

from __future__ import annotations

import numpy as np

from neatpack.planning import PackPlan


def skewed_lengths(rng: np.random.Generator, documents: int, longest: int) -> np.ndarray:
    """Many short documents, some of length zero, and a few of any length up to `longest`."""
    tail = rng.pareto(1.1, documents) * longest / 50
    return np.clip(tail.astype(np.int64), 0, longest)


def distributions(rng: np.random.Generator, documents: int) -> dict[str, tuple[int, np.ndarray]]:
    """The three corpora that the benchmarks use: name -> (capacity, lengths)."""
    return {
        "lognormal": (4096, np.clip(rng.lognormal(6, 1, documents), 1, 4096).astype(np.int32)),
        "uniform": (2048, rng.integers(1, 2049, documents).astype(np.int32)),
        "pareto": (8192, np.clip(rng.pareto(1.1, documents) * 64, 1, 8192).astype(np.int32)),
    }


def placed_tokens(plan: PackPlan) -> list[tuple[int, int]]:
    """Every (document, position) in the rows, sorted: the multiset of tokens."""
    return sorted(
        (slice_.doc, position)
        for row in plan
        for slice_ in row
        for position in range(slice_.start, slice_.start + slice_.length)
    )


def kept_tokens(lengths: list[int], capacity: int, overflow: str) -> list[tuple[int, int]]:
    """Every (document, position) that the overflow policy keeps, from its definition."""
    kept = []
    for doc, length in enumerate(lengths):
        if length > capacity and overflow == "drop":
            continue
        if length > capacity and overflow == "truncate":
            length = capacity
        kept += [(doc, position) for position in range(length)]
    return kept


def row_multiset(plan: PackPlan) -> list[list[int]]:
    """The lengths in each row, sorted in and over rows."""
    return sorted(sorted(slice_.length for slice_ in row) for row in plan)
