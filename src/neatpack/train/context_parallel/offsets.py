"""Boundaries as other context-parallel implementations read them: llama3-style attention, recurrent layers, THD kernels.

Each has its own idea of local and global; the same numbers in the wrong place raise no error in any of them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from neatpack.convert.segments import cumulative, longest, slots
from neatpack.errors import MetadataError
from neatpack.packed_seq import PackedSeqParams
from neatpack.train.context_parallel.index_maps import check_slots
from neatpack.train.context_parallel.shard import ContextShard


class Llama3Offsets(NamedTuple):
    """Arguments of varlen attention over a rank's queries and the slice of all gathered keys that they need.

    Attributes:
        cu_seqlens_q: `[P+1] int32` over the local queries.
        cu_seqlens_k: `[P+1] int32` over the slice; a kernel aligns queries and keys at the end of each piece.
        max_seqlen_q: longest piece.
        max_seqlen_k: longest key range.
        key_slice: which of the T gathered keys (in batch order) the slice holds.
    """

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    key_slice: slice


class RecurrentContext(NamedTuple):
    """What a recurrent layer must know about a contiguous shard, by flash-linear-attention's names.

    Attributes:
        cu_seqlens: `[P+1] int32` local offsets.
        is_first_rank: the first document of this rank starts here.
        is_last_rank: the last document of this rank ends here.
        pre_num_ranks: ranks before this one that hold part of the first document: whose states flow in.
        post_num_ranks: ranks after this one that hold part of the last document.
        pre_num_conv_tokens: tokens of the first document on earlier ranks, which a short convolution reaches back into.
    """

    cu_seqlens: torch.Tensor
    is_first_rank: bool
    is_last_rank: bool
    pre_num_ranks: int
    post_num_ranks: int
    pre_num_conv_tokens: int


class ThdOffsets(NamedTuple):
    """Global offsets for THD kernels that partition per document (TransformerEngine, Megatron); they divide by cp inside.

    Attributes:
        cu_seqlens: `[M+1] int32` cumulative lengths that count as keys.
        cu_seqlens_padded: `[M+1] int32` cumulative slots, where documents are in memory; always given.
        max_seqlen: widest slot.
        pad_between_seqs: the two differ somewhere, the last slot included; say it, do not let a kernel guess it.
    """

    cu_seqlens: torch.Tensor
    cu_seqlens_padded: torch.Tensor
    max_seqlen: int
    pad_between_seqs: bool


def llama3_offsets(shard: ContextShard) -> Llama3Offsets:
    """Query and key offsets of a contiguous shard, for attention over all-gathered keys (form A in).

    Raises:
        MetadataError: a shard of another scheme, whose keys are no one slice.

    Example:
        >>> from neatpack.packed_seq import packed_seq_params_from_doc_ids
        >>> from neatpack.train.context_parallel import shard_params
        >>> params = packed_seq_params_from_doc_ids(torch.tensor([[1, 1, 2, 2, 2, 0], [1, 2, 2, 3, 3, 3]]))
        >>> offsets = llama3_offsets(shard_params(params, 3, 1, scheme="contiguous"))
        >>> offsets.cu_seqlens_q.tolist(), offsets.cu_seqlens_k.tolist(), offsets.key_slice
        ([0, 1, 2, 3, 4], [0, 3, 4, 5, 6], slice(2, 8, None))

    Source: `llama3_flash_attn_prepare_cu_seqlens` of ring-flash-attention.
    """
    _require_contiguous(shard, "llama3_offsets")
    pieces = shard.pieces()
    first, last = pieces.key_ranges()
    queries, keys = pieces.end - pieces.start, last - first
    key_slice = slice(int(first[0]), int(last[-1])) if len(first) else slice(0, 0)
    return Llama3Offsets(_offsets(queries), _offsets(keys), int(queries.max(initial=0)), int(keys.max(initial=0)), key_slice)


def recurrent_context(shard: ContextShard) -> RecurrentContext:
    """Local offsets of a contiguous shard and how its first and last documents go on elsewhere (form A in).

    Raises:
        MetadataError: a shard of another scheme: a recurrence cannot run over zigzag chunks.

    Example:
        >>> from neatpack.packed_seq import packed_seq_params_from_doc_ids
        >>> from neatpack.train.context_parallel import shard_params
        >>> params = packed_seq_params_from_doc_ids(torch.tensor([[1, 1, 2, 2, 2, 0], [1, 2, 2, 3, 3, 3]]))
        >>> context = recurrent_context(shard_params(params, 4, 1, scheme="contiguous"))
        >>> context.cu_seqlens.tolist(), context.pre_num_ranks, context.pre_num_conv_tokens
        ([0, 2, 3], 1, 1)

    Source: `fla.ops.cp.build_cp_context` of flash-linear-attention.
    """
    _require_contiguous(shard, "recurrent_context")
    pieces = shard.pieces()
    if not len(pieces.start):
        return RecurrentContext(shard.local_cu_seqlens(), True, True, 0, 0, 0)
    share = len(shard.indices)
    begin, end = int(pieces.segment_start[0]), int(pieces.segment_end[-1])
    before, after = shard.rank - begin // share, (end - 1) // share - shard.rank
    return RecurrentContext(shard.local_cu_seqlens(), before == 0, after == 0, before, after, int(pieces.start[0]) - begin)


def thd_offsets(params: PackedSeqParams, cp_size: int, *, causal: bool = True) -> ThdOffsets:
    """Global slot offsets for kernels that cut every document's slot over `cp_size` ranks (form A in, form C out).

    Causal attention needs no real lengths: padding is at the end of a slot, where no real query looks, so both offsets are
    one tensor. Without causality the real lengths are given apart, and `pad_between_seqs` says so.

    Args:
        params: metadata of the whole batch.
        cp_size: number of context-parallel ranks; 1 for none.
        causal: no query sees a later key.

    Raises:
        MetadataError: a slot that does not divide into `2 * cp_size` chunks (for more than one rank).

    Example:
        >>> from neatpack.convert import align_documents
        >>> from neatpack.packed_seq import packed_seq_params_from_doc_ids
        >>> params = packed_seq_params_from_doc_ids(torch.tensor([[1, 1, 2, 2, 2, 0], [1, 2, 2, 3, 3, 3]]))
        >>> offsets = thd_offsets(align_documents(params, 4).params, cp_size=2, causal=False)
        >>> offsets.cu_seqlens.tolist(), offsets.cu_seqlens_padded.tolist()
        ([0, 2, 5, 6, 8, 11], [0, 4, 8, 12, 16, 20])

    Source: `transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py` of TransformerEngine.
    """
    form_c = slots(params)
    padded = form_c.cu_seqlens
    if cp_size > 1:
        check_slots(padded, cp_size)
    if causal:
        return ThdOffsets(padded, padded, form_c.max_slot, False)
    real = cumulative(form_c.lengths)
    return ThdOffsets(real, padded, form_c.max_slot, not torch.equal(real, padded))


def thd_position_ids(params: PackedSeqParams) -> torch.Tensor:
    """Positions that count on through the padding of a slot (form C): `[B, S] int64`, what THD rotary embeddings use.

    Real tokens have the positions that `position_ids_from_doc_ids` gives them. On the worked example
    `[[0, 1, 0, 1, 2, 3], [0, 0, 1, 0, 1, 2]]`.
    """
    padded = slots(params).cu_seqlens.long()
    lengths = padded.diff()
    tokens = torch.arange(params.doc_ids.numel(), device=padded.device)
    return (tokens - padded[:-1].repeat_interleave(lengths)).reshape(params.doc_ids.shape)


def zigzag_ring_offsets(params: PackedSeqParams, cp_size: int) -> tuple[torch.Tensor, int]:
    """Local offsets and longest local slot for a ring over per-document zigzag shards (form A in, form C out).

    They are the global slots divided by cp.

    Args:
        params: metadata of the whole batch.
        cp_size: number of context-parallel ranks.

    Returns:
        `[M+1] int32`, and an int: `[0, 2, 4, 6, 8, 10]` and 2 for the worked example in slots of four, over two ranks.

    Raises:
        MetadataError: a slot that does not divide into `2 * cp_size` chunks.

    Source: `zigzag_ring_flash_attn_varlen_func` of ring-flash-attention.
    """
    padded = slots(params).cu_seqlens
    check_slots(padded, cp_size)
    local = padded // cp_size
    return local, longest(local.diff())


def _require_contiguous(shard: ContextShard, what: str) -> None:
    if shard.scheme != "contiguous":
        raise MetadataError(
            f"{what} needs a contiguous shard, got scheme {shard.scheme!r}, whose tokens are no one stretch of the batch. "
            "Shard with scheme='contiguous'."
        )


def _offsets(lengths: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.cumsum(np.r_[0, lengths]).astype(np.int32))
