"""Positions that restart where attention flows on: a packed batch whose boundaries nobody passed on.

A cache turns transformers' own detection off, and so does any mask. What is compared is each token with the one before it that
is not masked out: documents with masked tokens between them see each other as those side by side do.
"""

from __future__ import annotations

import torch

from neatpack.errors import ContractError

WAYS_OUT = (
    "Use PackedCollator's batch: position_ids with all four of cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k, "
    "use_cache=False and no attention_mask."
)


def refuse_lost_boundaries(
    position_ids: torch.Tensor | None,
    batch: int,
    length: int,
    *,
    starts: torch.Tensor | None = None,
    kept: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    first: int | None = None,
) -> None:
    """Refuse position ids that restart where attention would flow on, under at most one of three masks (none: causal).

    Args:
        position_ids: `[B, S]` or `[1, S]`; other ranks (mRoPE) say nothing about documents.
        batch: B.
        length: S.
        starts: `[B, S]` bool, True where a position may not see its predecessor.
        kept: `[B, S]` bool, False where padding is.
        mask: `[B, 1, S, K]` bool or additive, who sees whom.
        first: which of the K keys belongs to the first query; by default what `mask` lets see.

    Raises:
        ContractError: they do; says where.
    """
    if position_ids is None or position_ids.dim() != 2 or position_ids.shape[-1] != length or length < 2:
        return
    positions = position_ids.expand(batch, -1)
    if not bool((positions[:, 1:] - positions[:, :-1] != 1).any()):
        return
    index = torch.arange(length, device=positions.device)
    flows = None if starts is None else ~starts.to(positions.device)
    if mask is not None:
        if mask.shape[-1] < length:
            return  # queries without keys of their own: not a row
        kept, flows = (part.to(positions.device) for part in _kept_and_flowing(mask, length, first))
    kept = torch.ones_like(positions, dtype=torch.bool) if kept is None else kept.to(positions.device).expand(batch, -1)
    latest = torch.where(kept, index, -1).cummax(1).values
    before = torch.cat([latest.new_full((batch, 1), -1), latest[:, :-1]], dim=1)
    step = positions - positions.gather(1, before.clamp(min=0))
    # over masked tokens positions go on, whether those were counted or not
    lost = kept & (before >= 0) & (step != 1) & (step != index - before)
    if flows is not None:
        lost = lost & flows
    if bool(lost.any()):
        row, place = (int(part) for part in lost.nonzero()[0])
        raise ContractError(
            f"position_ids go from {int(positions[row, before[row, place]])} to {int(positions[row, place])} at row {row}, "
            f"position {place}: a packed batch, but no offsets came along and attention would flow across that boundary "
            f"(a cache or any attention_mask turns transformers' own detection off). {WAYS_OUT}"
        )


def _kept_and_flowing(mask: torch.Tensor, length: int, first: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Two `[B, S]`: which tokens see themselves, and so are none of padding; and which see any earlier one of this call."""
    seen = (mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2).any(1)
    keys = seen.shape[-1]
    if first is None:
        # The queries are one block of the keys, with those of a cache in front, and where its size is fixed unused ones behind.
        places, index = torch.arange(keys, device=seen.device), torch.arange(length, device=seen.device)
        first = int((torch.where(seen, places, 0).amax(-1) - index).amax().clamp(0, keys - length))
    within = seen[:, :, first : first + length]
    return within.diagonal(dim1=-2, dim2=-1), within.tril(-1).any(-1)
