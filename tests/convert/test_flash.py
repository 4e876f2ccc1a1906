"""Varlen arguments, decoded as the kernels run them."""

import dataclasses
import inspect

import pytest
import torch
from hypothesis import given, settings
from packings import EMPTY, agrees, assert_isolated, doc_maps, offsets_pairs, packings, params_of, worked

from neatpack.convert import flash
from neatpack.convert.flash import pad, to_attention_mask_in_length, to_fa2, to_fa3, to_fa4, to_varlen, unpad
from neatpack.convert.huggingface import to_hf_kwargs
from neatpack.convert.nested import to_jagged
from neatpack.convert.segments import segment_documents, unpad_params
from neatpack.errors import ContractError, MetadataError

FORM_A = [0, 2, 5, 6, 7, 9, 12]


def decode(arguments, total):
    """What a varlen kernel computes from its arguments: `[T, T]`, window and partial slots included."""
    left = arguments["window_size"][0]
    window = None if left in (-1, None) else left + 1
    assert arguments["causal"]
    return offsets_pairs(arguments["cu_seqlens_q"], total, lengths=arguments.get("seqused_q"), window=window)


def test_worked_example_fa2():
    params = worked()
    arguments = to_fa2(params)
    assert arguments.pop("cu_seqlens_q") is arguments["cu_seqlens_k"] is params.cu_seqlens
    assert arguments.pop("cu_seqlens_k").tolist() == FORM_A
    assert arguments == {"max_seqlen_q": 3, "max_seqlen_k": 3, "causal": True, "window_size": (-1, -1)}


def test_worked_example_form_b():
    indices, real = unpad_params(worked())
    assert to_fa2(real)["cu_seqlens_q"].tolist() == [0, 2, 5, 6, 8, 11]
    assert to_fa2(real)["max_seqlen_k"] == 3
    assert len(indices) == 11


@pytest.mark.parametrize("convert", [to_fa3, to_fa4])
def test_worked_example_form_c(convert):
    arguments = convert(worked(), form="C")
    assert arguments["cu_seqlens_q"].tolist() == arguments["cu_seqlens_k"].tolist() == [0, 2, 6, 7, 9, 12]
    assert arguments["seqused_q"].tolist() == arguments["seqused_k"].tolist() == [2, 3, 1, 2, 3]
    assert arguments["seqused_q"].dtype == arguments["cu_seqlens_q"].dtype == torch.int32
    assert arguments["max_seqlen_q"] == arguments["max_seqlen_k"] == 3


def test_unlimited_windows_are_written_as_each_generation_reads_them():
    assert to_fa2(worked())["window_size"] == to_fa3(worked())["window_size"] == (-1, -1)
    assert to_fa4(worked())["window_size"] == (None, None)
    assert all(convert(worked(), window=3)["window_size"] == (2, 0) for convert in (to_fa2, to_fa3, to_fa4, to_varlen))


def test_worked_example_torch_varlen_fits_the_installed_signature():
    arguments = to_varlen(worked())
    assert arguments["cu_seq_q"].tolist() == arguments["cu_seq_k"].tolist() == FORM_A
    assert (arguments["max_q"], arguments["max_k"]) == (3, 3)
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    inspect.signature(varlen.varlen_attn).bind(None, None, None, **arguments)
    assert isinstance(arguments["window_size"], tuple)


def test_causality_is_written_as_the_installed_torch_takes_it():
    assert flash._varlen_causality(frozenset({"window_size"}), None) == {"window_size": (-1, 0)}
    assert flash._varlen_causality(frozenset({"is_causal"}), None) == {"is_causal": True}
    with pytest.raises(ContractError, match="would ignore the window of 4 tokens"):
        flash._varlen_causality(frozenset({"is_causal"}), 4)


CONVERSIONS = {
    "fa2": to_fa2,
    "fa3": to_fa3,
    "fa4": to_fa4,
    "fa3 slots": lambda params, **options: to_fa3(params, form="C", **options),
    "fa4 slots": lambda params, **options: to_fa4(params, form="C", **options),
}


@pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS)
@pytest.mark.parametrize("window", [None, 1, 3])
def test_kernels_see_what_the_oracle_allows_and_a_dropped_boundary_is_noticed(convert, window):
    assert_isolated(lambda params: decode(convert(params, window=window), params.doc_ids.numel()), window=window)


@given(doc_maps())
@settings(max_examples=40, deadline=None)
def test_static_segments_change_nothing_that_a_kernel_computes(doc_ids):
    params = params_of(doc_ids)
    for convert in CONVERSIONS.values():
        arguments = convert(params, pad_segments_to=100, round_max_seqlen_to=8)
        assert len(arguments["cu_seqlens_q"]) == 101
        assert arguments["max_seqlen_q"] % 8 == 0
        assert agrees(decode(arguments, doc_ids.numel()), doc_ids)


def test_padded_segments_repeat_the_last_offset_and_have_no_real_tokens():
    assert to_fa2(worked(), pad_segments_to=8)["cu_seqlens_q"].tolist() == [*FORM_A, 12, 12]
    assert to_varlen(worked(), pad_segments_to=8)["cu_seq_q"].tolist() == [*FORM_A, 12, 12]
    arguments = to_fa3(worked(), form="C", pad_segments_to=7)
    assert arguments["cu_seqlens_q"].tolist() == [0, 2, 6, 7, 9, 12, 12, 12]
    assert arguments["seqused_k"].tolist() == [2, 3, 1, 2, 3, 0, 0]
    assert to_fa2(worked(), pad_segments_to=6)["cu_seqlens_q"].tolist() == FORM_A


def test_maximum_is_never_one_beside_empty_segments():
    params = params_of([[1, 2, 3]])
    assert to_fa2(params)["max_seqlen_q"] == 1
    assert to_fa2(params, pad_segments_to=3)["max_seqlen_q"] == 1
    assert to_fa2(params, pad_segments_to=4)["max_seqlen_q"] == 2
    assert to_fa2(params, pad_segments_to=4, round_max_seqlen_to=1)["max_seqlen_q"] == 2


def test_maximum_is_rounded_up_and_never_down():
    assert [to_fa2(worked(), round_max_seqlen_to=multiple)["max_seqlen_q"] for multiple in (1, 2, 3, 128)] == [3, 4, 3, 128]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pad_segments_to": 5}, "6 segments, more than pad_segments_to = 5"),
        ({"round_max_seqlen_to": 0}, "round_max_seqlen_to is 0"),
        ({"window": 0}, "window is 0"),
    ],
)
def test_options_that_cannot_be_honoured_are_refused(options, message):
    for convert in (to_fa2, to_fa3, to_fa4, to_varlen):
        with pytest.raises(MetadataError, match=message):
            convert(worked(), **options)


def test_wrong_offsets_never_reach_a_kernel():
    short = dataclasses.replace(worked(), max_seqlen=2)
    for convert in (*CONVERSIONS.values(), to_varlen):
        with pytest.raises(MetadataError, match="longest segment has 3"):
            convert(short)


def test_worked_example_lengths_by_row():
    assert to_attention_mask_in_length(worked()).tolist() == [[2, 3, 0, 0, 0, 0], [1, 2, 3, 0, 0, 0]]


def pads_come_last(doc_ids) -> bool:
    return not ((doc_ids[:, :-1] == 0) & (doc_ids[:, 1:] != 0)).any()


@pytest.mark.parametrize("doc_ids", [doc_ids for doc_ids in packings() if pads_come_last(doc_ids)])
def test_lengths_by_row_describe_packings_that_are_padded_at_the_end(doc_ids):
    params = params_of(doc_ids)
    lengths = to_attention_mask_in_length(params)
    assert lengths[lengths > 0].tolist() == params.cu_seqlens.diff()[segment_documents(params) != 0].tolist()
    assert torch.equal(lengths.sum(1), (doc_ids != 0).sum(1))


@pytest.mark.parametrize("doc_ids", [doc_ids for doc_ids in packings() if not pads_come_last(doc_ids)])
def test_lengths_by_row_are_refused_where_they_cannot_say_the_place(doc_ids):
    with pytest.raises(MetadataError, match=r"row \d has padding before a document"):
        to_attention_mask_in_length(params_of(doc_ids))


@given(doc_maps())
@settings(max_examples=40, deadline=None)
def test_unpadding_and_padding_come_back(doc_ids):
    indices, _ = unpad_params(params_of(doc_ids))
    batch, length = doc_ids.shape
    activations = torch.randn(batch, length, 2, 3, requires_grad=True)
    back = pad(unpad(activations, indices), indices, batch, length)
    assert torch.equal(back, activations * (doc_ids != 0)[:, :, None, None])
    back.sum().backward()
    assert torch.equal(activations.grad, (doc_ids != 0)[:, :, None, None].expand_as(activations).float())
    labels = pad(unpad(doc_ids, indices), indices, batch, length, fill=-100)
    assert torch.equal(labels, torch.where(doc_ids == 0, -100, doc_ids))


def test_padding_with_the_indices_of_another_batch_is_refused():
    with pytest.raises(MetadataError, match="3 tokens for 11 indices"):
        pad(torch.zeros(3, 2), unpad_params(worked()).indices, 2, 6)


@pytest.mark.parametrize("doc_ids", EMPTY, ids=lambda doc_ids: str(tuple(doc_ids.shape)))
def test_an_empty_batch_has_no_segments(doc_ids):
    params = params_of(doc_ids)
    for convert in CONVERSIONS.values():
        assert convert(params)["cu_seqlens_q"].tolist() == [0]
        assert convert(params, pad_segments_to=2)["cu_seqlens_q"].tolist() == [0, 0, 0]
    assert to_attention_mask_in_length(params).shape == doc_ids.shape
    indices, _ = unpad_params(params)
    assert pad(unpad(torch.zeros(*doc_ids.shape, 4), indices), indices, *doc_ids.shape).shape == (*doc_ids.shape, 4)


class TestHuggingFace:
    def test_worked_example_form_a(self):
        params = worked()
        kwargs = to_hf_kwargs(params)
        assert set(kwargs) == {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
        assert kwargs["cu_seq_lens_q"] is kwargs["cu_seq_lens_k"] is params.cu_seqlens
        assert (kwargs["max_length_q"], kwargs["max_length_k"]) == (3, 3)

    def test_worked_example_form_b_is_what_the_flattening_collators_give(self):
        transformers = pytest.importorskip("transformers")
        collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
        theirs = collate([{"input_ids": list(range(length))} for length in (2, 3, 1, 2, 3)])
        ours = to_hf_kwargs(unpad_params(worked()).params, include_seq_idx=True)
        assert ours["cu_seq_lens_q"].tolist() == theirs["cu_seq_lens_q"].tolist() == [0, 2, 5, 6, 8, 11]
        assert ours["seq_idx"].tolist() == theirs["seq_idx"].tolist() == [[0, 0, 1, 1, 1, 2, 3, 3, 4, 4, 4]]
        for key in ours:
            assert type(ours[key]) is type(theirs[key])
            assert not isinstance(ours[key], torch.Tensor) or ours[key].dtype == theirs[key].dtype

    def test_hybrids_get_numbers_that_are_unique_over_the_batch(self):
        kwargs = to_hf_kwargs(worked(), include_seq_idx=True)
        assert kwargs["seq_idx"].tolist() == [[0, 0, 1, 1, 1, 2, 3, 4, 4, 5, 5, 5]]
        assert kwargs["seq_idx"].dtype == torch.int32

    def test_offsets_isolate(self):
        assert_isolated(lambda params: offsets_pairs(to_hf_kwargs(params)["cu_seq_lens_k"], params.doc_ids.numel()))


@pytest.mark.parametrize("convert", [to_fa3, to_fa4, to_jagged])
def test_a_form_that_a_conversion_does_not_have_is_refused(convert):
    with pytest.raises(MetadataError, match=r"got 'B'.*unpad_params"):
        convert(worked(), form="B")
