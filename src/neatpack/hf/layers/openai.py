"""The first GPT's attention on the registered attention."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.openai.modeling_openai import Attention

from neatpack.hf.layers.base import PackedLayer, in_heads, rate
from neatpack.hf.layers.boundaries import SegmentStarts


class PackedOpenAIGPTAttention(PackedLayer, Attention):
    """The first GPT's `Attention` within documents.

    Its model makes zeros and lowest numbers of any mask it is given, and puts two dimensions in front of the tokens'.
    """

    def forward(
        self, x: torch.Tensor, attention_mask: torch.Tensor | None = None, output_attentions: bool = False, **options: Any
    ) -> list[torch.Tensor]:
        """Attend; `[B, S, hidden]` in and out."""
        query, key, value = (in_heads(part, self.n_head) for part in self.c_attn(x).split(self.split_size, dim=2))
        scaling = query.shape[-1] ** -0.5 if self.scale else 1.0
        attended = self.attend(query, key, value, _as_it_was(attention_mask), scaling=scaling, dropout=rate(self.attn_dropout))
        return [self.resid_dropout(self.c_proj(attended))]


def _as_it_was(made: torch.Tensor | None) -> torch.Tensor | None:
    """What the model made zeros and lowest numbers of: the map of starts `[B, 1, 1, S]`, or padding, as `[B, 1, S, S]`."""
    if made is None:
        return None
    kept = (made == 0).flatten(1, -2)[:, None]
    return kept if isinstance(made, SegmentStarts) else kept & kept.new_ones(*2 * kept.shape[-1:]).tril()
