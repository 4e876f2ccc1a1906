"""xFormers: `BlockDiagonalCausalMask` from the lengths of the segments, for queries `[1, T, H, K]`."""

from __future__ import annotations

from typing import Any

from neatpack.convert.optional import attribute_of
from neatpack.convert.segments import segment_lengths
from neatpack.packed_seq import PackedSeqParams


def to_xformers_lengths(params: PackedSeqParams) -> list[int]:
    """Convert to the `q_seqlen` of `BlockDiagonalCausalMask.from_seqlens` (form A, or B on unpadded params): Python ints.

    On an accelerator this reports to the host. On the worked example `[2, 3, 1, 1, 2, 3]`, unpadded `[2, 3, 1, 2, 3]`.
    """
    lengths: list[int] = segment_lengths(params).tolist()
    return lengths


def to_xformers(params: PackedSeqParams) -> Any:
    """Build the `BlockDiagonalCausalMask` of a flattened batch (form A, or B on unpadded params), on the device of the params.

    Pass it as `attn_bias` with `q`, `k`, `v` of shape `[1, B*S, H, K]`.

    Raises:
        MissingDependencyError: xformers is not installed; `to_xformers_lengths` works without it.

    Source: `xformers.ops.fmha.attn_bias.BlockDiagonalCausalMask`.
    """
    mask = attribute_of("xformers.ops.fmha.attn_bias", "BlockDiagonalCausalMask", feature="to_xformers", install="xformers")
    return mask.from_seqlens(q_seqlen=to_xformers_lengths(params), device=params.cu_seqlens.device)
