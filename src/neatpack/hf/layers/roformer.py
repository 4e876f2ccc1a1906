"""RoFormer's attention on the registered attention: rotary positions, of values too where its config says so."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.roformer.modeling_roformer import RoFormerSelfAttention

from neatpack.hf.layers.base import PackedLayer, in_heads, rate, refuse_cross_attention
from neatpack.hf.layers.boundaries import SegmentStarts, places_within
from neatpack.hf.mask import PackedMask


class PackedRoFormerSelfAttention(PackedLayer, RoFormerSelfAttention):
    """`RoFormerSelfAttention` within documents. Its model takes no positions and counts along the row."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | PackedMask | None = None,
        sinusoidal_pos: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend; `[B, S, hidden]` in, `[B, S, H * D]` out. `sinusoidal_pos`, `[1, 1, S, D]`, is of places in the row."""
        refuse_cross_attention(encoder_hidden_states)
        projections = (self.query, self.key, self.value)
        query, key, value = (in_heads(project(hidden_states), self.num_attention_heads) for project in projections)
        if sinusoidal_pos is not None:
            angles = _within_documents(sinusoidal_pos, attention_mask)
            query, key = self.apply_rotary_position_embeddings(angles, query, key)
            if self.rotary_value:
                value, _ = self.apply_rotary_position_embeddings(angles, value, value)
        key, value = self.cached(key, value, options, self.layer_idx)
        scaling = self.attention_head_size**-0.5
        return self.attend(query, key, value, attention_mask, scaling=scaling, dropout=rate(self.dropout)), None


def _within_documents(angles: torch.Tensor, mask: torch.Tensor | PackedMask | None) -> torch.Tensor:
    """`[1, 1, S, D]` by place in the row to `[B, 1, S, D]` by place in the document, where the mask says where those start."""
    if not isinstance(mask, SegmentStarts):
        return angles
    with torch._C.DisableTorchFunctionSubclass():
        return angles[0, 0][places_within(mask[:, 0, 0])][:, None]
