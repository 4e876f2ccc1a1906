"""Which tokens of the flattened `[B*S]` batch each context-parallel rank holds: three ways to cut, and the way back.

An index map is `[T / cp] int64`: for every local token, in local order, its one global coordinate. Everything else
(shards of any tensor, positions, boundaries, who needs whose keys) follows from it.

    contiguous            rank r holds the r-th of cp equal stretches; what recurrent layers and llama3-style attention take
    zigzag                every row in 2*cp chunks; rank r holds chunks r and 2*cp-1-r, which evens out causal work
    per_document_zigzag   the same within every document's slot, as TransformerEngine partitions THD batches

The worked example is two rows of six tokens, `[2, 6]`, T = 12.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from neatpack.errors import MetadataError

Scheme = Literal["contiguous", "zigzag", "per_document_zigzag"]
"""How a batch is cut over ranks; see the table above."""


def contiguous_indices(total_tokens: int, cp_size: int, rank: int) -> torch.Tensor:
    """The `rank`-th of `cp_size` equal stretches of the flattened batch: `[T / cp] int64`.

    Args:
        total_tokens: T = B*S.
        cp_size: number of context-parallel ranks.
        rank: whose tokens.

    Raises:
        MetadataError: ranks that do not exist, or that do not divide the tokens.

    Example:
        >>> contiguous_indices(12, 3, 1).tolist()
        [4, 5, 6, 7]
    """
    _check_rank(cp_size, rank)
    if total_tokens % cp_size:
        raise MetadataError(
            f"{total_tokens} tokens (B*S) do not divide over {cp_size} ranks. "
            + _padding_advice(total_tokens, cp_size, "tokens")
        )
    share = total_tokens // cp_size
    return torch.arange(rank * share, (rank + 1) * share)


def zigzag_indices(batch: int, row_length: int, cp_size: int, rank: int) -> torch.Tensor:
    """Chunks `rank` and `2*cp - 1 - rank` of every row of the batch: `[B*S / cp] int64`, row by row.

    Args:
        batch: B.
        row_length: S.
        cp_size: number of context-parallel ranks.
        rank: whose tokens.

    Raises:
        MetadataError: ranks that do not exist, or rows that do not divide into `2 * cp_size` chunks.

    Example:
        >>> zigzag_indices(2, 6, 3, 0).tolist()
        [0, 5, 6, 11]
    """
    _check_rank(cp_size, rank)
    if row_length % (2 * cp_size):
        raise MetadataError(
            f"rows of {row_length} tokens do not divide into 2 * {cp_size} zigzag chunks. "
            + _padding_advice(row_length, 2 * cp_size, "tokens a row")
        )
    row_starts = torch.arange(batch) * row_length
    return _chunk_pairs(row_starts, torch.full((batch,), row_length), cp_size, rank)


def per_document_zigzag_indices(slot_offsets: torch.Tensor | Sequence[int], cp_size: int, rank: int) -> torch.Tensor:
    """Chunks `rank` and `2*cp - 1 - rank` of every slot: `[T / cp] int64`, document by document.

    Args:
        slot_offsets: `[N+1]` integer offsets of the slots (form C: a document and the padding that aligns it).
        cp_size: number of context-parallel ranks.
        rank: whose tokens.

    Raises:
        MetadataError: ranks that do not exist, or a slot that does not divide into `2 * cp_size` chunks; names the slot.

    Example:
        >>> per_document_zigzag_indices([0, 8, 16], 2, 0).tolist()
        [0, 1, 6, 7, 8, 9, 14, 15]

    Source: `thd_get_partitioned_indices` of TransformerEngine, which computes the same on its device.
    """
    _check_rank(cp_size, rank)
    offsets = torch.as_tensor(slot_offsets).detach().cpu().long()
    check_slots(offsets, cp_size)
    return _chunk_pairs(offsets[:-1], offsets.diff(), cp_size, rank)


def inverse_indices(maps: Sequence[torch.Tensor]) -> torch.Tensor:
    """The way back: where each global token is in the shards of all ranks laid end to end.

    Args:
        maps: the index map of every rank, in rank order.

    Returns:
        `[T] int64`; `torch.cat(shards)[inverse_indices(maps)]` is the flattened batch.

    Raises:
        MetadataError: maps that do not hold every token exactly once; names the first that is off.

    Example:
        >>> inverse_indices([zigzag_indices(1, 4, 2, 0), zigzag_indices(1, 4, 2, 1)]).tolist()
        [0, 2, 3, 1]
    """
    held = torch.cat(list(maps)) if maps else torch.empty(0, dtype=torch.int64)
    total = len(held)
    counts = torch.bincount(held[(held >= 0) & (held < total)], minlength=total)
    if not bool((counts == 1).all()):
        token = int((counts != 1).nonzero()[0])
        raise MetadataError(
            f"token {token} is held {int(counts[token])} times by index maps that hold {total} tokens; each rank's map must be "
            "of the same batch, scheme and number of ranks."
        )
    inverse = torch.empty_like(held)
    inverse[held] = torch.arange(total)
    return inverse


def check_slots(slot_offsets: torch.Tensor, cp_size: int) -> None:
    """Refuse slots (form C offsets `[N+1]`) that do not divide into `2 * cp_size` chunks each; kernels do not check.

    Raises:
        MetadataError: names the first such slot and the alignment that would do.
    """
    chunks = 2 * cp_size
    uneven = (slot_offsets.diff() % chunks).nonzero()
    if len(uneven):
        slot = int(uneven[0])
        start, end = slot_offsets[slot : slot + 2].tolist()
        raise MetadataError(
            f"slot {slot} (flat positions {start} to {end}) has {end - start} tokens, which do not divide into "
            f"2 * {cp_size} zigzag chunks. Pad it to {end - start + padding_to(end - start, chunks)}: lay documents out with "
            f"plan_rows(..., align={chunks}) and PackedCollator(align={chunks}), in a row_length that is a multiple of "
            f"{chunks} too, or cut whole rows with scheme='zigzag'."
        )


def aligned_slots(cu_seqlens: torch.Tensor, row_length: int, multiple: int) -> torch.Tensor:
    """Find the slots of an aligned batch whose offsets do not say which segments are padding (form A in, form C out).

    A segment that opens at no multiple, ends at one (or with its row) and is too short to have had a slot of its own can only
    be the padding of the document before it. Documents that lie side by side give slots that do not divide. Whatever the
    slots, attention follows the segments: a short document taken for padding here shares the cut of its neighbour, no more.

    Args:
        cu_seqlens: `[N+1]` offsets over the flattened batch, a boundary at every row start.
        row_length: S.
        multiple: what every document's slot was rounded up to, `2 * cp`.

    Returns:
        `[M+1]` offsets of the slots, to be checked with `check_slots`. Padding that opens at a multiple (a document that fills
        its slots, then the end of a row) is a slot of its own.

    Example:
        >>> aligned_slots(torch.tensor([0, 2, 4, 7, 8, 12, 16]), 16, 4).tolist()
        [0, 4, 8, 12, 16]
    """
    length = max(row_length, 1)
    starts, ends = cu_seqlens[:-1], cu_seqlens[1:]
    ends_row = ends % length == 0
    closes = (ends % length % multiple == 0) & ((ends - starts < multiple) | ends_row)
    padding = (starts % length % multiple != 0) & closes
    return torch.cat([starts[~padding], cu_seqlens[-1:]])


def padding_to(length: int, multiple: int) -> int:
    """How many tokens `length` lacks to a multiple of `multiple`; 0 if it is one.

    Example:
        >>> padding_to(10, 8), padding_to(16, 8)
        (6, 0)
    """
    return -length % multiple


def _chunk_pairs(starts: torch.Tensor, lengths: torch.Tensor, cp_size: int, rank: int) -> torch.Tensor:
    """Chunk `rank` and its mirror image of every stretch: `[sum(lengths) / cp] int64`."""
    chunk = lengths // (2 * cp_size)
    head, tail = starts + rank * chunk, starts + (2 * cp_size - 1 - rank) * chunk
    firsts = torch.stack([head, tail], dim=1).flatten()
    sizes = chunk.repeat_interleave(2)
    before = sizes.cumsum(0) - sizes
    return torch.arange(int(sizes.sum())) + (firsts - before).repeat_interleave(sizes)


def _padding_advice(length: int, multiple: int, unit: str) -> str:
    return (
        f"Pad {length} to {length + padding_to(length, multiple)} {unit}: take a capacity that is a multiple of {multiple} "
        f"(or plan_rows(..., align={multiple})), PackedCollator(pad_to_multiple_of={multiple}) or pad_batch(batch, {multiple})."
    )


def _check_rank(cp_size: int, rank: int) -> None:
    if cp_size < 1 or not 0 <= rank < cp_size:
        raise MetadataError(f"rank {rank} of {cp_size} context-parallel ranks does not exist: expected 0 <= rank < cp_size.")
