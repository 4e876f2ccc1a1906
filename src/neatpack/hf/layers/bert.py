"""The attention of BERT's relatives that have code of their own for it, on the registered attention."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.big_bird.modeling_big_bird import BigBirdSelfAttention
from transformers.models.megatron_bert.modeling_megatron_bert import MegatronBertSelfAttention
from transformers.models.rembert.modeling_rembert import RemBertSelfAttention

from neatpack.hf.layers.base import PackedLayer, in_heads, rate, refuse_cross_attention
from neatpack.hf.mask import PackedMask


class _PackedSelfAttention(PackedLayer):
    """The forward that they share."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | PackedMask | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend; `[B, S, hidden]` in, `[B, S, H * D]` out."""
        refuse_cross_attention(encoder_hidden_states)
        projections = (self.query, self.key, self.value)
        query, key, value = (in_heads(project(hidden_states), self.num_attention_heads) for project in projections)
        key, value = self.cached(key, value, options, self.layer_idx)
        scaling = self.attention_head_size**-0.5
        return self.attend(query, key, value, attention_mask, scaling=scaling, dropout=rate(self.dropout)), None


class PackedBigBirdSelfAttention(_PackedSelfAttention, BigBirdSelfAttention):
    """`BigBirdSelfAttention` (attention_type="original_full") within documents."""


class PackedMegatronBertSelfAttention(_PackedSelfAttention, MegatronBertSelfAttention):
    """`MegatronBertSelfAttention` within documents."""


class PackedRemBertSelfAttention(_PackedSelfAttention, RemBertSelfAttention):
    """`RemBertSelfAttention` within documents."""
