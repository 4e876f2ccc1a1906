"""Other trainers' metadata, decoded as they read it."""

import itertools

import numpy as np
import pytest
from packings import EMPTY, assert_isolated, offsets_pairs, params_of, worked

from neatpack.convert.segments import unpad_params
from neatpack.convert.trainers import to_magi, to_olmo, to_torchtitan


def test_worked_example_torchtitan():
    params = worked()
    fields = to_torchtitan(params)
    assert fields.pop("cu_seq_q") is fields.pop("cu_seq_k") is params.cu_seqlens
    assert fields == {"max_q": 3, "max_k": 3}
    assert to_torchtitan(unpad_params(params).params)["cu_seq_q"].tolist() == [0, 2, 5, 6, 8, 11]


def test_worked_example_olmo():
    fields = to_olmo(worked())
    assert fields["doc_lens"].tolist() == [[2, 3, 1], [1, 2, 3]]
    assert fields["max_doc_lens"] == [3, 3]
    assert to_olmo(params_of([[1, 1, 1], [1, 2, 3]]))["doc_lens"].tolist() == [[3, 0, 0], [1, 1, 1]]


def test_worked_example_magi():
    fields = to_magi(worked())
    assert fields["q_ranges"].tolist() == [[0, 2], [2, 5], [5, 6], [6, 7], [7, 9], [9, 12]]
    assert fields["attn_mask_type"] == ["causal"] * 6


def olmo_offsets(params):
    """Zeros dropped, the rest accumulated."""
    return [0, *itertools.accumulate(length for row in to_olmo(params)["doc_lens"].tolist() for length in row if length)]


def magi_pairs(params):
    fields = to_magi(params)
    pairs = np.zeros((params.doc_ids.numel(),) * 2, bool)
    for (q_start, q_end), (k_start, k_end) in zip(fields["q_ranges"].tolist(), fields["k_ranges"].tolist(), strict=True):
        pairs[q_start:q_end, k_start:k_end] = np.tri(q_end - q_start, k_end - k_start, dtype=bool)
    return pairs


def test_each_isolates():
    assert_isolated(lambda params: offsets_pairs(to_torchtitan(params)["cu_seq_k"], params.doc_ids.numel()))
    assert_isolated(lambda params: offsets_pairs(olmo_offsets(params), params.doc_ids.numel()))
    assert_isolated(magi_pairs)


def test_every_row_of_lengths_sums_to_the_row():
    params = params_of([[0, 0, 1, 1], [1, 2, 2, 0]])
    assert to_olmo(params)["doc_lens"].sum(1).tolist() == [4, 4]


@pytest.mark.parametrize("doc_ids", EMPTY, ids=lambda doc_ids: str(tuple(doc_ids.shape)))
def test_an_empty_batch_has_no_lengths(doc_ids):
    assert to_olmo(params_of(doc_ids))["doc_lens"].shape == (len(doc_ids), 0)
    assert to_olmo(params_of(doc_ids))["max_doc_lens"] == [0] * len(doc_ids)
    assert to_magi(params_of(doc_ids))["q_ranges"].shape == (0, 2)
