"""Recurrent layers: flash-linear-attention's offsets, and the `seq_idx` of Mamba and causal-conv1d.

A recurrence that is not told of a boundary carries its state, and its short convolution the last tokens, into the next
document. Mamba-1 has no argument for it at all, Mamba-3 accepts `seq_idx` without reading it (give it `cu_seqlens`).
"""

from __future__ import annotations

import warnings
from typing import Any, Literal

import torch

from neatpack.convert.segments import segment_index
from neatpack.errors import MetadataError
from neatpack.packed_seq import PackedSeqParams

MAMBA2_SAFE_TOKENS = 61_000
"""Rows longer than this have corrupted the chunk states of Mamba-2's kernels, whose offsets are 32-bit."""


def to_fla(params: PackedSeqParams, *, include_cpu: bool = False) -> dict[str, Any]:
    """Convert to the `cu_seqlens` of flash-linear-attention (form A, or B on unpadded params), for inputs `[1, B*S, H, D]`.

    Its kernels take batch size 1 and remember what they derived from a tensor by the tensor's identity: hand the same dict to
    every layer (the offsets are the params' own tensor), and never overwrite offsets in place between steps.

    Args:
        params: the batch's metadata.
        include_cpu: add `cu_seqlens_cpu`, for the functions that take it to avoid syncs. Where the params are on an
            accelerator this is a sync itself: convert on the CPU.

    Returns:
        `cu_seqlens [N+1] int32`, and `cu_seqlens_cpu` if asked for; `[0, 2, 5, 6, 7, 9, 12]` on the worked example.

    Source: `fla/ops/utils/index.py` of flash-linear-attention.
    """
    arguments = {"cu_seqlens": params.cu_seqlens}
    return {**arguments, "cu_seqlens_cpu": params.cu_seqlens.cpu()} if include_cpu else arguments


def to_seq_idx(params: PackedSeqParams, *, pad: Literal["keep", -1] = "keep", flat: bool = False) -> torch.Tensor:
    """Convert to the `seq_idx` of causal-conv1d and Mamba-2 (form A): which sequence each token belongs to, int32.

    Args:
        params: the batch's metadata.
        pad: "keep" numbers padding like a document of its own; -1 tells the kernels that it is padding: the convolution
            gives 0 there and the state is dropped.
        flat: number over the whole batch, for inputs flattened to `[1, B*S]`. Numbers by row would give documents of
            different rows one number there, and state would flow between them.

    Returns:
        `[B, S]`, or `[1, B*S]` when flat; contiguous. On the worked example `[[0, 0, 1, 1, 1, 2], [0, 1, 1, 2, 2, 2]]`, with
        pads as -1 `[[0, 0, 1, 1, 1, -1], ...]`, flat `[[0, 0, 1, 1, 1, 2, 3, 4, 4, 5, 5, 5]]`.

    Raises:
        MetadataError: another number for padding, which could be taken for a document's.

    Source: `causal_conv1d/causal_conv1d_interface.py` of causal-conv1d.
    """
    if pad not in ("keep", -1):
        raise MetadataError(f'pad is {pad!r}; use "keep" for a number of its own, or -1, which the kernels know as padding.')
    return segment_index(params, pad=pad, flat=flat)


def to_mamba2(params: PackedSeqParams, *, pad: Literal["keep", -1] = "keep", flat: bool = False) -> dict[str, torch.Tensor]:
    """Convert to the arguments of `Mamba2.forward` (form A): `seq_idx` as `to_seq_idx` gives it.

    Warns above 61,000 tokens a row, where the kernels' 32-bit offsets have corrupted states: pack shorter rows, or leave
    the batch `[B, S]` instead of flattening it.

    Args:
        params: the batch's metadata.
        pad: as in `to_seq_idx`.
        flat: as in `to_seq_idx`.

    Returns:
        `seq_idx`, `[B, S] int32`, or `[1, B*S] int32` when flat.

    Raises:
        MetadataError: what `to_seq_idx` refuses.

    Source: `mamba_ssm/modules/mamba2.py` of mamba.
    """
    seq_idx = to_seq_idx(params, pad=pad, flat=flat)
    if seq_idx.shape[1] > MAMBA2_SAFE_TOKENS:
        warnings.warn(
            f"rows of {seq_idx.shape[1]} tokens: above {MAMBA2_SAFE_TOKENS} Mamba-2's chunk states have come out corrupted. "
            "Pack shorter rows, or do not flatten the batch.",
            stacklevel=2,
        )
    return {"seq_idx": seq_idx}
