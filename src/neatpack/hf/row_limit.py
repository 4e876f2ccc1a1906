"""How long rows may be for a model whose computation depends on a row's length besides its documents; nothing is run.

Two kinds do, whatever boundaries they are sent:

- rotary embeddings of type `dynamic` and `longrope` choose the frequencies of **every** token by the largest position of the
  batch, a padding run's included;
- attention that tunes its temperature by position counts along the **row**, not along the document.

Both are what a document alone would have as long as rows stay within the length at which the change sets in.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class RowLimit:
    """The longest row, padding included, in which every document is what it is alone.

    Attributes:
        tokens: its length.
        why: what happens in longer ones.
    """

    tokens: int
    why: str


def row_limit(model: torch.nn.Module) -> RowLimit | None:
    """The lowest limit of a built model's layers, None where there is none.

    Example:
        >>> row_limit(model)                                                       # doctest: +SKIP
        RowLimit(tokens=4096, why="LlamaRotaryEmbedding chooses ...")

    Source: transformers' `dynamic_rope_update`, and the attention of Llama 4.
    """
    return min(_limits(model), key=lambda limit: limit.tokens, default=None)


def _limits(model: torch.nn.Module) -> Iterator[RowLimit]:
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for layer_type, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
            if isinstance(kind, str) and ("dynamic" in kind or kind == "longrope"):
                yield _limit_of_rotation(module, kind, layer_type)
        # layers that rotate are told positions and need no tuning
        if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True):
            scale = float(getattr(module, "floor_scale", 1.0))
            why = f"{type(module).__name__} tunes its temperature by the place in the row from token {scale:.0f} on"
            yield RowLimit(math.ceil(scale) - 1, why)


def _limit_of_rotation(module: Any, kind: str, layer_type: str | None) -> RowLimit:
    tokens = module.original_max_seq_len
    if kind == "longrope":
        parameters = module.config.rope_parameters
        parameters = parameters if layer_type is None else parameters[layer_type]
        tokens = parameters["original_max_position_embeddings"]
    why = (
        f"{type(module).__name__} ({kind}) rotates every document of a batch by other frequencies as soon as one of them, or "
        f"the padding of a row, is longer than {tokens} tokens"
    )
    return RowLimit(int(tokens), why)
