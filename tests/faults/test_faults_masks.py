"""Masks: what a query may see, from numbered masks, windows, blocks and pads."""

import numpy as np
import pytest
import torch
from fault_cases import params_of, params_of_map, runs

from neatpack.convert import (
    doc_ids_from_indexed_mask,
    first_keys,
    to_block_mask,
    to_dense_mask,
    to_mask_mod,
    unpad_params,
)
from neatpack.errors import MetadataError
from neatpack.packed_seq import packed_seq_params_from_doc_ids

KIND = "masks"


@runs(KIND, "indexed_mask")
def test_a_numbered_mask_gives_lengths_and_not_sums(case):
    doc_ids = doc_ids_from_indexed_mask(torch.tensor(case.input["mask"]))
    indices, real = unpad_params(packed_seq_params_from_doc_ids(doc_ids))
    assert indices.tolist() == case.expected["indices"]
    assert real.cu_seqlens.tolist() == case.expected["cu_seqlens"]
    assert real.max_seqlen == case.expected["max_seqlen"]


@runs(KIND, "rule_differs_by_row")
def test_the_rule_is_that_of_its_own_row(case):
    params = params_of_map(case.input["doc_ids"])
    rule = to_mask_mod(params)
    for row in (0, 1):
        allowed = rule(torch.tensor(row), torch.tensor(0), torch.tensor(1), torch.tensor(0))
        assert bool(allowed) is case.expected[f"row{row}_query1_key0"]
    assert to_block_mask(params, block_size=2).shape[0] == case.expected["batch"]
    with pytest.raises(MetadataError, match=r"no document at all.*separator"):
        doc_ids_from_indexed_mask(torch.zeros(2, 4, dtype=torch.int64))


@runs(KIND, "block_mask_shape")
def test_a_block_mask_is_as_long_as_its_row(case):
    assert list(to_block_mask(params_of(case.input["lengths"])).shape) == case.expected["shape"]


@runs(KIND, "window_keys")
def test_a_window_stays_in_its_document(case):
    params, window = params_of(case.input["lengths"]), case.input["window"]
    dense = to_dense_mask(params, window=window)[0, 0]
    first = first_keys(params, window=window)[0]
    for query, keys in case.expected["keys"].items():
        assert dense[int(query)].nonzero().flatten().tolist() == keys
        assert list(range(int(first[int(query)]), int(query) + 1)) == keys


@runs(KIND, "pads_see_themselves")
def test_a_pad_sees_itself_and_nothing_else(case):
    mask = to_dense_mask(params_of(case.input["lengths"], case.input["row_length"]))
    assert mask[0, 0].int().tolist() == case.expected["mask"]


@runs(KIND, "block_counts")
def test_blocks_come_from_the_offsets(case):
    mask = to_block_mask(params_of(case.input["lengths"]), block_size=case.input["block"])
    partial, full = int(mask.kv_num_blocks.sum()), int(np.asarray(mask.full_kv_num_blocks).sum())
    assert {"blocks": partial + full, "full": full, "partial": partial} == case.expected
