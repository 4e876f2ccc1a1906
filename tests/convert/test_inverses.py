"""Every conversion says the boundaries it was given: on generated maps, what comes out leads back to the map."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packings import doc_maps, params_of, renumbered

from neatpack.convert import (
    doc_ids_from_cu_seqlens,
    doc_ids_from_eos,
    doc_ids_from_indexed_mask,
    doc_ids_from_seq_lengths,
    document_numbers,
    flatten_params,
    from_nested,
    pad,
    segment_documents,
    segment_lengths,
    to_attention_mask_in_length,
    to_fa3,
    to_fla,
    to_flashinfer,
    to_hf_kwargs,
    to_jagged,
    to_magi,
    to_mamba2,
    to_megatron_fields,
    to_nested,
    to_olmo,
    to_segment_ids,
    to_seq_idx,
    to_te,
    to_torchtitan,
    to_varlen,
    to_xformers_lengths,
    unpad,
    unpad_params,
)
from neatpack.errors import MetadataError
from neatpack.train import document_spans, pad_documents, repack_documents, shift_within_documents, unpack_documents
from neatpack.train.context_parallel import inverse_indices, shard_params, shard_tensor

any_map = settings(max_examples=60, deadline=None)


def back_from_offsets(offsets, doc_ids, **options):
    """The map that form A offsets lead back to, padding named as the map has it."""
    padding = (segment_documents(params_of(doc_ids)) == 0).nonzero().flatten().tolist()
    return doc_ids_from_cu_seqlens(offsets, doc_ids.shape[1], padding_segments=padding, **options)


OFFSETS = {
    "to_fla": lambda params: to_fla(params, include_cpu=True)["cu_seqlens_cpu"],
    "to_flashinfer": lambda params: to_flashinfer(params)["kv_indptr"],
    "to_hf_kwargs": lambda params: to_hf_kwargs(params)["cu_seq_lens_k"],
    "to_torchtitan": lambda params: to_torchtitan(params)["cu_seq_k"],
    "to_varlen": lambda params: to_varlen(params, pad_segments_to=len(params.cu_seqlens) + 3)["cu_seq_q"],
    "to_jagged": lambda params: to_jagged(params)["offsets"],
    "to_xformers_lengths": lambda params: np.cumsum([0, *to_xformers_lengths(params)]),
    "to_magi": lambda params: np.r_[0, to_magi(params)["k_ranges"][:, 1]],
    "flatten_params": lambda params: flatten_params(params).cu_seqlens,
}


@pytest.mark.parametrize("name", OFFSETS)
@given(doc_maps())
@any_map
def test_offsets_lead_back_to_the_map(name, doc_ids):
    back = back_from_offsets(OFFSETS[name](params_of(doc_ids)), doc_ids)
    np.testing.assert_array_equal(back, renumbered(doc_ids))


@given(doc_maps())
@any_map
def test_slots_and_real_lengths_lead_back_to_the_map(doc_ids):
    params = params_of(doc_ids)
    arguments = to_fa3(params, form="C", pad_segments_to=doc_ids.numel())
    slots = int(arguments["cu_seqlens_q"].diff().gt(0).sum())
    lengths = arguments["seqused_q"][:slots]
    back = doc_ids_from_cu_seqlens(arguments["cu_seqlens_q"], doc_ids.shape[1], real_lengths=lengths)
    np.testing.assert_array_equal(back, renumbered(doc_ids))
    for theirs in (to_te(params, offsets="real"), to_megatron_fields(params, offsets="real")):
        lengths = theirs["cu_seqlens_kv"].diff()
        back = doc_ids_from_cu_seqlens(theirs["cu_seqlens_kv_padded"], doc_ids.shape[1], real_lengths=lengths)
        np.testing.assert_array_equal(back, renumbered(doc_ids))
        assert theirs["pad_between_seqs"] is bool((doc_ids == 0).any())


@given(doc_maps())
@any_map
def test_sequence_numbers_change_exactly_at_the_boundaries(doc_ids):
    params = params_of(doc_ids)
    starts = params.cu_seqlens[:-1].tolist()
    for numbers in (to_seq_idx(params, flat=True), to_mamba2(params, flat=True)["seq_idx"]):
        flat = numbers[0].tolist()
        assert [at for at, number in enumerate(flat) if at == 0 or number != flat[at - 1]] == starts
        assert sorted(set(flat)) == list(range(len(starts)))
    by_row, marked = to_seq_idx(params), to_seq_idx(params, pad=-1)
    assert not by_row[:, 0].any()
    assert torch.equal(marked == -1, doc_ids == 0)
    assert torch.equal(torch.where(doc_ids == 0, by_row, marked), by_row)


@given(doc_maps())
@any_map
def test_lengths_by_row_lead_back_to_the_map(doc_ids):
    params = params_of(doc_ids)
    theirs = to_olmo(params)
    lengths = [[length for length in row if length] for row in theirs["doc_lens"].tolist()]
    np.testing.assert_array_equal(np.cumsum([0, *np.concatenate(lengths)]), params.cu_seqlens)
    assert theirs["max_doc_lens"] == [max(row) for row in lengths]
    early = any(any(a == 0 != b for a, b in itertools.pairwise(row)) for row in doc_ids.tolist())
    if early:
        with pytest.raises(MetadataError, match="padding before a document"):
            to_attention_mask_in_length(params)
        return
    documents = [[length for length in row if length] for row in to_attention_mask_in_length(params).tolist()]
    np.testing.assert_array_equal(doc_ids_from_seq_lengths(documents, doc_ids.shape[1]), renumbered(doc_ids))


@given(doc_maps())
@any_map
def test_numbered_masks_lead_back_to_the_map(doc_ids):
    params = params_of(doc_ids)
    for mask in (document_numbers(params), torch.from_numpy(to_segment_ids(params))):
        if mask.max() == 0:
            with pytest.raises(MetadataError, match="no document at all"):
                doc_ids_from_indexed_mask(mask)
        else:
            back = doc_ids_from_indexed_mask(mask, single_document=bool(mask.max() == 1))
            np.testing.assert_array_equal(back, renumbered(doc_ids))


@given(st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=5), min_size=1, max_size=3))
@any_map
def test_documents_that_end_in_eos_lead_back_to_the_map(rows):
    doc_ids = doc_ids_from_seq_lengths(rows)
    mask = doc_ids != 0
    tokens = torch.where(mask, 5, 0)
    last = torch.nn.functional.pad(doc_ids, (0, 1))[:, 1:] != doc_ids
    tokens[mask & last] = 9
    np.testing.assert_array_equal(doc_ids_from_eos(tokens, 9, attention_mask=mask), doc_ids)
    if all(min(row) > 1 for row in rows):  # no two side by side
        np.testing.assert_array_equal(doc_ids_from_eos(tokens, [9, 8], pad_token_id=0), doc_ids)


@given(doc_maps())
@any_map
def test_values_come_back_from_every_layout(doc_ids):
    params, (batch, length) = params_of(doc_ids), doc_ids.shape
    values = torch.arange(1.0, 1 + doc_ids.numel() * 2).reshape(batch, length, 2)
    real = values * (doc_ids != 0)[..., None]
    indices, unpadded = unpad_params(params)
    assert torch.equal(pad(unpad(values, indices), indices, batch, length), real)
    assert unpadded.doc_ids.shape == (1, len(indices))
    assert torch.equal(from_nested(params, to_nested(params, values)), values)
    parts = unpack_documents(values, params)
    assert [len(part) for part in parts] == segment_lengths(params)[segment_documents(params) != 0].tolist()
    if parts:
        assert torch.equal(repack_documents(parts, params), real)
        padded = pad_documents(values, params, fill=-1)
        for part, row in zip(parts, padded, strict=True):
            assert torch.equal(row[: len(part)], part)
            assert bool((row[len(part) :] == -1).all())


@given(doc_maps(), st.integers(-4, 4), st.integers(0, 4))
@any_map
def test_shifts_add_up_and_stay_in_their_document(doc_ids, first, more):
    params = params_of(doc_ids)
    tokens = torch.arange(1, 1 + doc_ids.numel()).reshape(doc_ids.shape)
    second = more if first >= 0 else -more
    once = shift_within_documents(tokens, params, first + second, 0)
    assert torch.equal(shift_within_documents(shift_within_documents(tokens, params, first, 0), params, second, 0), once)
    owner = torch.from_numpy(renumbered(doc_ids)) + torch.arange(len(doc_ids))[:, None] * 1000
    kept = once != 0
    assert torch.equal(owner.flatten()[once[kept] - 1], owner[kept])
    assert torch.equal(once[kept], tokens[kept] + first + second)
    lost = document_spans(params).length.clamp(max=abs(first + second)).sum()
    assert int(kept.sum()) == int((doc_ids != 0).sum() - lost)


@given(doc_maps(max_length=12), st.integers(1, 3), st.sampled_from(["contiguous", "zigzag"]))
@any_map
def test_shards_hold_every_token_and_pair_once(doc_ids, cp_size, scheme):
    width = -doc_ids.shape[1] % (2 * cp_size)
    doc_ids = torch.nn.functional.pad(doc_ids, (0, width))
    params = params_of(doc_ids)
    shards = [shard_params(params, cp_size, rank, scheme=scheme) for rank in range(cp_size)]
    whole = torch.cat([shard_tensor(doc_ids, shard)[0] for shard in shards])[inverse_indices(shards[0].maps)]
    assert torch.equal(whole.reshape(doc_ids.shape), doc_ids)
    lengths = segment_lengths(params).long()
    assert sum(shard.attended_pairs() for shard in shards) == int((lengths * (lengths + 1) // 2).sum())
    for shard in shards:
        local = shard_tensor(doc_ids, shard)[0]
        for start, end in zip(shard.local_cu_seqlens()[:-1], shard.local_cu_seqlens()[1:], strict=True):
            assert len(set(local[start:end].tolist())) == 1
