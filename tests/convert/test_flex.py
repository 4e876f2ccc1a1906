"""Block masks equal to `create_block_mask`'s, and what FlexAttention makes of them."""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packings import EMPTY, assert_isolated, doc_maps, flat_pairs, flatten_rows, merged, packings, params_of, worked
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

from neatpack.convert.dense import to_dense_mask
from neatpack.convert.flex import to_block_mask, to_mask_mod
from neatpack.convert.segments import flatten_params
from neatpack.errors import MetadataError
from neatpack.testing import random_doc_ids

COUNTS_AND_INDICES = [
    ("kv_num_blocks", "kv_indices"),
    ("full_kv_num_blocks", "full_kv_indices"),
    ("q_num_blocks", "q_indices"),
    ("full_q_num_blocks", "full_q_indices"),
]


def valid(block_mask, counts, indices):
    """The indices that count, line by line; the rest is junk."""
    numbers = getattr(block_mask, counts)
    assert numbers.dtype == torch.int32
    lines = getattr(block_mask, indices).flatten(0, -2)
    return [line[:count].tolist() for line, count in zip(lines, numbers.reshape(-1).tolist(), strict=True)]


def assert_equal(ours, theirs):
    assert ours.shape == theirs.shape
    assert ours.BLOCK_SIZE == theirs.BLOCK_SIZE
    for counts, indices in COUNTS_AND_INDICES:
        assert getattr(ours, counts).shape == getattr(theirs, counts).shape
        assert valid(ours, counts, indices) == valid(theirs, counts, indices), counts


def both(doc_ids, block_size, window=None, pad_self=False):
    params = params_of(doc_ids)
    batch, length = doc_ids.shape
    mask_mod = to_mask_mod(params, window=window, pad_self=pad_self)
    ours = to_block_mask(params, block_size=block_size, window=window, pad_self=pad_self)
    return ours, create_block_mask(mask_mod, batch, None, length, length, device="cpu", BLOCK_SIZE=block_size)


def test_worked_example_in_blocks_of_two():
    block_mask = to_block_mask(worked(), block_size=2)
    assert block_mask.shape == (2, 1, 6, 6)
    assert block_mask.kv_num_blocks.tolist() == [[[1, 1, 2]], [[1, 2, 2]]]
    assert valid(block_mask, "kv_num_blocks", "kv_indices")[:3] == [[0], [1], [1, 2]]
    assert block_mask.full_kv_num_blocks.sum() == 0
    assert block_mask.sparsity() == 50.0


def test_worked_example_flattened_in_blocks_of_four():
    block_mask = to_block_mask(flatten_params(worked()), block_size=4)
    assert block_mask.kv_num_blocks.tolist() == [[[1, 2, 2]]]


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 16, (2, 4), (4, 2), (1, 3), (8, 1), (3, 5)], ids=str)
@pytest.mark.parametrize("window", [None, 1, 2, 5])
def test_block_mask_equals_create_block_mask_on_every_packing(block_size, window):
    for doc_ids in packings():
        assert_equal(*both(doc_ids, block_size, window))


@given(
    doc_maps(max_length=40),
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.one_of(st.none(), st.integers(1, 12)),
    st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_block_mask_equals_create_block_mask_on_any_map(doc_ids, block_size, window, pad_self):
    assert_equal(*both(doc_ids, block_size, window, pad_self))


@pytest.mark.parametrize(("length", "window"), [(1024, None), (1000, None), (1000, 300), (1024, 256)])
def test_block_mask_equals_create_block_mask_at_the_default_block_size(length, window):
    doc_ids = torch.from_numpy(random_doc_ids(np.random.default_rng(length), 2, length))
    doc_ids[1] = 1  # one long document: full blocks below the diagonal
    ours, theirs = both(doc_ids, 128, window)
    assert_equal(ours, theirs)
    assert ours.full_kv_num_blocks.sum() > 0


def test_a_dropped_boundary_changes_the_block_mask():
    """The equality above is not vacuous: without a boundary blocks appear."""
    ours = to_block_mask(worked(), block_size=1).to_dense()
    twin = to_block_mask(params_of(merged(worked().doc_ids)), block_size=1).to_dense()
    assert (twin - ours).nonzero()[:, 2:].tolist() == [[2, 0], [2, 1], [3, 0], [3, 1], [4, 0], [4, 1]]


def decode(params, window=None, pad_self=False):
    batch, length = params.doc_ids.shape
    mask_mod = to_mask_mod(params, window=window, pad_self=pad_self)
    return flatten_rows(create_mask(mask_mod, batch, 1, length, length, device="cpu")[:, 0])


@pytest.mark.parametrize("window", [None, 1, 3])
def test_mask_mod_is_the_oracle_and_a_dropped_boundary_is_noticed(window):
    assert_isolated(lambda params: decode(params, window), window=window)
    for doc_ids in packings():
        assert (decode(params_of(doc_ids), window, pad_self=True) == flat_pairs(doc_ids, window=window, pad_self=True)).all()


def test_blocks_cover_every_allowed_pair_and_full_ones_hold_no_other():
    for doc_ids in packings():
        length = doc_ids.shape[1]
        for block in (1, 2, 4):
            block_mask = to_block_mask(params_of(doc_ids), block_size=block)
            allowed = to_dense_mask(params_of(doc_ids), pad_self=False)
            touched = block_mask.to_dense().bool().repeat_interleave(block, -1).repeat_interleave(block, -2)
            assert not (allowed & ~touched[..., :length, :length]).any()
            for line, blocks in enumerate(valid(block_mask, "full_kv_num_blocks", "full_kv_indices")):
                row, q_block = divmod(line, -(-length // block))
                for kv_block in blocks:
                    tile = allowed[row, 0, q_block * block : (q_block + 1) * block, kv_block * block : (kv_block + 1) * block]
                    assert tile.shape == (block, block)
                    assert tile.all()


@pytest.mark.parametrize("window", [None, 40])
def test_flex_attention_equals_sdpa_on_real_tokens(window):
    doc_ids = torch.from_numpy(random_doc_ids(np.random.default_rng(3), 2, 200))
    params = params_of(doc_ids)
    q, k, v = torch.randn(3, 2, 2, 200, 16).unbind(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*without torch.compile", category=UserWarning)  # said once a process
        flex = flex_attention(q, k, v, block_mask=to_block_mask(params, window=window))
    sdpa = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=to_dense_mask(params, window=window))
    rows = (doc_ids != 0)[:, None, :, None]
    torch.testing.assert_close(flex * rows, sdpa * rows)
    assert (flex * ~rows).abs().max() == 0


@pytest.mark.parametrize("doc_ids", EMPTY, ids=lambda doc_ids: str(tuple(doc_ids.shape)))
def test_an_empty_batch_is_refused(doc_ids):
    with pytest.raises(MetadataError, match="not empty"):
        to_block_mask(params_of(doc_ids))


@pytest.mark.parametrize(("options", "message"), [({"block_size": 0}, "blocks of at least 1"), ({"window": 0}, "window is 0")])
def test_bad_options_are_refused(options, message):
    with pytest.raises(MetadataError, match=message):
        to_block_mask(worked(), **options)
