"""The causal language models that transformers ships, each as a small random model.

`shrink` does for most of them. What a family needs besides, because its default config cannot be built or would not be the
causal language model that the mapping promises, is in one table below.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch

from neatpack.audit.models import HEAD_DIM, HEADS, scale_weights, shrink, with_attention
from neatpack.errors import SourceError
from neatpack.hf.heads import refuse_several_models

# Encoders that the mapping lists as decoders: that is what they are configured as here.
_DECODERS = frozenset(
    {"bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "rembert",
     "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod", "reformer",
     "musicgen", "musicgen_melody"}
)  # fmt: skip

_MOST_PARAMETERS = 32_000_000
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

_ASSISTANT = {
    "num_hidden_layers": 2, "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "per_layer_config": {},
}  # fmt: skip

_ATTENTION_SIZES = {
    "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "q_lora_rank": HEAD_DIM, "kv_lora_rank": HEAD_DIM,
    "head_dim": HEAD_DIM + HEAD_DIM // 2, "qk_nope_head_dim": HEAD_DIM, "v_head_dim": HEAD_DIM,
    "qk_rope_head_dim": HEAD_DIM // 2,
}  # fmt: skip
_DOTS3 = {**_ATTENTION_SIZES, **{f"swa_{name}": size for name, size in _ATTENTION_SIZES.items()}}

# Arguments of the config, where its defaults leave a size open or differ from layer to layer.
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}, "ffn_config": {"ffn_hidden_size": 96}},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1},
    "dots3_note": {"text_config": _DOTS3},
    "dots3_note_text": _DOTS3,
    "gemma4_assistant": {"text_config": _ASSISTANT},
    "gemma4_unified_assistant": {"text_config": _ASSISTANT},
    "gemma4_text": {"per_layer_config": {}},
    "gemma4_unified_text": {"per_layer_config": {}},
    "hrm_text": {"num_layers_per_stack": 1},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "minimax_m3_vl_text": {"num_hidden_layers": 2, "layer_types": ["minimax_m3_sparse", "full_attention"]},
    "lfm2_moe": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
}
# Attributes set after shrinking.
_SELECTION = {
    "indexer_n_heads": HEADS, "indexer_kv_heads": 1, "indexer_head_dim": HEAD_DIM, "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}  # fmt: skip
_ATTRIBUTES: dict[str, dict[str, Any]] = {
    "big_bird": {"attention_type": "original_full"},
    "dbrx": {"ffn_config.hidden_size": HEADS * HEAD_DIM},
    "qwen4_exp": _SELECTION,
    "qwen4_exp_text": _SELECTION,
    "xmod": {"default_language": "en_XX"},
}


def causal_lm_names() -> list[str]:
    """Every model type that `AutoModelForCausalLM` builds, sorted."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def default_config(name: str) -> Any:
    """The config of a model type, as its class gives it, for the decoder that the mapping promises."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(name, **_ARGUMENTS.get(name, {}))
    config = getattr(config, "decoder", config) if name.startswith("musicgen") else config
    if name in _DECODERS:
        config.is_decoder = True
    return config


def small_model(name: str, attention: str | None, row_length: int, seed: int = 0) -> torch.nn.Module:
    """A small random model of a type, in float32 and eval mode; without `attention` on the implementation it is loaded with."""
    config = default_config(name)
    shrink(config, row_length)
    config = _own_config(name, _completed(name, config))
    _refuse_large(name, config)

    def build(implementation: str | None) -> torch.nn.Module:
        torch.manual_seed(seed)
        model: torch.nn.Module = _class_of(name)._from_config(copy.deepcopy(config), attn_implementation=implementation)
        scale_weights(model)
        return model.float().eval()

    return with_attention(build, attention)


def weightless_model(name: str, attention: str) -> torch.nn.Module:
    """The model of the default config without any weights, on the meta device: enough for its contract."""
    config = _own_config(name, _completed(name, default_config(name)))
    with torch.device("meta"):
        model: torch.nn.Module = _class_of(name)._from_config(config, attn_implementation=attention)
    return model


def _completed(name: str, config: Any) -> Any:
    """The config with what its family needs besides, set in place."""
    for attribute, value in _ATTRIBUTES.get(name, {}).items():
        *path, last = attribute.split(".")
        setattr(functools.reduce(getattr, path, config.get_text_config()), last, value)
    return config


def refuse_by_config(name: str) -> None:
    """Refuse a model type by its class and config alone, where not even a model without weights can be built.

    Raises:
        ContractError: it is made of several models.
    """
    refuse_several_models(_class_of(name).__name__, _own_config(name, default_config(name)))


def _refuse_large(name: str, config: Any) -> None:
    """Stop before the weights of a model that did not shrink are drawn: that would take minutes, or the memory there is."""
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in _class_of(name)._from_config(copy.deepcopy(config)).parameters())
    if size > _MOST_PARAMETERS:
        raise SourceError(f"{name} has {size:,} parameters even when shrunk, more than {_MOST_PARAMETERS:,}.")


def _class_of(name: str) -> Any:
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name])


def _own_config(name: str, config: Any) -> Any:
    """The text section, where the class is a composite config's text model."""
    return config.get_text_config() if isinstance(config.get_text_config(), _class_of(name).config_class) else config
