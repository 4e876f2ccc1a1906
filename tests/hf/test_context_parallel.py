"""transformers models over gloo ranks: logits, loss and gradients of one process, and refusals of what would mix."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, LlamaConfig, MambaConfig, MistralConfig

import neatpack.hf
from gloo_ranks import run_on_ranks
from neatpack.convert.doc_map import doc_ids_from_seq_lengths, position_ids_from_doc_ids
from neatpack.errors import ContractError, MetadataError
from neatpack.packed_seq import packed_seq_params_from_doc_ids, to_flash_attention_kwargs
from neatpack.train import PackedCollator, aligned_labels
from tiny_models import DOC_IDS, packed_batch, tiny_model

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
ROWS = {  # documents straddle 2 and 4 ranks under every scheme, and there is padding
    "contiguous": ([[29, 5, 30, 20]], 96),
    "zigzag": ([[29, 5, 9], [3, 20, 25]], 48),
}
CASES = [
    ("llama", "contiguous"),
    ("llama", "zigzag"),
    ("llama", "per_document_zigzag"),
    ("window", "contiguous"),
    ("window", "zigzag"),
    ("wide_window", "zigzag"),
    ("checkpointed", "zigzag"),
]


def model_of(kind):
    torch.manual_seed(0)
    windows = {"window": 11, "wide_window": 26}  # 26 is more than the 24 tokens that one of 4 ranks holds
    config = MistralConfig(**SIZES, sliding_window=windows[kind]) if kind in windows else LlamaConfig(**SIZES)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=neatpack.hf.register())
    if kind == "checkpointed":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def batch_of(scheme="zigzag", seed=0):
    if scheme != "per_document_zigzag":
        lengths, row_length = ROWS[scheme]
        tokens = torch.randint(1, 96, (len(lengths), row_length), generator=torch.Generator().manual_seed(seed))
        rows = [{"input_ids": ids[: sum(row)], "seq_lengths": row} for row, ids in zip(lengths, tokens, strict=True)]
        return PackedCollator(row_length=row_length)(rows)
    doc_ids = torch.tensor([[1] * 13 + [0] * 3 + [2] * 8 + [3] * 22 + [0] * 2, [1] * 37 + [0] * 3 + [2] * 5 + [0] * 3])
    params = packed_seq_params_from_doc_ids(doc_ids)
    tokens = torch.randint(1, 96, (2, 48), generator=torch.Generator().manual_seed(seed))
    batch = {"input_ids": tokens, "labels": aligned_labels(tokens, params), "doc_ids": doc_ids}
    return {
        **batch,
        "position_ids": position_ids_from_doc_ids(doc_ids),
        **to_flash_attention_kwargs(params),
        "use_cache": False,
    }


def real_tokens(batch, scheme):
    if "doc_ids" in batch:
        return batch["doc_ids"] != 0
    return doc_ids_from_seq_lengths(*ROWS[scheme]) != 0


def one_process(kind, batch):
    """Logits, loss and gradients of the whole batch; the loss is the mean over targets that `PackedCollator` left."""
    model = model_of(kind)
    output = model(**{name: value for name, value in batch.items() if name != "doc_ids"})
    output.loss.backward()
    return output.logits.detach(), output.loss.detach(), [parameter.grad for parameter in model.parameters()]


def over_ranks(kind, scheme, batch, group):
    model = model_of(kind)
    with neatpack.hf.context_parallel(model, group, scheme=scheme) as parallel:
        local = parallel.shard(batch)
        output = model(**local)
        output.loss.backward()
        parallel.sum_gradients()
        logits = parallel.gather(output.logits.detach(), local["context_shard"])
    loss = output.loss.detach().clone()
    dist.all_reduce(loss, group=parallel.group)
    remote = any(plan.exchange.remote for plan in local["context_shard"].plans.values())
    return logits, loss, [parameter.grad for parameter in model.parameters()], remote


def differences(kind, scheme, batch, group):
    logits, loss, gradients, remote = over_ranks(kind, scheme, batch, group)
    expected, expected_loss, expected_gradients = one_process(kind, batch)
    real = real_tokens(batch, scheme)
    return {
        "logits": (logits - expected)[real].abs().max().item(),
        "loss": (loss - expected_loss).abs().item(),
        "gradients": max((a - b).abs().max().item() for a, b in zip(gradients, expected_gradients, strict=True)),
        "remote": remote,
        "scale": (expected[real].abs().max().item(), max(gradient.abs().max().item() for gradient in expected_gradients)),
    }


def cases(rank, world_size):
    results = {case: differences(*case, batch_of(case[1]), dist.group.WORLD) for case in CASES}
    whole = batch_of()
    merged = {**whole, "doc_ids": torch.ones(2, 48, dtype=torch.int64)}
    logits = over_ranks("llama", "zigzag", merged, dist.group.WORLD)[0]
    expected = one_process("llama", whole)[0]
    results["merged"] = (logits - expected)[real_tokens(whole, "zigzag")].abs().max().item()
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("dp", "cp"))
    results["mesh"] = differences("llama", "zigzag", batch_of(seed=mesh["dp"].get_local_rank()), mesh["cp"])
    results["refused mesh"] = refusal(lambda: neatpack.hf.context_parallel(model_of("llama"), mesh))
    with neatpack.hf.context_parallel(model_of("llama"), dist.group.WORLD) as parallel:
        results["different batches"] = refusal(lambda: parallel.shard(batch_of(seed=rank)))
    return results


def refusal(call):
    try:
        call()
    except (ContractError, MetadataError) as error:
        return str(error)
    return None


@pytest.fixture(scope="module", params=[2, 4])
def measured(request, tmp_path_factory):
    return run_on_ranks(cases, request.param, tmp_path_factory.mktemp(f"ranks{request.param}"))


@pytest.mark.parametrize("case", [*CASES, "mesh"], ids=str)
def test_logits_loss_and_gradients_equal_one_process(measured, case):
    found = measured[case]
    assert found["logits"] < 1e-5
    assert found["loss"] < 1e-5
    assert found["gradients"] < 1e-5
    assert min(found["scale"]) > 0.1
    assert found["remote"]


def test_without_the_boundaries_logits_would_move(measured):
    assert measured["merged"] > 0.1


def test_ranks_that_hold_different_batches_are_refused(measured):
    assert "ranks 0 and 1 hold different batches (tokens differ)" in measured["different batches"]


def test_a_mesh_of_two_dimensions_is_refused_by_name(measured):
    assert "dimensions 'dp', 'cp'; context parallelism runs over one of them" in measured["refused mesh"]


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/init", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_one_rank_is_the_whole_batch(alone):
    found = differences("llama", "zigzag", batch_of(), alone)
    assert max(found["logits"], found["loss"], found["gradients"]) < 1e-5


@pytest.mark.parametrize("architecture", ["qwen3", "gemma2", "gemma3", "gpt2", "gpt_oss", "opt"])
def test_windows_soft_caps_and_sinks_of_other_models_reach_the_shards(alone, architecture):
    batch = packed_batch()
    model = tiny_model(architecture, neatpack.hf.register())
    expected = model(**batch).logits
    with neatpack.hf.context_parallel(model, alone) as parallel:
        local = parallel.shard(batch)
        logits = parallel.gather(model(**local).logits, local["context_shard"])
    assert (logits - expected)[torch.tensor(DOC_IDS) != 0].abs().max() < 1e-5


def test_a_batch_that_was_not_sharded_is_refused(alone):
    model = model_of("llama")
    with (
        neatpack.hf.context_parallel(model, alone),
        pytest.raises(ContractError, match=r"not sharded.*parallel.shard\(batch\)"),
    ):
        model(**batch_of())


def test_closing_gives_the_model_its_attention_back(alone):
    model, other = model_of("llama"), model_of("llama")
    before = model(**batch_of()).logits
    parallel = neatpack.hf.context_parallel(model, alone)
    assert model.config._attn_implementation == "packed_varlen_cp"
    assert other.config._attn_implementation == "packed_varlen"
    parallel.close()
    assert model.config._attn_implementation == "packed_varlen"
    assert torch.equal(model(**batch_of()).logits, before)


def test_a_shard_given_to_a_masked_call_is_refused(alone):
    model = model_of("llama")
    with neatpack.hf.context_parallel(model, alone) as parallel:
        local = parallel.shard(batch_of())
        mask = torch.ones(1, 96, dtype=torch.int64)
        assert model(**local, attention_mask=mask).logits.shape == (1, 96, 96)
        mask[:, -5:] = 0
        with pytest.raises(ContractError, match="more than causal attention in documents"):
            model(**local, attention_mask=mask)
        with pytest.raises(ContractError, match=r"a mask \[1, 1, 96, 96\] came along with a shard"):
            model(**local, attention_mask=torch.ones(1, 1, 96, 96, dtype=torch.bool))
        with pytest.raises(ContractError, match="one row"):
            model(**{**local, "input_ids": local["input_ids"].view(2, 48), "position_ids": local["position_ids"].view(2, 48)})


def test_recurrent_and_chunked_layers_are_refused(alone):
    from transformers import Llama4TextConfig

    mamba = AutoModelForCausalLM.from_config(MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, state_size=4))
    with pytest.raises(ContractError, match=r"layers of kind .*recurrent_context"):
        neatpack.hf.context_parallel(mamba, alone)
    sizes = {**SIZES, "head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 2, "attention_chunk_size": 8}
    chunked = AutoModelForCausalLM.from_config(Llama4TextConfig(**sizes, moe_layers=[]))
    with pytest.raises(ContractError, match="layers of kind chunked_attention"):
        neatpack.hf.context_parallel(chunked, alone)


def test_a_model_that_ignores_its_attention_interface_is_refused(alone):
    class Alone(torch.nn.Module):
        """Looks like a transformers model, and attends by itself."""

        def __init__(self):
            super().__init__()
            self.config = copy.deepcopy(model_of("llama").config)

        def set_attn_implementation(self, name):
            self.config._attn_implementation = name

        def forward(self, input_ids, **options):
            return input_ids

    model = Alone()
    with (
        neatpack.hf.context_parallel(model, alone) as parallel,
        pytest.raises(ContractError, match="no attention layer of Alone looked at context_shard"),
    ):
        model(**parallel.shard(batch_of()))


def test_a_wrapped_model_is_refused(alone):
    with pytest.raises(ContractError, match="Sequential has no set_attn_implementation"):
        neatpack.hf.context_parallel(torch.nn.Sequential(model_of("llama")), alone)


def test_the_model_is_told_the_way_out_when_its_forward_swallows_the_shard(alone):
    model = model_of("llama")
    with (
        neatpack.hf.context_parallel(model, alone) as parallel,
        pytest.raises(ContractError, match="does not pass keyword arguments on"),
    ):
        model(**{**parallel.shard(batch_of()), "context_group": None})
