"""Rows in an order that gives every rank of a step near-equal work, and every rank the same number of rows.

Rows of a plan are equally full, but attention costs the square of each document: with one row a rank and eight ranks,
the slowest rank does two to three times the mean, and the others wait for it. Rows of near-equal cost exist, though: in
the order of cost, neighbours differ little. So rows are sorted by cost and cut into groups of one row a rank; a step is
`batch_rows` groups drawn at random, dealt out with the costliest row going to the rank that has least so far. Steps then
come in random order: training sees no sorted data. Cost: one sort of the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from neatpack.errors import PlanError
from neatpack.planning.options import check_choice, check_number, check_seed
from neatpack.planning.plan import PackPlan

Cost = Callable[[np.ndarray], np.ndarray]
"""Document lengths `[N] float64` to their costs `[N]`, in any unit."""

Tail = Literal["error", "drop", "repeat"]
TAILS = ("error", "drop", "repeat")


@dataclass(frozen=True, kw_only=True, eq=False)
class BalancedPlan:
    """A plan in training order, `num_steps` times `world_size` times `batch_rows` rows, and how well it is balanced.

    Attributes:
        plan: the rows step by step, within a step rank by rank: row `(step * world_size + rank) * batch_rows + i` is the
            `i`-th row of `rank` in `step`.
        world_size: data-parallel ranks.
        batch_rows: rows a rank takes in a step.
        spread_before: time lost to waiting in the order given: the slowest rank's cost, summed over steps, over the mean.
        spread_after: the same in the order of `plan`; 1.0 is perfect.
        dropped_rows: rows left out by `tail="drop"`.
        dropped_tokens: their tokens.
        repeated_rows: rows that `tail="repeat"` gave a second time.
        repeated_tokens: their tokens.
    """

    plan: PackPlan
    world_size: int
    batch_rows: int
    spread_before: float
    spread_after: float
    dropped_rows: int
    dropped_tokens: int
    repeated_rows: int
    repeated_tokens: int

    @property
    def num_steps(self) -> int:
        """Steps in which every rank takes `batch_rows` rows: the same number on every rank."""
        return self.plan.num_rows // (self.world_size * self.batch_rows)

    def rank_rows(self, rank: int) -> np.ndarray:
        """Row numbers of `plan` that `rank` trains on, in order, `[num_steps * batch_rows] int64`.

        Raises:
            PlanError: no rank of this world.
        """
        if not 0 <= rank < self.world_size:
            raise PlanError(f"rank {rank} of a world of {self.world_size}: ranks are 0 to {self.world_size - 1}.")
        return np.arange(self.plan.num_rows).reshape(-1, self.world_size, self.batch_rows)[:, rank].reshape(-1)


def document_cost(linear: float = 0.0) -> Cost:
    """The cost of a document of `n` tokens as `n**2 + linear * n`: attention, and everything that grows with tokens.

    Args:
        linear: cost of a token beside attention, in the unit of one query meeting one key. A transformer layer of width
            `h` does about `24 h**2` operations a token and `4 h` a query and key, so `6 * h`, or `12 * h` where the
            kernel skips the causal half. Zero counts attention alone.

    Returns:
        A function from document lengths `[N] float64` to costs `[N] float64`, for `balance_rows(cost=...)`.

    Raises:
        PlanError: `linear` below zero, or no number.

    Example:
        >>> document_cost(linear=10)(np.array([2.0, 3.0])).tolist()
        [24.0, 39.0]
    """
    if not linear >= 0:
        raise PlanError(f"linear must be a number of zero or more, got {linear!r}.")
    return lambda lengths: lengths * (lengths + linear)


def balance_rows(
    plan: PackPlan,
    world_size: int,
    batch_rows: int,
    *,
    cost: Cost | None = None,
    tail: Tail = "error",
    seed: int = 0,
) -> BalancedPlan:
    """Order the rows of a plan so that the ranks of a step have near-equal work and no rank ever waits for a row.

    Every rank gets `batch_rows` rows in every step, and the same number of steps. Rows that fill no last step are refused
    unless `tail` says what becomes of them: nothing is lost or doubled that was not asked for and counted.

    Args:
        plan: the rows; their documents stay together.
        world_size: data-parallel ranks.
        batch_rows: rows a rank takes in a step.
        cost: the cost of documents by their length (their slot, in an aligned plan); a row costs the sum. None is
            `document_cost()`, attention alone.
        tail: what to do if the rows fill no whole number of steps: "error"; "drop" leaves rows out of the last, or
            "repeat" gives some a second time to fill it, in both cases drawn at random.
        seed: draws the steps and their order; the same seed gives the same order.

    Returns:
        The rows in training order, how well they are balanced, and what was dropped or repeated.

    Raises:
        PlanError: options that mean nothing, costs that are no numbers, a tail under `tail="error"`, or no whole step
            under `tail="drop"`.

    Example:
        >>> balanced = balance_rows(plan_rows([8, 4, 4, 8, 4, 4], capacity=8), world_size=2, batch_rows=1)
        >>> round(balanced.spread_after, 2), balanced.rank_rows(0).tolist()
        (1.0, [0, 2])
    """
    world_size = check_number("world_size", world_size, "ranks")
    batch_rows = check_number("batch_rows", batch_rows, "rows")
    check_choice("tail policy", tail, TAILS)
    rng = np.random.default_rng(check_seed(seed))
    costs = _row_costs(plan, cost or document_cost())
    rows = _whole_steps(plan.num_rows, world_size * batch_rows, tail, rng)
    order = _deal(rows, costs, world_size, batch_rows, rng)
    tokens = plan.row_lengths()
    left_out = np.ones(plan.num_rows, bool)
    left_out[rows] = False
    dropped = np.flatnonzero(left_out)
    repeated = rows[plan.num_rows :]
    return BalancedPlan(
        plan=plan.take_rows(order.reshape(-1)),
        world_size=world_size,
        batch_rows=batch_rows,
        spread_before=_spread(costs[rows.reshape(order.shape)]),
        spread_after=_spread(costs[order]),
        dropped_rows=len(dropped),
        dropped_tokens=int(tokens[dropped].sum()),
        repeated_rows=len(repeated),
        repeated_tokens=int(tokens[repeated].sum()),
    )


def _row_costs(plan: PackPlan, cost: Cost) -> np.ndarray:
    lengths = plan.slot_lengths().astype(np.float64)
    costs = np.asarray(cost(lengths), np.float64)
    if costs.shape != lengths.shape or not np.isfinite(costs).all() or (costs < 0).any():
        raise PlanError(
            f"cost must turn {len(lengths)} document lengths into as many finite numbers of zero or more; "
            f"got shape {costs.shape}" + (f", smallest {costs.min()}, largest {costs.max()}." if costs.size else ".")
        )
    return plan.sum_rows(costs)


def _whole_steps(num_rows: int, step_rows: int, tail: Tail, rng: np.random.Generator) -> np.ndarray:
    """Row numbers that fill whole steps, in the plan's order; repeated ones at the end."""
    left = num_rows % step_rows
    missing = -num_rows % step_rows
    if not left:
        return np.arange(num_rows)
    if tail == "error":
        raise PlanError(
            f"{num_rows} rows are no whole number of steps of {step_rows} (world_size * batch_rows): {left} are left. "
            f"Choose tail='drop' (leaves {left} rows out) or tail='repeat' (gives {missing} rows a second time)."
        )
    if tail == "repeat":
        rounds = [rng.permutation(num_rows) for _ in range(-(-missing // num_rows))]
        return np.concatenate([np.arange(num_rows), *rounds])[: num_rows + missing]
    if num_rows < step_rows:
        raise PlanError(f"tail='drop' would leave out all {num_rows} rows: a step takes {step_rows}. Use tail='repeat'.")
    return np.sort(rng.permutation(num_rows)[: num_rows - left])


def _deal(rows: np.ndarray, costs: np.ndarray, world_size: int, batch_rows: int, rng: np.random.Generator) -> np.ndarray:
    """Rows `[num_steps, world_size, batch_rows]`, each step's ranks near-equal in cost."""
    costliest_first = rows[np.argsort(-costs[rows], kind="stable")]
    groups = rng.permutation(costliest_first.reshape(-1, world_size))
    steps = groups.reshape(-1, batch_rows, world_size)
    # The groups that differ most within come first, so that the others can make up for them.
    uneven_first = np.argsort(costs[steps[..., -1]] - costs[steps[..., 0]], axis=1, kind="stable")
    steps = np.take_along_axis(steps, uneven_first[..., None], axis=1)
    load = np.zeros((len(steps), world_size))
    order = np.empty((len(steps), world_size, batch_rows), np.int64)
    for nth in range(batch_rows):
        lightest_first = np.argsort(load, axis=1, kind="stable")
        np.put_along_axis(order[..., nth], lightest_first, steps[:, nth], axis=1)
        load += costs[order[..., nth]]
    which_rank = rng.permuted(np.broadcast_to(np.arange(world_size), load.shape), axis=1)
    return np.take_along_axis(order, which_rank[..., None], axis=1)  # no rank is the costliest in every step


def _spread(costs: np.ndarray) -> float:
    """Slowest rank over mean, summed over steps, of row costs `[num_steps, world_size, batch_rows]`."""
    load = costs.sum(axis=2)
    mean = load.mean(axis=1).sum()
    return float(load.max(axis=1).sum() / mean) if mean else 1.0
