from __future__ import annotations

import numpy as np
import pytest
from planning_cases import distributions, row_multiset

from neatpack import plan_rows
from neatpack.errors import PlanError
from neatpack.planning import PackPlan, balance_rows, document_cost


def slowest_over_mean(plan: PackPlan, world_size: int, batch_rows: int, linear: float = 0.0) -> float:
    """The spread from its definition: rank by rank, row by row."""
    slowest = mean = 0.0
    rows = [sum(s.length**2 + linear * s.length for s in row) for row in plan]
    for first in range(0, len(rows), world_size * batch_rows):
        ranks = [sum(rows[first + r * batch_rows : first + (r + 1) * batch_rows]) for r in range(world_size)]
        slowest += max(ranks)
        mean += sum(ranks) / world_size
    return slowest / mean


def corpus(name: str) -> tuple[int, np.ndarray]:
    rng = np.random.default_rng(0)
    if name == "long":
        return 131_072, np.clip(rng.pareto(1.1, 100_000) * 256, 1, 131_072).astype(np.int32)
    return distributions(rng, 100_000)[name]


@pytest.mark.parametrize(("name", "limit"), [("lognormal", 1.01), ("uniform", 1.01), ("pareto", 1.01), ("long", 1.03)])
@pytest.mark.parametrize("batch_rows", [1, 4])
@pytest.mark.parametrize("linear", [0.0, 24_576.0])
def test_slowest_of_eight_ranks_is_near_the_mean(name, limit, batch_rows, linear) -> None:
    capacity, lengths = corpus(name)
    plan = plan_rows(lengths, capacity, seed=0)
    balanced = balance_rows(plan, 8, batch_rows, cost=document_cost(linear), tail="drop")
    assert balanced.spread_after <= limit
    assert balanced.spread_after == pytest.approx(slowest_over_mean(balanced.plan, 8, batch_rows, linear))


def test_rows_as_they_fall_are_far_from_balanced() -> None:
    capacity, lengths = corpus("lognormal")
    balanced = balance_rows(plan_rows(lengths, capacity, seed=0), 8, 1, tail="drop")
    assert balanced.spread_before > 1.5


def test_spread_before_is_that_of_the_order_given() -> None:
    plan = plan_rows(np.random.default_rng(1).integers(1, 64, 600), 64, seed=2)
    plan = plan.take_rows(range(plan.num_rows // 8 * 8))
    assert balance_rows(plan, 4, 2).spread_before == pytest.approx(slowest_over_mean(plan, 4, 2))


@pytest.mark.parametrize("batch_rows", [1, 3])
def test_every_rank_has_as_many_rows_and_all_rows_are_dealt_once(batch_rows) -> None:
    lengths = np.random.default_rng(3).integers(1, 64, 999)
    plan = plan_rows(lengths, 64)
    balanced = balance_rows(plan, 4, batch_rows, tail="repeat")
    ranks = [balanced.rank_rows(rank) for rank in range(4)]
    assert {len(rows) for rows in ranks} == {balanced.num_steps * batch_rows}
    assert sorted(np.concatenate(ranks).tolist()) == list(range(balanced.plan.num_rows))
    assert balanced.plan.num_rows == plan.num_rows + balanced.repeated_rows
    assert set(balanced.plan.doc.tolist()) == set(range(999))
    repeated = balanced.plan.num_tokens - plan.num_tokens
    assert (balanced.dropped_rows, balanced.repeated_tokens) == (0, repeated)
    assert balanced.repeated_rows < 4 * batch_rows


def test_dropped_rows_are_counted() -> None:
    plan = plan_rows(np.random.default_rng(4).integers(1, 64, 999), 64)
    balanced = balance_rows(plan, 7, 3, tail="drop")
    assert balanced.plan.num_rows == plan.num_rows - plan.num_rows % 21 == plan.num_rows - balanced.dropped_rows
    assert balanced.plan.num_tokens + balanced.dropped_tokens == plan.num_tokens
    assert len(set(balanced.plan.doc.tolist())) == len(balanced.plan.doc)


def test_a_tail_is_refused_unless_its_policy_is_chosen() -> None:
    plan = plan_rows([8] * 11, 8)
    with pytest.raises(PlanError, match=r"11 rows .* steps of 4 .*3 are left.*leaves 3 rows out.*gives 1 rows a second time"):
        balance_rows(plan, 2, 2)
    with pytest.raises(PlanError, match="leave out all 11 rows"):
        balance_rows(plan, 8, 2, tail="drop")
    assert balance_rows(plan, 8, 4, tail="repeat").repeated_rows == 21  # more than there are: each about twice


def test_nothing_to_balance_is_balanced() -> None:
    balanced = balance_rows(plan_rows([], 8), 4, 2)
    assert (balanced.num_steps, balanced.spread_before, balanced.spread_after) == (0, 1.0, 1.0)
    assert balanced.rank_rows(3).tolist() == []


def test_a_seed_gives_one_order_and_another_seed_another() -> None:
    plan = plan_rows(np.random.default_rng(5).integers(1, 64, 999), 64)
    one, same, other = (balance_rows(plan, 4, 2, tail="drop", seed=seed) for seed in (1, 1, 2))
    assert list(one.plan) == list(same.plan)
    assert list(one.plan) != list(other.plan)
    assert one.spread_after == pytest.approx(other.spread_after, abs=0.02)


def test_steps_do_not_come_sorted_by_cost() -> None:
    capacity, lengths = corpus("lognormal")
    balanced = balance_rows(plan_rows(lengths, capacity), 8, 1, tail="drop")
    work = balanced.plan.sum_rows(balanced.plan.length.astype(float) ** 2).reshape(-1, 8).sum(1)
    assert abs(np.corrcoef(work, np.arange(len(work)))[0, 1]) < 0.1


def test_no_rank_has_the_costliest_row_in_every_step() -> None:
    capacity, lengths = corpus("long")
    balanced = balance_rows(plan_rows(lengths, capacity), 8, 1, tail="drop")
    slowest = balanced.plan.sum_rows(balanced.plan.length.astype(float) ** 2).reshape(-1, 8).argmax(1)
    assert np.bincount(slowest, minlength=8).max() < len(slowest) / 4


def test_rows_keep_their_documents() -> None:
    plan = plan_rows([300, 20, 7, 64, 64, 9], 64, overflow="split", align=8)
    balanced = balance_rows(plan, 2, 1, tail="repeat" if plan.num_rows % 2 else "error")
    assert {tuple(row) for row in balanced.plan} == {tuple(row) for row in plan}
    if not plan.num_rows % 2:
        assert row_multiset(balanced.plan) == row_multiset(plan)
    assert balanced.plan.align == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world_size": 0}, "world_size must be"),
        ({"batch_rows": 1.0}, "batch_rows must be"),
        ({"tail": "pad"}, "unknown tail policy 'pad': choose one of error, drop, repeat"),
        ({"seed": None}, "seed must be"),
        ({"cost": lambda lengths: lengths[:1]}, r"4 document lengths .* got shape \(1,\)"),
        ({"cost": lambda lengths: lengths * np.nan}, "finite"),
        ({"cost": lambda lengths: -lengths}, "zero or more"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, message) -> None:
    with pytest.raises(PlanError, match=message):
        balance_rows(plan_rows([8] * 4, 8), **{"world_size": 2, "batch_rows": 1, **options})
    with pytest.raises(PlanError, match="linear must be"):
        document_cost(-1.0)
    with pytest.raises(PlanError, match="rank 2 of a world of 2"):
        balance_rows(plan_rows([8] * 4, 8), 2, 1).rank_rows(2)
