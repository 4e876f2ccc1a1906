"""Attention layers for families whose own attention code goes past transformers' interface, run on packed_varlen instead.

`neatpack.hf.use_packed_varlen(model)` gives the layers of one built model these classes. Each is a subclass of the layer it
stands in for, with the same parameters under the same names, and replaces its forward alone.
"""

from __future__ import annotations

from importlib import import_module

import torch

_FAMILIES = "transformers.models."
# The class that stands in, by the module and class whose place it takes; imported when a model has such a layer.
_STAND_INS = {
    "big_bird.modeling_big_bird.BigBirdSelfAttention": "bert.PackedBigBirdSelfAttention",
    "bloom.modeling_bloom.BloomAttention": "bloom.PackedBloomAttention",
    "bloom.modeling_bloom.BloomModel": "bloom.BloomModel",
    "falcon.modeling_falcon.FalconAttention": "falcon.PackedFalconAttention",
    "falcon.modeling_falcon.FalconFlashAttention2": "falcon.PackedFalconAttention",
    "falcon.modeling_falcon.FalconModel": "falcon.FalconModel",
    "gpt_neo.modeling_gpt_neo.GPTNeoFlashAttention2": "gpt_neo.PackedGPTNeoSelfAttention",
    "gpt_neo.modeling_gpt_neo.GPTNeoSelfAttention": "gpt_neo.PackedGPTNeoSelfAttention",
    "gpt_neox_japanese.modeling_gpt_neox_japanese.GPTNeoXJapaneseAttention": (
        "gpt_neox_japanese.PackedGPTNeoXJapaneseAttention"
    ),
    "megatron_bert.modeling_megatron_bert.MegatronBertSelfAttention": "bert.PackedMegatronBertSelfAttention",
    "mpt.modeling_mpt.MptAttention": "mpt.PackedMptAttention",
    "openai.modeling_openai.Attention": "openai.PackedOpenAIGPTAttention",
    "rembert.modeling_rembert.RemBertSelfAttention": "bert.PackedRemBertSelfAttention",
    "roformer.modeling_roformer.RoFormerSelfAttention": "roformer.PackedRoFormerSelfAttention",
    "xglm.modeling_xglm.XGLMAttention": "xglm.PackedXGLMAttention",
}


def stand_in_for(module: torch.nn.Module) -> type[torch.nn.Module] | None:
    """The class that runs this module's attention on packed_varlen, None where there is none."""
    kind = type(module)
    name = f"{kind.__module__}.{kind.__qualname__}"
    found = _STAND_INS.get(name.removeprefix(_FAMILIES)) if name.startswith(_FAMILIES) else None
    if found is None:
        return None
    file, _, stand_in = found.partition(".")
    return getattr(import_module(f"{__name__}.{file}"), stand_in)  # type: ignore[no-any-return]
