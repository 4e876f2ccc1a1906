"""Attention work of data-parallel ranks, in the order that rows lie in and in the order of `balance_rows`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from neatpack.errors import PlanError
from neatpack.planning import PackPlan, balance_rows, document_cost


@dataclass(frozen=True)
class RankWork:
    """What each rank does and waits for, in parts of the mean work of a rank.

    Attributes:
        work: `[world_size]` work of each rank over all steps.
        waiting: `[world_size]` what it waits for the slowest rank of each step.
        spread: the slowest rank's work, summed over steps, over the mean: 1.0 is perfect.
    """

    work: tuple[float, ...]
    waiting: tuple[float, ...]
    spread: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"work": list(self.work), "waiting": list(self.waiting), "spread": self.spread}


@dataclass(frozen=True, kw_only=True)
class RankComparison:
    """The ranks before and after balancing; both None where the rows fill no step, and `reason` says so."""

    world_size: int
    batch_rows: int
    steps: int
    before: RankWork | None
    after: RankWork | None
    reason: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "world_size": self.world_size,
            "batch_rows": self.batch_rows,
            "steps": self.steps,
            "before": None if self.before is None else self.before.to_dict(),
            "after": None if self.after is None else self.after.to_dict(),
            "reason": self.reason,
        }


def compare_ranks(plan: PackPlan, world_size: int, batch_rows: int = 1) -> RankComparison:
    """Measure the work of ranks that take the rows in turn, before and after `balance_rows`; whole steps only.

    Raises:
        PlanError: a world size or batch size below one.

    Example:
        >>> compared = compare_ranks(plan_rows([8, 4, 4, 8, 4, 4], 8, strategy="in_order"), world_size=2)
        >>> round(compared.before.spread, 2), compared.after.spread
        (1.33, 1.0)
    """
    if world_size < 1 or batch_rows < 1:
        raise PlanError(f"a step needs ranks and rows: got {world_size} ranks of {batch_rows} rows.")
    steps = plan.num_rows // (world_size * batch_rows)
    if not steps:
        reason = f"{plan.num_rows} rows fill no step of {world_size} ranks with {batch_rows} each"
        return RankComparison(world_size=world_size, batch_rows=batch_rows, steps=0, before=None, after=None, reason=reason)
    balanced = balance_rows(plan, world_size, batch_rows, tail="drop")
    shape = (steps, world_size, batch_rows)
    return RankComparison(
        world_size=world_size,
        batch_rows=batch_rows,
        steps=steps,
        before=_work(_costs(plan)[: steps * world_size * batch_rows].reshape(shape)),
        after=_work(_costs(balanced.plan).reshape(shape)),
    )


def _costs(plan: PackPlan) -> np.ndarray:
    return plan.sum_rows(document_cost()(plan.slot_lengths().astype(np.float64)))


def _work(costs: np.ndarray) -> RankWork:
    load = costs.sum(axis=2)
    slowest = load.max(axis=1, keepdims=True)
    mean = load.sum() / load.shape[1]
    work, waiting = load.sum(axis=0) / mean, (slowest - load).sum(axis=0) / mean
    return RankWork(tuple(work.tolist()), tuple(waiting.tolist()), float(slowest.sum() / mean))
