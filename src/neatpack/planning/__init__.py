"""Document lengths in, rows out: `plan_rows` and the `PackPlan` it returns. NumPy only."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from neatpack.planning.balance import BalancedPlan as BalancedPlan
from neatpack.planning.balance import balance_rows as balance_rows
from neatpack.planning.balance import document_cost as document_cost
from neatpack.planning.best_fit import plan_best_fit
from neatpack.planning.groups import plan_groups as plan_groups
from neatpack.planning.histogram import count_lengths, fewest_rows
from neatpack.planning.in_order import plan_next_fit, plan_wrapped
from neatpack.planning.lengths import check_lengths, fingerprint_lengths
from neatpack.planning.options import check_align, check_choice, check_max_docs, check_number, check_seed
from neatpack.planning.overflow import POLICIES, apply_overflow
from neatpack.planning.overflow import Overflow as Overflow
from neatpack.planning.plan import PackPlan as PackPlan
from neatpack.planning.plan import PlanCounts as PlanCounts
from neatpack.planning.plan import Slice as Slice
from neatpack.planning.store import load_plan as load_plan
from neatpack.planning.store import save_plan as save_plan
from neatpack.planning.stream import StreamPlanner as StreamPlanner

Strategy = Literal["best_fit", "in_order", "wrapped"]
"""How `plan_rows` puts documents into rows."""

STRATEGIES = ("best_fit", "in_order", "wrapped")

__all__ = [
    "BalancedPlan",
    "Overflow",
    "PackPlan",
    "PlanCounts",
    "Slice",
    "Strategy",
    "StreamPlanner",
    "balance_rows",
    "document_cost",
    "load_plan",
    "plan_groups",
    "plan_rows",
    "save_plan",
]


def plan_rows(
    lengths: object,
    capacity: int,
    *,
    strategy: Strategy = "best_fit",
    overflow: Overflow = "error",
    seed: int | None = None,
    max_docs_per_row: int | None = None,
    align: int = 1,
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
        max_docs_per_row: the most documents (pieces, where they are cut) in one row; kernels with a fixed number of
            segments need it. Where best fit would close rows by number that are nearly empty, long documents are put
            together with as many short ones as the rows need on average, which comes within 1 % of the lower bound.
            "wrapped" fills its rows whatever lies in them, and refuses it.
        align: round the slot of every document up to a multiple of this many tokens, as context parallelism (twice its
            size) and 8-bit kernels need; `capacity` must be a multiple too. `plan.slot_starts()` says where slots lie.

    Returns:
        The plan. Zero-length documents are placed in no row; they, and what the policy did, are in `plan.counts`.

    Raises:
        PlanError: lengths or options that no plan can honour, or an overlong document under `overflow="error"`.

    Example:
        >>> plan = plan_rows([5, 3, 4, 2, 2], capacity=8)
        >>> [[slice_.doc for slice_ in row] for row in plan]
        [[0, 1], [2, 3, 4]]

    Source: the lower bound is L2 of S. Martello and P. Toth, Lower bounds and reduction procedures for the bin packing problem
    (1990).
    """
    check_choice("strategy", strategy, STRATEGIES)
    check_choice("overflow policy", overflow, POLICIES)
    capacity = check_number("capacity", capacity, "tokens")
    align = check_number("align", align, "tokens")
    check_align(capacity, align)
    max_docs_per_row = check_max_docs(max_docs_per_row, strategy)
    array = check_lengths(lengths)
    seed = None if seed is None else check_seed(seed)
    rng = None if seed is None else np.random.default_rng(seed)
    if strategy == "wrapped":
        plan = _wrapped_plan(array, capacity, overflow, align)
    else:
        plan = _whole_plan(array, capacity, strategy, overflow, align, max_docs_per_row, rng)
    if rng is not None and strategy != "best_fit":
        plan = plan.take_rows(rng.permutation(plan.num_rows))
    return replace(plan, seed=seed, fingerprint=fingerprint_lengths(array))


def _whole_plan(
    lengths: np.ndarray,
    capacity: int,
    strategy: Strategy,
    overflow: Overflow,
    align: int,
    max_docs_per_row: int | None,
    rng: np.random.Generator | None,
) -> PackPlan:
    pieces = apply_overflow(lengths, capacity, overflow)
    # Planned in units of `align`: slots and rows are multiples of it, so nothing is lost by the change of unit.
    slots = pieces.length if align == 1 else -(-pieces.length // align)
    units = capacity // align
    histogram = count_lengths(slots)
    if strategy == "best_fit":
        rows = plan_best_fit(slots, histogram, units, max_docs_per_row, rng)
    else:
        rows = plan_next_fit(slots, units, max_docs_per_row)
    return PackPlan(
        capacity=capacity,
        row_offsets=rows.row_offsets,
        length=rows.lengths if align == 1 else pieces.length[rows.pieces].astype(np.int32, copy=False),
        start=np.broadcast_to(np.int32(0), rows.pieces.shape) if pieces.start is None else pieces.start[rows.pieces],
        doc=rows.pieces if pieces.doc is None else pieces.doc[rows.pieces],
        lower_bound=fewest_rows(histogram, units, max_docs_per_row),
        counts=pieces.counts,
        strategy=strategy,
        overflow=overflow,
        align=align,
        max_docs_per_row=max_docs_per_row,
    )


def _wrapped_plan(lengths: np.ndarray, capacity: int, overflow: Overflow, align: int) -> PackPlan:
    cuts_anyway = overflow in ("error", "split")
    pieces = apply_overflow(lengths, int(lengths.max(initial=1)) if cuts_anyway else capacity, overflow)
    doc, start, length, row_offsets = plan_wrapped(pieces.length, capacity, align)
    return PackPlan(
        capacity=capacity,
        row_offsets=row_offsets,
        length=length,
        start=start,
        doc=doc,
        lower_bound=len(row_offsets) - 1,
        counts=replace(pieces.counts, split=int(np.count_nonzero((doc[1:] == doc[:-1]) & (start[:-1] == 0)))),
        strategy="wrapped",
        overflow=overflow,
        align=align,
    )
