"""Tiny random models of many architectures, and packed batches written out by hand."""

import inspect

import torch
import transformers
from transformers import AutoModelForCausalLM

from neatpack.packed_seq import packed_seq_params_from_doc_ids, to_flash_attention_kwargs

SIZES = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
COMMON = {**SIZES, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GROUPED = {**COMMON, "num_key_value_heads": 2}

CONFIGS = {
    "llama": ("LlamaConfig", GROUPED),
    "qwen2": ("Qwen2Config", GROUPED),
    "qwen3": ("Qwen3Config", {**GROUPED, "head_dim": 16}),
    "mistral": ("MistralConfig", {**GROUPED, "sliding_window": 3}),
    "gemma": ("GemmaConfig", {**COMMON, "num_key_value_heads": 1, "head_dim": 16}),
    "gemma2": (
        "Gemma2Config",
        {**GROUPED, "head_dim": 16, "sliding_window": 3, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {**GROUPED, "head_dim": 16, "sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "phi3": ("Phi3Config", GROUPED),
    "gpt2": ("GPT2Config", {"vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "pad_token_id": 0}),
    "gpt_neox": ("GPTNeoXConfig", COMMON),
    "opt": ("OPTConfig", {**COMMON, "ffn_dim": 96, "word_embed_proj_dim": 64, "dropout": 0.0}),
    "mixtral": ("MixtralConfig", {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {**GROUPED, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 4,
         "num_experts_per_tok": 2,
         "use_sliding_window": True, "sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "gpt_oss": (
        "GptOssConfig",
        {**GROUPED, "head_dim": 16, "sliding_window": 3, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "llama4": (
        "Llama4TextConfig",
        {**GROUPED, "head_dim": 16, "intermediate_size_mlp": 96, "num_local_experts": 2, "attention_chunk_size": 4,
         "layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0], "moe_layers": []},
    ),
    "bloom": ("BloomConfig", {"vocab_size": 128, "hidden_size": 64, "n_layer": 2, "n_head": 4}),
}  # fmt: skip

DENSE = ["llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3", "phi3", "gpt2", "gpt_neox", "opt"]
MIXTURES = ["mixtral", "qwen2_moe", "gpt_oss"]

DOC_IDS = [[1] * 5 + [2] * 7 + [0] * 4, [1] * 6 + [2] * 4 + [3] * 6, [1] * 16]


def tiny_model(architecture, attention="packed_varlen", **changes):
    """A float32 model whose weights are large enough for attention to matter; logits are O(1-10)."""
    name, options = CONFIGS[architecture]
    config = getattr(transformers, name)(**{**options, **changes})
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            fan_in, fan_out = parameter.shape[-1], parameter.shape[-2]
            torch.nn.init.normal_(parameter, std=1.5 * (2 / (fan_in + fan_out)) ** 0.5)
        elif architecture == "gpt_oss":
            torch.nn.init.normal_(parameter, mean=1.0, std=0.5)
    return model


def positions_within(doc_ids):
    """`[B, S]`: 0, 1, 2, ... in every run of one index."""
    positions = torch.zeros_like(doc_ids)
    for row in range(doc_ids.shape[0]):
        for index in range(1, doc_ids.shape[1]):
            if doc_ids[row, index] == doc_ids[row, index - 1]:
                positions[row, index] = positions[row, index - 1] + 1
    return positions


def packed_batch(doc_ids=DOC_IDS, seed=0, vocab=128):
    """What the collator gives a model: ids, labels, positions and all four FlashAttentionKwargs; no attention mask."""
    doc_ids = torch.as_tensor(doc_ids)
    input_ids = torch.randint(3, vocab, doc_ids.shape, generator=torch.Generator().manual_seed(seed))
    positions = positions_within(doc_ids)
    labels = torch.where((doc_ids == 0) | (positions == 0), -100, input_ids)
    params = packed_seq_params_from_doc_ids(doc_ids)
    return {
        "input_ids": input_ids,
        "labels": labels,
        "position_ids": positions,
        **to_flash_attention_kwargs(params),
        "use_cache": False,
    }


def documents_of(doc_ids=DOC_IDS):
    """`(row, start, end)` of every document, padding left out."""
    found = []
    for row, ids in enumerate(torch.as_tensor(doc_ids).tolist()):
        start = 0
        for end in range(1, len(ids) + 1):
            if end == len(ids) or ids[end] != ids[start]:
                if ids[start]:
                    found.append((row, start, end))
                start = end
    return found


def cache_keyword(model):
    """What this model and this version of transformers call a cache."""
    return next(each for each in ("cache", "past_key_values") if each in inspect.signature(model.forward).parameters)
