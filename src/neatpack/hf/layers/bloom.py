"""Bloom's attention, with ALiBi, on the registered attention."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from transformers.models.bloom.modeling_bloom import BloomAttention, BloomModel, build_alibi_tensor

from neatpack.hf.layers.base import PackedLayer
from neatpack.hf.mask import PackedMask


class PackedBloomAttention(PackedLayer, BloomAttention):
    """`BloomAttention` within documents. Where a checkpoint asks for slices summed one by one, they are summed at once."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        residual: torch.Tensor,
        alibi: torch.Tensor | None = None,
        attention_mask: torch.Tensor | PackedMask | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend and add the residual; `[B, S, hidden]` in and out."""
        query, key, value = self._reshape(self.query_key_value(hidden_states))
        key, value = self.cached(key, value, options, self.layer_idx)
        two = torch.ones(1, 2, dtype=torch.long, device=query.device)
        attended = self.attend(
            query,
            key,
            value,
            attention_mask,
            scaling=self.inv_norm_factor,
            dropout=self.attention_dropout.p,
            slopes=build_alibi_tensor(two, self.num_heads, torch.float32)[:, 0, 1],
        )
        projected = functional.dropout(self.dense(attended), self.hidden_dropout, self.training)
        return projected + residual, None


class PackedBloomModel(BloomModel):
    """`BloomModel` whose distance bias is left to its layers: it computes one from 2-D masks only."""

    def build_alibi_tensor(self, mask: torch.Tensor, num_heads: int, dtype: torch.dtype) -> None:
        """Nothing: the layers know the slopes, and where documents start."""
