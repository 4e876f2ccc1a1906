"""Real and padded offsets, decoded as THD kernels read them."""

import dataclasses
import sys
import types
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packings import EMPTY, assert_isolated, doc_maps, equal_ids_pairs, flat_pairs, offsets_pairs, packings, params_of, worked

from neatpack.convert.align import align_documents
from neatpack.convert.megatron import select_fields, slot_index, to_megatron, to_megatron_fields, to_te
from neatpack.convert.segments import slots
from neatpack.errors import ContractError, MetadataError, MissingDependencyError

REAL, SLOTS = [0, 2, 5, 6, 8, 11], [0, 2, 6, 7, 9, 12]


@dataclasses.dataclass
class OldParams:
    """The fields of an early release."""

    qkv_format: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_kv: Any = None
    max_seqlen_q: Any = None
    max_seqlen_kv: Any = None


@dataclasses.dataclass
class NewParams(OldParams):
    """The fields of a recent release; it derives `seq_idx` from the padded offsets."""

    cu_seqlens_q_padded: Any = None
    cu_seqlens_kv_padded: Any = None
    local_cp_size: Any = None
    cp_group: Any = None
    total_tokens: Any = None
    seq_idx: Any = None
    tokens_per_sample: Any = None
    pad_between_seqs: Any = None


def decode(arguments, total):
    """Documents start where slots do, and are as long as the plain offsets say."""
    lengths = np.diff(arguments["cu_seqlens_kv"])
    left = arguments.get("window_size", (-1, 0))[0]
    return offsets_pairs(arguments["cu_seqlens_kv_padded"], total, lengths=lengths, window=None if left < 0 else left + 1)


def test_worked_example_te_slots_are_one_object():
    arguments = to_te(worked())
    assert arguments["cu_seqlens_q"] is arguments["cu_seqlens_q_padded"] is arguments["cu_seqlens_kv_padded"]
    assert arguments["cu_seqlens_q"].tolist() == SLOTS
    assert arguments["cu_seqlens_q"].dtype == torch.int32
    assert arguments["pad_between_seqs"] is False
    assert (arguments["max_seqlen_q"], arguments["max_seqlen_kv"]) == (4, 4)
    assert (arguments["qkv_format"], arguments["attn_mask_type"]) == ("thd", "padding_causal")


def test_worked_example_te_real():
    arguments = to_te(worked(), offsets="real")
    assert arguments["cu_seqlens_q"].tolist() == arguments["cu_seqlens_kv"].tolist() == REAL
    assert arguments["cu_seqlens_q_padded"].tolist() == arguments["cu_seqlens_kv_padded"].tolist() == SLOTS
    assert arguments["max_seqlen_q"] == 4
    assert arguments["pad_between_seqs"] is True


@pytest.mark.parametrize("offsets", ["slots", "real"])
@pytest.mark.parametrize(("window", "sides"), [(None, (-1, 0)), (1, (0, 0)), (3, (2, 0))])
def test_no_query_sees_a_key_to_its_right_with_a_window_or_without(offsets, window, sides):
    assert to_te(worked(), offsets=offsets, window=window)["window_size"] == sides


def test_equal_offsets_are_one_object_and_no_padding_between():
    arguments = to_te(params_of([[1, 1, 2]]), offsets="real")
    assert arguments["cu_seqlens_q"] is arguments["cu_seqlens_q_padded"]
    assert arguments["pad_between_seqs"] is False


def test_a_row_that_ends_in_padding_absorbs_it():
    assert to_te(params_of([[1, 1, 2, 2, 2, 0]]))["cu_seqlens_q"].tolist() == [0, 2, 6]


def test_transformer_engines_own_example():
    """Tokens `a a a 1 b b 2 2 c c c c 3`, digits padding."""
    arguments = to_te(params_of([[1, 1, 1, 0, 2, 2, 0, 0, 3, 3, 3, 3, 0]]), offsets="real")
    assert arguments["cu_seqlens_q"].tolist() == [0, 3, 5, 9]
    assert arguments["cu_seqlens_q_padded"].tolist() == [0, 4, 8, 13]


def test_worked_example_megatron():
    fields = to_megatron_fields(worked(), offsets="real")
    assert fields["cu_seqlens_q"].tolist() == REAL
    assert fields["cu_seqlens_q_padded"].tolist() == SLOTS
    assert fields["max_seqlen_q"] == 4
    assert fields["total_tokens"] == 12
    assert fields["seq_idx"].tolist() == [[0, 0, 1, 1, 1, 1, 2, 3, 3, 4, 4, 4]]
    assert fields["seq_idx"].dtype == torch.int32
    assert set(fields) <= {field.name for field in dataclasses.fields(NewParams)}


def test_tokens_past_the_last_offset_are_one_more_slot():
    assert slot_index(torch.tensor([0, 5, 7, 11], dtype=torch.int32), 16).tolist() == [[0] * 5 + [1] * 2 + [2] * 4 + [3] * 5]


@pytest.mark.parametrize("offsets", ["slots", "real"])
@pytest.mark.parametrize("window", [None, 1, 3])
def test_te_isolates_under_either_recipe(offsets, window):
    assert_isolated(lambda params: decode(to_te(params, offsets=offsets, window=window), params.doc_ids.numel()), window=window)


@pytest.mark.parametrize("offsets", ["slots", "real"])
def test_megatron_isolates_attention_and_recurrent_layers(offsets):
    assert_isolated(lambda params: decode(to_megatron_fields(params, offsets=offsets), params.doc_ids.numel()))
    assert_isolated(lambda params: equal_ids_pairs(to_megatron_fields(params, offsets=offsets)["seq_idx"]))


def test_the_installed_class_gets_the_fields_it_has(monkeypatch):
    module = types.ModuleType("megatron.core.packed_seq_params")
    module.PackedSeqParams = NewParams
    for name in ("megatron", "megatron.core"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "megatron.core.packed_seq_params", module)
    built = to_megatron(worked(), offsets="real", require=["seq_idx"])
    assert built.cu_seqlens_q_padded.tolist() == SLOTS
    assert built.pad_between_seqs is True
    module.PackedSeqParams = OldParams
    assert to_megatron(worked()).cu_seqlens_kv.tolist() == SLOTS
    with pytest.raises(ContractError, match=r"no field cu_seqlens_kv_padded, cu_seqlens_q_padded, pad_between_seqs"):
        to_megatron(worked(), offsets="real")
    with pytest.raises(ContractError, match="no field seq_idx"):
        to_megatron(worked(), require=["seq_idx"])


def test_a_class_without_offsets_is_refused():
    empty = dataclasses.make_dataclass("PackedSeqParams", ["qkv_format"])
    with pytest.raises(ContractError, match="no field cu_seqlens_kv, cu_seqlens_q"):
        select_fields(empty, to_megatron_fields(worked()))


def test_a_missing_megatron_is_named_with_its_install_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron", None)
    with pytest.raises(MissingDependencyError, match="pip install 'megatron-core'"):
        to_megatron(worked())


def test_unknown_recipes_are_refused():
    with pytest.raises(MetadataError, match="use 'slots' or 'real'"):
        to_te(worked(), offsets="padded")


class TestAlign:
    def test_worked_example_for_two_ranks(self):
        aligned = align_documents(worked(), 4)
        layout = slots(aligned.params)
        assert layout.cu_seqlens.tolist() == [0, 4, 8, 12, 16, 20]
        assert layout.lengths.tolist() == [2, 3, 1, 2, 3]
        arguments = to_te(aligned.params, offsets="real")
        assert arguments["cu_seqlens_q"].tolist() == REAL
        assert arguments["cu_seqlens_q_padded"].tolist() == [0, 4, 8, 12, 16, 20]
        assert aligned.source.tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11]
        assert aligned.target.tolist() == [0, 1, 4, 5, 6, 8, 12, 13, 16, 17, 18]

    @given(doc_maps(), st.integers(1, 6))
    @settings(max_examples=60, deadline=None)
    def test_every_document_gets_its_slot_and_every_token_arrives(self, doc_ids, multiple):
        aligned = align_documents(params_of(doc_ids), multiple)
        assert (slots(aligned.params).cu_seqlens % multiple == 0).all()
        tokens = torch.arange(1, doc_ids.numel() + 1).reshape(doc_ids.shape)
        moved = aligned.move(tokens, fill=-100)
        assert moved.shape == aligned.params.doc_ids.shape
        assert moved[moved != -100].tolist() == tokens[doc_ids != 0].tolist()
        assert torch.equal(moved == -100, aligned.params.doc_ids == 0)
        old, new = (torch.from_numpy(flat_pairs(ids)) for ids in (doc_ids, aligned.params.doc_ids))
        assert torch.equal(old[aligned.source][:, aligned.source], new[aligned.target][:, aligned.target])

    def test_moving_is_differentiable(self):
        activations = torch.randn(2, 6, 3, requires_grad=True)
        align_documents(worked(), 4).move(activations).sum().backward()
        assert torch.equal(activations.grad[..., 0], (worked().doc_ids != 0).float())

    def test_a_multiple_below_one_is_refused(self):
        with pytest.raises(MetadataError, match="multiple is 0"):
            align_documents(worked(), 0)


@pytest.mark.parametrize("doc_ids", EMPTY, ids=lambda doc_ids: str(tuple(doc_ids.shape)))
def test_an_empty_batch_has_no_slots(doc_ids):
    fields = to_megatron_fields(params_of(doc_ids))
    assert fields["cu_seqlens_q"].tolist() == [0]
    assert fields["seq_idx"].shape == (1, 0)
    assert align_documents(params_of(doc_ids), 4).params.doc_ids.shape == (1, 0)


def test_every_packing_has_as_many_real_as_slot_offsets():
    for doc_ids in packings():
        arguments = to_te(params_of(doc_ids), offsets="real")
        assert arguments["cu_seqlens_q"].shape == arguments["cu_seqlens_q_padded"].shape
        assert int(arguments["cu_seqlens_q"][-1]) == int((doc_ids != 0).sum()) or not arguments["pad_between_seqs"]
