"""Varlen attention as one operator of torch's library, so that a compiled program holds no trace of a batch's documents.

`torch.compile` sees `neatpack::varlen_attention` as one opaque call with shapes `[T, H, D]` and `[N+1]`: no graph break, no
guard on an offset's value. It runs on real tensors, reads the offsets, and works segment length by segment length: torch's
flash kernels for the CPU where they apply, the definition elsewhere (soft-capping, sinks, dropout, other devices). Autograd
records nothing inside an operator, so both have their backward written out, from the saved log-sum-exp.

`neatpack::checked_offsets` is the check as an operator: it fails on real offsets, however the program was compiled, and
what it returns is what attention gets, so that no compiler can leave it out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch

from neatpack.attention_plan import SegmentGroup, Span, plan_segments, spans_of
from neatpack.errors import MetadataError

__all__ = ["checked_offsets", "varlen_op"]

_FLASH_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def varlen_op(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scale: float | None = None,
    window: int | None = None,
    causal: bool = True,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Self-attention within the segments of a flattened packed batch (form A), as one operator.

    The arguments are those of `neatpack.attention.varlen_attention`; the offsets must run from 0 to T, which the operator
    checks when it runs.

    Returns:
        `[T, H, Dv]`.

    Raises:
        MetadataError: offsets that do not run from 0 to T.
        MetadataTypeError: `cu_seqlens` is no int32 tensor.
    """
    kind = query.device.type
    if torch.is_autocast_enabled(kind):  # autocast casts the arguments of torch's own attention, and knows nothing of this one
        query, key, value = (tensor.to(torch.get_autocast_dtype(kind)) for tensor in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    # the operator draws its mask from a seed, so that its backward can draw the same one
    seed = torch.randint(2**31 - 1, (1,)) if dropout else None
    attended, _ = torch.ops.neatpack.varlen_attention(
        query, key, value, cu_seqlens, sinks, seed, scale, window, causal, softcap, dropout
    )
    return cast(torch.Tensor, attended)


def checked_offsets(cu_seqlens: torch.Tensor, num_tokens: int, max_seqlen: int) -> torch.Tensor:
    """Check form A offsets when they are real, and return a copy of them.

    Args:
        cu_seqlens: `[N+1] int32`, form A; repeated offsets are empty segments.
        num_tokens: T, the length of the flattened batch.
        max_seqlen: at least the length of the longest segment.

    Raises:
        MetadataError: offsets that do not describe `num_tokens` tokens, or a segment longer than `max_seqlen`.
        MetadataTypeError: `cu_seqlens` is no int32 tensor.
    """
    return cast(torch.Tensor, torch.ops.neatpack.checked_offsets(cu_seqlens, num_tokens, max_seqlen))


def refuse_short_maximum(longest: int, max_seqlen: int) -> None:
    """Refuse a `max_seqlen` with which a kernel would leave out keys.

    Raises:
        MetadataError: the longest segment has more tokens.
    """
    if longest > max_seqlen:
        raise MetadataError(
            f"max_seqlen is {max_seqlen}, but the longest segment has {longest} tokens: a kernel would leave out keys. "
            "Use packed_seq_params_from_doc_ids(doc_ids).max_seqlen."
        )


@torch.library.custom_op(
    "neatpack::checked_offsets", mutates_args=(), schema="(Tensor cu_seqlens, SymInt num_tokens, SymInt max_seqlen) -> Tensor"
)
def _checked_offsets(cu_seqlens: torch.Tensor, num_tokens: int, max_seqlen: int) -> torch.Tensor:
    refuse_short_maximum(plan_segments(cu_seqlens, num_tokens).longest, max_seqlen)
    return cu_seqlens.clone()


@_checked_offsets.register_fake
def _(cu_seqlens: torch.Tensor, num_tokens: int, max_seqlen: int) -> torch.Tensor:
    return torch.empty_like(cu_seqlens)


# --- forward and backward over the whole batch ------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Scoring:
    """What one block's attention depends on besides its tensors."""

    scale: float
    window: int | None
    causal: bool
    softcap: float | None
    sinks: torch.Tensor | None  # [H]
    dropout: float
    seed: torch.Tensor | None  # [1] int64

    def flash_applies(self, query: torch.Tensor, value: torch.Tensor) -> bool:
        plain = self.softcap is None and self.sinks is None and not self.dropout
        fits = query.shape[-1] == value.shape[-1] and query.dtype in _FLASH_DTYPES
        return plain and fits and query.device.type == "cpu"


@dataclass(frozen=True, eq=False)
class Block:
    """Queries `[b, H, c, D]` against keys `[b, Hkv, k, D]`, under a bool mask `[c, k]` or plain causality or neither."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    causal: bool
    keep: torch.Tensor | None  # [b, H, c, k], 0 or 1 / (1 - dropout)


@torch.library.custom_op(
    "neatpack::varlen_attention",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens, Tensor? sinks, Tensor? seed, float scale, "
    "int? window, bool causal, float? softcap, float dropout) -> (Tensor, Tensor)",
)
def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seqlens: torch.Tensor, *options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output `[T, H, Dv]` and the log-sum-exp of the scores `[T, H, 1]`, sinks included."""
    scoring = _scoring(*options)
    out = query.new_empty(*query.shape[:2], value.shape[-1])
    lse = query.new_empty(*query.shape[:2], 1, dtype=_wide(query))
    attend = _flash if scoring.flash_applies(query, value) else _formula
    generator = _generator(scoring)
    for group in plan_segments(cu_seqlens, len(query), device=query.device).groups:
        q, k, v = (group.stack(tensor) for tensor in (query, key, value))
        parts = []
        for span in spans_of(group.length, scoring.window, scoring.causal):
            parts.append([span.join_queries(part) for part in attend(_block(span, q, k, v, scoring, generator), scoring)])
        for target, stacked in zip((out, lse), zip(*parts, strict=True), strict=True):
            group.write(torch.cat(stacked, dim=2), target)
    return out, lse


@_forward.register_fake
def _(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seqlens: torch.Tensor, *options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = query.shape[:2]
    return query.new_empty(*rows, value.shape[-1]), query.new_empty(*rows, 1, dtype=_wide(query))


@torch.library.custom_op(
    "neatpack::varlen_attention_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor out, Tensor lse, Tensor query, Tensor key, Tensor value, Tensor cu_seqlens, Tensor? sinks, "
    "Tensor? seed, float scale, int? window, bool causal, float? softcap, float dropout) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
)
def _backward(
    grad: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *options: Any,
) -> tuple[torch.Tensor, ...]:
    """The gradients of query, key, value and sinks (`[0]` without sinks)."""
    scoring = _scoring(*options)
    grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    attend = _flash_backward if scoring.flash_applies(query, value) else _formula_backward
    generator = _generator(scoring)
    for group in plan_segments(cu_seqlens, len(query), device=query.device).groups:
        q, k, v = (group.stack(tensor) for tensor in (query, key, value))
        saved = [group.stack(tensor) for tensor in (grad, out, lse)]
        spans = spans_of(group.length, scoring.window, scoring.causal)
        parts = []
        for span in spans:
            block = _block(span, q, k, v, scoring, generator)
            parts.append(attend(block, scoring, *(span.take_queries(tensor).contiguous() for tensor in saved)))
        _write_gradients(group, spans, parts, grads)
    return *grads, _sinks_gradient(grad, out, lse, scoring)


@_backward.register_fake
def _(
    grad: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, *inputs: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    query, key, value, _, sinks = inputs[:5]
    tail = query.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), tail


def _write_gradients(
    group: SegmentGroup,
    spans: tuple[Span, ...],
    parts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Queries belong to one block; a key may be reached from several, whose gradients add up (in float32 or wider)."""
    queries = [span.join_queries(part[0]) for span, part in zip(spans, parts, strict=True)]
    group.write(torch.cat(queries, dim=2), grads[0])
    for number in (1, 2):
        if len(spans) == 1:
            stacked = parts[0][number]
        else:
            first = parts[0][number]
            rows = (len(group.starts), first.shape[1], group.length, first.shape[3])
            stacked = first.new_zeros(rows, dtype=_wide(first))
            for span, part in zip(spans, parts, strict=True):
                span.add_to_keys(stacked, part[number].to(stacked.dtype))
        group.write(stacked.to(grads[number].dtype), grads[number])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, cu_seqlens, sinks, seed, *ctx.numbers = inputs
    ctx.save_for_backward(*output, query, key, value, cu_seqlens, sinks, seed)


def _differentiate(ctx: Any, grad: torch.Tensor, grad_of_lse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    saved = ctx.saved_tensors
    *grads, sinks = torch.ops.neatpack.varlen_attention_backward(grad, *saved, *ctx.numbers)
    return (*grads, None, None if saved[6] is None else sinks, *[None] * 6)


_forward.register_autograd(_differentiate, setup_context=_save)


def _scoring(
    sinks: torch.Tensor | None,
    seed: torch.Tensor | None,
    scale: float,
    window: int | None,
    causal: bool,
    softcap: float | None,
    dropout: float,
) -> Scoring:
    return Scoring(scale, window, causal, softcap, sinks, dropout, seed)


def _generator(scoring: Scoring) -> torch.Generator | None:
    return None if scoring.seed is None else torch.Generator().manual_seed(int(scoring.seed))


def _block(
    span: Span,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scoring: Scoring,
    generator: torch.Generator | None,
) -> Block:
    mask = span.mask(scoring.window, scoring.causal, query.device)
    q, k, v = span.take_queries(query), span.take_keys(key), span.take_keys(value)
    keep = None
    if generator is not None:
        drawn = torch.rand(*q.shape[:3], k.shape[2], generator=generator) >= scoring.dropout
        keep = (drawn / (1 - scoring.dropout)).to(q.device, _wide(q))
    return Block(q, k, v, mask, mask is None and scoring.causal and q.shape[2] > 1, keep)


# --- one block: torch's flash kernels for the CPU ---------------------------------------------------------------------


def _flash(block: Block, scoring: Scoring) -> tuple[torch.Tensor, torch.Tensor]:
    heads = block.query.shape[1]
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        block.query,
        _repeat_heads(block.key, heads),
        _repeat_heads(block.value, heads),
        0.0,
        block.causal,
        attn_mask=_additive(block.mask, block.query.dtype),
        scale=scoring.scale,
    )
    return out, lse.unsqueeze(-1)


def _flash_backward(
    block: Block, scoring: Scoring, grad: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    heads, kv_heads = block.query.shape[1], block.key.shape[1]
    of_query, of_key, of_value = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad,
        block.query,
        _repeat_heads(block.key, heads),
        _repeat_heads(block.value, heads),
        out,
        lse.squeeze(-1),
        0.0,
        block.causal,
        attn_mask=_additive(block.mask, block.query.dtype),
        scale=scoring.scale,
    )
    return of_query, _sum_heads(of_key, kv_heads), _sum_heads(of_value, kv_heads)


def _additive(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    return None if mask is None else torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, float("-inf"))


def _repeat_heads(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    repeats = heads // tensor.shape[1]
    return tensor if repeats == 1 else tensor.unsqueeze(2).expand(-1, -1, repeats, -1, -1).flatten(1, 2)


def _sum_heads(tensor: torch.Tensor, kv_heads: int) -> torch.Tensor:
    return tensor if tensor.shape[1] == kv_heads else tensor.view(len(tensor), kv_heads, -1, *tensor.shape[2:]).sum(2)


# --- one block: the definition, in float32 or wider -------------------------------------------------------------------


def _formula(block: Block, scoring: Scoring) -> tuple[torch.Tensor, torch.Tensor]:
    """`[b, H, c, Dv]` and the log-sum-exp `[b, H, c, 1]`."""
    scores, _ = _scores(block, scoring)
    lse = torch.logsumexp(scores, dim=-1, keepdim=True)
    if scoring.sinks is not None:
        lse = torch.logaddexp(lse, _by_head(scoring.sinks, lse))
    weights = (scores - lse).exp_()
    if block.keep is not None:
        weights *= block.keep
    heads = block.query.shape[1]
    return (weights @ _repeat_heads(block.value, heads).to(weights.dtype)).to(block.query.dtype), lse


def _formula_backward(
    block: Block, scoring: Scoring, grad: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    heads, kv_heads, wide = block.query.shape[1], block.key.shape[1], lse.dtype
    query, grad, out = block.query.to(wide), grad.to(wide), out.to(wide)
    key, value = (_repeat_heads(tensor, heads).to(wide) for tensor in (block.key, block.value))
    scores, slope = _scores(block, scoring)
    weights = (scores - lse).exp_()
    of_weights = grad @ value.transpose(-1, -2)
    kept = weights
    if block.keep is not None:
        of_weights, kept = of_weights * block.keep, weights * block.keep
    of_scores = weights * (of_weights - (grad * out).sum(-1, keepdim=True)) * scoring.scale
    if slope is not None:
        of_scores *= slope
    of_key, of_value = of_scores.transpose(-1, -2) @ query, kept.transpose(-1, -2) @ grad
    narrow = block.query.dtype
    return (of_scores @ key).to(narrow), _sum_heads(of_key, kv_heads), _sum_heads(of_value, kv_heads)


def _scores(block: Block, scoring: Scoring) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scores `[b, H, c, k]`, forbidden ones -inf, and the slope of the soft cap."""
    wide = _wide(block.query)
    key = _repeat_heads(block.key, block.query.shape[1]).to(wide)
    scores = block.query.to(wide) @ key.transpose(-1, -2) * scoring.scale
    slope = None
    if scoring.softcap is not None:
        bounded = torch.tanh(scores / scoring.softcap)
        scores, slope = scoring.softcap * bounded, 1 - bounded.square()
    mask = block.mask
    if block.causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    return (scores if mask is None else scores.masked_fill_(~mask, float("-inf"))), slope


def _sinks_gradient(grad: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    """A sink takes weight `exp(sink - lse)` of every query and gives no value."""
    if scoring.sinks is None:
        return grad.new_empty(0)
    weight = (scoring.sinks.to(lse.dtype)[None, :, None] - lse).exp()
    return -(weight * (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1, keepdim=True)).sum((0, 2)).to(scoring.sinks.dtype)


def _by_head(sinks: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return sinks.to(like.dtype).view(1, -1, 1, 1)


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
