"""Rows limited in documents, from a stream: the limit costs next to nothing, and no more is held than without it."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_cases import distributions

from neatpack import plan_rows
from neatpack.errors import PlanError
from neatpack.planning import Slice, StreamPlanner
from neatpack.planning.reserve import fill_rows

WHERE_A_CAP_BITES = [("lognormal", 4), ("lognormal", 8), ("lognormal", 16), ("pareto", 8), ("pareto", 32)]
MEANS = ("lognormal", "uniform", "pareto")


def all_rows(planner: StreamPlanner, lengths: object) -> list[list[Slice]]:
    return [*planner.extend(lengths), *planner.flush()]


def best_fit_alone(lengths: list[int], capacity: int, cap: int, lookahead: int, open_rows: int = 1024) -> list[list[int]]:
    """Best fit of `lookahead` documents at a time, that closes a row of `cap` of them: the slow twin, documents by number."""
    finished: list[list[int]] = []
    rows: list[list[int]] = []

    def room(row: list[int]) -> int:
        return capacity - sum(lengths[doc] for doc in row)

    def place(doc: int) -> None:
        fitting = [row for row in rows if lengths[doc] <= room(row)]
        if not fitting and len(rows) == open_rows:
            finished.append(min(rows, key=room))
            rows[:] = [other for other in rows if other is not finished[-1]]
        row = min(fitting, key=room, default=[])
        rows[:] = [other for other in rows if other is not row]
        row.append(doc)
        if not room(row) or len(row) == cap:
            finished.append(row)
        else:
            rows.insert(0, row)  # of rows with the same room, the one that got it last is first

    for begin in range(0, len(lengths), lookahead):
        for doc in sorted(range(begin, min(begin + lookahead, len(lengths))), key=lambda doc: -lengths[doc]):
            place(doc)
    return finished + rows


def filled_slowly(slots: list[int], capacity: int, cap: int, keep: int) -> list[list[int]]:
    """What `fill_rows` says of itself, from whole lists again at every step: the slow twin."""
    left, rows = sorted(slots), []
    while len(left) > keep:
        wanted = min(cap, -(-len(left) * capacity // sum(left)))
        shortest = left[: wanted - 1]
        row = [left.pop()]
        while left and len(row) < cap and left[0] <= capacity - sum(row):
            reserved = sum(shortest[: max(len(shortest) - len(row), 0)])
            leaves_room = [slot for slot in left if slot <= capacity - sum(row) - reserved]
            row.append(max(leaves_room, default=left[0]))
            left.remove(row[-1])
        rows.append(row)
    return rows


@given(
    slots=st.lists(st.integers(1, 20), max_size=60),
    spare=st.integers(0, 10),
    cap=st.integers(1, 6),
    keep=st.integers(0, 20),
)
@settings(max_examples=300, deadline=None)
def test_rows_are_filled_as_the_slow_twin_fills_them(slots, spare, cap, keep) -> None:
    capacity = max(slots, default=1) + spare
    ordered = sorted(slots)
    waiting = [Slice(number, 0, slot) for number, slot in enumerate(ordered)]
    rows = fill_rows(waiting, list(ordered), capacity, cap, keep)
    assert [[slice_.length for slice_ in row] for row, _ in rows] == filled_slowly(slots, capacity, cap, keep)
    assert all(room == capacity - sum(slice_.length for slice_ in row) for row, room in rows)
    docs = [slice_.doc for row, _ in rows for slice_ in row]
    assert sorted([*docs, *(slice_.doc for slice_ in waiting)]) == list(range(len(slots)))
    assert len(waiting) <= keep


@pytest.mark.parametrize(("name", "cap"), [*WHERE_A_CAP_BITES, ("uniform", 4)])
def test_a_cap_costs_a_stream_less_than_one_percent(name, cap) -> None:
    capacity, lengths = distributions(np.random.default_rng(2), 100_000)[name]
    rows = all_rows(StreamPlanner(capacity, max_docs_per_row=cap), lengths)
    assert max(map(len, rows)) <= cap
    assert max(sum(slice_.length for slice_ in row) for row in rows) <= capacity
    assert sorted(slice_.doc for row in rows for slice_ in row) == list(range(len(lengths)))
    assert len(rows) <= 1.01 * plan_rows(lengths, capacity, max_docs_per_row=cap).lower_bound


@pytest.mark.parametrize(("name", "cap"), WHERE_A_CAP_BITES)
def test_best_fit_alone_would_cost_more_there(name, cap) -> None:
    capacity, lengths = distributions(np.random.default_rng(2), 6000)[name]
    bound = plan_rows(lengths, capacity, max_docs_per_row=cap).lower_bound
    assert len(best_fit_alone(lengths.tolist(), capacity, cap, 1024)) > 1.03 * bound
    assert len(all_rows(StreamPlanner(capacity, max_docs_per_row=cap), lengths)) <= 1.01 * bound


@pytest.mark.parametrize("name", MEANS)
def test_a_cap_near_the_mean_of_documents_a_row_costs_less_than_one_percent(name) -> None:
    capacity, lengths = distributions(np.random.default_rng(5), 20_000)[name]
    mean = capacity / lengths.mean()
    for cap in sorted({max(2, round(mean * part)) for part in (0.3, 0.6, 0.8, 0.9, 1, 1.1, 1.3, 2, 4)}):
        rows = all_rows(StreamPlanner(capacity, max_docs_per_row=cap), lengths)
        assert len(rows) <= 1.01 * plan_rows(lengths, capacity, max_docs_per_row=cap).lower_bound, cap


@pytest.mark.parametrize(("lookahead", "open_rows"), [(64, 64), (256, 16), (1024, 64)])
def test_small_windows_under_a_cap_beat_best_fit_alone(lookahead, open_rows) -> None:
    capacity, lengths = distributions(np.random.default_rng(6), 4000)["lognormal"]
    planner = StreamPlanner(capacity, max_docs_per_row=6, lookahead=lookahead, open_rows=open_rows)
    bound = plan_rows(lengths, capacity, max_docs_per_row=6).lower_bound
    assert len(all_rows(planner, lengths)) <= 1.02 * bound
    assert len(best_fit_alone(lengths.tolist(), capacity, 6, lookahead, open_rows)) > 1.1 * bound


@given(
    lengths=st.lists(st.integers(1, 30), max_size=80),
    cap=st.integers(1, 5),
    open_rows=st.integers(1, 5),
)
@settings(max_examples=150, deadline=None)
def test_documents_placed_as_they_come_are_placed_by_best_fit(lengths, cap, open_rows) -> None:
    planner = StreamPlanner(30, max_docs_per_row=cap, lookahead=1, open_rows=open_rows)
    rows = [[slice_.doc for slice_ in row] for row in planner.extend(lengths)]
    want = best_fit_alone(lengths, 30, cap, 1, open_rows)
    assert [[lengths[doc] for doc in row] for row in rows] == [[lengths[doc] for doc in row] for row in want[: len(rows)]]


@pytest.mark.parametrize("align", [1, 4])
@pytest.mark.parametrize("spare", [0, 1, 1000])
@pytest.mark.parametrize("open_rows", [8, 16])  # with as many open rows as documents wait, only the cap could bind
def test_a_cap_that_never_binds_changes_nothing(align, spare, open_rows) -> None:
    lengths = np.random.default_rng(7).integers(1, 30, 500)
    options = {"open_rows": open_rows, "lookahead": 16, "align": align}
    plain, capped = (StreamPlanner(64, max_docs_per_row=cap, **options) for cap in (None, 64 // align + spare))
    for begin in range(0, 500, 50):
        assert plain.extend(lengths[begin : begin + 50]) == capped.extend(lengths[begin : begin + 50])
        assert plain.state_dict()["open_rows"] == capped.state_dict()["open_rows"]
    assert plain.flush() == capped.flush()


@pytest.mark.parametrize("lookahead", [1, 10, 1024])
def test_a_cap_of_one_gives_every_document_a_row(lookahead) -> None:
    lengths = np.random.default_rng(8).integers(0, 30, 200)
    planner = StreamPlanner(16, max_docs_per_row=1, lookahead=lookahead, overflow="split")
    rows = planner.extend(lengths)
    assert planner.state_dict()["open_rows"] == []
    assert len(planner.state_dict()["waiting"]) == sum(-(-int(length) // 16) for length in lengths) % lookahead
    rows += planner.flush()
    pieces = [(doc, start, min(int(n) - start, 16)) for doc, n in enumerate(lengths) for start in range(0, int(n), 16)]
    assert sorted(tuple(slice_) for row in rows for slice_ in row) == pieces
    assert {len(row) for row in rows} == {1}


@pytest.mark.parametrize("align", [1, 4])
@pytest.mark.parametrize(("lookahead", "open_rows"), [(1, 1), (2, 1), (7, 3), (16, 40)])
def test_a_stream_stopped_anywhere_goes_on_to_the_same_rows(align, lookahead, open_rows) -> None:
    lengths = np.random.default_rng(9).integers(0, 50, 90)

    def planner() -> StreamPlanner:
        options = {"lookahead": lookahead, "open_rows": open_rows, "overflow": "split"}
        return StreamPlanner(40, max_docs_per_row=3, align=align, **options)

    want = all_rows(planner(), lengths)
    assert max(map(len, want)) == 3
    for stop in range(len(lengths) + 1):
        before, after = planner(), planner()
        rows = [row for length in lengths[:stop] for row in before.add(length)]
        after.load_state_dict(json.loads(json.dumps(before.state_dict())))
        assert after.state_dict() == before.state_dict()  # as a planner that did not stop would give it
        assert [*rows, *all_rows(after, lengths[stop:])] == want


@pytest.mark.parametrize("chunk", [1, 100, 3001])
def test_a_resumed_stream_gives_the_rows_of_an_uninterrupted_one_at_the_defaults(chunk) -> None:
    capacity, lengths = distributions(np.random.default_rng(10), 12_000)["lognormal"]
    want = all_rows(StreamPlanner(capacity, max_docs_per_row=6), lengths)
    planner, rows = StreamPlanner(capacity, max_docs_per_row=6), []
    for begin in range(0, len(lengths), chunk):
        if begin % 3001 < chunk:
            state, planner = planner.state_dict(), StreamPlanner(capacity, max_docs_per_row=6)
            planner.load_state_dict(json.loads(json.dumps(state)))
        rows += planner.extend(lengths[begin : begin + chunk])
    assert [*rows, *planner.flush()] == want


@pytest.mark.parametrize("name", MEANS)
def test_no_more_is_held_than_the_windows_allow(name) -> None:
    capacity, lengths = distributions(np.random.default_rng(11), 3000)[name]
    planner = StreamPlanner(capacity, max_docs_per_row=5, lookahead=100, open_rows=20)
    out = 0
    for begin in range(0, len(lengths), 7):
        out += sum(map(len, planner.extend(lengths[begin : begin + 7])))
        state = planner.state_dict()
        assert len(state["waiting"]) < 100
        assert len(state["open_rows"]) <= 20
        assert all(len(row) < 5 for row in state["open_rows"])
        assert out + len(state["waiting"]) + sum(map(len, state["open_rows"])) == planner.counts.documents


def test_equal_documents_leave_in_the_order_they_came() -> None:
    planner = StreamPlanner(8, max_docs_per_row=2, lookahead=4)
    rows = planner.extend([4] * 20)
    assert [[slice_.doc for slice_ in row] for row in rows] == [[doc, doc + 1] for doc in range(0, 18, 2)]


def test_a_state_from_before_windows_under_a_cap_is_refused_and_one_without_a_cap_is_not() -> None:
    plain, capped = StreamPlanner(10), StreamPlanner(10, max_docs_per_row=4)
    plain.load_state_dict({**plain.state_dict(), "version": 1})
    with pytest.raises(PlanError, match=r"version 1; with these limits, this release reads version 2"):
        capped.load_state_dict({**capped.state_dict(), "version": 1})
    with pytest.raises(PlanError, match="version 2; this release reads version 1"):
        plain.load_state_dict({**plain.state_dict(), "version": 2})
    for mine, state in ((plain, capped.state_dict()), (capped, plain.state_dict())):
        with pytest.raises(PlanError, match=r"planner with max_docs_per_row=(None|4): make this one with the same"):
            mine.load_state_dict(state)
    full = {**capped.state_dict(), "open_rows": [[[doc, 0, 1] for doc in range(4)]]}
    with pytest.raises(PlanError, match="no state of a StreamPlanner: it holds more"):
        capped.load_state_dict(full)


@pytest.mark.parametrize("limits", [(16384, 1024), (4096, 1024), (1024, 256), (1024, 64)], ids=str)
@pytest.mark.parametrize("name", MEANS)
def test_fewer_open_rows_than_documents_that_wait_cost_two_percent_at_most(name, limits):
    """On uniform lengths best fit alone needed 19 % more rows than the bound with 64 open rows, or 16,384 waiting."""
    lookahead, open_rows = limits
    capacity, lengths = distributions(np.random.default_rng(0), 40_000)[name]
    rows = all_rows(StreamPlanner(capacity, lookahead=lookahead, open_rows=open_rows), lengths)
    bound = -(-int(np.sum(lengths)) // capacity)
    assert len(rows) <= 1.02 * bound
    assert sorted(slice_.doc for row in rows for slice_ in row) == list(range(len(lengths)))
