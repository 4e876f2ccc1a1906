"""MPT's attention, with ALiBi, on the registered attention."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.mpt.modeling_mpt import MptAttention, build_mpt_alibi_tensor

from neatpack.hf.layers.base import PackedLayer, in_heads
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
        """Attend; `[B, S, hidden]` in and out. `position_bias`, `[H, 1, K]`, is made anew, within documents."""
        mixed = self.Wqkv(hidden_states)
        if self.clip_qkv:
            mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        query, key, value = (in_heads(part, self.n_heads) for part in mixed.chunk(3, dim=-1))
        key, value = self.cached(key, value, options, self.layer_idx)
        two = build_mpt_alibi_tensor(self.n_heads, 2, device=query.device)
        slopes = None if position_bias is None else two[:, 0, 1] - two[:, 0, 0]
        attended = self.attend(
            query, key, value, attention_mask, scaling=self.softmax_scale, dropout=self.attn_dropout_p, slopes=slopes
        )
        return self.out_proj(attended), None
