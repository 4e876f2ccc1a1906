"""State and convolutions that run on into the next document."""

import pytest
import torch
import transformers
from fault_cases import params_of, row_of, runs

from neatpack.convert import doc_ids_from_cu_seqlens, to_hf_kwargs, to_megatron_fields, to_seq_idx
from neatpack.isolation import check_isolation
from neatpack.packed_seq import packed_seq_params_from_doc_ids
from neatpack.train import PackedCollator
from neatpack.train.context_parallel import shard_params

KIND = "recurrent state"


@runs(KIND, "megatron_seq_idx")
def test_the_sequence_index_is_always_there(case):
    doc_ids = doc_ids_from_cu_seqlens(case.input["cu_seqlens"])
    seq_idx = to_megatron_fields(packed_seq_params_from_doc_ids(doc_ids))["seq_idx"]
    assert seq_idx.tolist() == case.expected["seq_idx"]
    assert seq_idx.dtype == torch.int32


class _SmallLeak(torch.nn.Module):
    """A model whose every logit holds a little of the first token of its row."""

    def __init__(self, size):
        super().__init__()
        self.embedding = torch.nn.Embedding(64, 8)
        torch.nn.init.uniform_(self.embedding.weight, -1, 1)
        self.size = size

    def forward(self, input_ids, **_):
        states = self.embedding(input_ids)
        return states + self.size * states[:, :1] / states.abs().max()


@runs(KIND, "seq_idx")
def test_a_leak_of_a_few_thousandths_is_a_leak(case):
    params = params_of(case.input["lengths"])
    assert to_seq_idx(params).tolist() == case.expected["seq_idx"]
    assert params.cu_seqlens.tolist() == case.expected["cu_seqlens"]
    batch = PackedCollator()([row_of(case.input["lengths"])])
    report = check_isolation(_SmallLeak(case.input["leak"]), batch)
    assert report.max_influence < 2 * case.input["leak"]
    assert report.verdict == case.expected["verdict"]
    assert report.tolerance < case.input["leak"] / 100


@runs(KIND, "both_at_once")
def test_offsets_and_sequence_index_travel_together(case):
    kwargs = to_hf_kwargs(params_of(case.input["lengths"]), include_seq_idx=True)
    assert kwargs["seq_idx"].tolist() == case.expected["seq_idx"]
    assert kwargs["cu_seq_lens_q"].tolist() == case.expected["cu_seqlens"]
    assert kwargs["max_length_q"] == case.expected["max_seqlen"]


class _Convolution(torch.nn.Module):
    """A causal convolution over embeddings; with a sequence index, a tap of another sequence counts nothing."""

    def __init__(self, kernel, seq_idx=None):
        super().__init__()
        self.embedding = torch.nn.Embedding(64, 8)
        self.kernel, self.seq_idx = kernel, seq_idx

    def forward(self, input_ids, **_):
        states, length = self.embedding(input_ids), input_ids.shape[1]
        seq_idx = torch.zeros_like(input_ids) if self.seq_idx is None else self.seq_idx[:, :length]
        out = states.clone()
        for back in range(1, min(self.kernel, length)):
            same = (seq_idx[:, back:] == seq_idx[:, :-back])[..., None]
            out[:, back:] += same * states[:, :-back] / (back + 1)
        return out


@runs(KIND, "convolution_reach")
def test_a_convolution_reaches_no_further_back_than_its_document(case):
    params, kernel = params_of(case.input["lengths"]), case.input["kernel"]
    tokens = torch.arange(3, 3 + params.doc_ids.numel())[None]
    changed = tokens.clone()
    changed[params.doc_ids == 1] += 20
    later = (params.doc_ids == 2)[0]
    for seq_idx, expected in ((None, case.expected["contaminated"]), (to_seq_idx(params), [])):
        torch.manual_seed(0)
        model = _Convolution(kernel, seq_idx)
        moved = (model(tokens) != model(changed)).any(-1)[0]
        assert (moved & later).nonzero().flatten().tolist() == expected
        report = check_isolation(model, {"input_ids": tokens}, doc_ids=params.doc_ids)
        assert (report.verdict == "leaking") is bool(expected)


@runs(KIND, "whole_row_before_the_cut")
def test_every_rank_knows_the_offsets_of_the_whole_row(case):
    params = params_of(case.input["lengths"])
    assert to_seq_idx(params).tolist() == case.expected["seq_idx"]
    for scheme in ("contiguous", "zigzag"):
        for rank in range(case.input["cp_size"]):
            shard = shard_params(params, case.input["cp_size"], rank, scheme=scheme)
            assert shard.cu_seqlens.tolist() == case.expected["cu_seqlens"]


@pytest.mark.filterwarnings("ignore")  # transformers says that the fast path is missing: it is what this is about
@runs(KIND, "slow_path")
def test_a_slow_path_that_ignores_the_sequence_index_is_found(case):
    config = transformers.Mamba2Config(
        vocab_size=64, hidden_size=32, state_size=8, num_hidden_layers=2, num_heads=4, head_dim=16, n_groups=1, chunk_size=4
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.5)
    params = params_of(case.input["lengths"])
    batch = {"input_ids": PackedCollator()([row_of(case.input["lengths"])])["input_ids"], "use_cache": False}
    report = check_isolation(model, batch, doc_ids=params.doc_ids)
    assert report.verdict == case.expected["verdict"]
    assert not report.isolated
