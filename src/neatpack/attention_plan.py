"""How a flattened packed batch is cut for attention: segments by length, and long ones under a short window by blocks.

Segments of one length are stacked to `[G, H, n, D]`. A stack attends whole, or, where a sliding window is much shorter than
the segment, in blocks of queries against the keys that their windows reach: no `n x n` mask, and work that grows with
`n * window`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from neatpack.errors import MetadataError, MetadataTypeError

__all__ = ["SegmentGroup", "SegmentPlan", "Span", "plan_segments", "spans_of"]

SMALLEST_BLOCK = 128
"""Queries that share a block at least, however short the window: fewer leave the kernel too little to do."""


@dataclass(frozen=True, eq=False)
class SegmentGroup:
    """Segments of one length: `starts` in the flattened batch, and where to gather them if they are not adjacent."""

    length: int
    starts: tuple[int, ...]
    index: torch.Tensor | None  # [len(starts) * length] int64, None for one contiguous block

    def stack(self, tensor: torch.Tensor) -> torch.Tensor:
        """`[T, H, D]` to `[G, H, length, D]`, a view where the segments are adjacent."""
        if self.index is None:
            rows = tensor[self.starts[0] : self.starts[0] + len(self.starts) * self.length]
        else:
            rows = tensor.index_select(0, self.index)
        return rows.view(len(self.starts), self.length, *rows.shape[1:]).transpose(1, 2)

    def write(self, stacked: torch.Tensor, target: torch.Tensor) -> None:
        """Put `[G, H, length, D]` into its place in `[T, H, D]`."""
        rows = stacked.transpose(1, 2).flatten(0, 1)
        if self.index is None:
            target[self.starts[0] : self.starts[0] + len(rows)] = rows
        else:
            target.index_copy_(0, self.index, rows)


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

    Returns:
        The plan, with its index tensors on `device`.

    Raises:
        MetadataTypeError: `cu_seqlens` is no int32 tensor.
        MetadataError: not 1-D, empty, decreasing, or not running from 0 to T.

    Example:
        >>> plan = plan_segments(torch.tensor([0, 2, 5, 6, 7, 9, 12], dtype=torch.int32), 12)
        >>> plan.longest, [(group.length, group.starts) for group in plan.groups]
        (3, [(2, (0, 7)), (3, (2, 9)), (1, (5, 6))])
    """
    offsets = _checked_offsets(cu_seqlens, num_tokens)
    starts_by_length: dict[int, list[int]] = {}
    for start, end in itertools.pairwise(offsets):
        if end > start:
            starts_by_length.setdefault(end - start, []).append(start)
    where = cu_seqlens.device if device is None else device
    groups = tuple(_group(length, starts, where) for length, starts in starts_by_length.items())
    return SegmentPlan(num_tokens, max(starts_by_length, default=0), groups, _restore_order(groups, where))


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


# --- long segments under a short window -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Span:
    """`count` blocks of `queries` queries each, from position `first` on, every block against `keys` keys.

    The first block's keys begin at `first_key`, each further block's `queries` tokens later, as its queries do: one mask
    fits all of them.
    """

    first: int
    queries: int
    count: int
    first_key: int
    keys: int

    def take_queries(self, stacked: torch.Tensor) -> torch.Tensor:
        """`[G, H, n, D]` to `[G * count, H, queries, D]`, a view."""
        taken = stacked[:, :, self.first : self.first + self.count * self.queries]
        return taken if self.count == 1 else _split(taken, 2, self.count).transpose(1, 2).flatten(0, 1)

    def take_keys(self, stacked: torch.Tensor) -> torch.Tensor:
        """`[G, Hkv, n, D]` to `[G * count, Hkv, keys, D]`; blocks overlap, so several are a copy."""
        reach = stacked[:, :, self.first_key : self.first_key + (self.count - 1) * self.queries + self.keys]
        return reach if self.count == 1 else reach.unfold(2, self.keys, self.queries).permute(0, 2, 1, 4, 3).flatten(0, 1)

    def join_queries(self, blocks: torch.Tensor) -> torch.Tensor:
        """`[G * count, H, queries, D]` back to `[G, H, count * queries, D]`."""
        return blocks if self.count == 1 else _split(blocks, 0, len(blocks) // self.count).transpose(1, 2).flatten(2, 3)

    def add_to_keys(self, stacked: torch.Tensor, blocks: torch.Tensor) -> None:
        """Add `[G * count, Hkv, keys, D]` to `[G, Hkv, n, D]` in place: what `take_keys` is undone by in a backward."""
        starts = self.first_key + torch.arange(self.count, device=stacked.device) * self.queries
        index = starts[:, None] + torch.arange(self.keys, device=stacked.device)
        stacked.index_add_(2, index.flatten(), _split(blocks, 0, len(stacked)).transpose(1, 2).flatten(2, 3))

    def mask(self, window: int | None, causal: bool, device: torch.device) -> torch.Tensor | None:
        """Bool `[queries, keys]`; None where plain causality, or nothing, is all that a query is denied."""
        if window is None or (self.first == self.first_key and max(self.queries, self.keys) <= window):
            return None
        back = torch.arange(self.queries, device=device)[:, None] + (self.first - self.first_key)
        back = back - torch.arange(self.keys, device=device)
        return (back < window) & (back >= 0 if causal else back > -window)


def _split(tensor: torch.Tensor, dim: int, parts: int) -> torch.Tensor:
    """Make a dimension two: `[..., parts, size / parts, ...]`."""
    return tensor.view(*tensor.shape[:dim], parts, -1, *tensor.shape[dim + 1 :])


@functools.lru_cache(maxsize=1024)
def spans_of(length: int, window: int | None = None, causal: bool = True) -> tuple[Span, ...]:
    """The blocks in which a segment of `length` tokens attends, in the order of their queries.

    Example:
        >>> spans_of(5, window=8)
        (Span(first=0, queries=5, count=1, first_key=0, keys=5),)
        >>> for span in spans_of(600, window=200):
        ...     print(span)
        Span(first=0, queries=200, count=1, first_key=0, keys=200)
        Span(first=200, queries=200, count=2, first_key=1, keys=399)
    """
    block = length if window is None else max(window, SMALLEST_BLOCK)
    if window is None or length <= 2 * block:
        return (Span(0, length, 1, 0, length),)
    left, right = window - 1, 0 if causal else window - 1
    inner = range(min(left, 1), (length - right) // block)  # the blocks that have all their keys
    starts = itertools.chain(range(inner.start), range(inner.stop, -(-length // block)))
    edges = []
    for start in (number * block for number in starts):
        first_key, last_key = max(start - left, 0), min(start + block + right, length)
        edges.append(Span(start, min(block, length - start), 1, first_key, last_key - first_key))
    middle = Span(inner.start * block, block, len(inner), inner.start * block - left, block + left + right)
    return tuple(sorted([*edges, *([middle] if len(inner) else [])], key=lambda span: span.first))
