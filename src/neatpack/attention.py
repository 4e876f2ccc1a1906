"""Varlen attention for any device, built on torch alone: every segment attends to itself and to nothing else.

A packed batch is flattened to `[T, H, D]` and cut at the form A offsets. On CUDA in half precision torch's own varlen
kernel does the work (`torch.nn.attention.varlen`, where the installed torch has it); everywhere else segments of one
length are stacked and handed to `scaled_dot_product_attention` together, so that a batch of `n` documents with `k`
distinct lengths costs `k` calls and no `T x T` mask exists at any time.

Soft-capping and sinks have no fused kernel in torch; they run the plain formula per stack of equal segments.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.nn import functional

from neatpack.errors import MetadataError, MetadataTypeError

__all__ = ["SegmentPlan", "dense_attention", "plan_segments", "varlen_attention"]


@dataclass(frozen=True, eq=False)
class SegmentGroup:
    """Segments of one length: `starts` in the flattened batch, and where to gather them if they are not adjacent."""

    length: int
    starts: tuple[int, ...]
    index: torch.Tensor | None  # [len(starts) * length] int64, None for one contiguous block


@dataclass(frozen=True, eq=False)
class SegmentPlan:
    """Checked form A offsets, sorted by segment length: build it once a batch, use it in every layer.

    Attributes:
        num_tokens: T, the length of the flattened batch.
        longest: length of the longest segment.
        groups: the segments by length, empty ones left out.
        restore: `[T] int64`, from grouped order back to batch order; None when they are the same.
    """

    num_tokens: int
    longest: int
    groups: tuple[SegmentGroup, ...]
    restore: torch.Tensor | None


def plan_segments(cu_seqlens: torch.Tensor, num_tokens: int, *, device: torch.device | None = None) -> SegmentPlan:
    """Check form A offsets against the input they cut, and sort its segments by length.

    On an accelerator this reads the offsets back (one sync); do it once a batch and pass the result to every
    `varlen_attention` call of that batch.

    Args:
        cu_seqlens: `[N+1] int32`, form A; repeated offsets are empty segments.
        num_tokens: T, the length of the flattened batch that the offsets must cover exactly.
        device: where the queries live; the offsets' own device by default.

    Raises:
        MetadataTypeError: `cu_seqlens` is no int32 tensor.
        MetadataError: not 1-D, empty, decreasing, or not running from 0 to T.
    """
    offsets = _checked_offsets(cu_seqlens, num_tokens)
    starts_by_length: dict[int, list[int]] = {}
    for start, end in itertools.pairwise(offsets):
        if end > start:
            starts_by_length.setdefault(end - start, []).append(start)
    where = cu_seqlens.device if device is None else device
    groups = tuple(_group(length, starts, where) for length, starts in starts_by_length.items())
    return SegmentPlan(num_tokens, max(starts_by_length, default=0), groups, _restore_order(groups, where))


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
        MetadataError: offsets that do not describe the input, or a longest segment above `max_seqlen`.
        MetadataTypeError: `cu_seqlens` is no int32 tensor.

    Example:
        >>> q = torch.randn(12, 4, 8)
        >>> kv = torch.randn(12, 2, 8)
        >>> offsets = torch.tensor([0, 2, 5, 6, 7, 9, 12], dtype=torch.int32)
        >>> varlen_attention(q, kv, kv, offsets, 3).shape
        torch.Size([12, 4, 8])
    """
    _check_tensors(query, key, value, window)
    if plan is None:
        plan = plan_segments(cu_seqlens, len(query), device=query.device)
    _check_plan(plan, len(query), max_seqlen)
    if not plan.groups:
        return value.new_empty((0, query.shape[1], value.shape[-1]))
    plain = softcap is None and sinks is None and dropout == 0.0
    if plain and _kernel_applies(query, key, value, window, scale):
        return _kernel_attention(query, key, value, cu_seqlens.to(query.device), max_seqlen, scale, window, causal)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        mask = _window_mask(q.shape[2], window, causal, q.device)
        return dense_attention(q, k, v, mask, causal=causal, scale=scale, softcap=softcap, sinks=sinks, dropout=dropout)

    return _attend_by_length(query, key, value, plan, attend)


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


def _window_mask(length: int, window: int | None, causal: bool, device: torch.device) -> torch.Tensor | None:
    """Bool `[length, length]`, or None where the window never bites."""
    if window is None or length <= window:
        return None
    near = torch.ones(length, length, dtype=torch.bool, device=device).triu(1 - window)
    return near.tril(0 if causal else window - 1)


# --- by length --------------------------------------------------------------------------------------------------------


def _attend_by_length(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: SegmentPlan,
    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Stack the segments of each length to `[G, H, n, D]`, attend, and put the results back in batch order."""
    pieces = []
    for group in plan.groups:
        stacked = attend(*(_stack(tensor, group) for tensor in (query, key, value)))
        pieces.append(stacked.transpose(1, 2).flatten(0, 1))
    attended = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return attended if plan.restore is None else attended.index_select(0, plan.restore)


def _stack(tensor: torch.Tensor, group: SegmentGroup) -> torch.Tensor:
    if group.index is None:
        rows = tensor[group.starts[0] : group.starts[0] + len(group.starts) * group.length]
    else:
        rows = tensor.index_select(0, group.index)
    return rows.view(len(group.starts), group.length, *rows.shape[1:]).transpose(1, 2)


def _group(length: int, starts: Sequence[int], device: torch.device) -> SegmentGroup:
    adjacent = all(right - left == length for left, right in itertools.pairwise(starts))
    if adjacent:
        return SegmentGroup(length, tuple(starts), None)
    index = torch.tensor(starts).unsqueeze(1) + torch.arange(length)
    return SegmentGroup(length, tuple(starts), index.flatten().to(device, non_blocking=True))


def _restore_order(groups: tuple[SegmentGroup, ...], device: torch.device) -> torch.Tensor | None:
    if all(group.index is None for group in groups) and _ascending([group.starts[0] for group in groups]):
        return None
    parts = [torch.tensor(group.starts).unsqueeze(1) + torch.arange(group.length) for group in groups]
    return torch.argsort(torch.cat([part.flatten() for part in parts])).to(device, non_blocking=True)


def _ascending(numbers: Sequence[int]) -> bool:
    return all(left < right for left, right in itertools.pairwise(numbers))


# --- torch's own varlen kernel ----------------------------------------------------------------------------------------


@functools.cache
def _kernel_parameters() -> frozenset[str]:
    """The parameters of torch's varlen kernel as installed; empty where there is none."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)


def _kernel_applies(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None, scale: float | None
) -> bool:
    if query.device.type != "cuda" or query.dtype not in (torch.float16, torch.bfloat16):
        return False
    head_dim = query.shape[-1]
    if head_dim != value.shape[-1] or head_dim % 8 or head_dim > 256 or torch.cuda.get_device_capability(query.device) < (8, 0):
        return False
    parameters = _kernel_parameters()
    needed = {"enable_gqa"} if query.shape[1] != key.shape[1] else set()
    needed |= {"window_size"} if window is not None else set()
    needed |= {"scale"} if scale is not None else set()
    return bool(parameters & {"window_size", "is_causal"}) and needed <= parameters


def _kernel_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float | None,
    window: int | None,
    causal: bool,
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    parameters = _kernel_parameters()
    options: dict[str, Any] = {}
    if "window_size" in parameters:
        # left and right reach in tokens, -1 for unlimited; the newer kernels know causality by (-1, 0) alone
        left = -1 if window is None else window - 1
        options["window_size"] = (left, 0 if causal else left)
    if "is_causal" in parameters:
        options["is_causal"] = causal
    if scale is not None:
        options["scale"] = scale
    if query.shape[1] != key.shape[1]:
        options["enable_gqa"] = True
    attended = varlen_attn(query, key, value, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, **options)
    return cast(torch.Tensor, attended)


# --- checks -----------------------------------------------------------------------------------------------------------


def _checked_offsets(cu_seqlens: torch.Tensor, num_tokens: int) -> list[int]:
    if not isinstance(cu_seqlens, torch.Tensor) or cu_seqlens.dtype != torch.int32:
        got = getattr(cu_seqlens, "dtype", type(cu_seqlens).__name__)
        raise MetadataTypeError(f"cu_seqlens must be an int32 tensor, got {got}. Convert it with cu_seqlens.int().")
    if cu_seqlens.dim() != 1 or not len(cu_seqlens):
        raise MetadataError(
            f"cu_seqlens must be [num_segments + 1], got shape {tuple(cu_seqlens.shape)}. "
            "Build it with packed_seq_params_from_doc_ids(doc_ids).cu_seqlens."
        )
    offsets: list[int] = cu_seqlens.tolist()
    if offsets[0] != 0 or offsets[-1] != num_tokens:
        raise MetadataError(
            f"cu_seqlens must run from 0 to the {num_tokens} tokens of the flattened batch, got {offsets[0]} to {offsets[-1]}. "
            "Form A covers every token, padding runs included: use packed_seq_params_from_doc_ids(doc_ids).cu_seqlens."
        )
    for segment, (start, end) in enumerate(itertools.pairwise(offsets)):
        if end < start:
            raise MetadataError(
                f"cu_seqlens decreases at segment {segment}: from {start} to {end}. Offsets are cumulative token counts."
            )
    return offsets


def _check_plan(plan: SegmentPlan, num_tokens: int, max_seqlen: int) -> None:
    if plan.num_tokens != num_tokens:
        raise MetadataError(
            f"the plan describes {plan.num_tokens} tokens, the query has {num_tokens}. "
            "Build it with plan_segments for this batch."
        )
    if plan.longest > max_seqlen:
        raise MetadataError(
            f"max_seqlen is {max_seqlen}, but the longest segment has {plan.longest} tokens: a kernel would leave out keys. "
            "Use packed_seq_params_from_doc_ids(doc_ids).max_seqlen."
        )


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
