"""Groups are planned whole: members side by side, in order, in one row, and every token accounted for."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neatpack import plan_rows
from neatpack.errors import PlanError
from neatpack.planning.groups import plan_groups

REQUESTS = st.tuples(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), max_size=30),
    st.sampled_from(["best_fit", "in_order"]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([None, 0, 7]),
)


def flat(groups):
    lengths = [length for group in groups for length in group]
    return lengths, [number for number, group in enumerate(groups) for _ in group]


@given(REQUESTS)
@settings(deadline=None)
def test_every_group_is_whole_and_every_document_placed_once(request):
    groups, strategy, align, seed = request
    lengths, ids = flat(groups)
    plan = plan_groups(lengths, ids, 48, strategy=strategy, align=align, seed=seed)
    placed = [piece.doc for row in plan for piece in row]
    assert sorted(placed) == list(range(len(lengths)))
    for row in plan:
        own = [piece.doc for piece in row]
        assert sum(-(-piece.length // align) * align for piece in row) <= 48
        for group in {ids[doc] for doc in own}:
            members = [doc for doc in range(len(ids)) if ids[doc] == group]
            first = own.index(members[0])
            assert own[first : first + len(members)] == members
        assert [(piece.start, piece.length) for piece in row] == [(0, lengths[doc]) for doc in own]
    assert plan.counts.documents == len(lengths)
    assert plan.counts.tokens == plan.num_tokens == sum(lengths)
    plan.check_source(np.array(lengths, np.int64))


def test_rows_of_documents_alone_would_part_a_pair():
    lengths, ids = [6, 2, 4, 4], [0, 0, 1, 1]
    assert [{ids[piece.doc] for piece in row} for row in plan_rows(lengths, 10)] == [{0, 1}, {0, 1}]
    assert [{ids[piece.doc] for piece in row} for row in plan_groups(lengths, ids, 10)] == [{0}, {1}]


def test_groups_need_not_stand_together_in_the_input():
    plan = plan_groups([2, 3, 4, 5], [9, 4, 9, 4], capacity=8, strategy="in_order")
    assert [[piece.doc for piece in row] for row in plan] == [[0, 2], [1, 3]]


def test_a_group_over_capacity_is_named_or_dropped_whole():
    lengths, ids = [5, 6, 1, 1], [0, 0, 1, 1]
    with pytest.raises(
        PlanError, match=r"1 groups are longer than capacity=10; the first is group 0 with 11 tokens \(documents 0, 1\)"
    ):
        plan_groups(lengths, ids, 10)
    plan = plan_groups(lengths, ids, 10, overflow="drop")
    assert [[piece.doc for piece in row] for row in plan] == [[2, 3]]
    assert (plan.counts.dropped, plan.counts.dropped_tokens) == (2, 11)


def test_the_limit_of_documents_a_row_counts_documents():
    plan = plan_groups([1] * 12, np.arange(12) // 2, 100, max_docs_per_row=5)
    assert [len(row) for row in plan] == [4, 4, 4]
    assert plan.max_docs_per_row == 5


def test_f046_one_document_a_row_is_a_limit_of_one():
    assert [len(row) for row in plan_rows([3, 2, 4, 1], 16, max_docs_per_row=1)] == [1, 1, 1, 1]


def test_a_seed_gives_the_same_plan_again_and_another_one_another():
    lengths, ids = np.random.default_rng(0).integers(1, 20, 200), np.arange(200) // 2
    plans = [plan_groups(lengths, ids, 64, seed=seed).doc.tolist() for seed in (3, 3, 4)]
    assert plans[0] == plans[1] != plans[2]


def test_no_documents_give_no_rows():
    assert plan_groups([], [], 8).num_rows == 0


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([3, 2], [0], 8), {}, "group_ids must be one integer a document, 2 in all"),
        (([3, 2], [0.5, 1.5], 8), {}, "group_ids must be one integer a document"),
        (([3, 0], [5, 5], 8), {}, "document 1 of group 5 is empty"),
        (([3, 2, 1], [0, 0, 1], 8), {"max_docs_per_row": 2}, "needs groups of one size, and these have 1 to 2"),
        (([3, 2], [0, 0], 8), {"max_docs_per_row": 1}, "holds no group of 2 documents"),
        (([3, 2], [0, 0], 8), {"strategy": "wrapped"}, "unknown strategy for groups 'wrapped'"),
        (([3, 2], [0, 0], 8), {"overflow": "split"}, "unknown overflow policy for groups 'split'"),
        (([3, 2], [0, 0], 9), {"align": 2}, "capacity 9 is not a multiple of align=2"),
    ],
)
def test_what_no_plan_can_honour_is_one_clear_error(arguments, options, message):
    with pytest.raises(PlanError, match=message):
        plan_groups(*arguments, **options)
