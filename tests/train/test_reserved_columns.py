"""Further columns of a batch mean nothing to a model, or are refused by name: `model(**batch)` passes every name on."""

import inspect

import pytest
import torch
from transformers import modeling_flash_attention_utils
from transformers.loss import loss_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama
from transformers.utils.generic import TransformersKwargs

import neatpack.hf
from neatpack.errors import MetadataError
from neatpack.reserved import BATCH_KEYS, MODEL_ARGUMENTS
from neatpack.train import PackedCollator
from neatpack.train.row_columns import KNOWN_COLUMNS
from tiny_models import tiny_model

neatpack.hf.register()
ROW = {"input_ids": [11, 12, 21, 22, 23], "seq_lengths": [2, 3], "weight": [1, 2, 3, 4, 5], "topic": [1, 2]}
COLLATOR = PackedCollator(token_columns=["weight"], document_columns=["topic"])


def functions_that_a_batch_goes_through():
    llama = modeling_llama
    yield from (loss_utils.fixed_cross_entropy, loss_utils.ForCausalLMLoss, llama.eager_attention_forward)
    yield from ALL_ATTENTION_FUNCTIONS.values()
    flash = modeling_flash_attention_utils
    yield from (flash._flash_attention_forward, flash._process_flash_attention_kwargs)
    layers = (llama.LlamaForCausalLM, llama.LlamaModel, llama.LlamaDecoderLayer, llama.LlamaAttention)
    yield from (layer.forward for layer in layers)


def test_every_argument_on_the_way_of_a_batch_through_transformers_is_reserved():
    arguments = {name for function in functions_that_a_batch_goes_through() for name in inspect.signature(function).parameters}
    arguments |= set(TransformersKwargs.__annotations__)
    assert arguments - {"self", "kwargs", "options"} <= MODEL_ARGUMENTS | BATCH_KEYS | set(KNOWN_COLUMNS)


@pytest.mark.parametrize("option", ["token_columns", "document_columns"])
def test_every_reserved_name_is_refused_and_may_be_left_out(option):
    for name in MODEL_ARGUMENTS | BATCH_KEYS:
        with pytest.raises(MetadataError, match=f"{option} names '{name}'.*Rename the column"):
            PackedCollator(**{option: [name]})
        PackedCollator(ignore_columns=[name])


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "opt", "gpt_oss"])
@pytest.mark.parametrize("attention", ["packed_varlen", "eager"])
def test_columns_that_are_left_in_the_batch_change_nothing_in_a_model(architecture, attention):
    model = tiny_model(architecture, attention)
    batch = COLLATOR([ROW])
    carried = model(**batch)
    weight, topic = batch.pop("weight"), batch.pop("topic")
    plain = model(**batch)
    assert (weight.shape, topic.shape) == ((1, 5), (2,))
    assert torch.equal(carried.logits, plain.logits)
    assert torch.equal(carried.loss, plain.loss)


@pytest.mark.parametrize("name", ["source", "target", "ignore_index", "key", "value", "hidden_states", "dropout"])
def test_a_reserved_name_in_the_batch_would_break_the_call(name):
    """The twin: what the collator refuses, under names that a data set may well have."""
    batch = COLLATOR([ROW])
    with pytest.raises((TypeError, RuntimeError, ValueError)):
        tiny_model("llama", "sdpa")(**batch, **{name: batch["topic"]})
