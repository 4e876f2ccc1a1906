"""Varlen attention for any device, built on torch alone: every segment attends to itself and to nothing else.

A packed batch is flattened to `[T, H, D]` and cut at the form A offsets. On CUDA in half precision torch's own varlen
kernel does the work (`torch.nn.attention.varlen`, where the installed torch has it); everywhere else segments of one
length are stacked and handed to `scaled_dot_product_attention` together, so that a batch of `n` documents with `k`
distinct lengths costs `k` calls and no `T x T` mask exists at any time.

Soft-capping and sinks have no fused kernel in torch; they run the plain formula per stack of equal segments.

While torch compiles, one opaque operator (`neatpack.attention_op`) stands for all of this: how many documents a batch has,
and how long they are, is then no part of the compiled program.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from neatpack.attention_kernel import INSTALLED_KERNEL, VarlenKernel, runs_on
from neatpack.attention_op import checked_offsets, refuse_short_maximum, varlen_op
from neatpack.attention_plan import SegmentPlan, plan_segments, spans_of
from neatpack.errors import MetadataError

__all__ = ["SegmentPlan", "dense_attention", "plan_segments", "varlen_attention"]


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    *,
    scale: float | None = None,
    window: int | None = None,
    causal: bool = True,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    dropout: float = 0.0,
    plan: SegmentPlan | None = None,
) -> torch.Tensor:
    """Self-attention within the segments of a flattened packed batch (form A).

    Args:
        query: `[T, H, D]`, any floating dtype.
        key: `[T, Hkv, D]`; `Hkv` divides `H` (grouped-query attention), heads are not repeated by the caller.
        value: `[T, Hkv, Dv]`.
        cu_seqlens: `[N+1] int32` offsets that run from 0 to T; repeated offsets are empty segments.
        max_seqlen: at least the length of the longest segment; a Python int.
        scale: factor on the scores, `D ** -0.5` by default.
        window: sliding-window size in tokens, the query's own token included: query `i` sees keys `j > i - window`
            (and, not causal, `j < i + window`). None for unlimited.
        causal: a query sees no later key.
        softcap: bound the scores to `softcap * tanh(scores / softcap)`.
        sinks: `[H]`, a logit per head that takes part in the softmax and has no value.
        dropout: probability of dropping an attention weight; 0 outside training.
        plan: what `plan_segments` returned for these offsets, to spare the check (and on an accelerator the sync).

    Returns:
        `[T, H, Dv]`. Segment `k` is what it would be alone.

    Raises:
        MetadataError: tensors of other shapes, a window below 1, offsets or a plan that do not describe the input, or a
            longest segment above `max_seqlen`.
        MetadataTypeError: `cu_seqlens` is no int32 tensor.

    Example:
        >>> q = torch.randn(12, 4, 8)
        >>> kv = torch.randn(12, 2, 8)
        >>> offsets = torch.tensor([0, 2, 5, 6, 7, 9, 12], dtype=torch.int32)
        >>> varlen_attention(q, kv, kv, offsets, 3).shape
        torch.Size([12, 4, 8])
    """
    _check_tensors(query, key, value, window)
    plain = softcap is None and sinks is None and dropout == 0.0
    kernel = _kernel_for(query, key, value, scale, window, causal) if plain else None
    if torch.compiler.is_compiling():
        offsets = checked_offsets(cu_seqlens, len(query), max_seqlen).to(query.device)
        if kernel is not None:
            return kernel.attend(query, key, value, offsets, max_seqlen, scale=scale, window=window, causal=causal)
        return varlen_op(query, key, value, offsets, scale, window, causal, softcap, sinks, dropout)
    if plan is None:
        plan = plan_segments(cu_seqlens, len(query), device=query.device)
    _check_plan(plan, len(query), max_seqlen)
    if not plan.groups:
        return value.new_empty((0, query.shape[1], value.shape[-1]))
    if kernel is not None:
        offsets = cu_seqlens.to(query.device)
        return kernel.attend(query, key, value, offsets, max_seqlen, scale=scale, window=window, causal=causal)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return dense_attention(q, k, v, mask, causal=causal, scale=scale, softcap=softcap, sinks=sinks, dropout=dropout)

    return _attend_by_length(query, key, value, plan, window, causal, attend)


def dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    causal: bool = True,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Attention over whole rows, with grouped-query heads, soft-capping and sinks.

    Args:
        query: `[B, H, S, D]`.
        key: `[B, Hkv, K, D]`.
        value: `[B, Hkv, K, Dv]`.
        mask: broadcastable to `[B, H, S, K]`, bool (True = may attend) or additive; None for causal or everything.
        causal: with no mask, query `i` sees keys up to `i` (rows of one length: S = K).
        scale: factor on the scores, `D ** -0.5` by default.
        softcap: bound the scores to `softcap * tanh(scores / softcap)` before the mask.
        sinks: `[H]`, a logit per head that takes part in the softmax and has no value.
        dropout: probability of dropping an attention weight.

    Returns:
        `[B, H, S, Dv]`.

    Example:
        >>> q, kv = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8)
        >>> dense_attention(q, kv, kv).shape
        torch.Size([2, 4, 6, 8])
    """
    causal = causal and mask is None and query.shape[2] > 1
    if softcap is not None or sinks is not None:
        return _formula(query, key, value, mask, causal, scale, softcap, sinks, dropout)
    grouped = query.shape[1] != key.shape[1]
    if grouped and query.device.type not in ("cpu", "cuda"):
        key, value = _repeat_heads(key, query.shape[1]), _repeat_heads(value, query.shape[1])
        grouped = False
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=grouped
    )


def _formula(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    dropout: float,
) -> torch.Tensor:
    """The definition, for what no fused kernel computes; scores `[B, Hkv, H / Hkv, S, K]`, softmax in float32 or wider."""
    kv_heads = key.shape[1]
    grouped = _by_kv_head(query, kv_heads) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = grouped @ key.unsqueeze(2).transpose(-1, -2)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if mask is not None:
        mask = mask if mask.dim() < 4 else _by_kv_head(mask, kv_heads if mask.shape[1] > 1 else 1)
        # the lowest finite score, not -inf: a query that sees nothing (left padding) must not turn into NaN
        lowest = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~mask, lowest) if mask.dtype == torch.bool else scores + mask
    weights = _softmax_with_sinks(scores, sinks, kv_heads).to(value.dtype)
    if dropout:
        weights = functional.dropout(weights, dropout)
    return (weights @ value.unsqueeze(2)).flatten(1, 2)


def _by_kv_head(tensor: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """`[B, H, S, D]` to `[B, Hkv, H / Hkv, S, D]`: the query heads that share a key head side by side."""
    return tensor.view(tensor.shape[0], kv_heads, -1, *tensor.shape[2:])


def _softmax_with_sinks(scores: torch.Tensor, sinks: torch.Tensor | None, kv_heads: int) -> torch.Tensor:
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    column = sinks.to(scores.dtype).view(1, kv_heads, -1, 1, 1).expand(*scores.shape[:1], -1, -1, scores.shape[-2], -1)
    return torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]


def _repeat_heads(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    return tensor.repeat_interleave(heads // tensor.shape[1], dim=1)


# --- by length --------------------------------------------------------------------------------------------------------

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


def _attend_by_length(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: SegmentPlan,
    window: int | None,
    causal: bool,
    attend: Attend,
) -> torch.Tensor:
    """Stack the segments of each length to `[G, H, n, D]`, attend, and put the results back in batch order."""
    pieces = []
    for group in plan.groups:
        q, k, v = (group.stack(tensor) for tensor in (query, key, value))
        parts = []
        for span in spans_of(group.length, window, causal):
            mask = span.mask(window, causal, q.device)
            parts.append(span.join_queries(attend(span.take_queries(q), span.take_keys(k), span.take_keys(v), mask)))
        stacked = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
        pieces.append(stacked.transpose(1, 2).flatten(0, 1))
    attended = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return attended if plan.restore is None else attended.index_select(0, plan.restore)


def _kernel_for(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, window: int | None, causal: bool
) -> VarlenKernel | None:
    """Torch's varlen kernel where it computes this call, else None."""
    head_dim = query.shape[-1]
    narrow = query.dtype in (torch.float16, torch.bfloat16)
    if not narrow or head_dim != value.shape[-1] or head_dim % 8 or head_dim > 256:
        return None
    grouped = query.shape[1] != key.shape[1]
    kernel = INSTALLED_KERNEL
    if kernel is None or not kernel.computes(window=window, scale=scale, causal=causal, grouped=grouped):
        return None
    return kernel if runs_on(query.device) else None


# --- checks -----------------------------------------------------------------------------------------------------------


def _check_plan(plan: SegmentPlan, num_tokens: int, max_seqlen: int) -> None:
    if plan.num_tokens != num_tokens:
        raise MetadataError(
            f"the plan describes {plan.num_tokens} tokens, the query has {num_tokens}. "
            "Build it with plan_segments for this batch."
        )
    refuse_short_maximum(plan.longest, max_seqlen)


def _check_tensors(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None) -> None:
    if query.dim() != 3 or key.dim() != 3 or value.dim() != 3:
        shapes = [tuple(tensor.shape) for tensor in (query, key, value)]
        raise MetadataError(f"query, key and value must be [T, heads, head_dim], got {shapes}. Flatten [B, S] to T = B * S.")
    if not len(query) == len(key) == len(value):
        raise MetadataError(
            f"query, key and value must hold the same tokens, got {len(query)}, {len(key)} and {len(value)}: "
            "varlen attention is self-attention; a KV cache of another length is no packed batch."
        )
    if key.shape[1] != value.shape[1] or query.shape[1] % key.shape[1]:
        raise MetadataError(
            f"{query.shape[1]} query heads cannot share {key.shape[1]} key and {value.shape[1]} value heads: "
            "the number of key/value heads must divide the number of query heads."
        )
    if window is not None and window < 1:
        raise MetadataError(f"window must be at least 1 (the query's own token), got {window}. Use None for no window.")
