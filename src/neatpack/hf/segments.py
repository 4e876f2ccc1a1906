"""Which segments a call of the registered attention has: read once a batch, checked against everything the call says."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from neatpack.attention import SegmentPlan, plan_segments
from neatpack.errors import ContractError, MetadataError
from neatpack.hf.lost import WAYS_OUT, refuse_lost_boundaries
from neatpack.hf.mask import PackedMask


@dataclass(frozen=True, eq=False)
class Segments:
    """Form A offsets `[N+1] int32` over the flattened batch, and the plan made from them."""

    cu_seqlens: torch.Tensor
    plan: SegmentPlan


@dataclass(frozen=True, eq=False)
class _Memo:
    """Segments, and what they were made from."""

    batch: int
    length: int
    device: torch.device
    sources: tuple[Callable[[torch.Tensor | None], bool], ...]
    segments: Segments


class SegmentsOfBatch:
    """The last batch's segments: every layer asks, the first one works (and on an accelerator reads the offsets back)."""

    def __init__(self) -> None:
        self._memo: _Memo | None = None

    def from_offsets(
        self,
        query: torch.Tensor,
        mask: PackedMask | None,
        position_ids: torch.Tensor | None,
        offsets: torch.Tensor | None,
        key_offsets: torch.Tensor | None,
        max_length: int | None,
        max_key_length: int | None,
    ) -> Segments:
        """Segments from the caller's offsets (form A), checked against the batch, its positions and its mask."""
        batch, length = query.shape[0], query.shape[2]
        starts = chunk_starts(mask)

        def build() -> Segments:
            return segments_from_offsets(mask, position_ids, offsets, key_offsets, batch, length, query.device)

        segments = self._remembered(query, (offsets, key_offsets, position_ids, starts), build)
        refuse_short_maximum(segments, max_length, max_key_length)
        return segments

    def from_rows(self, query: torch.Tensor, mask: PackedMask | None, position_ids: torch.Tensor | None) -> Segments:
        """Segments without offsets: those that transformers found in the positions, or one a row."""
        batch, length = query.shape[0], query.shape[2]
        starts = None if mask is None else mask.starts

        def build() -> Segments:
            return segments_from_rows(mask, position_ids, batch, length, query.device)

        return self._remembered(query, (None, None, position_ids, starts), build)

    def _remembered(
        self, query: torch.Tensor, sources: Sequence[torch.Tensor | None], build: Callable[[], Segments]
    ) -> Segments:
        batch, length, memo = query.shape[0], query.shape[2], self._memo
        if (
            memo is not None
            and (memo.batch, memo.length, memo.device) == (batch, length, query.device)
            and all(unchanged(source) for unchanged, source in zip(memo.sources, sources, strict=True))
        ):
            return memo.segments
        segments = build()
        self._memo = _Memo(batch, length, query.device, tuple(_watch(source) for source in sources), segments)
        return segments


def chunk_starts(mask: PackedMask | None) -> torch.Tensor | None:
    """Where these layers start anew besides the offsets: only layers with a window or chunks say more than those do."""
    return None if mask is None or mask.window is None else mask.starts


def segments_from_offsets(
    mask: PackedMask | None,
    position_ids: torch.Tensor | None,
    offsets: torch.Tensor | None,
    key_offsets: torch.Tensor | None,
    batch: int,
    length: int,
    device: torch.device,
) -> Segments:
    """Segments from the caller's offsets (form A), checked against the batch, its positions and its mask."""
    if offsets is None:
        raise ContractError(f"cu_seq_lens_k or max_length_* came without cu_seq_lens_q. {WAYS_OUT}")
    starts = chunk_starts(mask)
    if mask is not None and starts is not None and not mask.from_positions and bool(starts[:, 1:].any()):
        raise ContractError(
            "this model attends in chunks, and transformers counted them from the row's start because a cache was on or "
            f"no position_ids came along: they would cut documents at the wrong places. {WAYS_OUT}"
        )
    segments = _checked(offsets, key_offsets, batch, length, device)
    _refuse_positions_that_fall(segments, position_ids, batch, length)
    return segments if starts is None else _cut_at(segments, starts, device)


def segments_from_rows(
    mask: PackedMask | None, position_ids: torch.Tensor | None, batch: int, length: int, device: torch.device
) -> Segments:
    """Segments without offsets: those that transformers found in the positions, or one a row."""
    starts = None if mask is None else mask.starts
    if mask is None or not mask.from_positions:
        refuse_lost_boundaries(position_ids, batch, length, starts=starts)
    rows = _from_host(list(range(0, batch * length + 1, max(length, 1)) if length else [0]), device)
    return rows if starts is None else _cut_at(rows, starts, device)


def _checked(
    offsets: torch.Tensor, key_offsets: torch.Tensor | None, batch: int, length: int, device: torch.device
) -> Segments:
    """The caller's offsets as segments, or a refusal that says how they fail to describe `[batch, length]`."""
    try:
        plan = plan_segments(offsets, batch * length, device=device)
    except MetadataError as error:
        raise ContractError(f"cu_seq_lens_q does not describe this batch of {batch} rows x {length} tokens: {error}") from error
    if key_offsets is not None and key_offsets is not offsets and not _equal(offsets, key_offsets):
        raise ContractError(
            "cu_seq_lens_q and cu_seq_lens_k differ: in self-attention queries and keys share their boundaries. " + WAYS_OUT
        )
    on_boundary = set(offsets.tolist())
    for row in range(batch):
        if row * length not in on_boundary:
            raise ContractError(
                f"a segment of cu_seq_lens_q crosses the start of row {row} (flat position {row * length}): row {row} sees "
                f"the last document of row {row - 1}. Offsets over [B * S] need a boundary at every row start: "
                "use packed_seq_params_from_doc_ids(doc_ids)."
            )
    return Segments(offsets.to(device), plan)


def _equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and bool((left == right.to(left.device)).all())


def _refuse_positions_that_fall(segments: Segments, position_ids: torch.Tensor | None, batch: int, length: int) -> None:
    """Positions never fall within a document; where they do, the offsets have lost a boundary."""
    if position_ids is None or position_ids.dim() != 2 or position_ids.shape[-1] != length or not batch * length:
        return
    flat = position_ids.expand(batch, -1).flatten()
    falls = torch.zeros_like(flat, dtype=torch.bool)
    falls[1:] = flat[1:] < flat[:-1]
    falls[segments.cu_seqlens[:-1].to(falls.device).long().clamp(max=len(flat) - 1)] = False
    if bool(falls.any()):
        row, position = divmod(int(falls.nonzero()[0]), length)
        raise ContractError(
            f"position_ids restart at row {row}, position {position}, inside a segment of cu_seq_lens_q: the two describe "
            "different documents. Build both from one document map: " + WAYS_OUT
        )


def refuse_short_maximum(segments: Segments, *maxima: int | None) -> None:
    """Refuse a longest length with which a kernel would leave out keys.

    Raises:
        ContractError: the longest segment is longer.
    """
    for maximum in maxima:
        if maximum is not None and int(maximum) < segments.plan.longest:
            raise ContractError(
                f"max_length is {maximum}, but the longest segment has {segments.plan.longest} tokens: a kernel would leave "
                "out keys. Use packed_seq_params_from_doc_ids(doc_ids).max_seqlen."
            )


def _cut_at(segments: Segments, starts: torch.Tensor, device: torch.device) -> Segments:
    """The segments cut further at every `True` of a `[B, S]` map."""
    extra = starts.flatten().nonzero().flatten().tolist()
    return _from_host(sorted({*segments.cu_seqlens.tolist(), *extra}), device)


def _from_host(offsets: list[int], device: torch.device) -> Segments:
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32)
    return Segments(cu_seqlens.to(device), plan_segments(cu_seqlens, offsets[-1], device=device))


def _watch(tensor: torch.Tensor | None) -> Callable[[torch.Tensor | None], bool]:
    """A function that says whether a tensor still holds what `tensor` holds now.

    On the CPU contents are compared, so that a buffer refilled behind torch's back counts as changed; on an accelerator,
    where that would cost a sync, identity and torch's version counter are. A view is the same as another one when both show
    the same part of the same tensor.
    """
    if tensor is None:
        return lambda other: other is None
    if tensor.device.type == "cpu":
        kept = tensor.clone()
        return lambda other: other is not None and other.device.type == "cpu" and torch.equal(kept, other)
    if tensor.is_inference():
        return lambda other: False
    source, part, version = weakref.ref(_base(tensor)), _part(tensor), tensor._version
    return lambda other: other is not None and _base(other) is source() and _part(other) == part and other._version == version


def _base(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or the one that it is a view of."""
    return tensor if tensor._base is None else tensor._base


def _part(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype
