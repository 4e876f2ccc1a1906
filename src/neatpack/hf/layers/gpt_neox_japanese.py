"""The attention of Japanese GPT-NeoX on the registered attention: rotary positions on a part of each head."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.gpt_neox_japanese.modeling_gpt_neox_japanese import GPTNeoXJapaneseAttention, apply_rotary_pos_emb

from neatpack.hf.layers.base import PackedLayer, rate
from neatpack.hf.mask import PackedMask


class PackedGPTNeoXJapaneseAttention(PackedLayer, GPTNeoXJapaneseAttention):
    """`GPTNeoXJapaneseAttention` within documents; the bias of the last layer is added by its caller."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | PackedMask | None = None,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        **options: Any,
    ) -> tuple[torch.Tensor, None, torch.Tensor | None]:
        """Attend; `[B, S, hidden]` in and out."""
        heads = (*hidden_states.shape[:-1], self.num_attention_heads, 3 * self.head_size)
        query, key, value = self.query_key_value(hidden_states).view(heads).transpose(1, 2).chunk(3, dim=-1)
        rotated = self.rotary_ndims
        turned = apply_rotary_pos_emb(query[..., :rotated], key[..., :rotated], *position_embeddings)
        query, key = (torch.cat([part, whole[..., rotated:]], dim=-1) for part, whole in zip(turned, (query, key), strict=True))
        key, value = self.cached(key, value, options, self.layer_idx)
        attended = self.attend(
            query, key, value, attention_mask, scaling=1 / self.norm_factor, dropout=rate(self.attention_dropout)
        )
        return self.dense(attended), None, self.dense_bias
