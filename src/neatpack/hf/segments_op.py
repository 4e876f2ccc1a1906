"""The segments of a call as one operator of torch's library: every check of `neatpack.hf.segments`, in a compiled program.

A compiler cannot look at offsets or positions while it traces. This operator runs on real tensors, refuses what the
uncompiled function refuses, and returns the offsets that attention then reads, so no check can be left out. How many
offsets come out must be known beforehand; what is left over repeats the last one (empty segments).

The lengths of the longest segments that come with a batch are not read: a compiler would guard on their values. A row's
length bounds every segment as well, so no kernel can leave out keys because of a wrong one.
"""

from __future__ import annotations

from typing import cast

import torch

from neatpack.errors import ContractError
from neatpack.hf.mask import PackedMask
from neatpack.hf.segments import chunk_starts, segments_from_offsets, segments_from_rows


def traced_offsets(
    query: torch.Tensor,
    mask: PackedMask | None,
    position_ids: torch.Tensor | None,
    offsets: torch.Tensor | None,
    key_offsets: torch.Tensor | None,
) -> torch.Tensor:
    """Form A offsets `int32` over the flattened batch, on the query's device, checked when the compiled program runs.

    Args:
        query: `[B, H, S, D]`.
        mask: what `packed_mask` returned.
        position_ids: `[B, S]`.
        offsets: the caller's form A offsets, or None for those that transformers found in the positions.
        key_offsets: the same offsets.
    """
    batch, length = query.shape[0], query.shape[2]
    if offsets is None:
        starts = None if mask is None else mask.starts
        size = batch + 1 if starts is None else batch * length + 1
    else:
        starts = chunk_starts(mask)
        # chunks cut a document at multiples of their size, windows not at all
        size = len(offsets) if mask is None or mask.window is None else len(offsets) + batch * length // mask.window
    return cast(
        torch.Tensor,
        torch.ops.neatpack.batch_offsets(
            offsets,
            key_offsets,
            position_ids,
            starts,
            None if mask is None else mask.sees_later,
            None if mask is None else mask.window,
            mask is not None and mask.from_positions,
            batch,
            length,
            size,
            query.device,
        ),
    )


@torch.library.custom_op(
    "neatpack::batch_offsets",
    mutates_args=(),
    schema="(Tensor? offsets, Tensor? key_offsets, Tensor? position_ids, Tensor? starts, Tensor? sees_later, int? window, "
    "bool from_positions, SymInt batch, SymInt length, SymInt size, Device device) "
    "-> Tensor",
)
def _batch_offsets(
    offsets: torch.Tensor | None,
    key_offsets: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    starts: torch.Tensor | None,
    sees_later: torch.Tensor | None,
    window: int | None,
    from_positions: bool,
    batch: int,
    length: int,
    size: int,
    device: torch.device,
) -> torch.Tensor:
    if sees_later is not None and bool(sees_later):
        raise ContractError(
            "this call lets positions see later ones (bidirectional blocks or a custom mask function), which a compiled "
            "packed_varlen does not compute. Leave this model uncompiled, or use attn_implementation='sdpa' without packing."
        )
    mask = PackedMask(starts, from_positions, window)
    if offsets is None:
        segments = segments_from_rows(mask, position_ids, batch, length, device)
    else:
        segments = segments_from_offsets(mask, position_ids, offsets, key_offsets, batch, length, device)
    found = segments.cu_seqlens
    if len(found) > size:
        raise ContractError(
            f"this model's mask cuts the batch into {len(found) - 1} segments, at most {size - 1} were expected from offsets "
            f"and a window of {window} tokens. Leave this model uncompiled."
        )
    return torch.cat([found, found[-1:].expand(size - len(found))])


@_batch_offsets.register_fake
def _(*arguments: object) -> torch.Tensor:
    size, device = cast("tuple[int, torch.device]", arguments[-2:])
    return torch.empty(size, dtype=torch.int32, device=device)
