from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_cases import kept_tokens, placed_tokens, row_multiset, skewed_lengths

from neatpack import plan_rows
from neatpack.errors import PlanError
from neatpack.planning import Slice
from neatpack.testing import textbook_best_fit

STRATEGIES = ("best_fit", "in_order", "wrapped")
OVERFLOWS = ("error", "drop", "truncate", "split")

lengths_lists = st.lists(st.integers(0, 40), max_size=60)
capacities = st.integers(1, 24)


def fills(plan) -> list[int]:
    return sorted(plan.row_lengths().tolist())


# --- every token once, or counted ------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("overflow", OVERFLOWS)
@given(lengths=lengths_lists, capacity=capacities, seed=st.none() | st.integers(0, 99))
@settings(max_examples=150, deadline=None)
def test_every_token_is_in_one_row_or_counted(strategy, overflow, lengths, capacity, seed) -> None:
    if overflow == "error" and strategy != "wrapped" and max(lengths, default=0) > capacity:
        with pytest.raises(PlanError, match="longer than the row capacity"):
            plan_rows(lengths, capacity, strategy=strategy, seed=seed)
        return
    plan = plan_rows(lengths, capacity, strategy=strategy, overflow=overflow, seed=seed)
    assert placed_tokens(plan) == kept_tokens(lengths, capacity, overflow)
    counts = plan.counts
    assert plan.num_tokens + counts.dropped_tokens + counts.truncated_tokens == counts.tokens == sum(lengths)
    assert (counts.documents, counts.empty) == (len(lengths), lengths.count(0))
    assert all(slice_.length > 0 for row in plan for slice_ in row)
    assert all(0 < fill <= capacity for fill in plan.row_lengths())
    assert plan.lower_bound <= plan.num_rows
    in_pieces = [doc for doc, group in itertools.groupby(sorted(s.doc for row in plan for s in row)) if len(list(group)) > 1]
    assert counts.split == len(in_pieces)


def test_token_check_sees_a_lost_and_a_doubled_token() -> None:
    plan = plan_rows([5, 3, 4], capacity=8)
    assert placed_tokens(plan.take_rows([0])) != kept_tokens([5, 3, 4], 8, "error")
    assert placed_tokens(plan.take_rows([0, 1, 1])) != kept_tokens([5, 3, 4], 8, "error")


# --- best fit ---------------------------------------------------------------------------------------------------------


def test_rows_equal_textbook_best_fit_on_thousands_of_cases() -> None:
    rng = np.random.default_rng(0)
    for _ in range(4000):
        capacity = int(rng.integers(1, 60))
        lengths = rng.integers(0, capacity + 1, rng.integers(0, 50))
        if rng.random() < 0.5:
            lengths = skewed_lengths(rng, len(lengths), capacity)
        plan = plan_rows(lengths, capacity, seed=None if rng.random() < 0.5 else int(rng.integers(99)))
        expected = textbook_best_fit(lengths.tolist(), capacity)
        assert fills(plan) == sorted(map(sum, expected))  # which of two equally full rows is free


def test_rows_equal_textbook_best_fit_past_one_block() -> None:
    rng = np.random.default_rng(1)
    lengths = rng.integers(1, 40, 150_000)  # the sort and the scatter work in blocks of 65,536
    plan = plan_rows(lengths, 200)
    assert np.array_equal(np.sort(plan.doc), np.arange(len(lengths)))
    assert np.array_equal(lengths[plan.doc], plan.length)
    assert plan.num_rows == plan.lower_bound
    assert plan.row_lengths().max() <= 200


def test_no_document_fitted_a_fuller_row_when_it_was_placed() -> None:
    rng = np.random.default_rng(2)
    for _ in range(300):
        capacity = int(rng.integers(1, 50))
        lengths = rng.integers(1, capacity + 1, rng.integers(1, 60))
        plan = plan_rows(lengths, capacity)
        for row in plan:
            lengths_in_row = [slice_.length for slice_ in row]
            assert lengths_in_row == sorted(lengths_in_row, reverse=True)
        assert_best_fit([[s.length for s in row] for row in plan], capacity)


def assert_best_fit(rows: list[list[int]], capacity: int) -> None:
    """A row whose longer documents left it less full must not have taken a document that a fuller open row could hold.

    Only documents strictly longer than the one placed are surely placed before it, and only rows that end without any
    of its length surely had their final state when it came; so fullness is compared with those.
    """
    for row, length in [(lengths, length) for lengths in rows for length in set(lengths)]:
        room = capacity - sum(longer for longer in row if longer > length)
        for other in rows:
            if length in other:
                continue
            before = [longer for longer in other if longer > length]
            if before:
                assert not length <= capacity - sum(before) < room, (rows, row, length, other)


def test_best_fit_check_sees_a_first_fit_row() -> None:
    with pytest.raises(AssertionError):
        assert_best_fit([[8, 1], [6, 3]], 10)  # F-104: 1 belongs to the row with 9


def test_ties_keep_their_order_without_a_seed() -> None:
    plan = plan_rows([6, 2, 6, 2, 6, 2], capacity=8)
    assert [[slice_.doc for slice_ in row] for row in plan] == [[0, 1], [2, 3], [4, 5]]


# --- lower bound ------------------------------------------------------------------------------------------------------


def fewest_rows_by_search(lengths: list[int], capacity: int) -> int:
    """The optimum: try every assignment, longest first, with rows that are alike tried once."""
    best = len(lengths)

    def place(index: int, rooms: tuple[int, ...]) -> None:
        nonlocal best
        if len(rooms) >= best:
            return
        if index == len(lengths):
            best = len(rooms)
            return
        for room in {room for room in rooms if room >= lengths[index]}:
            rest = list(rooms)
            rest.remove(room)
            place(index + 1, (*rest, room - lengths[index]))
        place(index + 1, (*rooms, capacity - lengths[index]))

    place(0, ())
    return best


def test_lower_bound_is_never_above_the_optimum() -> None:
    rng = np.random.default_rng(3)
    tight = 0
    for _ in range(400):
        capacity = int(rng.integers(1, 20))
        lengths = sorted(rng.integers(1, capacity + 1, rng.integers(1, 9)).tolist(), reverse=True)
        plan, optimum = plan_rows(lengths, capacity), fewest_rows_by_search(lengths, capacity)
        assert -(-sum(lengths) // capacity) <= plan.lower_bound <= optimum <= plan.num_rows
        tight += plan.lower_bound == optimum > -(-sum(lengths) // capacity)
    assert tight > 20  # better than tokens over capacity, often: not that bound under another name


def bound_at_every_threshold(lengths: list[int], capacity: int) -> int:
    best = 0
    for threshold in range(capacity // 2 + 1):
        alone = [x for x in lengths if x > capacity - threshold]
        large = [x for x in lengths if capacity // 2 < x <= capacity - threshold]
        small = [x for x in lengths if threshold <= x <= capacity // 2]
        extra = -(-(sum(small) - (len(large) * capacity - sum(large))) // capacity)
        best = max(best, len(alone) + len(large) + max(extra, 0))
    return best


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=40), capacity=st.integers(30, 61))
@settings(max_examples=300, deadline=None)
def test_lower_bound_is_the_best_over_every_threshold(lengths, capacity) -> None:
    assert plan_rows(lengths, capacity).lower_bound == bound_at_every_threshold(lengths, capacity)


# --- seed -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_seed_gives_one_plan_and_another_seed_another(strategy) -> None:
    lengths = np.random.default_rng(4).integers(1, 30, 500)
    one, same, other = (plan_rows(lengths, 64, strategy=strategy, seed=seed) for seed in (7, 7, 8))
    for name in ("row_offsets", "doc", "start", "length"):
        assert np.array_equal(getattr(one, name), getattr(same, name))
    assert not np.array_equal(one.doc, other.doc)
    assert row_multiset(one) == row_multiset(other) == row_multiset(plan_rows(lengths, 64, strategy=strategy))
    assert one.seed == 7


def test_a_seed_shuffles_ties_evenly() -> None:
    partners = [plan_rows([6, 2, 2, 2, 2], capacity=8, seed=seed)[0] for seed in range(400)]
    partners += [plan_rows([6, 2, 2, 2, 2], capacity=8, seed=seed)[1] for seed in range(400)]
    taken = [row[1].doc for row in partners if row[0].length == 6]
    counts = [taken.count(doc) for doc in (1, 2, 3, 4)]
    assert sum(counts) == 400
    assert min(counts) > 60


def test_a_seed_keeps_slices_in_order_within_in_order_rows() -> None:
    plan = plan_rows(list(range(1, 30)), 64, strategy="in_order", seed=1)
    assert all([s.doc for s in row] == sorted(s.doc for s in row) for row in plan)


# --- overflow: faults that other packers had --------------------------------------------------------------------------


def test_dropped_neighbours_leave_no_empty_row() -> None:  # F-098
    plan = plan_rows([3, 9, 9, 2], 8, strategy="in_order", overflow="drop")
    assert list(plan) == [[Slice(0, 0, 3), Slice(3, 0, 2)]]
    assert (plan.counts.dropped, plan.counts.dropped_tokens) == (2, 18)


@pytest.mark.parametrize(("overflow", "kept", "lost"), [("truncate", 10, 1), ("split", 11, 0), ("drop", 6, 5)])
def test_what_a_policy_loses_is_counted(overflow, kept, lost) -> None:  # F-100
    plan = plan_rows([5, 2, 3, 1], 4, overflow=overflow)
    assert plan.num_tokens == kept
    assert plan.counts.dropped_tokens + plan.counts.truncated_tokens == lost


def test_truncate_makes_no_fragments() -> None:  # F-102
    plan = plan_rows([13, 11], 10, overflow="truncate")
    assert list(plan) == [[Slice(0, 0, 10)], [Slice(1, 0, 10)]]
    assert (plan.counts.truncated, plan.counts.truncated_tokens, plan.counts.split) == (2, 4, 0)


def test_best_fit_takes_the_fullest_row_not_the_first() -> None:  # F-104
    assert row_multiset(plan_rows([1, 3, 6, 8], 10)) == [[1, 3, 6], [8]]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_document_of_more_than_two_rows_is_split_into_full_ones(strategy) -> None:  # F-107
    plan = plan_rows([121], 60, strategy=strategy, overflow="split")
    assert list(plan) == [[Slice(0, 0, 60)], [Slice(0, 60, 60)], [Slice(0, 120, 1)]]
    assert plan.counts.split == 1
    assert plan.num_rows * plan.capacity - plan.num_tokens == 59


def test_drop_sees_the_length_before_any_cut() -> None:  # F-110
    plan = plan_rows([12, 4], 10, overflow="drop")
    assert (plan.num_tokens, plan.counts.dropped, plan.counts.dropped_tokens) == (4, 1, 12)


@pytest.mark.parametrize(
    ("overflow", "rows", "lost"), [("drop", [[20]], 300), ("truncate", [[20], [256]], 44), ("split", [[20, 44], [256]], 0)]
)
def test_drop_truncate_and_split_of_one_document(overflow, rows, lost) -> None:  # F-111
    plan = plan_rows([300, 20], 256, overflow=overflow)
    assert row_multiset(plan) == rows
    assert plan.counts.dropped_tokens + plan.counts.truncated_tokens == lost


@pytest.mark.parametrize(("overflow", "rows"), [("truncate", [[2], [4]]), ("split", [[2], [3], [4]])])
def test_split_pieces_are_documents_of_their_own(overflow, rows) -> None:  # F-112
    assert row_multiset(plan_rows([7, 2], 4, overflow=overflow)) == rows


def test_a_few_tokens_make_one_row() -> None:  # F-117
    plan = plan_rows([5, 4, 3], 2048)
    assert (plan.num_rows, plan.num_tokens, plan.capacity - plan.num_tokens) == (1, 12, 2036)


def test_an_overlong_document_is_named_with_the_ways_out() -> None:  # F-120
    with pytest.raises(PlanError, match=r"document 0 \(12 tokens\).*overflow='split'.*'truncate' or 'drop'"):
        plan_rows([12, 3], 10)
    with pytest.raises(PlanError, match=r"7 of 7 documents .* and 2 more"):
        plan_rows([12] * 7, 10)


def test_half_full_rows_cost_no_search() -> None:  # F-123
    assert plan_rows([5] * 100_000, 8).num_rows == 100_000


# --- what comes in ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", ">i4", ">u8"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("overflow", ["drop", "truncate", "split"])
def test_every_integer_dtype_gives_the_same_plan(dtype, strategy, overflow) -> None:
    lengths = np.random.default_rng(5).integers(0, 120, 300)
    want = plan_rows(lengths, np.int64(50), strategy=strategy, overflow=overflow)
    got = plan_rows(lengths.astype(dtype), 50, strategy=strategy, overflow=overflow)
    for name in ("row_offsets", "doc", "start", "length"):
        assert np.array_equal(getattr(got, name), getattr(want, name))
        assert getattr(got, name).dtype == getattr(want, name).dtype
    assert got.counts == want.counts
    assert got.fingerprint == want.fingerprint


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_plan_arrays_have_their_stated_dtypes(strategy) -> None:
    for lengths in ([], [0], [5, 3, 9]):
        plan = plan_rows(lengths, 6, strategy=strategy, overflow="split")
        assert (plan.row_offsets.dtype, plan.doc.dtype, plan.length.dtype) == (np.int64, np.int32, np.int32)
        assert plan.row_offsets[0] == 0
        assert plan.row_offsets[-1] == len(plan.doc) == len(plan.start) == len(plan.length)


def test_lists_tuples_strided_arrays_and_tensors_come_in() -> None:
    import torch

    want = list(plan_rows([5, 3, 4, 2, 2], 8))
    strided = np.array([5, 0, 3, 0, 4, 0, 2, 0, 2, 0])[::2]
    for lengths in ((5, 3, 4, 2, 2), strided, torch.tensor([5, 3, 4, 2, 2]), [np.int16(n) for n in (5, 3, 4, 2, 2)]):
        assert list(plan_rows(lengths, 8)) == want


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ((n for n in (1, 2)), "got generator"),
        ([1.0, 2.0], "dtype float64"),
        ([True, False], "dtype bool"),
        (["a", "b"], "1-D sequence of integers"),
        ([[1, 2], [3, 4]], r"shape \(2, 2\)"),
        ([[1], [2, 3]], "one a document"),
        (7, "got int"),
        (None, "got NoneType"),
        ([3, -1], "document 1 has length -1"),
        ([2**64], r"18446744073709551616 tokens, the longest \(document 0\).*fewer than 2\*\*62"),
        ([1, 2**62], r"4611686018427387905 tokens, the longest \(document 1\) 4611686018427387904: .*2\*\*62.*in parts"),
        ([-(2**64)], "1-D sequence of integers"),
        (np.array([1, 2], object), "of dtype object"),
        ([2**61, 2**61], r"fewer than 2\*\*62"),
        (np.array([2**64 - 1], np.uint64), r"fewer than 2\*\*62"),
    ],
)
def test_what_is_no_list_of_lengths_is_refused(lengths, message) -> None:
    with pytest.raises(PlanError, match=message):
        plan_rows(lengths, 8, overflow="truncate")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": 0}, "capacity must be a positive"),
        ({"capacity": 8.0}, "capacity must be a positive"),
        ({"capacity": True}, "capacity must be a positive"),
        ({"capacity": 2**31}, "capacity must be a positive"),
        ({"strategy": "first_fit"}, "best_fit, in_order, wrapped"),
        ({"overflow": "ignore"}, "error, drop, truncate, split"),
        ({"seed": -1}, "seed must be"),
        ({"seed": 1.5}, "seed must be"),
        ({"align": 0}, "align must be a positive"),
        ({"max_docs_per_row": 0}, "max_docs_per_row must be a positive"),
        ({"max_docs_per_row": 2, "strategy": "wrapped"}, "fills every row"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, message) -> None:
    with pytest.raises(PlanError, match=message):
        plan_rows([1, 2], **{"capacity": 8, **options})


def test_more_pieces_than_a_plan_counts_are_refused_before_they_are_made() -> None:
    with pytest.raises(PlanError, match="pieces"):
        plan_rows([2**40], 1, overflow="split")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0], np.zeros(0, np.int64)])
def test_nothing_in_gives_no_rows(strategy, lengths) -> None:
    plan = plan_rows(lengths, 8, strategy=strategy, seed=1)
    assert (plan.num_rows, len(plan), list(plan), plan.num_tokens, plan.lower_bound) == (0, 0, [], 0, 0)
    assert plan.efficiency == 1.0
    assert plan.row_lengths().tolist() == plan.slot_starts().tolist() == []
    assert plan.counts.empty == len(lengths)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("capacity", [1, 131_072, 2**20, 2**31 - 1])
def test_a_document_as_long_as_the_row_fills_it(strategy, capacity) -> None:
    plan = plan_rows([capacity, 1, capacity], capacity, strategy=strategy)
    assert fills(plan) == sorted([capacity, 1, capacity])
    assert plan.lower_bound == 3


@pytest.mark.parametrize("capacity", [131_072, 2**20])
def test_long_rows_equal_textbook_best_fit(capacity) -> None:
    lengths = skewed_lengths(np.random.default_rng(6), 400, capacity)
    assert fills(plan_rows(lengths, capacity)) == sorted(map(sum, textbook_best_fit(lengths.tolist(), capacity)))


def test_long_rows_of_many_documents_use_wide_keys_and_stay_exact() -> None:
    lengths = np.random.default_rng(7).integers(1, 131_073, 150_000)
    plan = plan_rows(lengths, 131_072)
    assert np.array_equal(np.sort(plan.doc), np.arange(len(lengths)))
    assert np.array_equal(lengths[plan.doc], plan.length)
    assert plan.num_rows <= plan.lower_bound * 1.01


# --- order ------------------------------------------------------------------------------------------------------------


@given(lengths=lengths_lists, capacity=capacities)
@settings(max_examples=200, deadline=None)
def test_wrapped_is_the_concatenated_stream_cut_at_the_capacity(lengths, capacity) -> None:
    stream = [(doc, position) for doc, length in enumerate(lengths) for position in range(length)]
    plan = plan_rows(lengths, capacity, strategy="wrapped")
    rows = [[(s.doc, s.start + i) for s in row for i in range(s.length)] for row in plan]
    assert rows == [stream[first : first + capacity] for first in range(0, len(stream), capacity)]


def test_wrapped_past_one_block_is_the_stream() -> None:
    lengths = np.random.default_rng(8).integers(0, 9, 140_000)
    plan = plan_rows(lengths, 100, strategy="wrapped")
    assert np.array_equal(np.repeat(plan.doc, plan.length), np.repeat(np.arange(len(lengths)), lengths))
    assert set(plan.row_lengths()[:-1].tolist()) == {100}


@given(lengths=lengths_lists, capacity=st.integers(1, 40), max_docs=st.none() | st.integers(1, 5))
@settings(max_examples=200, deadline=None)
def test_in_order_is_next_fit(lengths, capacity, max_docs) -> None:
    rows: list[list[int]] = []
    for length in (min(length, capacity) for length in lengths if length):
        if not rows or sum(rows[-1]) + length > capacity or len(rows[-1]) == max_docs:
            rows.append([])
        rows[-1].append(length)
    plan = plan_rows(lengths, capacity, strategy="in_order", overflow="truncate", max_docs_per_row=max_docs)
    assert [[s.length for s in row] for row in plan] == rows
    assert plan.doc.tolist() == [doc for doc, length in enumerate(lengths) if length]


def test_in_order_past_one_block_is_next_fit() -> None:
    lengths = np.random.default_rng(9).integers(1, 9, 140_000)
    plan = plan_rows(lengths, 100, strategy="in_order")
    row_lengths = plan.row_lengths()
    assert np.array_equal(plan.doc, np.arange(len(lengths)))
    assert (row_lengths <= 100).all()
    assert (row_lengths[:-1] + plan.length[plan.row_offsets[1:-1]] > 100).all()


# --- rows in hand -----------------------------------------------------------------------------------------------------


def test_rows_are_indexed_like_a_list() -> None:
    plan = plan_rows([5, 3, 4, 2, 2], 8)
    assert plan[-1] == plan[1] == [Slice(2, 0, 4), Slice(3, 0, 2), Slice(4, 0, 2)]
    assert plan[np.int64(0)] == plan[0]
    for row in (2, -3):
        with pytest.raises(IndexError, match=f"row {row} of a plan of 2 rows"):
            plan[row]
    assert "2 rows of 8" in repr(plan)


def test_rows_taken_keep_their_slices() -> None:
    plan = plan_rows([5, 3, 9, 2, 2], 8, overflow="split")
    assert list(plan.take_rows([2, 0, 2])) == [plan[2], plan[0], plan[2]]
    assert list(plan.take_rows([])) == []
    for rows in ([3], [-1]):
        with pytest.raises(IndexError, match="row"):
            plan.take_rows(rows)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_aligned_plan_is_checked_row_by_row(strategy) -> None:
    rng = np.random.default_rng(10)
    for _ in range(200):
        align = int(rng.integers(1, 9))
        capacity = align * int(rng.integers(1, 9))
        lengths = rng.integers(0, 2 * capacity, rng.integers(0, 30))
        plan = plan_rows(lengths, capacity, strategy=strategy, overflow="split", align=align)
        assert placed_tokens(plan) == kept_tokens(lengths.tolist(), capacity, "split")
        slots, starts = plan.slot_lengths().tolist(), plan.slot_starts().tolist()
        assert all(slot % align == start % align == 0 for slot, start in zip(slots, starts, strict=True))
        assert all(length <= slot < length + align for length, slot in zip(plan.length.tolist(), slots, strict=True))
        for first, last in itertools.pairwise(plan.row_offsets.tolist()):
            assert starts[first:last] == np.cumsum([0, *slots[first:last]])[:-1].tolist()
            assert sum(slots[first:last]) <= capacity


def test_alignment_changes_what_fits() -> None:
    assert plan_rows([3, 5], 8).num_rows == 1
    assert plan_rows([3, 5], 8, align=4).num_rows == 2
    assert row_multiset(plan_rows([2, 3], 8, align=4)) == [[2, 3]]


def test_a_document_that_only_fits_unaligned_is_refused_with_the_capacity() -> None:  # five tokens in six, by fours
    for strategy in STRATEGIES:
        with pytest.raises(PlanError, match=r"capacity 6 is not a multiple of align=4.*4 or 8"):
            plan_rows([5], 6, align=4, strategy=strategy)
    assert plan_rows([5], 8, align=4).slot_lengths().tolist() == [8]
    with pytest.raises(PlanError, match="Use a capacity of 8"):
        plan_rows([5], 6, align=8)


@pytest.mark.parametrize("lengths", [[2**62 - 1], [2**62 - 4, 3], [2**61, *[1] * 9]])
@pytest.mark.parametrize("align", [1, 8])
def test_the_longest_documents_that_a_plan_counts_are_dropped_or_truncated_and_not_cut_beyond_counting(lengths, align):
    for strategy in ("best_fit", "in_order", "wrapped"):
        options = {"strategy": strategy, "align": align}
        assert plan_rows(lengths, 8, overflow="drop", **options).counts.dropped_tokens == lengths[0]
        assert plan_rows(lengths, 8, overflow="truncate", **options).counts.truncated_tokens == lengths[0] - 8
        with pytest.raises(PlanError, match=r"(split|wrapped) would cut .*at most 2\*\*31 - 1\. Raise the capacity"):
            plan_rows(lengths, 8, overflow="split", **options)
