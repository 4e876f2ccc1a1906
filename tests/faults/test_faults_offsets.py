"""Offsets: their maximum, their width, their names, and a number of them that does not change."""

import numpy as np
import pytest
import torch
from fault_cases import params_of, params_of_map, refuses, row_of, runs

from neatpack.attention import varlen_attention
from neatpack.convert import (
    check_params,
    doc_ids_from_cu_seqlens,
    to_attention_mask_in_length,
    to_fa2,
    to_megatron_fields,
    to_olmo,
)
from neatpack.errors import MetadataError
from neatpack.packed_seq import PackedSeqParams, packed_seq_params_from_doc_ids, to_flash_attention_kwargs
from neatpack.train import PackedCollator, document_spans

KIND = "offsets"


@runs(KIND, "one_document")
def test_a_row_of_one_document_has_two_offsets(case):
    params = params_of(case.input["lengths"], sum(case.input["lengths"]))
    assert params.cu_seqlens.tolist() == case.expected["cu_seqlens"]
    assert params.max_seqlen == case.expected["max_seqlen"]
    assert int((params.doc_ids == 0).sum()) == case.expected["padding"]
    assert len(document_spans(params)) == 1


@runs(KIND, "maximum_is_int")
def test_the_maximum_is_a_python_int_everywhere(case):
    params = params_of(case.input["lengths"])
    batch = PackedCollator()([row_of(case.input["lengths"])])
    found = [params.max_seqlen, batch["max_length_q"], batch["max_length_k"]]
    found += [to_fa2(params)["max_seqlen_q"], to_megatron_fields(params)["max_seqlen_q"]]
    assert {type(value) for value in found} == {int}
    assert set(found) == {case.expected["max_seqlen"]}


@runs(KIND, "batch_carries_offsets")
def test_the_batch_carries_all_four_values(case):
    batch = PackedCollator()([row_of(case.input["lengths"])])
    for side in "qk":
        assert batch[f"cu_seq_lens_{side}"].tolist() == case.expected["cu_seqlens"]
        assert batch[f"max_length_{side}"] == case.expected["max_seqlen"]
    assert to_flash_attention_kwargs(params_of(case.input["lengths"])).keys() <= batch.keys()


@runs(KIND, "megatron_names")
def test_each_library_gets_its_own_names(case):
    params = packed_seq_params_from_doc_ids(doc_ids_from_cu_seqlens(case.input["cu_seqlens"]))
    fields = to_megatron_fields(params)
    for side in ("q", "kv"):
        assert fields[f"cu_seqlens_{side}"].tolist() == case.expected["cu_seqlens"]
        assert fields[f"max_seqlen_{side}"] == case.expected["max_seqlen"]
    assert fields["qkv_format"] == case.expected["qkv_format"]
    assert "max_length_q" not in fields


@runs(KIND, "maximum_too_small")
def test_a_maximum_below_the_longest_segment_is_refused(case):
    offsets, maximum = torch.tensor(case.input["cu_seqlens"], dtype=torch.int32), case.input["max_seqlen"]
    x = torch.randn(int(offsets[-1]), 2, 4)
    with refuses(case.expected):
        varlen_attention(x, x, x, offsets, maximum)
    params = PackedSeqParams(offsets, maximum, doc_ids_from_cu_seqlens(offsets))
    with refuses(case.expected):
        check_params(params)
    with refuses(case.expected):
        to_fa2(params)


@runs(KIND, "too_many_tokens")
def test_more_tokens_than_int32_counts_are_refused_before_anything_is_allocated(case):
    batch, length = case.input["batch"], case.input["length"]
    assert batch * length > 2**31
    with refuses(case.expected):
        packed_seq_params_from_doc_ids(torch.ones(1, 1, dtype=torch.int64).expand(batch, length))
    with pytest.raises(OverflowError):
        packed_seq_params_from_doc_ids(torch.ones(1, 1, dtype=torch.uint8).expand(2**31, 1))


def far_apart(path, values, stride):
    """The values `[T, ...]` with rows `stride` elements apart, in a sparse file in the place of gigabytes."""
    memory = np.memmap(path, np.float32, "w+", shape=((len(values) - 1) * stride + values[0].numel(),))
    return torch.from_numpy(memory).as_strided(values.shape, (stride, *values.stride()[1:])).copy_(values)


@runs(KIND, "far_rows")
def test_rows_and_gradients_beyond_what_32_bits_address_are_read_where_they_lie(case, tmp_path):
    assert case.input["row"] * case.input["stride"] == case.expected["offset"] > 2**31
    stride = case.expected["offset"] // 2  # the first, the middle and the last of those rows
    values, gradient = torch.randn(2, 3, 2, 4)
    offsets = torch.tensor([0, 2, 3], dtype=torch.int32)
    near = values.clone().requires_grad_()
    far = far_apart(tmp_path / "values", values, stride).requires_grad_()
    outputs = [varlen_attention(x, x, x, offsets, 2) for x in (near, far)]
    assert torch.equal(*outputs)
    expected = torch.autograd.grad(outputs[0], near, gradient)[0]
    assert torch.equal(torch.autograd.grad(outputs[1], far, far_apart(tmp_path / "gradient", gradient, stride))[0], expected)


@runs(KIND, "lengths_by_row")
def test_lengths_come_row_by_row(case):
    params = params_of_map(case.input["doc_ids"])
    spans = document_spans(params)
    by_row = [spans.length[spans.row == row].tolist() for row in range(len(case.input["doc_ids"]))]
    assert by_row == case.expected["lengths"]
    in_length = to_attention_mask_in_length(params)
    assert [[length for length in row if length] for row in in_length.tolist()] == case.expected["lengths"]
    theirs = to_olmo(params)
    assert theirs["max_doc_lens"] == case.expected["longest"]
    assert theirs["doc_lens"].dtype == torch.int32
    assert theirs["doc_lens"].sum(1).tolist() == [params.doc_ids.shape[1]] * len(by_row)  # padding listed, as it must be


@runs(KIND, "static_offsets")
def test_offsets_of_a_fixed_number_of_segments(case):
    arguments = [to_fa2(params_of(lengths), pad_segments_to=case.input["segments"]) for lengths in case.input["batches"]]
    assert [entry["cu_seqlens_q"].tolist() for entry in arguments] == case.expected["cu_seqlens"]
    assert len({entry["cu_seqlens_q"].shape for entry in arguments}) == 1
    assert [entry["max_seqlen_q"] for entry in arguments] == [max(lengths) for lengths in case.input["batches"]]
    back = [doc_ids_from_cu_seqlens(entry["cu_seqlens_q"]) for entry in arguments]
    assert [int(doc_ids.max()) for doc_ids in back] == case.expected["documents"]
    with pytest.raises(MetadataError, match="Raise it, or limit the documents of a row"):
        to_fa2(params_of([1] * (case.input["segments"] + 1)), pad_segments_to=case.input["segments"])
