"""FlashAttention 3's functions on the CPU, from their definition: transformers' real flash path runs down to the kernel call.

The stand-in is as strict as the kernel where boundaries are concerned: int32 offsets, a maximum that covers the longest
segment, and NaN in every output position that the offsets do not cover. It takes any dtype, so that results can be compared
in float32. Nothing of transformers or torch is replaced: an importable module named `flash_attn_interface` is all that its
flash path asks for.
"""

from __future__ import annotations

import importlib.machinery
import itertools
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

MODULE = "flash_attn_interface"
IMPLEMENTATION = "flash_attention_3"


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool,
    scale: float | None,
    window: tuple[int, int],
    softcap: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """One sequence from the definition, causal from the bottom right: `[n, H, D]` on `[m, Hkv, D]` gives `[n, H, Dv]`."""
    queries, keys = len(query), len(key)
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.einsum("nhd,mhd->hnm", query.float(), key.float()) * factor
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    ahead = torch.arange(keys)[None, :] - torch.arange(queries)[:, None] - (keys - queries)
    left, right = window
    hidden = (ahead > 0) if causal else torch.zeros_like(ahead, dtype=torch.bool)
    hidden |= (ahead < -left) if left >= 0 else False
    hidden |= (ahead > right) if right >= 0 else False
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, queries, 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :keys]
    return torch.einsum("hnm,mhd->nhd", weights, value.float()).to(query.dtype)


def attend_segments(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_offsets: torch.Tensor,
    key_offsets: torch.Tensor,
    longest: int,
    **options: Any,
) -> torch.Tensor:
    """Every segment by itself; NaN where the offsets say nothing."""
    if query_offsets.dtype != torch.int32 or key_offsets.dtype != torch.int32:
        raise RuntimeError("cu_seqlens_q and cu_seqlens_k must have dtype int32")
    queries, keys = query_offsets.tolist(), key_offsets.tolist()
    if max((end - start for start, end in itertools.pairwise(queries)), default=0) > int(longest):
        raise RuntimeError("max_seqlen_q is less than the longest sequence")
    empty = value.new_full((len(query), query.shape[1], value.shape[-1]), float("nan"))
    pieces = [empty[: queries[0]]]
    for index in range(len(queries) - 1):
        mine, theirs = slice(*queries[index : index + 2]), slice(*keys[index : index + 2])
        pieces.append(attend(query[mine], key[theirs], value[theirs], **options))
    return torch.cat([*pieces, empty[queries[-1] :]])


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    """Every row of `[B, S, H, D]` as one sequence."""
    rows = zip(q, k, v, strict=True)
    return torch.stack([attend(*row, causal, softmax_scale, window_size, softcap, s_aux) for row in rows])


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    """`[T, H, D]` in segments (form A)."""
    options = {"causal": causal, "scale": softmax_scale, "window": window_size, "softcap": softcap, "sinks": s_aux}
    return attend_segments(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, **options)


def flash_attn_with_kvcache(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, **options: Any) -> torch.Tensor:
    """Refuse decoding: the stand-in computes whole sequences only."""
    raise NotImplementedError("the reference kernel computes whole sequences only")


@contextmanager
def importable() -> Iterator[str]:
    """Make the functions importable as `flash_attn_interface`, and name the implementation to set on a built model."""
    module: Any = types.ModuleType(MODULE)
    module.__spec__ = importlib.machinery.ModuleSpec(MODULE, loader=None)
    for function in (flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache):
        setattr(module, function.__name__, function)
    before = sys.modules.get(MODULE)
    sys.modules[MODULE] = module
    try:
        yield IMPLEMENTATION
    finally:
        if before is None:
            del sys.modules[MODULE]
        else:
            sys.modules[MODULE] = before
