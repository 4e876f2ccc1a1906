"""MPT's attention, with ALiBi, on the registered attention."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.mpt.modeling_mpt import MptAttention

from neatpack.hf.layers.base import PackedLayer
from neatpack.hf.mask import PackedMask


class PackedMptAttention(PackedLayer, MptAttention):
    """`MptAttention` within documents."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_bias: torch.Tensor | None = None,
        attention_mask: torch.Tensor | PackedMask | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend; `[B, S, hidden]` in and out. Of `position_bias`, `[H, 1, K]`, the step between two keys is used."""
        mixed = self.Wqkv(hidden_states)
        if self.clip_qkv:
            mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        shape = (*hidden_states.shape[:-1], self.n_heads, self.head_dim)
        query, key, value = (part.view(shape).transpose(1, 2) for part in mixed.chunk(3, dim=-1))
        key, value = self.cached(key, value, options, self.layer_idx)
        slopes = None if position_bias is None else (position_bias[:, 0, -1] - position_bias[:, 0, -2])
        attended = self.attend(
            query, key, value, attention_mask, scaling=self.softmax_scale, dropout=self.attn_dropout_p, slopes=slopes
        )
        return self.out_proj(attended), None
