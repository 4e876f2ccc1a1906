"""Row lengths in: maps and positions."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packings import doc_maps, packings, params_of

from neatpack.convert.doc_map import doc_ids_from_seq_lengths, position_ids_from_doc_ids
from neatpack.convert.segments import position_ids
from neatpack.errors import MetadataError, MetadataOverflowError, MetadataTypeError
from neatpack.testing import WORKED_EXAMPLE


def test_worked_example_comes_from_its_lengths():
    doc_ids = doc_ids_from_seq_lengths([[2, 3], [1, 2, 3]], row_length=6)
    assert doc_ids.tolist() == WORKED_EXAMPLE
    assert doc_ids.dtype == torch.int64
    assert doc_ids_from_seq_lengths([[2, 3], [1, 2, 3]]).tolist() == WORKED_EXAMPLE


@given(st.lists(st.lists(st.integers(1, 9), max_size=6), max_size=4), st.integers(0, 5))
@settings(max_examples=100, deadline=None)
def test_lengths_give_runs_in_order_and_padding_as_one_run_at_the_end(rows, spare):
    width = max((sum(row) for row in rows), default=0) + spare
    expected = []
    for row in rows:
        tokens = [number for number, length in enumerate(row, start=1) for _ in range(length)]
        expected.append(tokens + [0] * (width - len(tokens)))
    doc_ids = doc_ids_from_seq_lengths(rows, width)
    assert doc_ids.shape == (len(rows), width)
    assert doc_ids.tolist() == expected


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor, lambda row: np.array(row, np.uint8)])
def test_a_row_may_be_any_vector_of_integers(kind):
    assert doc_ids_from_seq_lengths([kind([2, 3]), kind([1, 2, 3])]).tolist() == WORKED_EXAMPLE


def test_equal_lengths_stay_apart():  # F-077
    doc_ids = doc_ids_from_seq_lengths([[3, 3]])
    assert doc_ids.tolist() == [[1, 1, 1, 2, 2, 2]]
    assert position_ids_from_doc_ids(doc_ids).tolist() == [[0, 1, 2, 0, 1, 2]]
    assert params_of(doc_ids).cu_seqlens.tolist() == [0, 3, 6]


def test_padding_is_one_segment_however_long():  # F-080, F-082
    params = params_of(doc_ids_from_seq_lengths([[4, 2]], 10))
    assert params.cu_seqlens.tolist() == [0, 4, 6, 10]
    assert doc_ids_from_seq_lengths([[5]], 8).tolist() == [[1, 1, 1, 1, 1, 0, 0, 0]]


@pytest.mark.parametrize(
    ("seq_lengths", "error", "message"),
    [
        ([[2], [3, 0]], MetadataError, r"seq_lengths\[1\]\[1\] is 0.*Drop empty documents"),
        ([[-4]], MetadataError, r"seq_lengths\[0\]\[0\] is -4"),
        ([[6], [4, 3]], MetadataError, r"seq_lengths\[1\] sums to 7 tokens, more than the row length 6"),
        ([[2.0]], MetadataTypeError, r"seq_lengths\[0\] must be a flat list of integers.*float64"),
        ([[True]], MetadataTypeError, "bool"),
        ([["2"]], MetadataTypeError, "U1"),
        ([2, 3], MetadataTypeError, r"seq_lengths\[0\].*shape \(\)"),
        ([[[2]]], MetadataTypeError, r"shape \(1, 1\)"),
        ([[1, [2]]], MetadataTypeError, "unequal length"),
        ([[2**63 - 1, 2]], MetadataOverflowError, "int32 offsets"),
        ([[2**70]], MetadataTypeError, "object"),
    ],
)
def test_lengths_that_describe_no_row_are_refused_by_row_and_index(seq_lengths, error, message):
    with pytest.raises(error, match=message):
        doc_ids_from_seq_lengths(seq_lengths, 6)


def test_worked_example_positions_restart_with_every_segment():
    doc_ids = torch.tensor(WORKED_EXAMPLE)
    assert position_ids_from_doc_ids(doc_ids).tolist() == [[0, 1, 0, 1, 2, 0], [0, 0, 1, 0, 1, 2]]
    assert position_ids_from_doc_ids(doc_ids).dtype == torch.int64


def test_positions_may_start_where_the_model_does():  # F-059
    doc_ids = doc_ids_from_seq_lengths([[3, 2]], 8)
    assert position_ids_from_doc_ids(doc_ids, start=2).tolist() == [[2, 3, 4, 2, 3, 2, 3, 4]]


def slow_positions(doc_ids, start):
    rows = []
    for row in np.asarray(doc_ids).tolist():
        positions = []
        for index, document in enumerate(row):
            continues = index and row[index - 1] == document
            positions.append(positions[-1] + 1 if continues else start)
        rows.append(positions)
    return rows


@given(doc_maps(), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_both_ways_to_positions_agree_with_counting(doc_ids, start):
    assert position_ids_from_doc_ids(doc_ids, start).tolist() == slow_positions(doc_ids, start)
    assert position_ids(params_of(doc_ids), start).tolist() == slow_positions(doc_ids, start)


def test_positions_of_strided_maps_and_views_are_the_same():
    for doc_ids in packings():
        wide = torch.stack([doc_ids, doc_ids + 1], dim=-1).reshape(len(doc_ids), -1)[:, ::2]
        assert position_ids_from_doc_ids(wide).tolist() == slow_positions(doc_ids, 0)
    view = torch.ones(1, 1, dtype=torch.int64).expand(3, 4)
    assert position_ids_from_doc_ids(view).tolist() == [[0, 1, 2, 3]] * 3


@pytest.mark.parametrize("shape", [(0, 6), (2, 0), (0, 0)])
def test_an_empty_batch_has_no_positions(shape):
    assert position_ids_from_doc_ids(torch.zeros(shape, dtype=torch.int64)).shape == shape
    assert doc_ids_from_seq_lengths([], 6).shape == (0, 6)
    assert doc_ids_from_seq_lengths([]).shape == (0, 0)
    assert doc_ids_from_seq_lengths([[], []], 0).shape == (2, 0)
