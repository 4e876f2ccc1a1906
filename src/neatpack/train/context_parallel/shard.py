"""One rank's share of a packed batch: which tokens, in which pieces of which segments, and what keys those need.

`ContextShard` is metadata only (no process group), so it can be built for every rank in one process, in a data-loader
worker, and in tests. A shard's tensors are one row, `[1, T / cp, ...]`, whatever the scheme: its pieces may come from
several rows of the batch, and nothing but attention may look from one token to another.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from neatpack.convert.segments import check_params, slots
from neatpack.errors import MetadataError
from neatpack.packed_seq import PackedSeqParams
from neatpack.train.context_parallel.index_maps import (
    Scheme,
    contiguous_indices,
    per_document_zigzag_indices,
    zigzag_indices,
)


class Pieces(NamedTuple):
    """Stretches of a shard that lie side by side in one segment of the batch, in local order; `[P] int64` each.

    Attributes:
        start: global coordinate of a piece's first token.
        end: global coordinate past its last token.
        segment_start: where its segment starts, perhaps on another rank.
        segment_end: past the end of its segment.
    """

    start: np.ndarray
    end: np.ndarray
    segment_start: np.ndarray
    segment_end: np.ndarray

    def key_ranges(self, window: int | None = None, causal: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """First key, and past the last, that any query of a piece may see: two `[P] int64` of global coordinates."""
        first = self.segment_start if window is None else np.maximum(self.segment_start, self.start - window + 1)
        if causal:
            return first, self.end
        return first, self.segment_end if window is None else np.minimum(self.segment_end, self.end + window - 1)


@dataclass(frozen=True, eq=False, kw_only=True)
class ContextShard:
    """One rank's share of a packed batch `[B, S]`.

    Attributes:
        scheme: how the batch was cut.
        rank: whose share this is.
        batch_shape: (B, S).
        cu_seqlens: `[N+1] int32` on the CPU: form A offsets of the whole batch, as before sharding.
        maps: the index map `[T / cp] int64` of every rank, on the CPU.
        plans: what was worked out from these, kept for the other layers and steps of the same batch.

    Example:
        >>> from neatpack.packed_seq import packed_seq_params_from_doc_ids
        >>> params = packed_seq_params_from_doc_ids(torch.tensor([[1, 1, 2, 2, 2, 0], [1, 2, 2, 3, 3, 3]]))
        >>> shard = shard_params(params, 3, 1, scheme="contiguous")
        >>> shard.indices.tolist(), shard.local_cu_seqlens().tolist()
        ([4, 5, 6, 7], [0, 1, 2, 3, 4])
    """

    scheme: Scheme
    rank: int
    batch_shape: tuple[int, int]
    cu_seqlens: torch.Tensor
    maps: tuple[torch.Tensor, ...]
    plans: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def cp_size(self) -> int:
        """How many ranks share the batch."""
        return len(self.maps)

    @property
    def indices(self) -> torch.Tensor:
        """`[T / cp] int64`: the global coordinate in `[B*S]` of every local token."""
        return self.maps[self.rank]

    @property
    def total_tokens(self) -> int:
        """T = B*S, the tokens of the whole batch."""
        return self.batch_shape[0] * self.batch_shape[1]

    def pieces(self, rank: int | None = None) -> Pieces:
        """The pieces of this rank's share, or of another's."""
        return _pieces(self.maps[self.rank if rank is None else rank].numpy(), self.cu_seqlens.numpy())

    def local_cu_seqlens(self) -> torch.Tensor:
        """Offsets of the pieces within the shard: `[P+1] int32`, from 0 to T / cp.

        A document that continues on this rank starts at 0 here like any other; nothing is counted from its positions.
        For kernels that attend within the shard only these would cut documents short: see `llama3_offsets`.
        """
        pieces = self.pieces()
        return torch.from_numpy(np.cumsum(np.r_[0, pieces.end - pieces.start]).astype(np.int32))

    def attended_pairs(self, window: int | None = None, causal: bool = True) -> int:
        """This rank's work in attention: (query, key) pairs, padding runs included as kernels compute them."""
        pieces = self.pieces()
        lengths = pieces.end - pieces.start
        query = self.indices.numpy()
        before = query - np.repeat(pieces.segment_start, lengths)
        after = np.zeros_like(before) if causal else np.repeat(pieces.segment_end, lengths) - 1 - query
        if window is not None:
            before, after = np.minimum(before, window - 1), np.minimum(after, window - 1)
        return int((before + after + 1).sum())


def shard_params(
    params: PackedSeqParams, cp_size: int, rank: int, *, scheme: Scheme = "zigzag", slot_offsets: torch.Tensor | None = None
) -> ContextShard:
    """Cut a packed batch for one of `cp_size` context-parallel ranks (form A in).

    Args:
        params: metadata of the whole batch; on an accelerator its offsets are read back (one sync): prefer the CPU.
        cp_size: number of ranks that share the batch.
        rank: whose share.
        scheme: "contiguous", "zigzag" or "per_document_zigzag" (each slot cut by itself; form C slots, so that padding
            after a document counts towards its alignment).
        slot_offsets: `[M+1]` the slots that "per_document_zigzag" cuts, where the map does not tell padding from documents
            (`aligned_slots`); None takes those of the map.

    Returns:
        The rank's share; `ContextShard` shows it on the worked example.

    Raises:
        MetadataError: offsets that do not fit the map; rows, slots or tokens that do not divide, with the alignment that would;
            a rank that does not exist, or an unknown scheme.
    """
    check_params(params)
    batch, length = params.doc_ids.shape
    if scheme == "contiguous":
        maps = [contiguous_indices(batch * length, cp_size, each) for each in range(cp_size)]
    elif scheme == "zigzag":
        maps = [zigzag_indices(batch, length, cp_size, each) for each in range(cp_size)]
    elif scheme == "per_document_zigzag":
        slot_offsets = slots(params).cu_seqlens if slot_offsets is None else slot_offsets
        maps = [per_document_zigzag_indices(slot_offsets, cp_size, each) for each in range(cp_size)]
    else:
        raise MetadataError(f"scheme {scheme!r} is unknown: use 'contiguous', 'zigzag' or 'per_document_zigzag'.")
    if not 0 <= rank < len(maps):
        raise MetadataError(f"rank {rank} of {cp_size} context-parallel ranks does not exist.")
    offsets = params.cu_seqlens.detach().cpu()
    return ContextShard(scheme=scheme, rank=rank, batch_shape=(batch, length), cu_seqlens=offsets, maps=tuple(maps))


def _pieces(indices: np.ndarray, offsets: np.ndarray) -> Pieces:
    segment = np.searchsorted(offsets, indices, side="right") - 1
    opens = np.ones(len(indices), bool)
    opens[1:] = (indices[1:] != indices[:-1] + 1) | (segment[1:] != segment[:-1])
    first = np.flatnonzero(opens)
    sizes = np.diff(np.r_[first, len(indices)])
    start, segment = indices[first], segment[first]
    return Pieces(start, start + sizes, offsets[segment].astype(np.int64), offsets[segment + 1].astype(np.int64))
