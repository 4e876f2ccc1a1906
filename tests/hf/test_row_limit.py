"""Models that look at the length of a row, or of a batch, besides its documents: rows up to a length, and no longer."""

import pytest
import torch
import transformers

import neatpack.hf
from neatpack import PackedCollator, check_isolation
from neatpack.audit.models import scale_weights
from neatpack.errors import ContractError
from neatpack.hf import collator_for, contract_for, require_isolation
from tiny_models import COMMON, GROUPED

neatpack.hf.register()
LIMIT = 16
ROPE = {"rope_theta": 10000.0, "factor": 4.0}
LONG = {**ROPE, "rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
LONG["original_max_position_embeddings"] = LIMIT


def dynamic():
    rope = {**ROPE, "rope_type": "dynamic"}
    return transformers.LlamaConfig(**{**GROUPED, "max_position_embeddings": LIMIT}, rope_parameters=rope)


def longrope():
    return transformers.LlamaConfig(**GROUPED, rope_parameters=LONG)


def temperature():
    tuned = {"attn_temperature_tuning": True, "floor_scale": LIMIT + 1, "attn_scale": 0.5, "no_rope_layers": [1, 0]}
    experts = {"num_local_experts": 2, "intermediate_size_mlp": 96, "head_dim": 16}
    return transformers.Llama4TextConfig(**GROUPED, **experts, **tuned)


CONFIGS = [dynamic, longrope, temperature]


def model_of(config, attention="packed_varlen"):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config(), attn_implementation=attention).eval()
    scale_weights(model)
    return model


def rows(*lengths):
    generator = torch.Generator().manual_seed(0)
    return [
        {"input_ids": torch.randint(3, 128, (sum(row),), generator=generator).tolist(), "seq_lengths": list(row)}
        for row in lengths
    ]


@pytest.mark.parametrize("attention", ["packed_varlen", "sdpa"])
@pytest.mark.parametrize("config", CONFIGS)
def test_rows_up_to_the_limit_are_isolated_and_longer_ones_would_not_be(config, attention):
    model = model_of(config, attention)
    assert contract_for(model).row_limit.tokens == LIMIT
    batch = collator_for(model, row_length=LIMIT)(rows([5, 7], [2, 14]))
    assert check_isolation(model, batch).isolated
    longer = PackedCollator()(rows([5, 7], [6, 20, 4]))
    assert check_isolation(model, longer).verdict == "differing"


@pytest.mark.parametrize("config", [dynamic, longrope])
def test_padding_past_the_limit_is_enough(config):
    padded = PackedCollator(row_length=2 * LIMIT, return_doc_ids=True)(rows([5, 7]))
    assert check_isolation(model_of(config), padded).verdict == "differing"


@pytest.mark.parametrize(
    "options", [{}, {"row_length": LIMIT + 1}, {"row_length": LIMIT, "pad_to_multiple_of": 12}], ids=["open", "long", "rounded"]
)
@pytest.mark.parametrize("config", CONFIGS)
def test_a_collator_whose_rows_could_be_longer_is_refused(config, options):
    with pytest.raises(ContractError, match=rf"rows of at most {LIMIT} tokens.*--seq-len {LIMIT}.*row_length={LIMIT}"):
        collator_for(model_of(config), **options)


def test_a_longer_batch_is_stopped_before_it_is_measured():
    model = model_of(longrope)
    with pytest.raises(ContractError, match=rf"rows of at most {LIMIT} tokens, and here are rows of 24 tokens"):
        require_isolation(model, PackedCollator(row_length=24)(rows([5, 7], [3, 9])))


def test_the_contract_says_so_and_others_have_no_limit():
    assert f"rows of at most {LIMIT} tokens" in str(contract_for(model_of(longrope)))
    assert contract_for(model_of(lambda: transformers.LlamaConfig(**COMMON))).row_limit is None
    yarn = {**ROPE, "rope_type": "yarn", "original_max_position_embeddings": LIMIT}
    model = model_of(lambda: transformers.LlamaConfig(**COMMON, rope_parameters=yarn))
    assert contract_for(model).row_limit is None
    assert check_isolation(model, PackedCollator()(rows([5, 7], [6, 20, 4]))).isolated
