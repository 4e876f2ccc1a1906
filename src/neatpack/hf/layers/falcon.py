"""Falcon's attention, with rotary positions or ALiBi, on the registered attention."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.falcon.modeling_falcon import FalconAttention, apply_rotary_pos_emb, build_alibi_tensor
from transformers.models.falcon.modeling_falcon import FalconModel as OriginalFalconModel

from neatpack.hf.layers.base import PackedLayer, rate
from neatpack.hf.mask import PackedMask


class PackedFalconAttention(PackedLayer, FalconAttention):
    """`FalconAttention` within documents. As there, attention weights are dropped under ALiBi only.

    ALiBi is computed as the paper has it; transformers rounds its biases to bfloat16 whatever the model's dtype, which makes
    itself felt over a thousand tokens away.
    """

    def forward(
        self,
        hidden_states: torch.Tensor,
        alibi: torch.Tensor | None = None,
        attention_mask: torch.Tensor | PackedMask | None = None,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend; `[B, S, hidden]` in and out."""
        query, key, value = (part.transpose(1, 2) for part in self._split_heads(self.query_key_value(hidden_states)))
        slopes, dropout = None, 0.0
        if self.config.alibi:
            slopes, dropout = self._slopes(query.device), rate(self.attention_dropout)
        else:
            query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        key, value = self.cached(key, value, options, self.layer_idx)
        attended = self.attend(
            query,
            key,
            value,
            attention_mask,
            scaling=self.inv_norm_factor,
            dropout=dropout,
            slopes=slopes,
            skips_padding=True,
        )
        return self.dense(attended), None

    def _slopes(self, device: torch.device) -> torch.Tensor:
        """The bias between neighbours, `[H]`; Falcon scales it with the scores."""
        two = build_alibi_tensor(torch.ones(1, 2, dtype=torch.long, device=device), self.num_heads, torch.float32)
        slopes: torch.Tensor = two[:, 0, 1] * self.inv_norm_factor
        return slopes


class FalconModel(OriginalFalconModel):  # by the same name, which saved configs hold
    """`FalconModel` whose distance bias is left to its layers: it computes one from 2-D masks only, and into other masks."""

    @property
    def use_alibi(self) -> bool:
        """No: the layers know the slopes, and where documents start."""
        return False
