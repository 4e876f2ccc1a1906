"""Dense masks against the oracle, and what attention makes of them."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from packings import EMPTY, agrees, assert_isolated, doc_maps, flat_pairs, flatten_rows, merged, packings, params_of, worked

from neatpack.convert.dense import to_additive_mask, to_dense_mask, to_mask_dict
from neatpack.errors import MetadataError


def test_worked_example_has_nineteen_pairs_with_these_counts_a_row():
    mask = to_dense_mask(worked(), pad_self=False)
    assert mask.shape == (2, 1, 6, 6)
    assert mask.dtype == torch.bool
    assert int(mask.sum()) == 19
    assert mask.sum(-1)[:, 0].tolist() == [[1, 2, 1, 2, 3, 0], [1, 1, 2, 1, 2, 3]]


def test_pad_self_adds_the_pads_own_diagonal_and_nothing_else():
    added = to_dense_mask(worked()) & ~to_dense_mask(worked(), pad_self=False)
    assert added.nonzero().tolist() == [[0, 0, 5, 5]]


@pytest.mark.parametrize("window", [None, 1, 2, 3, 100])
@pytest.mark.parametrize("pad_self", [False, True])
def test_bool_mask_is_the_oracle_on_every_packing(window, pad_self):
    for doc_ids in packings():
        mask = to_dense_mask(params_of(doc_ids), pad_self=pad_self, window=window)[:, 0]
        np.testing.assert_array_equal(flatten_rows(mask), flat_pairs(doc_ids, window=window, pad_self=pad_self))


@given(doc_maps())
@settings(max_examples=60, deadline=None)
def test_bool_mask_is_the_oracle_on_any_map(doc_ids):
    assert agrees(flatten_rows(to_dense_mask(params_of(doc_ids))[:, 0]), doc_ids)


def test_a_dropped_boundary_is_noticed():
    assert_isolated(lambda params: flatten_rows(to_dense_mask(params)[:, 0]))


def test_additive_mask_is_zero_where_allowed_and_the_lowest_number_elsewhere():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for doc_ids in packings():
            mask = to_additive_mask(params_of(doc_ids), dtype=dtype, window=2)
            assert mask.dtype == dtype
            allowed = to_dense_mask(params_of(doc_ids), window=2)
            assert (mask[allowed] == 0).all()
            assert (mask[~allowed] == torch.finfo(dtype).min).all()


def eager_attention(mask, q, k, v):
    return ((q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1]) + mask).softmax(-1) @ v


def test_eager_on_the_additive_mask_equals_sdpa_on_the_bool_mask():
    q, k, v = torch.randn(3, 2, 2, 6, 8).unbind(0)
    eager = eager_attention(to_additive_mask(worked()), q, k, v)
    sdpa = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=to_dense_mask(worked()))
    torch.testing.assert_close(eager, sdpa)


def test_eager_on_a_bool_mask_sees_other_documents():
    """Why there are two masks: the check above would fail on the bool one."""
    q, k, v = torch.randn(3, 2, 2, 6, 8).unbind(0)
    leaking = eager_attention(to_dense_mask(worked()), q, k, v)
    sdpa = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=to_dense_mask(worked()))
    assert (leaking - sdpa).abs().max() > 0.1


def test_empty_rows_are_finite_in_sdpa_and_pad_self_leaves_none():
    q, k, v = (tensor.requires_grad_() for tensor in torch.randn(3, 2, 2, 6, 8).unbind(0))
    output = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=to_dense_mask(worked(), pad_self=False))
    output.sum().backward()
    assert output[0, :, 5].abs().max() == 0
    assert all(tensor.grad.isfinite().all() for tensor in (q, k, v))
    assert all(to_dense_mask(params_of(doc_ids)).any(-1).all() for doc_ids in packings())


def test_mask_dict_holds_the_full_and_the_sliding_mask():
    masks = to_mask_dict(worked(), 2)
    assert set(masks) == {"full_attention", "sliding_attention"}
    assert torch.equal(masks["full_attention"], to_dense_mask(worked()))
    assert torch.equal(masks["sliding_attention"], to_dense_mask(worked(), window=2))
    additive = to_mask_dict(worked(), 2, dtype=torch.bfloat16)
    assert torch.equal(additive["sliding_attention"], to_additive_mask(worked(), window=2, dtype=torch.bfloat16))


def test_a_large_mask_is_refused_before_it_is_allocated_and_the_way_out_is_named():
    params = params_of(torch.ones(1, dtype=torch.int64).expand(4, 131072))
    with pytest.raises(MetadataError, match=r"4 x 131072 x 131072 needs 68,719,476,736 bytes.*to_block_mask"):
        to_dense_mask(params)
    with pytest.raises(MetadataError, match=r"needs 288 bytes, more than max_bytes = 287"):
        to_additive_mask(worked(), max_bytes=287)
    assert to_additive_mask(worked(), max_bytes=288).shape == (2, 1, 6, 6)
    with pytest.raises(MetadataError, match="max_bytes = 71"):
        to_mask_dict(worked(), 2, max_bytes=143)


def test_bad_windows_and_dtypes_are_refused():
    with pytest.raises(MetadataError, match="window is 0"):
        to_dense_mask(worked(), window=0)
    with pytest.raises(MetadataError, match="must be floating"):
        to_additive_mask(worked(), dtype=torch.int32)


@pytest.mark.parametrize("doc_ids", EMPTY, ids=lambda doc_ids: str(tuple(doc_ids.shape)))
def test_an_empty_batch_has_an_empty_mask(doc_ids):
    batch, length = doc_ids.shape
    assert to_dense_mask(params_of(doc_ids), window=1).shape == (batch, 1, length, length)


def test_the_twin_differs_from_the_packing():
    assert merged([[1, 1, 2, 0]]).tolist() == [[1, 1, 1, 0]]
