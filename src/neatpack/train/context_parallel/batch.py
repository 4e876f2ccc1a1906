"""A collated batch in, one rank's batch out; and local results back into `[B, S]`.

Every rank of the group collates the same batch. Next-token targets are made before the cut, so that the last token of a
shard keeps the target that lives on the next rank, and the count of targets is the whole batch's, so that the ranks' losses
add up to its loss.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from neatpack.convert.foreign import doc_ids_from_cu_seqlens
from neatpack.convert.segments import position_ids
from neatpack.errors import MetadataError
from neatpack.packed_seq import PackedSeqParams, packed_seq_params_from_doc_ids, to_flash_attention_kwargs
from neatpack.train.context_parallel.exchange import Group, all_to_all, process_group
from neatpack.train.context_parallel.index_maps import Scheme, aligned_slots, inverse_indices, padding_to
from neatpack.train.context_parallel.shard import ContextShard, shard_params
from neatpack.train.labels import IGNORE_INDEX, shift_within_documents

# What describes the whole batch; a shard has its own description.
_DESCRIPTION = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "packed_seq_params", "doc_ids"})


def shard_tensor(tensor: torch.Tensor, shard: ContextShard) -> torch.Tensor:
    """This rank's tokens of a `[B, S, ...]` tensor, as one row `[1, T / cp, ...]`.

    Args:
        tensor: `[B, S, ...]`, on any device.
        shard: this rank's share of the batch.

    Raises:
        MetadataError: a tensor of another batch or sequence length.

    Example:
        >>> params = packed_seq_params_from_doc_ids(torch.tensor([[1, 1, 2, 2, 2, 0], [1, 2, 2, 3, 3, 3]]))
        >>> shard_tensor(params.doc_ids, shard_params(params, 3, 0, scheme="zigzag")).tolist()
        [[1, 0, 1, 3]]
    """
    if tuple(tensor.shape[:2]) != shard.batch_shape:
        raise MetadataError(
            f"a tensor of shape {tuple(tensor.shape)} is not of the batch {list(shard.batch_shape)} that was sharded: "
            "it must be [B, S, ...]."
        )
    return tensor.flatten(0, 1).index_select(0, shard.indices.to(tensor.device)).unsqueeze(0)


def gather_tensor(local: torch.Tensor, shard: ContextShard, group: Group) -> torch.Tensor:
    """All ranks' `[1, T / cp, ...]` put back into `[B, S, ...]`, on every rank. A collective; gradients flow back.

    A gradient on several ranks' copies adds up: compute a loss from the gathered tensor on one rank, or divide it by cp.

    Args:
        local: `[1, T / cp, ...]`, this rank's.
        shard: this rank's share of the batch.
        group: the ranks that share the batch: a process group or a `DeviceMesh` dimension.

    Raises:
        MetadataError: a tensor that is not of the shard's length, or a group that is none.
    """
    share, cp_size = len(shard.indices), shard.cp_size
    if tuple(local.shape[:2]) != (1, share):
        raise MetadataError(f"a local tensor must be [1, {share}, ...] like its shard, got shape {tuple(local.shape)}.")
    copies = local.expand(cp_size, *local.shape[1:]).flatten(0, 1)
    gathered = all_to_all(copies, (share,) * cp_size, (share,) * cp_size, process_group(group))
    restored = gathered.index_select(0, inverse_indices(shard.maps).to(local.device))
    return restored.view(*shard.batch_shape, *restored.shape[1:])


def shard_batch(
    batch: Mapping[str, Any], group: Group, *, scheme: Scheme = "zigzag", check_equal: bool = True
) -> dict[str, Any]:
    """This rank's share of a collated batch (form A in), ready for a model whose attention is context parallel.

    Args:
        batch: what `PackedCollator` returned, the same on every rank of the group; boundaries come from its
            `packed_seq_params`, `doc_ids` or `cu_seq_lens_q`. Prefer the CPU: shard, then move.
        group: the ranks that share the batch: a process group or a `DeviceMesh` dimension.
        scheme: how to cut; "per_document_zigzag" takes what `PackedCollator(align=2 * cp)` makes of the rows of
            `plan_rows(..., align=2 * cp)`.
        check_equal: compare a checksum of the batch over the ranks, one small collective: ranks that loaded different
            batches would exchange each other's keys. Turn it off where the loader is known to be right.

    Returns:
        Every `[B, S, ...]` tensor of the batch as `[1, T / cp, ...]`, scalars as they were; `position_ids` as in the whole
        batch (made from its segments if it had none), on several axes `[A, B, S]` as `[A, 1, T / cp]`; with labels also
        `shift_labels`, the targets from before the cut, and `num_items_in_batch`, their number over all ranks; and
        `context_shard` and `context_group` for attention. The whole batch's description (offsets, map) is left out.

    Raises:
        MetadataError: no boundaries, an attention mask with padding, a tensor that is not per token, what does not divide,
            ranks that hold different batches, or a group that is none.
    """
    members = process_group(group)
    params = _params(batch)
    shard = shard_params(params, members.size(), members.rank(), scheme=scheme, slot_offsets=_slots(batch, params, members))
    if check_equal:
        _refuse_different_batches(batch["input_ids"], shard, members)
    columns = {name: value for name, value in batch.items() if name not in _DESCRIPTION}
    _drop_mask(columns)
    if columns.get("position_ids") is None:
        columns["position_ids"] = position_ids(params)
    if columns.get("labels") is not None:
        columns.setdefault("shift_labels", shift_within_documents(columns["labels"], params))
    if columns.get("shift_labels") is not None and columns.get("num_items_in_batch") is None:
        columns["num_items_in_batch"] = max(1, int((columns["shift_labels"] != IGNORE_INDEX).sum()))
    local = {name: _sharded_column(name, value, shard) for name, value in columns.items()}
    return {**local, "context_shard": shard, "context_group": members}


def pad_batch(
    batch: Mapping[str, Any], multiple: int, *, pad_token_id: int = 0, fills: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """Pad every row of a collated batch at its end to a multiple of `multiple` tokens, boundaries (form A) included.

    Labels and targets are filled with -100, the document map with 0, positions count on (from 0 where the padding is a
    segment of its own), and the offsets are extended to match.

    Args:
        batch: what `PackedCollator` returned.
        multiple: `cp` for contiguous shards, `2 * cp` for zigzag.
        pad_token_id: the id in padded slots.
        fills: what to fill other per-token columns with, by name.

    Returns:
        A new batch; the same values if nothing lacks.

    Raises:
        MetadataError: no boundaries, or a per-token column whose fill is not known; names it.
    """
    doc_ids = _params(batch).doc_ids
    shape = (doc_ids.shape[0], doc_ids.shape[1])
    extra = padding_to(shape[1], multiple)
    if not extra:
        return dict(batch)
    known = {"input_ids": pad_token_id, "labels": IGNORE_INDEX, "shift_labels": IGNORE_INDEX, **(fills or {})}
    padded: dict[str, Any] = {}
    for name, value in batch.items():
        if _on_axes(name, value, shape):
            padded[name] = torch.stack([torch.cat([axis, _pad_positions(axis, doc_ids, extra)], dim=1) for axis in value])
        elif name in _DESCRIPTION or not _per_token(value, shape):
            padded[name] = value
        elif name == "position_ids":
            padded[name] = torch.cat([value, _pad_positions(value, doc_ids, extra)], dim=1)
        elif name in known:
            padded[name] = torch.cat([value, value.new_full((shape[0], extra, *value.shape[2:]), known[name])], dim=1)
        else:
            raise MetadataError(
                f"column {name!r} is per token; what padding should hold is not known: pass fills={{{name!r}: ...}}."
            )
    params = packed_seq_params_from_doc_ids(torch.nn.functional.pad(doc_ids, (0, extra)))
    described = {**to_flash_attention_kwargs(params), "packed_seq_params": params, "doc_ids": params.doc_ids}
    return {**padded, **{name: value for name, value in described.items() if name in batch}}


def _params(batch: Mapping[str, Any]) -> PackedSeqParams:
    """The batch's metadata, from its document map or, where it has none, from its offsets (padding is then a segment too)."""
    ids = batch.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        raise MetadataError(f"the batch needs input_ids [B, S], got {type(ids).__name__}; it has {sorted(batch)}.")
    params: PackedSeqParams | None = batch.get("packed_seq_params")
    doc_ids: torch.Tensor | None = batch.get("doc_ids")
    if params is None and doc_ids is None:
        if batch.get("cu_seq_lens_q") is None:
            raise MetadataError(
                f"the batch has no boundaries, only {sorted(batch)}: it needs cu_seq_lens_q, doc_ids or packed_seq_params. "
                "PackedCollator sends them."
            )
        doc_ids = doc_ids_from_cu_seqlens(batch["cu_seq_lens_q"], row_length=ids.shape[1], total_tokens=ids.numel())
    if params is None and doc_ids is not None:
        params = packed_seq_params_from_doc_ids(doc_ids)
    assert params is not None
    if params.doc_ids.shape != ids.shape:
        raise MetadataError(f"the boundaries are of a batch {list(params.doc_ids.shape)}, input_ids are {list(ids.shape)}.")
    return params


def _slots(batch: Mapping[str, Any], params: PackedSeqParams, group: dist.ProcessGroup) -> torch.Tensor | None:
    """Slots by their alignment, where the batch brings offsets only and its padding looks like a document."""
    if batch.get("packed_seq_params") is not None or batch.get("doc_ids") is not None:
        return None
    return aligned_slots(params.cu_seqlens, params.doc_ids.shape[1], 2 * group.size())


def _drop_mask(columns: dict[str, Any]) -> None:
    mask = columns.pop("attention_mask", None)
    if mask is not None and not bool((mask == 1).all()):
        raise MetadataError(
            "the batch has an attention_mask that masks something; attention over shards follows the boundaries only. "
            "Leave the mask out: padding is a segment of its own."
        )


def _sharded_column(name: str, value: Any, shard: ContextShard) -> Any:
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    if _on_axes(name, value, shard.batch_shape):
        return torch.stack([shard_tensor(axis, shard) for axis in value])
    if not _per_token(value, shard.batch_shape):
        raise MetadataError(
            f"column {name!r} has shape {tuple(value.shape)}, not [B, S, ...] = {list(shard.batch_shape)}: how to cut it is "
            "not known. Take it out of the batch, or cut it with shard_tensor."
        )
    return shard_tensor(value, shard)


def _on_axes(name: str, value: Any, shape: tuple[int, int]) -> bool:
    """Are these positions `[A, B, S]` (mRoPE)?"""
    return name == "position_ids" and isinstance(value, torch.Tensor) and value.dim() == 3 and tuple(value.shape[1:]) == shape


def _per_token(value: Any, shape: tuple[int, int]) -> bool:
    return isinstance(value, torch.Tensor) and tuple(value.shape[:2]) == shape


def _pad_positions(positions: torch.Tensor, doc_ids: torch.Tensor, extra: int) -> torch.Tensor:
    """`[B, extra]`: on from the last position where the row already ends in padding, else from 0."""
    count = torch.arange(extra, device=positions.device)
    begin = torch.where(doc_ids[:, -1:].to(positions.device) == 0, positions[:, -1:] + 1, 0)
    return (begin + count).to(positions.dtype)


def _refuse_different_batches(input_ids: torch.Tensor, shard: ContextShard, group: dist.ProcessGroup) -> None:
    checksums = [zlib.crc32(tensor.detach().cpu().numpy().tobytes()) for tensor in (input_ids, shard.cu_seqlens)]
    own = (shard.scheme, shard.batch_shape, *checksums)
    all_ranks: list[Any] = [None] * shard.cp_size
    dist.all_gather_object(all_ranks, own, group=group)
    for rank, other in enumerate(all_ranks):
        if other != all_ranks[0]:
            names = ("scheme", "shape", "tokens", "boundaries")
            differing = [name for name, left, right in zip(names, all_ranks[0], other, strict=True) if left != right]
            raise MetadataError(
                f"context-parallel ranks 0 and {rank} hold different batches ({', '.join(differing)} differ): they "
                "would attend to each other's keys. "
                "Give all ranks of the group the same rows: a sampler over data-parallel ranks only."
            )
