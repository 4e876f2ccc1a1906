"""Document lengths in, rows out: `plan_rows` and the `PackPlan` it returns. NumPy only."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from neatpack.errors import PlanError
from neatpack.planning.best_fit import plan_best_fit
from neatpack.planning.bound import fewest_rows
from neatpack.planning.in_order import plan_next_fit, plan_wrapped
from neatpack.planning.overflow import POLICIES, apply_overflow
from neatpack.planning.plan import PackPlan as PackPlan
from neatpack.planning.plan import PlanCounts as PlanCounts
from neatpack.planning.plan import Slice as Slice
from neatpack.planning.plan import check_lengths

Strategy = Literal["best_fit", "in_order", "wrapped"]
Overflow = Literal["error", "drop", "truncate", "split"]
STRATEGIES = ("best_fit", "in_order", "wrapped")

__all__ = ["Overflow", "PackPlan", "PlanCounts", "Slice", "Strategy", "plan_rows"]


def plan_rows(
    lengths: object,
    capacity: int,
    *,
    strategy: Strategy = "best_fit",
    overflow: Overflow = "error",
    seed: int | None = None,
) -> PackPlan:
    """Plan which documents share a row.

    Args:
        lengths: tokens of each document, a 1-D sequence or array of integers.
        capacity: tokens a row can hold.
        strategy: "best_fit" (fewest rows: best-fit decreasing), "in_order" (next-fit: rows and documents in the order
            given) or "wrapped" (no padding: the concatenated stream cut into rows; documents may span rows).
        overflow: what to do with a document longer than `capacity`: "error" names the first such documents, "drop"
            leaves it out, "truncate" keeps its first `capacity` tokens, "split" makes its pieces documents of their own.
            "wrapped" cuts documents wherever a row ends, so there "error" has nothing to refuse and equals "split".
        seed: shuffles the order of the rows, and among documents of one length which of them goes where; the same seed
            gives the same plan. None keeps the planner's own order (best_fit: longest documents first).

    Returns:
        The plan. Zero-length documents are placed in no row; they, and what the policy did, are in `plan.counts`.

    Raises:
        PlanError: lengths or options that no plan can honour, or an overlong document under `overflow="error"`.

    Example:
        >>> plan = plan_rows([5, 3, 4, 2, 2], capacity=8)
        >>> [[slice_.doc for slice_ in row] for row in plan]
        [[0, 1], [2, 3, 4]]
    """
    _check_options(capacity, strategy, overflow, seed)
    array = check_lengths(lengths)
    rng = None if seed is None else np.random.default_rng(seed)
    if strategy == "wrapped":
        plan = _wrapped_plan(array, capacity, overflow)
    else:
        plan = _whole_plan(array, capacity, strategy, overflow, rng)
    if rng is not None and strategy != "best_fit":
        plan = _shuffle_rows(plan, rng)
    return replace(plan, seed=seed)


def _whole_plan(
    lengths: np.ndarray, capacity: int, strategy: Strategy, overflow: Overflow, rng: np.random.Generator | None
) -> PackPlan:
    pieces = apply_overflow(lengths, capacity, overflow)
    histogram = np.bincount(pieces.length, minlength=capacity + 1)
    if strategy == "best_fit":
        rows = plan_best_fit(pieces.length, histogram, capacity, rng)
    else:
        rows = plan_next_fit(pieces.length, capacity)
    return PackPlan(
        capacity=capacity,
        row_offsets=rows.row_offsets,
        length=rows.lengths,
        start=np.broadcast_to(np.int32(0), rows.pieces.shape) if pieces.start is None else pieces.start[rows.pieces],
        doc=rows.pieces if pieces.doc is None else pieces.doc[rows.pieces],
        lower_bound=fewest_rows(histogram),
        counts=pieces.counts,
        strategy=strategy,
        overflow=overflow,
    )


def _wrapped_plan(lengths: np.ndarray, capacity: int, overflow: Overflow) -> PackPlan:
    cuts_anyway = overflow in ("error", "split")
    pieces = apply_overflow(lengths, int(lengths.max(initial=1)) if cuts_anyway else capacity, overflow)
    doc, start, length, row_offsets = plan_wrapped(pieces.length, capacity)
    return PackPlan(
        capacity=capacity,
        row_offsets=row_offsets,
        length=length,
        start=start,
        doc=doc,
        lower_bound=len(row_offsets) - 1,
        counts=replace(pieces.counts, split=len(np.unique(doc[start > 0]))),
        strategy="wrapped",
        overflow=overflow,
    )


def _shuffle_rows(plan: PackPlan, rng: np.random.Generator) -> PackPlan:
    """The same rows in a random order; slices stay in order within a row."""
    order = rng.permutation(plan.num_rows)
    sizes = np.diff(plan.row_offsets)[order]
    row_offsets = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))
    take = np.arange(len(plan.doc)) + np.repeat(plan.row_offsets[:-1][order] - row_offsets[:-1], sizes)
    return replace(plan, row_offsets=row_offsets, doc=plan.doc[take], start=plan.start[take], length=plan.length[take])


def _check_options(capacity: int, strategy: str, overflow: str, seed: int | None) -> None:
    if isinstance(capacity, bool) or not isinstance(capacity, int | np.integer) or not 0 < capacity < 2**31:
        raise PlanError(f"capacity must be a positive number of tokens below 2**31, got {capacity!r}.")
    if strategy not in STRATEGIES:
        raise PlanError(f"unknown strategy {strategy!r}: choose one of {', '.join(STRATEGIES)}.")
    if overflow not in POLICIES:
        raise PlanError(f"unknown overflow policy {overflow!r}: choose one of {', '.join(POLICIES)}.")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0):
        raise PlanError(f"seed must be None or an integer of zero or more, got {seed!r}.")
