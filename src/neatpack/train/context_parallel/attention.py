"""Varlen attention over a batch that several ranks share: each attends with its own queries to all keys they may see.

Keys and values of a piece's document that live elsewhere are fetched (`exchange`), no others: with documents shorter than
a shard that is a small part of the batch. Pieces then attend one by one, or stacked where their shapes agree. A piece that
lacks nothing runs as plain causal attention; the others run in blocks of queries, each against its own key range, so that
the mask is at most `QUERY_BLOCK` rows and a sliding window costs its band only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import torch

from neatpack.attention import dense_attention
from neatpack.convert.segments import check_window
from neatpack.errors import ContractError
from neatpack.train.context_parallel.exchange import Group, KeyExchange, exchange, plan_exchange, process_group
from neatpack.train.context_parallel.shard import ContextShard, Pieces

QUERY_BLOCK = 1024
"""Queries that attend under one mask; bounds the mask to this many rows."""


@dataclass(frozen=True, eq=False)
class BlockGroup:
    """Blocks of one shape: `count` times `queries` against `keys`, the first query `lead` tokens after the first key."""

    count: int
    queries: int
    keys: int
    lead: int
    query_index: torch.Tensor  # [count * queries] int64, into the shard
    key_index: torch.Tensor  # [count * keys] int64, into what the exchange brought


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """What one shard does in every layer of one window: fetch keys, attend by blocks, put the results in order."""

    exchange: KeyExchange
    send_index: torch.Tensor
    groups: tuple[BlockGroup, ...]
    restore: torch.Tensor


def context_parallel_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    shard: ContextShard,
    group: Group,
    *,
    scale: float | None = None,
    window: int | None = None,
    causal: bool = True,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Self-attention within the documents of a packed batch (form A) of which this rank holds one shard.

    A collective: every rank of the group calls it, and its backward, for the same batch in the same order.

    Args:
        query: `[T / cp, H, D]`, the shard's tokens in local order.
        key: `[T / cp, Hkv, D]`; `Hkv` divides `H`.
        value: `[T / cp, Hkv, Dv]`.
        shard: this rank's share of the batch.
        group: the ranks that share the batch: a process group or a `DeviceMesh` dimension.
        scale: factor on the scores, `D ** -0.5` by default.
        window: sliding-window size in tokens, the query's own token included; None for unlimited.
        causal: a query sees no later key.
        softcap: bound the scores to `softcap * tanh(scores / softcap)`.
        sinks: `[H]`, a logit per head that takes part in the softmax and has no value.
        dropout: probability of dropping an attention weight.

    Returns:
        `[T / cp, H, Dv]`: what attention over the whole batch gives these tokens.

    Raises:
        ContractError: tensors that are not the shard's, or a group that is not.
        MetadataError: a window below 1, or a group that is none.
    """
    check_window(window)
    members = process_group(group)
    _check(query, key, value, shard, members.rank(), members.size())
    plan = attention_plan(shard, window, causal, query.device)
    fetched = exchange(torch.cat([key, value], dim=-1), plan.exchange, plan.send_index, members)
    keys, values = fetched[..., : key.shape[-1]], fetched[..., key.shape[-1] :]
    attended = []
    for blocks in plan.groups:
        mask, plain_causal = _block_mask(blocks, window, causal, query.device)
        out = dense_attention(
            _stacked(query, blocks.query_index, blocks.count),
            _stacked(keys, blocks.key_index, blocks.count),
            _stacked(values, blocks.key_index, blocks.count),
            mask,
            causal=plain_causal,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
            dropout=dropout,
        )
        attended.append(out.transpose(1, 2).flatten(0, 1))
    if not attended:
        return query.new_empty((0, query.shape[1], value.shape[-1]))
    return torch.cat(attended).index_select(0, plan.restore)


def attention_plan(shard: ContextShard, window: int | None, causal: bool, device: torch.device) -> AttentionPlan:
    """The plan for layers of this window; made once a batch on the host, kept with the shard."""
    wanted = (window, causal, device)
    if wanted not in shard.plans:
        shard.plans[wanted] = _plan(shard, window, causal, device)
    return cast(AttentionPlan, shard.plans[wanted])


def _plan(shard: ContextShard, window: int | None, causal: bool, device: torch.device) -> AttentionPlan:
    fetched = plan_exchange(shard, window, causal)
    place = np.zeros(shard.total_tokens, np.int64)
    place[fetched.coordinates] = np.arange(len(fetched.coordinates))
    blocks = _blocks(shard.pieces(), window, causal)
    first, last = blocks.key_ranges(window, causal)
    sizes = blocks.end - blocks.start
    local = np.cumsum(sizes) - sizes
    shapes, member = np.unique(np.stack([sizes, last - first, blocks.start - first]), axis=1, return_inverse=True)
    groups, order = [], []
    for number, (queries, keys, lead) in enumerate(shapes.T.tolist()):
        chosen = np.flatnonzero(member.reshape(-1) == number)
        query_index = (local[chosen, None] + np.arange(queries)).reshape(-1)
        key_index = place[(first[chosen, None] + np.arange(keys)).reshape(-1)]
        order.append(query_index)
        groups.append(BlockGroup(len(chosen), queries, keys, lead, _to(query_index, device), _to(key_index, device)))
    restore = np.argsort(np.concatenate(order)) if order else np.empty(0, np.int64)
    return AttentionPlan(fetched, fetched.send_index.to(device), tuple(groups), _to(restore, device))


def _blocks(pieces: Pieces, window: int | None, causal: bool) -> Pieces:
    """Cut the pieces that need a mask into blocks of at most `QUERY_BLOCK` queries."""
    lengths = pieces.end - pieces.start
    if window is None:
        unmasked = (pieces.start == pieces.segment_start) | (not causal)
    else:
        unmasked = (pieces.segment_end - pieces.segment_start <= window) & (
            (pieces.start == pieces.segment_start) | (not causal)
        )
    counts = np.where(unmasked, 1, -(-lengths // QUERY_BLOCK))
    piece = np.repeat(np.arange(len(lengths)), counts)
    step = np.arange(len(piece)) - np.repeat(np.cumsum(counts) - counts, counts)
    start = pieces.start[piece] + step * QUERY_BLOCK
    end = np.where(unmasked[piece], pieces.end[piece], np.minimum(start + QUERY_BLOCK, pieces.end[piece]))
    return Pieces(start, end, pieces.segment_start[piece], pieces.segment_end[piece])


def _block_mask(blocks: BlockGroup, window: int | None, causal: bool, device: torch.device) -> tuple[torch.Tensor | None, bool]:
    """Bool `[queries, keys]` and False; or None and whether plain causality says it all."""
    if window is None and not causal:
        return None, False
    fits = window is None or max(blocks.keys, blocks.queries) <= window
    if causal and fits and blocks.lead == 0:
        return None, True
    back = torch.arange(blocks.queries, device=device)[:, None] + blocks.lead - torch.arange(blocks.keys, device=device)
    allowed = back >= 0 if causal else back > -cast(int, window)
    return allowed if window is None else allowed & (back < window), False


def _stacked(tensor: torch.Tensor, index: torch.Tensor, count: int) -> torch.Tensor:
    """`[N, H, D]` to `[count, H, n, D]`."""
    rows = tensor.index_select(0, index)
    return rows.view(count, -1, *rows.shape[1:]).transpose(1, 2)


def _to(index: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(index)).to(device)


def _check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, shard: ContextShard, rank: int, size: int) -> None:
    if (rank, size) != (shard.rank, shard.cp_size):
        raise ContractError(
            f"the shard is rank {shard.rank} of {shard.cp_size}, but this process is rank {rank} of {size} in the group. "
            "Shard the batch for this group: shard_batch(batch, group)."
        )
    share = len(shard.indices)
    if not len(query) == len(key) == len(value) == share:
        raise ContractError(
            f"query, key and value hold {len(query)}, {len(key)} and {len(value)} tokens, the shard {share}: they must be "
            "its own tokens in local order, without a cache."
        )
