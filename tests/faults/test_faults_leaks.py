"""Attention that crosses a boundary: pairs from every source of boundaries, and models that never see them."""

import pytest
import torch
from fault_cases import params_of, row_of, runs

from neatpack.convert import (
    doc_ids_from_indexed_mask,
    doc_ids_from_position_ids,
    doc_ids_from_seq_lengths,
    to_dense_mask,
    unpad_params,
)
from neatpack.errors import ContractError, MetadataError
from neatpack.hf import register
from neatpack.isolation import check_isolation
from neatpack.packed_seq import packed_seq_params_from_doc_ids, to_flash_attention_kwargs
from neatpack.train import PackedCollator
from neatpack.train.context_parallel import shard_params
from tiny_models import tiny_model

KIND = "cross-document leak"


@pytest.fixture(scope="module", autouse=True)
def _registered():
    register()


def pairs(params):
    """Pairs of tokens of one document that may attend, padding left out."""
    return int(to_dense_mask(params, pad_self=False).sum())


def segment_pairs(params):
    """The same, padding runs taken for documents, as offsets show them."""
    lengths = params.cu_seqlens.diff().tolist()
    return sum(length * (length + 1) // 2 for length in lengths)


@runs(KIND, "position_pairs")
def test_positions_give_boundaries_to_every_backend(case):
    params = packed_seq_params_from_doc_ids(doc_ids_from_position_ids(torch.tensor(case.input["position_ids"])))
    assert params.cu_seqlens.tolist() == case.expected["cu_seqlens"]
    assert pairs(params) == segment_pairs(params) == case.expected["pairs"]


@runs(KIND, "lengths_pairs")
def test_lengths_give_the_map_and_its_pairs(case):
    params = params_of(case.input["lengths"])
    assert params.doc_ids.tolist() == case.expected["doc_ids"]
    assert pairs(params) == case.expected["pairs"]
    assert pairs(params_of([sum(case.input["lengths"])])) == case.expected["causal_pairs"]


@runs(KIND, "mask_rows")
def test_the_mask_is_block_causal(case):
    assert to_dense_mask(params_of(case.input["lengths"]))[0, 0].int().tolist() == case.expected["mask"]
    model = tiny_model("llama", "sdpa")
    batch = PackedCollator()([row_of(case.input["lengths"])])
    only_positions = {name: batch[name] for name in ("input_ids", "position_ids")}
    leaking = {**only_positions, "attention_mask": torch.ones_like(batch["input_ids"])}
    doc_ids = params_of(case.input["lengths"]).doc_ids
    assert check_isolation(model, leaking, doc_ids=doc_ids).verdict == "leaking"
    masked = {**only_positions, "attention_mask": to_dense_mask(params_of(case.input["lengths"]))}
    report = check_isolation(model, masked, doc_ids=doc_ids)
    assert report.isolated
    assert report.max_influence == 0.0


@runs(KIND, "context_parallel_pairs")
def test_ranks_together_attend_to_the_pairs_of_the_documents(case):
    cp_size = case.input["cp_size"]
    for scheme in ("contiguous", "zigzag"):
        by_rank = [shard_params(params_of(case.input["lengths"]), cp_size, rank, scheme=scheme) for rank in range(cp_size)]
        assert sum(shard.attended_pairs() for shard in by_rank) == case.expected["pairs"]
        alone = params_of([sum(case.input["lengths"])])  # the control: one document
        control = [shard_params(alone, cp_size, rank, scheme=scheme) for rank in range(cp_size)]
        assert sum(shard.attended_pairs() for shard in control) == case.expected["causal_pairs"]


@runs(KIND, "backend_without_boundaries")
def test_the_probe_sees_a_backend_that_lost_the_boundaries(case):
    params = params_of(case.input["lengths"])
    assert pairs(params) == case.expected["pairs"]
    assert pairs(params_of([sum(case.input["lengths"])])) == case.expected["causal_pairs"]
    batch = PackedCollator()([row_of(case.input["lengths"])])
    sent = {"input_ids": batch["input_ids"]}
    if case.input["send"] == "offsets only":
        sent |= {**to_flash_attention_kwargs(params), "use_cache": False}
    else:
        sent |= {"position_ids": batch["position_ids"], "attention_mask": torch.ones_like(batch["input_ids"])}
    report = check_isolation(tiny_model("llama", case.input["attention"]), sent, doc_ids=params.doc_ids)
    assert report.verdict == case.expected["verdict"]
    with pytest.raises(ContractError, match=r"(?s)leaking.*attn_implementation='packed_varlen'"):
        report.raise_if_leaking()
    assert check_isolation(tiny_model("llama"), batch).isolated
    dense = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"], "attention_mask": to_dense_mask(params)}
    assert check_isolation(tiny_model("llama", case.input["attention"]), dense, doc_ids=params.doc_ids).isolated


class _ReadsOneName(torch.nn.Module):
    """A model that takes anything and looks at `cu_seqlens` alone."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(64, 8)

    def forward(self, input_ids, cu_seqlens=None, **swallowed):
        states = self.embedding(input_ids)
        if cu_seqlens is None:
            return states.cumsum(1)
        parts = states.flatten(0, 1).tensor_split(cu_seqlens[1:-1].tolist())
        return torch.cat([part.cumsum(0) for part in parts]).reshape(states.shape)


@runs(KIND, "swallowed_metadata")
def test_boundaries_are_top_level_keys_and_a_model_that_swallows_them_is_found(case):
    params = params_of(case.input["lengths"])
    kwargs = to_flash_attention_kwargs(params)
    assert list(kwargs) == case.expected["keys"]
    assert kwargs["cu_seq_lens_q"].tolist() == case.expected["cu_seqlens"]
    assert kwargs["max_length_q"] == case.expected["max_seqlen"]
    batch = PackedCollator()([row_of(case.input["lengths"])])
    for nested in ({}, {"flash_attn_kwargs": kwargs}):
        report = check_isolation(_ReadsOneName(), {**batch, **nested})
        assert report.verdict == case.expected["verdict"]
    assert check_isolation(_ReadsOneName(), {**batch, "cu_seqlens": params.cu_seqlens}).max_influence == 0.0


@runs(KIND, "offsets_beside_a_mask")
def test_offsets_win_over_a_mask_of_ones_and_over_any_other_are_refused(case):
    mask = torch.tensor(case.input["mask"])
    params = params_of(case.input["lengths"])
    batch = {**PackedCollator()([row_of(case.input["lengths"])]), "attention_mask": mask}
    assert params.cu_seqlens.tolist() == case.expected["cu_seqlens"] == batch["cu_seq_lens_q"].tolist()
    assert check_isolation(tiny_model("llama"), batch).isolated
    padded = mask.clone()
    padded[:, -1] = 0
    with pytest.raises(ContractError, match="Leave attention_mask out"):
        tiny_model("llama")(**{**batch, "attention_mask": padded})
    with pytest.raises(MetadataError, match=r"only 0 and 1.*single_document=True"):
        doc_ids_from_indexed_mask(mask)


@runs(KIND, "padding_changes_nothing")
def test_a_pad_more_or_less_changes_no_logit(case):
    lengths, numbered = case.input["lengths"], torch.tensor(case.input["segment_mask"])
    doc_ids = doc_ids_from_indexed_mask(numbered)
    assert doc_ids.tolist() == doc_ids_from_seq_lengths([lengths], numbered.shape[1]).tolist()
    real = unpad_params(packed_seq_params_from_doc_ids(doc_ids)).params
    assert real.cu_seqlens.tolist() == case.expected["cu_seqlens"]
    model, row = tiny_model("llama"), row_of(lengths)
    with torch.no_grad():
        without, padded = (model(**PackedCollator(row_length=length)([row])).logits for length in (None, numbered.shape[1]))
    assert torch.equal(without[0], padded[0, : sum(lengths)])
