"""FlexAttention: a `mask_mod`, and its `BlockMask` built from the offsets.

`create_block_mask` evaluates the rule on every pair of the batch, S*S a row, to find which blocks hold any. The offsets
know: cut each segment where query blocks begin, and each piece of queries sees one interval of keys. So the blocks follow
from N + B*S/block pieces, and the largest thing ever held is the table of blocks, `[B, S/block, S/block]`, which a
`BlockMask` holds anyway. The answer is the same, partial and full blocks alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from neatpack.convert.segments import check_window, first_keys, segment_documents
from neatpack.errors import MetadataError
from neatpack.packed_seq import PackedSeqParams

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def to_mask_mod(params: PackedSeqParams, *, window: int | None = None, pad_self: bool = False) -> MaskMod:
    """Build the rule of FlexAttention (form A) as one interval of keys a query: `first_key[b, q] <= kv <= q`.

    One load a pair instead of the two that comparing document ids takes.

    Args:
        params: the batch's metadata. Pass `B=B` to `create_block_mask`: the rule differs by row.
        window: sliding window in tokens, the query's own included, counted within the document; None for unlimited.
        pad_self: let a pad see itself; otherwise it sees nothing and its output is 0.

    Returns:
        `mask_mod(b, h, q_idx, kv_idx)`, True = attend.

    Raises:
        MetadataError: a window below 1.
    """
    first_key = first_keys(params, window=window, pad_self=pad_self)

    def packed_causal(b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        return (first_key[b, q_idx] <= kv_idx) & (kv_idx <= q_idx)

    return packed_causal


def to_block_mask(
    params: PackedSeqParams,
    *,
    block_size: int | tuple[int, int] = 128,
    window: int | None = None,
    pad_self: bool = False,
) -> BlockMask:
    """Build the `BlockMask` of a packed batch from its offsets (form A): batch B, one for all heads, `[B, 1, S, S]`.

    Equal to `create_block_mask(to_mask_mod(params), B, None, S, S)`, without evaluating S*S pairs. For a batch that is
    flattened to `[1, B*S]` convert `flatten_params(params)`. Where a `score_mod` goes with it, pad rows to a multiple of the
    block (`PackedCollator(pad_to_multiple_of=128)`): at other lengths its backward pass has given NaN.

    Args:
        params: the batch's metadata. Convert on the CPU (an accelerator reports to the host) and move the result.
        block_size: queries and keys in a block, one number or two.
        window: sliding window in tokens, the query's own included; None for unlimited.
        pad_self: let a pad see itself; otherwise it sees nothing and its output is 0.

    Returns:
        The mask, with `mask_mod` for its partial blocks and the full blocks apart. With blocks of 2 on the worked example:
        `kv_num_blocks [[[1, 1, 2]], [[1, 2, 2]]]`, no full blocks.

    Raises:
        MetadataError: a window or a block size below 1, or an empty batch, which FlexAttention cannot describe.

    Source: `torch.nn.attention.flex_attention.BlockMask.from_kv_blocks`.
    """
    from torch.nn.attention.flex_attention import BlockMask

    check_window(window)
    blocks = (block_size, block_size) if isinstance(block_size, int) else block_size
    length = params.doc_ids.shape[1]
    if min(blocks) < 1 or not params.doc_ids.numel():
        raise MetadataError(
            f"a BlockMask needs blocks of at least 1 and a batch that is not empty, got blocks {blocks} and "
            f"doc_ids {tuple(params.doc_ids.shape)}. Skip attention for an empty batch."
        )
    some, full = _block_tables(params, blocks, window, pad_self)
    partial_count, partial_indices = _ordered(some & ~full)
    full_count, full_indices = _ordered(full)
    return BlockMask.from_kv_blocks(
        partial_count,
        partial_indices,
        full_count,
        full_indices,
        BLOCK_SIZE=blocks,
        mask_mod=to_mask_mod(params, window=window, pad_self=pad_self),
        seq_lengths=(length, length),
    )


class _Pieces(NamedTuple):
    """Runs of queries that lie in one segment and one query block; all `[P] int64`, positions within the row."""

    row: torch.Tensor
    first: torch.Tensor
    last: torch.Tensor
    segment_start: torch.Tensor
    window: torch.Tensor

    def reach(self, query: torch.Tensor) -> torch.Tensor:
        """The first key that `query` of each piece may see."""
        return torch.maximum(self.segment_start, query - self.window + 1)


def _pieces(params: PackedSeqParams, query_block: int, window: int | None, pad_self: bool) -> _Pieces:
    """Cut the segments where query blocks begin; padding is left out, or sees itself only: a window of 1."""
    batch, length = params.doc_ids.shape
    offsets = params.cu_seqlens.long()
    block_starts = torch.arange(0, length, query_block, device=offsets.device)
    row_starts = torch.arange(0, batch * length, length, device=offsets.device)
    cuts = torch.unique(torch.cat([offsets, (row_starts[:, None] + block_starts).reshape(-1)]))
    first, end = cuts[:-1], cuts[1:]
    segment = torch.searchsorted(offsets, first, right=True) - 1
    padding = (segment_documents(params) == 0)[segment]
    windows = torch.where(padding, 1, length if window is None else window)
    pieces = (first // length, first % length, (end - 1) % length, offsets[segment] % length, windows)
    return _Pieces(*pieces) if pad_self else _Pieces(*(piece[~padding] for piece in pieces))


def _block_tables(
    params: PackedSeqParams, blocks: tuple[int, int], window: int | None, pad_self: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which blocks allow some pair, and which allow every pair: bool `[B, Q, K]` each."""
    query_block, key_block = blocks
    batch, length = params.doc_ids.shape
    num_q, num_k = -(-length // query_block), -(-length // key_block)
    pieces = _pieces(params, query_block, window, pad_self)
    line = pieces.row * num_q + pieces.first // query_block
    # Some pair: keys from what the first query reaches up to the last query itself.
    some = _intervals(line, pieces.reach(pieces.first) // key_block, pieces.last // key_block + 1, batch * num_q, num_k)
    # Every pair: the piece fills its query block, and keys lie between what its last query reaches and its first query.
    fills = pieces.last - pieces.first == query_block - 1
    begin = -(-pieces.reach(pieces.last) // key_block)
    end = torch.where(fills, (pieces.first + 1) // key_block, begin)
    full = _intervals(line, begin, torch.maximum(begin, end), batch * num_q, num_k)
    return some.reshape(batch, 1, num_q, num_k), full.reshape(batch, 1, num_q, num_k)


def _intervals(line: torch.Tensor, begin: torch.Tensor, end: torch.Tensor, lines: int, columns: int) -> torch.Tensor:
    """Bool `[lines, columns]`: True from `begin` up to `end` on each given line; the union where several meet."""
    edges = torch.zeros(lines * (columns + 1), dtype=torch.int32, device=line.device)
    ones = torch.ones_like(line, dtype=torch.int32)
    edges.index_add_(0, line * (columns + 1) + begin, ones)
    edges.index_add_(0, line * (columns + 1) + end, -ones)
    return torch.cumsum(edges.reshape(lines, columns + 1), 1, dtype=torch.int32)[:, :columns] > 0


def _ordered(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many blocks each line holds, and all column numbers, those held first in ascending order: int32."""
    order = torch.argsort(table.to(torch.int8), dim=-1, descending=True, stable=True)
    return table.sum(-1, dtype=torch.int32), order.to(torch.int32)
