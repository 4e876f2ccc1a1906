"""The local engine: results in task order for any number of workers, and a clear word when a worker fails or dies."""

from __future__ import annotations

import os
import time

import pytest

from neatpack.engine import LocalEngine
from neatpack.errors import PackError, SourceError


def make_square():
    def square(task, tick):
        time.sleep(0.02 * (task % 3))  # later tasks finish before earlier ones
        tick(task)
        return task * task, os.getpid()

    return square


def make_failing():
    def fail(task, tick):
        if task == 2:
            raise SourceError("file 2 is bad")
        if task == 3:
            raise KeyError("a fault of our own")
        return task

    return fail


def make_dying():
    def die(task, tick):
        os._exit(7)

    return die


@pytest.mark.parametrize("workers", [1, 3])
def test_results_come_in_task_order_and_progress_adds_up(workers):
    ticks = []
    with LocalEngine(make_square, workers) as engine:
        results = list(engine.run(range(9), ticks.append))
        again = list(engine.run(range(4), ticks.append))
    assert [square for square, _ in results] == [task * task for task in range(9)]
    assert sum(ticks) == sum(range(9)) + sum(range(4))
    processes = {process for _, process in results}
    assert (processes == {os.getpid()}) == (workers == 1)
    assert {process for _, process in again} <= processes  # the same workers serve every run


@pytest.mark.parametrize("workers", [1, 2])
def test_the_first_failure_in_task_order_is_raised_as_it_was(workers):
    with LocalEngine(make_failing, workers) as engine, pytest.raises(SourceError, match="file 2 is bad"):
        list(engine.run(range(4), lambda amount: None))


def test_a_fault_of_our_own_keeps_its_story():
    with LocalEngine(make_failing, 2) as engine, pytest.raises(RuntimeError, match="a fault of our own"):
        list(engine.run([0, 3], lambda amount: None))


def test_a_worker_that_dies_is_named_with_its_exit_code():
    with LocalEngine(make_dying, 2) as engine, pytest.raises(PackError, match=r"exit code 7.*finished work is kept"):
        list(engine.run(range(4), lambda amount: None))


def test_no_tasks_need_no_worker():
    with LocalEngine(make_dying, 2) as engine:
        assert list(engine.run([], lambda amount: None)) == []
