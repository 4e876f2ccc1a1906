"""Memory and time of plans, compared with each other and never with a clock."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from planning_cases import distributions

from neatpack import plan_rows


def peak_bytes(run: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def seconds(run: Callable[[], object], repeats: int = 3) -> float:
    def once() -> float:
        begin = time.process_time()
        run()
        return time.process_time() - begin

    return min(once() for _ in range(repeats))


@pytest.mark.parametrize(
    ("strategy", "seed", "allowed"),
    [
        ("best_fit", None, 32),
        ("best_fit", 1, 32),
        ("in_order", None, 32),
        ("in_order", 1, 32),
        ("wrapped", None, 32),
        ("wrapped", 1, 40),  # slices of both orders at once, and more of them than documents
    ],
)
def test_a_million_documents_take_few_bytes_each(strategy, seed, allowed) -> None:
    capacity, lengths = distributions(np.random.default_rng(0), 1_000_000)["lognormal"]
    assert peak_bytes(lambda: plan_rows(lengths, capacity, strategy=strategy, seed=seed)) < allowed * len(lengths)


def test_rows_of_few_documents_take_under_32_bytes_a_document_too() -> None:  # a row for every two documents
    capacity, lengths = distributions(np.random.default_rng(0), 1_000_000)["uniform"]
    assert peak_bytes(lambda: plan_rows(lengths, capacity)) < 32 * len(lengths)


def test_memory_does_not_depend_on_the_capacity() -> None:
    lengths = np.random.default_rng(1).integers(1, 1000, 1000)
    assert peak_bytes(lambda: plan_rows([*lengths, 2**30], 2**31 - 1)) < 10_000_000


def test_ten_times_the_documents_take_about_ten_times_as_long() -> None:
    rng = np.random.default_rng(2)
    few, many = (rng.integers(1, 2049, n).astype(np.int32) for n in (200_000, 2_000_000))
    assert seconds(lambda: plan_rows(many, 2048)) < 20 * seconds(lambda: plan_rows(few, 2048))


def test_rows_that_hold_one_document_cost_no_search() -> None:  # F-123: a scan over open rows would be quadratic
    few, many = np.full(100_000, 5), np.full(1_000_000, 5)
    assert seconds(lambda: plan_rows(many, 8)) < 30 * seconds(lambda: plan_rows(few, 8))
