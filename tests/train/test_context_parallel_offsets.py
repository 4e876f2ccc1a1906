"""Shards and their boundaries: equal to what the kernels' own preparation gives, and to the definition."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from neatpack.convert.doc_map import doc_ids_from_seq_lengths, position_ids_from_doc_ids
from neatpack.convert.segments import segment_index
from neatpack.errors import MetadataError
from neatpack.packed_seq import packed_seq_params_from_doc_ids
from neatpack.testing import WORKED_EXAMPLE, allowed_pairs, random_doc_ids
from neatpack.train.context_parallel import (
    llama3_offsets,
    recurrent_context,
    shard_params,
    thd_offsets,
    thd_position_ids,
    zigzag_ring_offsets,
)


def params_of(doc_ids):
    return packed_seq_params_from_doc_ids(torch.as_tensor(np.asarray(doc_ids)))


def one_row(*lengths):
    return packed_seq_params_from_doc_ids(doc_ids_from_seq_lengths([list(lengths)]))


def in_slots(lengths, align):
    """One row in which every document is followed by the padding that aligns it."""
    row = []
    for number, length in enumerate(lengths, 1):
        row += [number] * length + [0] * (-length % align)
    return params_of([row])


def test_llama3_offsets_of_the_worked_example_over_two_ranks():
    params = params_of(WORKED_EXAMPLE)
    first, second = (llama3_offsets(shard_params(params, 2, rank, scheme="contiguous")) for rank in range(2))
    assert first.cu_seqlens_q.tolist() == first.cu_seqlens_k.tolist() == [0, 2, 5, 6]
    assert second.cu_seqlens_q.tolist() == second.cu_seqlens_k.tolist() == [0, 1, 3, 6]
    assert (first.key_slice, second.key_slice) == (slice(0, 6), slice(6, 12))
    assert first.cu_seqlens_q.dtype == first.cu_seqlens_k.dtype == torch.int32


def test_llama3_offsets_reach_back_for_documents_that_straddle_ranks():
    params = params_of(WORKED_EXAMPLE)
    _, middle, last = (llama3_offsets(shard_params(params, 3, rank, scheme="contiguous")) for rank in range(3))
    assert (middle.cu_seqlens_q.tolist(), middle.cu_seqlens_k.tolist()) == ([0, 1, 2, 3, 4], [0, 3, 4, 5, 6])
    assert (middle.max_seqlen_q, middle.max_seqlen_k, middle.key_slice) == (1, 3, slice(2, 8))
    assert (last.cu_seqlens_q.tolist(), last.cu_seqlens_k.tolist()) == ([0, 1, 4], [0, 2, 5])
    assert last.key_slice == slice(7, 12)


def test_recurrent_context_of_the_worked_example_over_four_ranks():
    params = params_of(WORKED_EXAMPLE)
    contexts = [recurrent_context(shard_params(params, 4, rank, scheme="contiguous")) for rank in range(4)]
    assert [context.cu_seqlens.tolist() for context in contexts] == [[0, 2, 3], [0, 2, 3], [0, 1, 3], [0, 3]]
    assert [context.pre_num_ranks for context in contexts] == [0, 1, 0, 0]
    assert [context.pre_num_conv_tokens for context in contexts] == [0, 1, 0, 0]
    assert [context.post_num_ranks for context in contexts] == [1, 0, 0, 0]
    assert [context.is_first_rank for context in contexts] == [True, False, True, True]
    assert [context.is_last_rank for context in contexts] == [False, True, True, True]


def test_a_document_over_many_ranks_counts_them_all():
    context = recurrent_context(shard_params(one_row(8), 4, 2, scheme="contiguous"))
    assert (context.pre_num_ranks, context.post_num_ranks, context.pre_num_conv_tokens) == (2, 1, 4)


def test_local_offsets_start_at_zero_on_every_rank():  # F-075
    shard = shard_params(one_row(6, 2), 2, 1, scheme="contiguous")
    assert shard.local_cu_seqlens().tolist() == [0, 2, 4]
    assert position_ids_from_doc_ids(one_row(6, 2).doc_ids).flatten()[shard.indices].tolist() == [4, 5, 0, 1]


def test_a_shard_keeps_the_offsets_from_before_sharding():  # F-021
    params = one_row(3, 5)
    shard = shard_params(params, 2, 1, scheme="contiguous")
    assert shard.cu_seqlens.tolist() == [0, 3, 8]
    assert segment_index(params, flat=True).tolist() == [[0, 0, 0, 1, 1, 1, 1, 1]]


def test_thd_offsets_of_the_worked_example_in_slots_of_four():
    params = in_slots([2, 3, 1, 2, 3], 4)
    causal, both = thd_offsets(params, 2), thd_offsets(params, 2, causal=False)
    assert causal.cu_seqlens is causal.cu_seqlens_padded
    assert (causal.cu_seqlens.tolist(), causal.max_seqlen, causal.pad_between_seqs) == ([0, 4, 8, 12, 16, 20], 4, False)
    assert (both.cu_seqlens.tolist(), both.pad_between_seqs) == ([0, 2, 5, 6, 8, 11], True)
    assert both.cu_seqlens_padded.tolist() == [0, 4, 8, 12, 16, 20]
    shard = shard_params(params, 2, 0, scheme="per_document_zigzag")
    assert shard.indices.tolist() == [0, 3, 4, 7, 8, 11, 12, 15, 16, 19]


def test_padding_in_the_last_slot_alone_is_padding_between_sequences():  # F-126
    offsets = thd_offsets(in_slots([8, 5], 4), 2, causal=False)
    assert (offsets.cu_seqlens.tolist(), offsets.cu_seqlens_padded.tolist()) == ([0, 8, 13], [0, 8, 16])
    assert offsets.pad_between_seqs


def test_real_and_slot_offsets_are_two_arrays():  # F-129
    offsets = thd_offsets(params_of([[1, 1, 0, 2, 2, 2, 0, 0, 3, 0, 0, 0]]), 1, causal=False)
    assert (offsets.cu_seqlens.tolist(), offsets.cu_seqlens_padded.tolist()) == ([0, 2, 5, 6], [0, 3, 8, 12])


def test_rotary_positions_follow_the_slots():  # F-132
    params = in_slots([3, 5], 4)
    assert thd_offsets(params, 2).cu_seqlens_padded.tolist() == [0, 4, 12]
    assert thd_position_ids(params).tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7]]
    real = params.doc_ids != 0
    assert torch.equal(thd_position_ids(params)[real], position_ids_from_doc_ids(params.doc_ids)[real])


def test_slot_offsets_are_given_when_nothing_needed_padding():  # F-134
    offsets = thd_offsets(in_slots([4, 8], 4), 2, causal=False)
    assert offsets.cu_seqlens.tolist() == offsets.cu_seqlens_padded.tolist() == [0, 4, 12]
    assert not offsets.pad_between_seqs


def test_the_token_count_is_compared_with_the_slots():  # F-137
    offsets = thd_offsets(params_of([[1, 1, 1, 0, 2, 2, 0, 0]]), 1, causal=False)
    assert (offsets.cu_seqlens.tolist(), offsets.cu_seqlens_padded.tolist()) == ([0, 3, 5], [0, 4, 8])


def test_per_document_zigzag_evens_out_the_work():  # F-139
    params = one_row(4, 8)
    zigzag = [shard_params(params, 2, rank, scheme="per_document_zigzag") for rank in range(2)]
    assert [shard.indices.tolist() for shard in zigzag] == [[0, 3, 4, 5, 10, 11], [1, 2, 6, 7, 8, 9]]
    assert [shard.attended_pairs() for shard in zigzag] == [23, 23]
    assert [shard_params(params, 2, rank, scheme="contiguous").attended_pairs() for rank in range(2)] == [13, 33]


def test_ring_offsets_are_the_slots_divided_by_the_ranks():  # F-144
    local, longest = zigzag_ring_offsets(one_row(8, 4), 2)
    assert (local.tolist(), local.dtype, longest) == ([0, 4, 6], torch.int32, 4)
    with pytest.raises(MetadataError, match=r"slot 0 \(.*has 7 tokens.*2 \* 2 zigzag chunks.*align=4"):
        zigzag_ring_offsets(one_row(7, 5), 2)
    with pytest.raises(MetadataError, match="has 7 tokens"):
        thd_offsets(one_row(7, 5), 2)


def test_offsets_of_one_stretch_are_refused_for_zigzag_shards():
    shard = shard_params(one_row(8), 2, 0, scheme="zigzag")
    for convert in (llama3_offsets, recurrent_context):
        with pytest.raises(MetadataError, match="contiguous shard, got scheme 'zigzag'"):
            convert(shard)


def test_pieces_and_their_key_ranges_are_the_definition():
    rng = np.random.default_rng(1)
    for _ in range(60):
        doc_ids = random_doc_ids(rng, 2, 16)
        window = int(rng.integers(1, 6)) if rng.random() < 0.5 else None
        scheme = str(rng.choice(["contiguous", "zigzag"]))
        allowed = np.zeros((32, 32), bool)
        for row, seen in enumerate(allowed_pairs(doc_ids, window=window)):
            allowed[row * 16 : row * 16 + 16, row * 16 : row * 16 + 16] = seen
        real = doc_ids.flatten() != 0
        work = 0
        for rank in range(4):
            shard = shard_params(params_of(doc_ids), 4, rank, scheme=scheme)
            pieces = shard.pieces()
            first, last = pieces.key_ranges(window)
            seen = np.zeros_like(allowed)
            for start, end, key, past in zip(pieces.start, pieces.end, first, last, strict=True):
                for query in range(start, end):
                    for other in range(key, past):
                        seen[query, other] = other <= query and (window is None or query - other < window)
            held = shard.indices.numpy()
            assert np.array_equal(seen[held][real[held]], allowed[held][real[held]])
            assert shard.attended_pairs(window) == seen.sum()
            work += shard.attended_pairs(window)
        assert work >= allowed.sum()


@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 3), (False, None), (False, 3)])
def test_the_ranks_work_adds_up_to_one_process_work(causal, window):
    params = one_row(5, 16, 11)
    whole = shard_params(params, 1, 0, scheme="contiguous").attended_pairs(window, causal)
    for scheme in ("contiguous", "zigzag"):
        shares = [shard_params(params, 4, rank, scheme=scheme).attended_pairs(window, causal) for rank in range(4)]
        assert sum(shares) == whole


def test_offsets_of_another_batch_are_refused():
    params = params_of(WORKED_EXAMPLE)
    with pytest.raises(MetadataError, match=r"cu_seqlens must increase from 0 to B\*S = 12, got \[0, 2, 5, 6\]"):
        shard_params(replace(params, cu_seqlens=params.cu_seqlens[:4]), 2, 0, scheme="contiguous")
    with pytest.raises(MetadataError, match="scheme 'spiral' is unknown"):
        shard_params(one_row(8), 2, 0, scheme="spiral")


def test_an_empty_batch_has_empty_shards():
    shard = shard_params(params_of(np.zeros((0, 8), np.int64)), 2, 0, scheme="contiguous")
    assert (shard.indices.tolist(), shard.local_cu_seqlens().tolist(), shard.attended_pairs()) == ([], [0], 0)
    assert llama3_offsets(shard).key_slice == slice(0, 0)
