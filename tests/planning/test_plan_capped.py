"""Rows limited in documents: the limit holds, and costs close to nothing over what no plan can do without."""

from __future__ import annotations

import numpy as np
import pytest
from planning_cases import distributions, skewed_lengths

from neatpack import plan_rows


def best_fit_with_a_cap(lengths: list[int], capacity: int, cap: int) -> int:
    """Rows of textbook best-fit decreasing that closes a row of `cap` documents: the slow twin."""
    rows: list[list[int]] = []
    for length in sorted((length for length in lengths if length), reverse=True):
        fitting = [row for row in rows if sum(row) + length <= capacity and len(row) < cap]
        if fitting:
            max(fitting, key=sum).append(length)
        else:
            rows.append([length])
    return len(rows)


def fewest_rows_by_search(lengths: list[int], capacity: int, cap: int) -> int:
    """The optimum: try every assignment, longest first, with rows that are alike tried once."""
    ordered = sorted((length for length in lengths if length), reverse=True)
    best = len(ordered)

    def place(index: int, rows: tuple[tuple[int, int], ...]) -> None:
        nonlocal best
        if len(rows) >= best:
            return
        if index == len(ordered):
            best = len(rows)
            return
        for room, free in set(rows):
            if ordered[index] <= room and free:
                left = list(rows)
                left.remove((room, free))
                place(index + 1, (*left, (room - ordered[index], free - 1)))
        place(index + 1, (*rows, (capacity - ordered[index], cap - 1)))

    place(0, ())
    return best


@pytest.mark.parametrize("strategy", ["best_fit", "in_order"])
def test_the_cap_on_documents_holds_for_every_row(strategy) -> None:  # F-106
    plan = plan_rows([1] * 6, 6, strategy=strategy, max_docs_per_row=4)
    assert [[s.length for s in row] for row in plan] == [[1, 1, 1, 1], [1, 1]]
    rng = np.random.default_rng(11)
    for _ in range(400):
        cap, align = int(rng.integers(1, 6)), int(rng.integers(1, 4))
        lengths = rng.integers(0, 12 * align, rng.integers(0, 60))
        if rng.random() < 0.5:
            lengths = skewed_lengths(rng, len(lengths), 12 * align)
        seed = None if rng.random() < 0.5 else int(rng.integers(9))
        plan = plan_rows(lengths, 12 * align, strategy=strategy, max_docs_per_row=cap, align=align, seed=seed)
        assert np.diff(plan.row_offsets).max(initial=0) <= cap
        assert plan.sum_rows(plan.slot_lengths()).max(initial=0) <= 12 * align if plan.num_rows else True
        assert np.array_equal(np.sort(plan.doc), np.flatnonzero(lengths))
        assert np.array_equal(lengths[plan.doc], plan.length)
        assert -(-np.count_nonzero(lengths) // cap) <= plan.lower_bound <= plan.num_rows


def test_a_cap_that_never_binds_changes_nothing() -> None:
    for seed in range(50):
        lengths = np.random.default_rng(seed).integers(1, 30, 300)
        plain, capped = plan_rows(lengths, 64), plan_rows(lengths, 64, max_docs_per_row=64)
        assert np.array_equal(plain.doc, capped.doc)
        assert np.array_equal(plain.row_offsets, capped.row_offsets)


@pytest.mark.parametrize("documents", [2000, 20_000])
@pytest.mark.parametrize("name", ["lognormal", "uniform", "pareto"])
def test_a_cap_near_the_mean_of_documents_a_row_costs_less_than_one_percent(documents, name) -> None:
    capacity, lengths = distributions(np.random.default_rng(5), documents)[name]
    mean = capacity / lengths.mean()
    for cap in sorted({max(2, round(mean * part)) for part in (0.3, 0.6, 0.8, 0.9, 1, 1.1, 1.3, 2, 4)}):
        plan = plan_rows(lengths, capacity, max_docs_per_row=cap)
        assert np.diff(plan.row_offsets).max() <= cap
        assert plan.num_rows <= 1.01 * plan.lower_bound, cap


def test_best_fit_alone_costs_a_quarter_there() -> None:
    capacity, lengths = distributions(np.random.default_rng(5), 2000)["lognormal"]
    bound = plan_rows(lengths, capacity, max_docs_per_row=6).lower_bound
    assert best_fit_with_a_cap(lengths.tolist(), capacity, 6) > 1.2 * bound


def test_a_cap_never_costs_more_rows_than_best_fit_and_rarely_one_over_the_optimum() -> None:
    rng = np.random.default_rng(6)
    over = 0
    for _ in range(400):
        capacity, cap = int(rng.integers(4, 25)), int(rng.integers(1, 6))
        lengths = rng.integers(1, capacity + 1, rng.integers(0, 10))
        if rng.random() < 0.7:
            lengths = np.maximum(skewed_lengths(rng, len(lengths), capacity), 1)
        plan = plan_rows(lengths, capacity, max_docs_per_row=cap)
        optimum = fewest_rows_by_search(lengths.tolist(), capacity, cap)
        assert plan.lower_bound <= optimum <= plan.num_rows <= best_fit_with_a_cap(lengths.tolist(), capacity, cap)
        assert plan.num_rows <= optimum + 1
        over += plan.num_rows > optimum
    assert over <= 8


def test_the_bound_sees_documents_that_share_a_row_with_none() -> None:
    # Six full rows, and nine documents by threes: number alone says five, tokens say seven.
    plan = plan_rows([10] * 6 + [1] * 9, 10, max_docs_per_row=3)
    assert plan.num_rows == plan.lower_bound == 9


def test_a_seed_shuffles_a_capped_plan_and_keeps_its_rows() -> None:
    capacity, lengths = distributions(np.random.default_rng(7), 3000)["lognormal"]
    plans = [plan_rows(lengths, capacity, max_docs_per_row=6, seed=seed) for seed in (None, 1, 1, 2)]
    patterns = [sorted(sorted(slice_.length for slice_ in row) for row in plan) for plan in plans]
    assert all(pattern == patterns[0] for pattern in patterns)
    assert np.array_equal(plans[1].doc, plans[2].doc)
    assert not np.array_equal(plans[1].doc, plans[3].doc)
