from __future__ import annotations

import json
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_cases import distributions, kept_tokens, skewed_lengths

from neatpack import plan_rows
from neatpack.errors import PlanError
from neatpack.planning import PlanCounts, Slice, StreamPlanner

OVERFLOWS = ("error", "drop", "truncate", "split")


def all_rows(planner: StreamPlanner, lengths: object) -> list[list[Slice]]:
    return [*planner.extend(lengths), *planner.flush()]


def placed(rows: list[list[Slice]]) -> list[tuple[int, int]]:
    return sorted((s.doc, position) for row in rows for s in row for position in range(s.start, s.start + s.length))


@pytest.mark.parametrize("overflow", OVERFLOWS)
@given(
    lengths=st.lists(st.integers(0, 40), max_size=80),
    units=st.integers(1, 8),
    align=st.integers(1, 4),
    windows=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    max_docs=st.none() | st.integers(1, 4),
)
@settings(max_examples=150, deadline=None)
def test_every_token_is_in_one_row_or_counted(overflow, lengths, units, align, windows, max_docs) -> None:
    capacity = units * align
    options = {"open_rows": windows[0], "lookahead": windows[1], "max_docs_per_row": max_docs, "align": align}
    planner = StreamPlanner(capacity, overflow=overflow, **options)
    if overflow == "error" and max(lengths, default=0) > capacity:
        with pytest.raises(PlanError, match="longer than the row capacity"):
            planner.extend(lengths)
        assert planner.counts == PlanCounts()
        assert planner.flush() == []
        return
    rows = all_rows(planner, lengths)
    assert placed(rows) == kept_tokens(lengths, capacity, overflow)
    assert planner.counts == plan_rows(lengths, capacity, overflow=overflow).counts
    assert all(sum(-(-s.length // align) * align for s in row) <= capacity for row in rows)
    assert all(1 <= len(row) <= (max_docs or capacity) for row in rows)


@given(
    lengths=st.lists(st.integers(0, 30), max_size=120), cuts=st.lists(st.integers(0, 120), max_size=4), stop=st.integers(0, 120)
)
@settings(max_examples=200, deadline=None)
def test_rows_depend_neither_on_chunks_nor_on_a_checkpoint(lengths, cuts, stop) -> None:
    def planner() -> StreamPlanner:
        return StreamPlanner(20, open_rows=4, lookahead=5, overflow="split", max_docs_per_row=6)

    want = all_rows(planner(), lengths)
    chunked = planner()
    rows = [row for chunk in np.split(np.array(lengths, int), sorted(cuts)) for row in chunked.extend(chunk)]
    assert [*rows, *chunked.flush()] == want
    one_by_one = planner()
    assert [*(row for length in lengths for row in one_by_one.add(length)), *one_by_one.flush()] == want
    before, after = planner(), planner()
    rows = before.extend(lengths[:stop])
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    rows += after.extend(lengths[after.counts.documents :])
    assert [*rows, *after.flush()] == want
    assert after.counts == one_by_one.counts == chunked.counts


def test_a_resumed_stream_gives_the_rows_of_an_uninterrupted_one_at_the_defaults() -> None:
    capacity, lengths = distributions(np.random.default_rng(0), 20_000)["lognormal"]
    want = all_rows(StreamPlanner(capacity), lengths)
    rows, state = [], StreamPlanner(capacity).state_dict()
    for _ in range(7):
        planner = StreamPlanner(capacity)
        planner.load_state_dict(json.loads(json.dumps(state)))
        rows += planner.extend(lengths[planner.counts.documents :][:3001])
        state = planner.state_dict()
    assert [*rows, *planner.flush()] == want


def test_a_forgotten_checkpoint_would_show() -> None:
    lengths = np.random.default_rng(1).integers(1, 20, 100)
    first, second = (StreamPlanner(20, open_rows=4, lookahead=5) for _ in range(2))
    rows = [*first.extend(lengths[:50]), *second.extend(lengths[50:]), *second.flush()]
    assert placed(rows) != kept_tokens(lengths.tolist(), 20, "error")


@pytest.mark.parametrize(("name", "fill"), [("lognormal", 0.999), ("uniform", 0.995), ("pareto", 0.998)])
def test_rows_of_200k_documents_are_full(name, fill) -> None:
    capacity, lengths = distributions(np.random.default_rng(2), 200_000)[name]
    rows = all_rows(StreamPlanner(capacity), lengths)
    assert sum(s.length for row in rows for s in row) == lengths.sum()
    assert lengths.sum() / (len(rows) * capacity) >= fill


@pytest.mark.parametrize("documents", [1, 100, 1000])
def test_a_stream_that_ends_early_is_planned_as_a_whole(documents) -> None:
    capacity, lengths = distributions(np.random.default_rng(3), documents)["lognormal"]
    assert len(all_rows(StreamPlanner(capacity), lengths)) == plan_rows(lengths, capacity).num_rows


@pytest.mark.parametrize("limit", [None, 6])
def test_memory_is_bounded_by_the_windows_not_by_the_stream(limit) -> None:
    def held(chunks: int) -> int:
        planner = StreamPlanner(4096, max_docs_per_row=limit)
        tracemalloc.start()
        for seed in range(chunks):
            planner.extend(distributions(np.random.default_rng(seed), 5000)["lognormal"][1])
        current = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        return current

    assert held(12) < 1.5 * held(4)


def test_no_more_rows_are_open_than_asked_and_the_fullest_goes_first() -> None:
    planner = StreamPlanner(10, open_rows=2, lookahead=1)
    assert planner.extend([6, 7]) == []
    assert planner.extend([8]) == [[Slice(1, 0, 7)]]
    assert len(planner.state_dict()["open_rows"]) == 2
    assert planner.add(2) == [[Slice(2, 0, 8), Slice(3, 0, 2)]]
    assert planner.flush() == [[Slice(0, 0, 6)]]


def test_a_document_goes_into_the_fullest_row_that_holds_it() -> None:
    planner = StreamPlanner(10, lookahead=4)
    planner.extend([1, 3, 6, 8])  # F-104
    assert planner.state_dict()["open_rows"] == [[[3, 0, 8]]]
    rows = all_rows(StreamPlanner(10, lookahead=4), [1, 3, 6, 8])
    assert rows[0] == [Slice(2, 0, 6), Slice(1, 0, 3), Slice(0, 0, 1)]


def test_documents_after_a_flush_keep_counting() -> None:
    planner = StreamPlanner(8)
    assert all_rows(planner, [5]) == [[Slice(0, 0, 5)]]
    assert all_rows(planner, [0, 4]) == [[Slice(2, 0, 4)]]
    assert planner.flush() == []
    assert planner.counts == PlanCounts(documents=3, tokens=9, empty=1)


def test_pieces_of_a_long_document_know_where_they_start() -> None:  # F-107
    planner = StreamPlanner(60, overflow="split", lookahead=1)
    planner.add(3)
    assert planner.add(121) == [[Slice(1, 0, 60)], [Slice(1, 60, 60)]]
    assert planner.flush() == [[Slice(0, 0, 3), Slice(1, 120, 1)]]
    assert planner.counts.split == 1


@pytest.mark.parametrize(
    "take", [lambda planner, length: planner.add(length), lambda planner, length: planner.extend([length])]
)
def test_a_refused_document_is_named_by_its_place_in_the_stream_and_not_taken(take) -> None:
    planner = StreamPlanner(10)
    planner.extend([3, 4])
    with pytest.raises(PlanError, match=r"document 2 \(12 tokens\)"):
        take(planner, 12)
    with pytest.raises(PlanError, match="document 2 has length -1"):
        take(planner, -1)
    for length in (1.5, True, "a"):
        with pytest.raises(PlanError, match="1-D sequence of integers"):
            take(planner, length)
    assert planner.counts == PlanCounts(documents=2, tokens=7)
    assert take(planner, np.int32(3)) == []
    assert planner.counts.documents == 3


def test_a_state_of_another_planner_is_refused() -> None:
    state = StreamPlanner(10, lookahead=7).state_dict()
    with pytest.raises(PlanError, match=r"planner with lookahead=7: make this one with the same"):
        StreamPlanner(10).load_state_dict(state)
    with pytest.raises(PlanError, match="capacity=10, lookahead=7"):
        StreamPlanner(20).load_state_dict(state)
    with pytest.raises(PlanError, match="version 99"):
        StreamPlanner(10, lookahead=7).load_state_dict({**state, "version": 99})
    for broken in ({}, {**state, "waiting": [[1]]}, {**state, "counts": {"files": 3}}, {**state, "open_rows": None}):
        with pytest.raises(PlanError, match="no state of a StreamPlanner"):
            StreamPlanner(10, lookahead=7).load_state_dict(broken)
    for length in (10, 11):  # full, so finished; and overfull
        with pytest.raises(PlanError, match="no state of a StreamPlanner: it holds more than its own options allow"):
            StreamPlanner(10, lookahead=7).load_state_dict({**state, "open_rows": [[[0, 0, length]]]})


@pytest.mark.parametrize(
    ("options", "lengths", "open_rows"),
    [
        ({"capacity": 10, "lookahead": 1}, [9], [[[0, 0, 9]]]),  # room for one token more
        ({"capacity": 1, "lookahead": 1}, [1], []),
        ({"capacity": 10, "max_docs_per_row": 1}, [4], []),
        ({"capacity": 10, "max_docs_per_row": 2, "lookahead": 1}, [4], [[[0, 0, 4]]]),
    ],
)
def test_a_state_that_is_as_full_as_a_planner_allows_is_taken(options, lengths, open_rows) -> None:
    before, after = StreamPlanner(**options), StreamPlanner(**options)
    before.extend(lengths)
    after.load_state_dict(before.state_dict())
    assert after.state_dict() == before.state_dict()
    assert after.state_dict()["open_rows"] == open_rows


@pytest.mark.parametrize(
    "options",
    [{"capacity": 0}, {"open_rows": 0}, {"lookahead": 0}, {"overflow": "skip"}, {"align": 3}, {"max_docs_per_row": 0}],
)
def test_options_that_mean_nothing_are_refused(options) -> None:
    with pytest.raises(PlanError):
        StreamPlanner(**{"capacity": 8, **options})


def test_skewed_streams_with_tight_windows_lose_nothing() -> None:
    lengths = skewed_lengths(np.random.default_rng(4), 5000, 500)
    rows = all_rows(StreamPlanner(100, open_rows=3, lookahead=16, overflow="split"), lengths)
    assert placed(rows) == kept_tokens(lengths.tolist(), 100, "split")
