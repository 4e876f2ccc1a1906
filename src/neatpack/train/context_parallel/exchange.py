"""Move tokens between ranks, with gradients that flow back the way they came.

One collective does everything, `all_to_all_single` with uneven counts, which both NCCL and gloo have. Who needs what
follows from the shard's metadata on every rank alike, so nothing is negotiated: a rank sends each other rank exactly the
keys that its queries may see, and none where documents end at the cut.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from neatpack.errors import MetadataError
from neatpack.train.context_parallel.shard import ContextShard

Group = dist.ProcessGroup | DeviceMesh


@dataclass(frozen=True, eq=False)
class KeyExchange:
    """Which local tokens go where, and what comes back.

    Attributes:
        send_index: `[sum(send_counts)] int64` local tokens, by the rank they go to.
        send_counts: tokens that go to each rank, this one included.
        receive_counts: tokens that come from each rank.
        coordinates: `[sum(receive_counts)] int64` global coordinates of what comes, in the order it comes.
        remote: some rank needs a token of another; otherwise no collective runs.
    """

    send_index: torch.Tensor
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]
    coordinates: np.ndarray
    remote: bool


def process_group(group: Group) -> dist.ProcessGroup:
    """The process group that `group` names: itself, or that of a one-dimensional `DeviceMesh` (`mesh["cp"]`).

    Raises:
        MetadataError: None, or a mesh of several dimensions.
    """
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            names = group.mesh_dim_names or tuple(str(number) for number in range(group.ndim))
            raise MetadataError(
                f"the device mesh has dimensions {', '.join(map(repr, names))}; context parallelism runs over one of them. "
                "Pass that one, as in mesh['cp']."
            )
        return group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise MetadataError(
            f"context parallelism needs a process group or a DeviceMesh dimension, got {type(group).__name__}. "
            "Call torch.distributed.init_process_group first; its default group is torch.distributed.group.WORLD."
        )
    return group


def plan_exchange(shard: ContextShard, window: int | None, causal: bool) -> KeyExchange:
    """Work out what each rank needs for its queries; O(T) for each rank, on the host, once a batch."""
    needed = [_needed(shard, rank, window, causal) for rank in range(shard.cp_size)]
    own = shard.indices.numpy()
    send = [np.flatnonzero(mask[own]) for mask in needed]
    receive = [tokens[needed[shard.rank][tokens]] for tokens in (held.numpy() for held in shard.maps)]
    return KeyExchange(
        torch.from_numpy(np.concatenate(send)),
        tuple(map(len, send)),
        tuple(map(len, receive)),
        np.concatenate(receive),
        any(mask.sum() > mask[held.numpy()].sum() for mask, held in zip(needed, shard.maps, strict=True)),
    )


def exchange(tokens: torch.Tensor, plan: KeyExchange, send_index: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Send local `tokens [T / cp, ...]` as planned; what comes, `[len(plan.coordinates), ...]`. Gradients flow back."""
    sent = tokens.index_select(0, send_index)
    return all_to_all(sent, plan.send_counts, plan.receive_counts, group) if plan.remote else sent


def all_to_all(
    rows: torch.Tensor, send_counts: tuple[int, ...], receive_counts: tuple[int, ...], group: dist.ProcessGroup
) -> torch.Tensor:
    """Send the first `send_counts[0]` rows to rank 0, and so on; what the ranks sent here, in rank order.

    The gradient of a row is sent back to where the row came from: a token used on several ranks gets the sum.
    """
    received: torch.Tensor = _AllToAll.apply(rows, send_counts, receive_counts, group)  # type: ignore[no-untyped-call]
    return received


def sum_gradients(parameters: Iterable[torch.nn.Parameter], group: Group) -> None:
    """Add up every parameter's gradient over the ranks that share a batch, in place.

    Each rank's loss is its share of the batch's loss (a sum over its tokens, divided by the whole batch's count), so the
    batch's gradient is the sum. A wrapper that averages gradients over these ranks (DDP) needs the loss times cp instead.

    Args:
        parameters: of the model; those that require no gradient are passed over.
        group: the ranks that share the batch: a process group or a `DeviceMesh` dimension.

    Raises:
        MetadataError: a group that is none.
    """
    members = process_group(group)
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:  # an expert that no local token chose: other ranks wait for it all the same
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad, group=members)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        send_counts: tuple[int, ...],
        receive_counts: tuple[int, ...],
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        ctx.way_back = (receive_counts, send_counts, group)
        return _moved(rows, send_counts, receive_counts, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        receive_counts, send_counts, group = ctx.way_back
        return _moved(gradient, receive_counts, send_counts, group), None, None, None


def _moved(
    rows: torch.Tensor, send_counts: tuple[int, ...], receive_counts: tuple[int, ...], group: dist.ProcessGroup
) -> torch.Tensor:
    received = rows.new_empty((sum(receive_counts), *rows.shape[1:]))
    dist.all_to_all_single(received, rows.contiguous(), list(receive_counts), list(send_counts), group=group)
    return received


def _needed(shard: ContextShard, rank: int, window: int | None, causal: bool) -> np.ndarray:
    """Bool `[T]`: the keys that some query of `rank` may see."""
    first, last = shard.pieces(rank).key_ranges(window, causal)
    edges = np.zeros(shard.total_tokens + 1, np.int64)
    np.add.at(edges, first, 1)
    np.add.at(edges, last, -1)
    return np.cumsum(edges[:-1]) > 0
