"""The attention function of `packed_varlen`: varlen wherever boundaries are known, a refusal wherever they would be lost.

What decides, in this order:

1. `cu_seq_lens_q` in the call: varlen over the flattened `[B * S]` tokens, after a check that the offsets describe them.
2. Whole rows without padding: varlen with the segments that transformers found in the position ids, or one a row.
3. A mask tensor (padding, a cache of another length, 4-D): attention under that mask.
4. `indices` in the call, which holds for 1 to 3: the layer has selected keys, and sees those of them that are allowed.

Position ids that restart where attention would flow on are refused in 2 and 3: that is a packed batch whose boundaries
got lost on the way (a cache turns transformers' detection off, and so does any 2-D mask). Families that do not tell their
attention the positions (llama4, deepseek_v32, persimmon, ...) refuse them in their own forward, where packed_varlen was
selected by `use_packed_varlen`; loaded with its name alone they cannot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from neatpack.attention import SegmentPlan, dense_attention, varlen_attention
from neatpack.errors import ContractError
from neatpack.hf.lost import WAYS_OUT, refuse_lost_boundaries
from neatpack.hf.mask import FIRST_QUERY, PackedMask
from neatpack.hf.segments import SegmentsOfBatch
from neatpack.hf.segments_op import traced_offsets
from neatpack.hf.selected import selected_keys

# What some models pass to their attention function, and packed_varlen does not compute.
_UNSUPPORTED = {
    "position_bias": "a learned position bias",
    "alibi": "ALiBi",
    "alibi_slopes": "ALiBi",
    "sinks": "sinks under another name than s_aux",
    "indices": "sparse attention over selected keys",
    "block_indices": "sparse attention over selected blocks",
    "head_mask": "a head mask",
}


@dataclass(frozen=True, eq=False)
class ScoreOptions:
    """What changes the scores and weights, boundaries aside."""

    scale: float | None
    softcap: float | None
    sinks: torch.Tensor | None
    dropout: float


@dataclass(frozen=True, eq=False)
class Cuts:
    """Form A offsets `[N+1] int32`, a bound on the longest segment, and the plan made from them, unless torch compiles."""

    cu_seqlens: torch.Tensor
    longest: int
    plan: SegmentPlan | None = None


class PackedVarlenAttention:
    """The callable that `register` gives to transformers."""

    def __init__(self) -> None:
        self._segments = SegmentsOfBatch()

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | PackedMask | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        is_causal: bool | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cu_seq_lens_q: torch.Tensor | None = None,
        cu_seq_lens_k: torch.Tensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
        indices: torch.Tensor | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend as transformers' attention interface asks.

        Args:
            module: the attention layer; its `is_causal` counts where the call says nothing.
            query: `[B, H, S, D]`.
            key: `[B, Hkv, K, D]`, heads not repeated.
            value: `[B, Hkv, K, Dv]`.
            attention_mask: what `packed_mask` returned, or the caller's own 4-D mask.
            dropout: probability of dropping an attention weight; transformers passes 0 outside training.
            scaling: factor on the scores.
            sliding_window: this layer's window, the query's own token included.
            is_causal: overrides the module's.
            softcap: bound on the scores.
            s_aux: `[H]` attention sinks.
            position_ids: `[B, S]`, to find boundaries that got lost.
            cu_seq_lens_q: `[N+1] int32`, form A, over the flattened `B * S`.
            cu_seq_lens_k: the same offsets.
            max_length_q: at least the length of the longest segment.
            max_length_k: the same number.
            indices: `[B, S, k]` places of the keys that the layer selected by its mask; see `neatpack.hf.selected`.
            options: whatever else the model and its caller pass.

        Returns:
            `[B, S, H, Dv]`, and no weights.

        Raises:
            ContractError: boundaries that do not fit the input or would be ignored, or a feature that is not computed.
        """
        refuse_unsupported(options)
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        scores = ScoreOptions(scaling, softcap, s_aux, dropout)
        offered = (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
        if any(part is not None for part in offered):
            mask = _no_tensor(attention_mask)
        elif isinstance(attention_mask, PackedMask) or (attention_mask is None and query.shape[2] == key.shape[2]):
            mask = attention_mask
        else:
            first = getattr(attention_mask, FIRST_QUERY, None)
            refuse_lost_boundaries(position_ids, query.shape[0], query.shape[2], mask=attention_mask, first=first)
            if indices is not None:
                attention_mask = selected_keys(indices, attention_mask, None, key.shape[2], sliding_window, query.dtype)
            return _masked_attention(module, query, key, value, attention_mask, causal, scores), None
        _refuse_cache(query, key)
        cuts = self._cuts(query, mask, position_ids, *offered)
        if indices is not None:
            selected = selected_keys(indices, mask, cu_seq_lens_q, key.shape[2], sliding_window, query.dtype)
            return _masked_attention(module, query, key, value, selected, causal, scores), None
        window = sliding_window
        if mask is not None:
            causal, window = mask.causal, mask.window or sliding_window
        return _segment_attention(query, key, value, cuts, causal, window, scores), None

    def _cuts(
        self,
        query: torch.Tensor,
        mask: PackedMask | None,
        position_ids: torch.Tensor | None,
        offsets: torch.Tensor | None,
        key_offsets: torch.Tensor | None,
        max_length: int | None,
        max_key_length: int | None,
    ) -> Cuts:
        """Find and check the segments: now, or, while torch compiles, when the program runs."""
        offered = (offsets, key_offsets, max_length, max_key_length)
        given = any(part is not None for part in offered)
        if torch.compiler.is_compiling():
            if given and offsets is None:
                raise ContractError(f"cu_seq_lens_k or max_length_* came without cu_seq_lens_q. {WAYS_OUT}")
            return Cuts(traced_offsets(query, mask, position_ids, offsets, key_offsets), longest=query.shape[2])
        if given:
            segments = self._segments.from_offsets(query, mask, position_ids, *offered)
        else:
            segments = self._segments.from_rows(query, mask, position_ids)
        return Cuts(segments.cu_seqlens, segments.plan.longest, segments.plan)


def _segment_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cuts: Cuts,
    causal: bool,
    window: int | None,
    scores: ScoreOptions,
) -> torch.Tensor:
    """Varlen attention over the flattened batch; `[B, H, S, D]` in, `[B, S, H, Dv]` out."""
    if window is not None and not causal and window < cuts.longest:
        raise ContractError(
            f"packed_varlen does not compute a bidirectional sliding window (here {window} tokens). "
            "Use attn_implementation='sdpa' without packing for this model."
        )
    batch, _, length, _ = query.shape
    flat_query, flat_key, flat_value = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    attended = varlen_attention(
        flat_query,
        flat_key,
        flat_value,
        cuts.cu_seqlens,
        cuts.longest,
        scale=scores.scale,
        window=window,
        causal=causal,
        softcap=scores.softcap,
        sinks=scores.sinks,
        dropout=scores.dropout,
        plan=cuts.plan,
    )
    return attended.reshape(batch, length, *attended.shape[1:])


def _masked_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scores: ScoreOptions,
) -> torch.Tensor:
    """Attention under a mask tensor: transformers' own SDPA path, or the formula for what SDPA has no argument for."""
    if scores.softcap is None and scores.sinks is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        attended: torch.Tensor = sdpa_attention_forward(
            module, query, key, value, mask, dropout=scores.dropout, scaling=scores.scale, is_causal=causal
        )[0]
        return attended
    length = query.shape[2]
    if mask is None and causal and 1 < length < key.shape[2]:
        # the first call on an empty cache of fixed size: what lies behind the queries is not written yet
        key, value = key[:, :, :length], value[:, :, :length]
    attended = dense_attention(
        query,
        key,
        value,
        mask,
        causal=causal,
        scale=scores.scale,
        softcap=scores.softcap,
        sinks=scores.sinks,
        dropout=scores.dropout,
    )
    return attended.transpose(1, 2).contiguous()


def refuse_unsupported(options: dict[str, Any]) -> None:
    """Refuse what a model asks of its attention beyond what the registered functions compute."""
    for name, what in _UNSUPPORTED.items():
        if options.get(name) is not None:
            raise ContractError(
                f"this model asks its attention for {what} ({name}=), which packed_varlen does not compute. "
                "Use attn_implementation='eager' without packing for this model."
            )


def _no_tensor(mask: torch.Tensor | PackedMask | None) -> PackedMask | None:
    """The mask that may come along with offsets; a tensor says something else than they do, so one would be ignored."""
    if mask is not None and not isinstance(mask, PackedMask):
        raise ContractError(
            f"a mask {list(mask.shape)} came along with cu_seq_lens_q; transformers' flash path would drop one of the two "
            f"without a word. Leave attention_mask out: padding is a segment of its own in the offsets. {WAYS_OUT}"
        )
    return mask


def _refuse_cache(query: torch.Tensor, key: torch.Tensor) -> None:
    if key.shape[2] != query.shape[2]:
        raise ContractError(
            f"packed rows have {query.shape[2]} queries and {key.shape[2]} keys each: boundaries describe whole rows, "
            "not a cache or a prefix. Pass use_cache=False, and no cu_seq_lens to generate()."
        )
