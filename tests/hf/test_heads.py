"""Packing is for causal language models of text: every other head is refused by its name, and text-only builds are not."""

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import neatpack.hf
from neatpack.audit.zoo_models import default_config, small_model
from neatpack.errors import ContractError
from neatpack.hf import collator_for, contract_for
from tiny_models import COMMON, GROUPED

neatpack.hf.register()
T5 = {"vocab_size": 128, "d_model": 32, "d_ff": 32, "num_layers": 1, "num_heads": 2, "d_kv": 16}
BART = {
    "vocab_size": 128, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 64,
}  # fmt: skip

HEADS = {
    "LlamaForSequenceClassification is a sequence-classification head": lambda: AutoModelForSequenceClassification.from_config(
        transformers.LlamaConfig(**GROUPED)
    ),
    "BertForSequenceClassification is a sequence-classification head": lambda: AutoModelForSequenceClassification.from_config(
        transformers.BertConfig(**COMMON)
    ),
    "LlamaForTokenClassification is a token-classification head": lambda: transformers.LlamaForTokenClassification(
        transformers.LlamaConfig(**GROUPED)
    ),
    "LlamaForQuestionAnswering is a question-answering head": lambda: transformers.LlamaForQuestionAnswering(
        transformers.LlamaConfig(**GROUPED)
    ),
    "BertForMultipleChoice is a multiple-choice head": lambda: transformers.BertForMultipleChoice(
        transformers.BertConfig(**COMMON)
    ),
    "BertForMaskedLM is a masked-language-model head on an encoder": lambda: transformers.BertForMaskedLM(
        transformers.BertConfig(**COMMON)
    ),
    "RobertaForMaskedLM is a masked-language-model head on an encoder": lambda: transformers.RobertaForMaskedLM(
        transformers.RobertaConfig(**{**COMMON, "pad_token_id": 1})
    ),
    "T5ForConditionalGeneration is an encoder and a decoder": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(**T5)
    ),
    "BartForConditionalGeneration is an encoder and a decoder": lambda: transformers.BartForConditionalGeneration(
        transformers.BartConfig(**BART)
    ),
    "LlamaModel is no language-modelling head": lambda: transformers.LlamaModel(transformers.LlamaConfig(**GROUPED)),
}

SEVERAL = {
    "Gemma3ForConditionalGeneration is made of several models (vision_config)": (transformers.Gemma3Config, {}),
    "LlavaForConditionalGeneration is made of several models (vision_config)": (transformers.LlavaConfig, {}),
    "Qwen2_5_VLForConditionalGeneration is made of several models (vision_config)": (transformers.Qwen2_5_VLConfig, {}),
    "Gemma4ForConditionalGeneration is made of several models (vision_config)": (
        transformers.Gemma4Config,
        {"vision_config": {}},
    ),
}


@pytest.mark.parametrize("what", HEADS)
def test_heads_that_packing_does_not_support_are_refused_by_name(what):
    with torch.device("meta"):
        model = HEADS[what]()
    with pytest.raises(ContractError) as refused:
        contract_for(model)
    assert what.split(" is ")[0] in str(refused.value)
    assert what in str(refused.value) or f"has {what.split(' is ')[1]}" in str(refused.value)
    with pytest.raises(ContractError):
        collator_for(model)


@pytest.mark.parametrize("what", SEVERAL)
def test_models_that_see_images_are_refused_by_name(what):
    config, options = SEVERAL[what]
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config(**options))
    with pytest.raises(ContractError) as refused:
        contract_for(model)
    assert what in str(refused.value)


def test_the_very_same_class_without_its_image_model_is_packed_for_text():
    """What the config leaves out is no part of the model: Gemma 4 of text alone, as AutoModelForCausalLM builds it."""
    model = small_model("gemma4", "packed_varlen", 32)
    assert type(model).__name__ == "Gemma4ForConditionalGeneration"
    contract = contract_for(model)
    assert contract.payload == "offsets"
    assert "text only: rows carry no pixel_values" in contract.why


@pytest.mark.parametrize(("name", "why"), [("fuyu", "image_patches or pixel_values"), ("moshi", "")])
def test_text_models_with_other_inputs_besides_are_packed_for_text(name, why):
    assert why in contract_for(small_model(name, "packed_varlen", 32)).why


def test_a_model_that_reads_another_ones_keys_is_refused():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(default_config("gemma4_assistant"))
    with pytest.raises(ContractError, match=r"reads the keys and values of another model \(shared_kv_states\)"):
        contract_for(model)
