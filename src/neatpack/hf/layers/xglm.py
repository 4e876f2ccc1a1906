"""XGLM's attention on the registered attention."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.xglm.modeling_xglm import XGLMAttention

from neatpack.hf.layers.base import PackedLayer, in_heads, refuse_cross_attention
from neatpack.hf.mask import PackedMask


class PackedXGLMAttention(PackedLayer, XGLMAttention):
    """`XGLMAttention` within documents."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | PackedMask | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend; `[B, S, hidden]` in and out."""
        refuse_cross_attention(key_value_states)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        query, key, value = (in_heads(project(hidden_states), self.num_heads) for project in projections)
        key, value = self.cached(key, value, options, self.layer_idx)
        attended = self.attend(query, key, value, attention_mask, scaling=self.scaling, dropout=self.dropout)
        return self.out_proj(attended), None
