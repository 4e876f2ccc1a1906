"""Positions on several axes (mRoPE): what they can say of boundaries, and how they are cut, packed and padded."""

import pytest
import torch
from fault_cases import params_of, refuses, row_of, runs
from torch.testing._internal.distributed.fake_pg import FakeStore

from neatpack.convert import doc_ids_from_position_ids
from neatpack.packed_seq import packed_seq_params_from_doc_ids
from neatpack.train import PackedCollator, repack_documents, unpack_documents
from neatpack.train.context_parallel import pad_batch, shard_batch

KIND = "multimodal positions"


@runs(KIND, "not_a_ramp")
@pytest.mark.parametrize("axis", ["temporal", "width"])
def test_positions_of_image_tokens_are_no_boundaries(case, axis):
    positions = torch.tensor([case.input[axis]])
    with refuses(case.expected):
        doc_ids_from_position_ids(positions)
    with refuses(case.expected):
        doc_ids_from_position_ids(positions, torch.ones_like(positions))
    assert params_of([positions.shape[1]]).cu_seqlens.tolist() == case.expected["cu_seqlens"]


@runs(KIND, "equal_axes")
def test_axes_that_agree_are_text_and_count_once(case):
    positions = torch.tensor(case.input["position_ids"])
    doc_ids = doc_ids_from_position_ids(positions)
    assert packed_seq_params_from_doc_ids(doc_ids).cu_seqlens.tolist() == case.expected["cu_seqlens"]
    one_axis = doc_ids_from_position_ids(positions[0, 0])
    assert packed_seq_params_from_doc_ids(one_axis).cu_seqlens.tolist() == case.expected["cu_seqlens"]


@runs(KIND, "sharded_axes")
def test_axes_are_cut_along_the_tokens(case):
    axes, batch_size, length = case.input["shape"]
    rows = [row_of([length]), row_of([2, length - 2])]
    batch = PackedCollator()(rows[:batch_size])
    positions = torch.arange(axes * batch_size * length).reshape(axes, batch_size, length)
    batch["position_ids"] = positions.transpose(0, 1).contiguous().transpose(0, 1)  # strided, as a slice is
    cp_size, rank = case.input["cp_size"], case.input["rank"]
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=cp_size)  # cutting sends nothing
    try:
        local = shard_batch(batch, torch.distributed.group.WORLD, scheme="contiguous", check_equal=False)["position_ids"]
    finally:
        torch.distributed.destroy_process_group()
    share = axes, cp_size, -1
    assert local.tolist() == positions.reshape(share)[:, rank : rank + 1].tolist()
    assert list(local.shape) == case.expected["shape"]
    assert local.is_contiguous() is case.expected["contiguous"]
    padded = pad_batch(batch, 4)["position_ids"]
    assert padded.shape == (axes, batch_size, 8)
    assert padded[..., :length].tolist() == positions.tolist()


@runs(KIND, "packed_axes")
def test_positions_on_axes_are_packed_by_document_or_refused(case):
    lengths, row_length = case.input["lengths"], case.input["row_length"]
    per_document = [torch.arange(3 * length).reshape(3, length) for length in lengths]
    with refuses(case.expected):
        PackedCollator()([{**row_of(lengths), "position_ids": [part.tolist() for part in per_document]}])
    packed = repack_documents([part.T for part in per_document], params_of(lengths, row_length))[0].T
    assert list(packed.shape) == case.expected["shape"]
    assert packed[:, : lengths[0]].tolist() == per_document[0].tolist()
    assert packed[:, lengths[0] : sum(lengths)].tolist() == per_document[1].tolist()


@runs(KIND, "axes_per_document")
def test_a_models_own_positions_are_made_document_by_document(case):
    calls = []

    def rope_index(ids):
        calls.append(ids.tolist())
        return torch.arange(len(ids)).expand(3, -1)

    params = params_of(case.input["lengths"])
    tokens = torch.arange(params.doc_ids.numel())[None]
    positions = repack_documents([rope_index(part).T for part in unpack_documents(tokens, params)], params)[0].T
    assert list(positions.shape) == case.expected["shape"]
    assert len(calls) == case.expected["calls"]
    assert positions[0].tolist() == [0, 1, 2, 3, 0, 1, 2]
