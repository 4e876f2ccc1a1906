"""GPT-Neo's attention on the registered attention: no scaling of scores, and every other layer in a window."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.gpt_neo.modeling_gpt_neo import GPTNeoSelfAttention

from neatpack.hf.layers.base import PackedLayer, in_heads, rate
from neatpack.hf.mask import PackedMask


class PackedGPTNeoSelfAttention(PackedLayer, GPTNeoSelfAttention):
    """`GPTNeoSelfAttention` within documents, in the dtype of its input."""

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | PackedMask | None = None, **options: Any
    ) -> tuple[torch.Tensor, None]:
        """Attend; `[B, S, hidden]` in and out."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        query, key, value = (in_heads(project(hidden_states), self.num_heads) for project in projections)
        window = self.config.window_size if self.attention_type == "local" else None
        key, value = self.cached(key, value, options, self.layer_id, window)
        attended = self.attend(query, key, value, attention_mask, scaling=1.0, dropout=rate(self.attn_dropout), window=window)
        return self.resid_dropout(self.out_proj(attended)), None
