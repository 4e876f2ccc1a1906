"""Models to audit: a checkpoint with its weights, or a small random model that keeps a config's traits.

A config alone says what the attention does (windows, grouped heads, soft-caps, which layers are of which kind), and that
is all the audit needs; the sizes only cost time. So sizes shrink and traits stay: one layer of each kind, the ratio of
query to key/value heads, windows and chunks small enough to bite within a short row.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from neatpack.errors import ContractError, MissingDependencyError, SourceError
from neatpack.hf import use_packed_varlen

HEAD_DIM = 16
HEADS = 4
VOCABULARY = 128

# Sizes, by every name that configs use for them, and the most that a small model has of each.
_LIMITS = {
    "intermediate_size": 96,
    "ffn_dim": 96,
    "n_inner": 96,
    "intermediate_size_mlp": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "index_topk": 8,
    "index_block_size": 4,
    "index_topk_blocks": 2,
    "keep_window_size": 8,
    "window_size": 8,
    "n_group": 1,
    "topk_group": 1,
    "rotary_dim": HEAD_DIM,
    "decoder_ffn_dim": 96,
    "encoder_ffn_dim": 96,
    "ffn_hidden_size": 96,
    "encoder_layers": 1,
    "num_encoder_layers": 1,
    "num_decoder_layers": 2,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "num_kv_shared_layers": 0,
    "sliding_window": 8,
    "attention_chunk_size": 8,
    "vocab_size_per_layer_input": VOCABULARY,
    "word_embed_proj_dim": HEADS * HEAD_DIM,
    # multi-head latent attention
    "kv_lora_rank": HEAD_DIM,
    "q_lora_rank": HEAD_DIM,
    "qk_nope_head_dim": HEAD_DIM,
    "qk_rope_head_dim": HEAD_DIM // 2,
    "qk_head_dim": HEAD_DIM + HEAD_DIM // 2,
    "v_head_dim": HEAD_DIM,
}
_TOKEN_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

# What a config may leave open and its model then cannot be built with.
_FILLED_IN = {
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "num_experts": 4,
    "head_dim": HEAD_DIM,
    "num_key_value_heads": HEADS,
}


def load_config(source: Path) -> Any:
    """Read a transformers config from a folder or a `config.json`.

    Raises:
        SourceError: there is no config, or transformers does not know it.
        MissingDependencyError: transformers is not installed.
    """
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise MissingDependencyError("transformers", "neatpack audit", "neatpack[hf]") from error
    file = source / "config.json" if source.is_dir() else source
    if not file.is_file():
        raise SourceError(
            f"{file} does not exist: expected a model (a config.json, or a folder that holds one) or a folder of packed rows. "
            "Models are not downloaded: fetch the folder first, or write a config with config.save_pretrained(folder)."
        )
    try:
        return AutoConfig.from_pretrained(str(file), trust_remote_code=False)
    except Exception as error:
        first_sentence = re.split(r"(?<=[.!?])\s", str(error).strip(), maxsplit=1)[0].rstrip(".")
        raise SourceError(
            f"{file}: transformers cannot read this config: {first_sentence}. Check the file, or update transformers "
            f"({version('transformers')}) if the model is newer."
        ) from error


def has_weights(source: Path) -> bool:
    """Does the folder hold a checkpoint, or only a config?"""
    patterns = ("*.safetensors", "pytorch_model*.bin")
    return source.is_dir() and any(next(source.glob(pattern), None) for pattern in patterns)


def load_checkpoint(source: Path, attention: str) -> torch.nn.Module:
    """The model as it was saved, in float32, with the attention implementation asked for."""
    from transformers import AutoModelForCausalLM

    def load(implementation: str | None) -> torch.nn.Module:
        model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
            str(source), attn_implementation=implementation, dtype=torch.float32, trust_remote_code=False, local_files_only=True
        )
        return model

    return with_attention(load, attention)


def build_small(config: Any, attention: str, *, row_length: int, seed: int = 0) -> torch.nn.Module:
    """A small random model from `config`, shrunk in place, with weights large enough for attention to matter."""
    from transformers import AutoModelForCausalLM

    shrink(config, row_length)

    def build(implementation: str | None) -> torch.nn.Module:
        torch.manual_seed(seed)
        model: torch.nn.Module = AutoModelForCausalLM.from_config(
            config, attn_implementation=implementation, trust_remote_code=False
        )
        scale_weights(model)
        return model.float()

    return with_attention(build, attention)


def longest_rows(config: Any) -> int | None:
    """The longest rows that the model of a config takes, None for any: read off it without weights, at its full size."""
    from transformers import AutoModelForCausalLM

    from neatpack.hf.row_limit import row_limit

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager", trust_remote_code=False)
    limit = row_limit(model)
    return None if limit is None else limit.tokens


def with_attention(load: Callable[[str | None], torch.nn.Module], attention: str | None) -> torch.nn.Module:
    """What `load` makes of an attention implementation; packed_varlen is selected on the built model, as users do it.

    Args:
        load: builds the model on an implementation, or on its own choice where it is given None.
        attention: the implementation.
    """
    if attention == "packed_varlen":
        with suppress(ContractError):  # then it is built with the name, and its contract says why that does not do
            return use_packed_varlen(load(None))
    return load(attention)


def shrink(config: Any, row_length: int) -> None:
    """Make the sizes of a config small and leave its traits: in place; of a composite one, those of its text model."""
    config = config.get_text_config()
    head_ratio = _ratio(config, "num_attention_heads", "num_key_value_heads")
    rotary = _rotary_dimensions(config)
    kept = _representative_layers(config)
    _keep_layers(config, kept)
    _set(config, "num_attention_heads", HEADS)
    _set(config, "num_key_value_heads", max(1, HEADS // head_ratio))
    # latent attention rotates a part of each head, and calls that part's size the head's
    _set(config, "head_dim", HEAD_DIM // 2 if hasattr(config, "qk_rope_head_dim") else HEAD_DIM)
    _set(config, "hidden_size", HEADS * HEAD_DIM)
    _set(config, "vocab_size", VOCABULARY)
    for name, most in _LIMITS.items():
        value = _get(config, name)
        if isinstance(value, int) and value > most:
            _set(config, name, most)
    for name, value in _FILLED_IN.items():
        if hasattr(type(config), name) and _get(config, name) is None:
            setattr(config, name, value)
    _shrink_state_space(config)
    longest = _get(config, "max_position_embeddings")
    if isinstance(longest, int) and longest > 4 * row_length and not rotary:
        _set(config, "max_position_embeddings", 4 * row_length)
    _shorten_rotary_factors(config, rotary)
    for name, small in _TOKEN_IDS.items():
        token = _get(config, name)
        if isinstance(token, list) or (isinstance(token, int) and token >= VOCABULARY):
            setattr(config, name, small)


def scale_weights(model: torch.nn.Module) -> None:
    """Give every matrix a spread at which scores, weights and logits are of order one to ten.

    Vectors get a little noise: what models start with zeros there (biases, sinks, the scores by which some select keys)
    would say nothing, or leave ties whose order is nobody's choice.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=1.5 * math.sqrt(2 / (parameter.shape[-1] + parameter.shape[-2])))
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))


def _get(config: Any, name: str) -> Any:
    """An attribute, or None where a config has none, or one a layer (which transformers answers with an error)."""
    try:
        return getattr(config, name, None)
    except Exception:
        return None


def _set(config: Any, name: str, value: int) -> None:
    """Change a size that the config has; where it is computed from others or fixed by the model, it stays."""
    if _get(config, name) is not None:
        with suppress(AttributeError, NotImplementedError):
            setattr(config, name, value)


def _ratio(config: Any, many: str, few: str) -> int:
    heads, key_heads = _get(config, many), _get(config, few)
    if not isinstance(heads, int) or not isinstance(key_heads, int) or key_heads < 1:
        return 1
    # any grouping keeps groups, down to one key head for all queries
    return HEADS if key_heads == 1 else min(2, heads // key_heads)


def _representative_layers(config: Any) -> list[int]:
    """The first layer of each kind, in order, and at least two layers."""
    count = int(_get(config, "num_hidden_layers") or 2)
    kinds = _get(config, "layer_types") or ["same"] * count
    first = {kind: index for index, kind in reversed(list(enumerate(kinds)))}
    kept = sorted(first.values())
    spare = [index for index in range(count) if index not in kept]
    return sorted(kept + spare[: max(0, 2 - len(kept))])


def _keep_layers(config: Any, kept: list[int]) -> None:
    """Cut the number of layers, and with it every list that has an entry for each."""
    count = getattr(config, "num_hidden_layers", None)
    if not isinstance(count, int):
        return
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == count and name != "architectures":
            setattr(config, name, [value[index] for index in kept])
    _set(config, "num_hidden_layers", len(kept))


def _shrink_state_space(config: Any) -> None:
    """Mamba heads: their number times their size is the expanded hidden size."""
    for expand, heads, size in (("expand", "num_heads", "head_dim"), ("mamba_expand", "mamba_n_heads", "mamba_d_head")):
        if isinstance(getattr(config, expand, None), int) and isinstance(getattr(config, heads, None), int):
            setattr(config, size, HEAD_DIM)
            setattr(config, heads, getattr(config, expand) * HEADS)


def _rotary_dimensions(config: Any) -> int:
    """How many entries a per-frequency list has: 0 where the config holds none."""
    factors = [value for key, value in _rope(config).items() if key.endswith("_factor") and isinstance(value, list)]
    return max((len(value) for value in factors), default=0)


def _shorten_rotary_factors(config: Any, entries: int) -> None:
    """Per-frequency factors (long RoPE) have an entry for every pair of rotated dimensions."""
    if not entries:
        return
    rope = _rope(config)
    wanted = int(HEAD_DIM * rope.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", 1.0))) // 2
    for key, value in rope.items():
        if key.endswith("_factor") and isinstance(value, list):
            rope[key] = [value[index * len(value) // wanted] for index in range(wanted)]


def _rope(config: Any) -> dict[str, Any]:
    return getattr(config, "rope_parameters", None) or {}
