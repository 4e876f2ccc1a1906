"""Bloom's attention, with ALiBi, on the registered attention."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from transformers.models.bloom.modeling_bloom import BloomAttention, build_alibi_tensor
from transformers.models.bloom.modeling_bloom import BloomModel as OriginalBloomModel

from neatpack.hf.layers.base import PackedLayer, rate
from neatpack.hf.mask import PackedMask


class PackedBloomAttention(PackedLayer, BloomAttention):
    """`BloomAttention` within documents. What `slow_but_exact` sums slice by slice is summed at once."""

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
            dropout=rate(self.attention_dropout),
            slopes=build_alibi_tensor(two, self.num_heads, torch.float32)[:, 0, 1],
            skips_padding=True,
        )
        by_slices = self.pretraining_tp > 1 and self.slow_but_exact  # which leaves the bias out
        projected = functional.linear(attended, self.dense.weight) if by_slices else self.dense(attended)
        return functional.dropout(projected, self.hidden_dropout, self.training) + residual, None


class BloomModel(OriginalBloomModel):  # by the same name, which saved configs hold
    """`BloomModel` whose distance bias is left to its layers: it computes one from 2-D masks only."""

    def build_alibi_tensor(self, mask: torch.Tensor, num_heads: int, dtype: torch.dtype) -> None:
        """Nothing: the layers know the slopes, and where documents start."""
