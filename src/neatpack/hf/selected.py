"""Attention to selected keys: what DeepSeek's sparse attention and its relatives ask for with `indices`.

Such a layer scores all keys that its mask allows, keeps the best few for every query, and hands their places to the attention
function: `indices [B, S, k]`. Documents stay apart if the selection was made within them (keys of another document would
take places of a document's own) and if keys beyond the mask are dropped again: a query with fewer than k keys to choose from
is given some that it may not see. So the boundaries must be in the mask, where the layer that selects reads them.
"""

from __future__ import annotations

import torch

from neatpack.errors import ContractError
from neatpack.hf.lost import WAYS_OUT
from neatpack.hf.mask import PackedMask


def selected_keys(
    indices: torch.Tensor,
    mask: torch.Tensor | PackedMask | None,
    offsets: torch.Tensor | None,
    keys: int,
    window: int | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Turn selected places into a mask: those of them that the layer's own mask allows.

    Args:
        indices: `[B, S, k]` integers, places of keys in the row, in any order.
        mask: what the layer selected by: a `PackedMask`, or a tensor `[B, 1, S, K]`, bool or additive.
        offsets: form A offsets `[N+1] int32` over the flattened `[B * S]`, where the call carries them.
        keys: K.
        window: the layer's sliding window in tokens.
        dtype: of the scores, which an additive mask comes in.

    Returns:
        `[B, 1, S, K]`, bool or additive as the mask is.

    Raises:
        ContractError: the offsets hold boundaries that the mask does not, so keys were selected across them; there is no
            mask to have selected by; or torch compiles.

    Example:
        >>> mask = PackedMask(torch.tensor([[True, False, True, False]]))  # two documents of two tokens
        >>> indices = torch.tensor([[[0, 3], [0, 1], [2, 0], [3, 1]]])     # some are another document's
        >>> selected_keys(indices, mask, None, 4, None, torch.float32)[0, 0].int().tolist()
        [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    """
    if torch.compiler.is_compiling():
        raise ContractError(
            "packed_varlen does not compile layers that select keys: whether they were selected within documents can only be "
            "checked on values. Run the model uncompiled, or with attn_implementation='sdpa'."
        )
    if mask is None:
        raise ContractError(f"indices of selected keys came without the mask that they were selected by. {WAYS_OUT}")
    chosen = torch.zeros(*indices.shape[:2], keys, dtype=torch.bool, device=indices.device)
    chosen = chosen.scatter(-1, indices.long(), True)[:, None]
    if isinstance(mask, PackedMask):
        _refuse_selection_across(mask, offsets)
        return mask.dense(window)[:, None] & chosen
    if mask.dtype == torch.bool:
        return mask & chosen
    return mask.masked_fill(~chosen, torch.finfo(dtype).min)


def _refuse_selection_across(mask: PackedMask, offsets: torch.Tensor | None) -> None:
    if offsets is None or mask.starts is None:
        return
    starts = mask.starts.flatten()
    inside = offsets[(offsets > 0) & (offsets < len(starts))].long().to(starts.device)
    lost = inside[~starts[inside]]
    if len(lost):
        row, position = divmod(int(lost[0]), mask.starts.shape[1])
        raise ContractError(
            f"a document starts at row {row}, position {position}, but this layer selected its keys without knowing: its mask "
            f"does not end there, because a cache was on or position_ids do not restart. {WAYS_OUT}"
        )
