"""Padding that is taken for a document, for part of one, or is never written."""

import torch
from fault_cases import params_of, params_of_map, refuses, runs

from neatpack.attention import varlen_attention
from neatpack.convert import (
    check_params,
    doc_ids_from_cu_seqlens,
    pad,
    segment_documents,
    segment_lengths,
    slots,
    to_te,
    unpad,
    unpad_params,
)
from neatpack.packed_seq import packed_seq_params_from_doc_ids
from neatpack.train import document_spans, unpack_documents

KIND = "padding as a document"


@runs(KIND, "one_padding_run")
def test_padding_is_one_segment_and_no_document(case):
    params = params_of(case.input["lengths"], case.input["row_length"])
    assert params.cu_seqlens.tolist() == case.expected["cu_seqlens"]
    assert document_spans(params).length.tolist() == case.expected["documents"]
    padding = segment_lengths(params)[segment_documents(params) == 0]
    assert padding.tolist() == [case.expected["padding"]]


@runs(KIND, "padding_joins_its_slot")
def test_a_slot_keeps_the_length_of_its_document(case):
    layout = slots(params_of(case.input["seq_lengths"], case.input["row_length"]))
    assert layout.cu_seqlens.diff().tolist() == case.expected["slots"]
    assert layout.lengths.tolist() == case.expected["lengths"]
    assert slots(params_of([], case.input["row_length"])).lengths.tolist() == case.expected["all_pad_lengths"]


@runs(KIND, "absorbed_padding")
def test_lengths_say_what_a_span_has_swallowed(case):
    doc_ids = doc_ids_from_cu_seqlens(case.input["cu_seqlens"], real_lengths=case.input["lengths"])
    assert doc_ids.tolist() == case.expected["doc_ids"]
    params = packed_seq_params_from_doc_ids(doc_ids)
    assert [len(part) for part in unpack_documents(doc_ids, params)] == case.expected["lengths"]
    assert unpad_params(params).params.cu_seqlens.tolist() == case.expected["real_cu_seqlens"]


@runs(KIND, "trailing_sentinels")
def test_negative_entries_behind_the_offsets_are_none(case):
    doc_ids = doc_ids_from_cu_seqlens(case.input["cu_seqlens"])
    params = packed_seq_params_from_doc_ids(doc_ids)
    assert params.cu_seqlens.tolist() == case.expected["cu_seqlens"]
    assert len(document_spans(params)) == case.expected["documents"]


@runs(KIND, "pads_give_zero")
def test_what_lies_in_padding_is_zero_forth_and_back(case):
    doc_ids = doc_ids_from_cu_seqlens(case.input["slots"], real_lengths=case.input["lengths"], total_tokens=case.input["total"])
    assert (doc_ids[0] == 0).nonzero().flatten().tolist() == case.expected["pads"]
    indices, real = unpad_params(packed_seq_params_from_doc_ids(doc_ids))
    assert len(indices) == case.expected["real"]
    x = torch.randn(1, case.input["total"], 2, 4, requires_grad=True)
    tokens = unpad(x, indices)
    out = pad(varlen_attention(tokens, tokens, tokens, real.cu_seqlens, real.max_seqlen), indices, 1, case.input["total"])
    out.square().sum().backward()
    pads = case.expected["pads"]
    assert not out[0, pads].any()
    assert not x.grad[0, pads].any()
    assert bool((x.grad[0, indices] != 0).any(-1).all())


@runs(KIND, "two_arrays")
def test_real_and_padded_offsets_are_two_arrays(case):
    arguments = to_te(params_of(case.input["lengths"], case.input["row_length"]), offsets="real")
    assert arguments["cu_seqlens_q"].tolist() == case.expected["cu_seqlens"]
    assert arguments["cu_seqlens_q_padded"].tolist() == case.expected["cu_seqlens_padded"]
    assert arguments["pad_between_seqs"] is case.expected["pad_between_seqs"]


@runs(KIND, "uncovered_tail")
def test_tokens_past_the_last_offset_are_refused_or_named_padding(case):
    total = case.input["total"]
    offsets = torch.tensor(case.input["cu_seqlens"], dtype=torch.int32)
    x = torch.randn(total, 2, 4, requires_grad=True)
    with refuses(case.expected):
        varlen_attention(x, x, x, offsets, 5)
    doc_ids = doc_ids_from_cu_seqlens(offsets, total_tokens=total)
    assert (doc_ids[0] == 0).nonzero().flatten().tolist() == case.expected["uncovered"]
    params = packed_seq_params_from_doc_ids(doc_ids)
    check_params(params, total_tokens=total)
    assert params.cu_seqlens.tolist() == case.expected["cu_physical"]
    varlen_attention(x, x, x, params.cu_seqlens, params.max_seqlen)[doc_ids[0] != 0].sum().backward()
    assert not x.grad[case.expected["uncovered"]].any()
    assert params_of_map([[1, 1, 1, 2, 2, 2, 2, 2, 0, 0]]).cu_seqlens.tolist() == case.expected["cu_physical"]
