"""Context parallelism: local and global offsets, padded and real ones, divisibility, and equal lengths over ranks."""

import numpy as np
import pytest
import torch
from fault_cases import params_of, refuses, row_of, runs

from neatpack.convert import align_documents, doc_ids_from_cu_seqlens, doc_ids_from_position_ids, slots, to_te
from neatpack.packed_seq import packed_seq_params_from_doc_ids
from neatpack.train import PackedCollator
from neatpack.train.context_parallel import (
    padding_to,
    shard_params,
    thd_offsets,
    thd_position_ids,
    zigzag_ring_offsets,
)

KIND = "context parallel"


def params_of_slots(offsets, lengths=None):
    return packed_seq_params_from_doc_ids(doc_ids_from_cu_seqlens(offsets, real_lengths=lengths))


@runs(KIND, "local_offsets")
def test_local_offsets_start_at_0_on_every_rank(case):
    shard = shard_params(params_of(case.input["lengths"]), case.input["cp_size"], case.input["rank"], scheme="contiguous")
    assert shard.local_cu_seqlens().tolist() == case.expected["cu_seqlens"]
    doc_ids = doc_ids_from_position_ids(torch.tensor(case.input["local_position_ids"]))
    assert packed_seq_params_from_doc_ids(doc_ids).cu_seqlens.tolist() == case.expected["cu_seqlens"]


@runs(KIND, "runtime_alignment")
def test_rows_run_at_the_length_that_was_aligned(case):
    multiple = case.input["multiple"]
    assert [padding_to(length, multiple) for length in case.input["lengths"]] == case.expected["padding"]
    for length, padded in zip(case.input["lengths"], case.expected["padded"], strict=True):
        batch = PackedCollator(pad_to_multiple_of=multiple, return_shift_labels=True)([row_of([length])])
        for name in ("input_ids", "labels", "position_ids", "shift_labels"):
            assert batch[name].shape == (1, padded), name


@runs(KIND, "thd")
def test_real_and_padded_offsets_differ_in_the_tail_too(case):
    params = params_of_slots(case.input["slots"], case.input["lengths"])
    cp_size = case.input.get("cp_size", 1)
    given = thd_offsets(params, cp_size, causal=False)
    theirs = to_te(params, offsets="real")
    for real, padded, between in [
        (given.cu_seqlens, given.cu_seqlens_padded, given.pad_between_seqs),
        (theirs["cu_seqlens_q"], theirs["cu_seqlens_q_padded"], theirs["pad_between_seqs"]),
    ]:
        assert real.tolist() == case.expected["cu_seqlens"]
        assert padded.tolist() == case.expected["cu_seqlens_padded"]
        assert between is case.expected["pad_between_seqs"]
    assert int(given.cu_seqlens_padded[-1]) == params.doc_ids.numel()


@runs(KIND, "aligned_slots")
def test_aligned_slots_are_one_tensor_on_both_sides(case):
    layout = align_documents(params_of(case.input["lengths"]), case.input["multiple"])
    assert layout.params.doc_ids.numel() == case.expected["tokens"]
    real = to_te(layout.params, offsets="real")
    assert real["cu_seqlens_q"].tolist() == case.expected["cu_seqlens"]
    assert real["cu_seqlens_q_padded"].tolist() == case.expected["cu_seqlens_padded"]
    default = to_te(layout.params)  # kernels that fail where the two differ get them equal
    assert default["cu_seqlens_q"] is default["cu_seqlens_q_padded"]
    assert default["pad_between_seqs"] is False


@runs(KIND, "rotary_positions")
def test_rotary_positions_follow_the_padded_slots(case):
    layout = align_documents(params_of(case.input["lengths"]), case.input["multiple"])
    assert slots(layout.params).cu_seqlens.tolist() == case.expected["cu_seqlens_padded"]
    assert thd_position_ids(layout.params)[0].tolist() == case.expected["position_ids"]


@runs(KIND, "padded_always_present")
def test_padded_offsets_are_there_when_nothing_was_padded(case):
    params = params_of(case.input["lengths"])
    for causal in (True, False):
        given = thd_offsets(params, case.input["cp_size"], causal=causal)
        assert given.cu_seqlens.tolist() == case.expected["cu_seqlens"]
        assert given.cu_seqlens_padded.tolist() == case.expected["cu_seqlens_padded"]
        assert given.pad_between_seqs is False


@runs(KIND, "balanced_chunks")
def test_balanced_chunks_are_cut_within_each_document(case):
    params, cp_size = params_of(case.input["lengths"]), case.input["cp_size"]
    shards = [shard_params(params, cp_size, rank, scheme="per_document_zigzag") for rank in range(cp_size)]
    assert [shard.indices.tolist() for shard in shards] == case.expected["indices"]
    assert [shard.attended_pairs() for shard in shards] == case.expected["work"]
    contiguous = [shard_params(params, cp_size, rank, scheme="contiguous").attended_pairs() for rank in range(cp_size)]
    assert contiguous == case.expected["contiguous_work"]


@runs(KIND, "padding_to")
def test_padding_is_what_lacks_and_not_what_is_left(case):
    assert [padding_to(length, case.input["multiple"]) for length in case.input["lengths"]] == case.expected["padding"]


@runs(KIND, "padded_batch")
def test_everything_a_token_is_padded_alike(case):
    batch = PackedCollator(pad_to_multiple_of=case.input["multiple"])([row_of(case.input["lengths"])])
    per_token = [batch[name].shape[1] for name in ("input_ids", "labels", "position_ids")]
    assert per_token == [case.expected["length"]] * 3
    assert int(batch["cu_seq_lens_q"][-1]) == case.expected["length"]


@runs(KIND, "ranks_agree")
def test_ranks_pad_to_one_length(case):
    rows = [row_of([tokens]) for tokens in case.input["rank_tokens"]]
    by_multiple = [PackedCollator(pad_to_multiple_of=case.input["multiple"])([row])["input_ids"].shape[1] for row in rows]
    assert by_multiple == [case.expected["length"]] * len(rows)
    far_apart = [*rows, row_of([3])]  # a multiple alone does not make these equal, a row length does
    fixed = [PackedCollator(row_length=case.expected["length"])([row])["input_ids"].shape[1] for row in far_apart]
    assert set(fixed) == {case.expected["length"]}


@runs(KIND, "halved_offsets")
def test_offsets_are_divided_only_where_they_divide(case):
    local, longest = zigzag_ring_offsets(params_of_slots(case.input["slots"]), case.input["cp_size"])
    assert local.tolist() == case.expected["cu_seqlens"]
    assert longest == int(np.diff(case.expected["cu_seqlens"]).max())
    with refuses(case.expected):
        zigzag_ring_offsets(params_of_slots(case.input["uneven"]), case.input["cp_size"])
    with pytest.raises(ValueError, match=r"plan_rows\(..., align=4\)"):
        thd_offsets(params_of_slots(case.input["uneven"]), case.input["cp_size"])
