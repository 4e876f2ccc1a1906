"""TransformerEngine's THD layout, and the `PackedSeqParams` of Megatron-core that carries it.

Both take two pairs of offsets: `cu_seqlens_*` counts real tokens, `cu_seqlens_*_padded` says where slots lie in memory
(form C). Two recipes are right:

    slots  the slot offsets in both places, as one tensor object, `pad_between_seqs=False`. Padding sits at the end of a
           slot, so under a causal mask no real token sees it. The fast path; wrong for bidirectional attention.
    real   real offsets and slot offsets, `pad_between_seqs=True`. Exact for any mask; only where the kernel supports it.

`pad_between_seqs` is always decided here: left open, versions have inferred it from the tensors' identity or from their
values without the tail, and computed garbage. Batches are flattened to `[1, B*S]`, or laid out by `align_documents`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any, Literal

import torch

from neatpack.convert.optional import attribute_of
from neatpack.convert.segments import check_window, cumulative, slots
from neatpack.errors import ContractError, MetadataError
from neatpack.packed_seq import PackedSeqParams

Offsets = Literal["slots", "real"]


def to_te(params: PackedSeqParams, *, offsets: Offsets = "slots", window: int | None = None) -> dict[str, Any]:
    """Convert to the arguments of TransformerEngine's `DotProductAttention.forward` (form C), causal, thd layout.

    For `q`, `k`, `v` of shape `[B*S, H, D]`. On an accelerator this reports to the host: convert on the CPU.

    Args:
        params: the batch's metadata.
        offsets: "slots" (safe and fast under the causal mask) or "real"; see the module's docstring.
        window: sliding window in tokens, the query's own included; None for unlimited.

    Returns:
        `qkv_format`, `attn_mask_type`, `window_size`, four offset tensors `[N+1] int32`, `max_seqlen_q`, `max_seqlen_kv` (the
        widest slot) and `pad_between_seqs`. On the worked example `cu_seqlens_q_padded` is `[0, 2, 6, 7, 9, 12]`, the maximum
        4, and with "real" `cu_seqlens_q` is `[0, 2, 5, 6, 8, 11]`.

    Raises:
        MetadataError: an unknown recipe, or a window below 1.

    Source: `transformer_engine/pytorch/attention/dot_product_attention/dot_product_attention.py` of TransformerEngine.
    """
    check_window(window)
    window_size = (-1, 0) if window is None else (window - 1, 0)
    return {"attn_mask_type": "padding_causal", "window_size": window_size, **_thd(params, offsets)}


def to_megatron_fields(params: PackedSeqParams, *, offsets: Offsets = "slots") -> dict[str, Any]:
    """Convert to the fields of Megatron-core's `PackedSeqParams` (form C), as plain data; Megatron is not needed.

    Args:
        params: the batch's metadata.
        offsets: "slots" (safe and fast under the causal mask) or "real"; see the module's docstring.

    Returns:
        What `to_te` gives without the mask's type, plus `total_tokens` and `seq_idx [1, B*S] int32`, the slot of each token
        for recurrent layers; `12` and `[[0, 0, 1, 1, 1, 1, 2, 3, 3, 4, 4, 4]]` on the worked example. The padded offsets
        are always present.

    Raises:
        MetadataError: an unknown recipe.
    """
    fields = _thd(params, offsets)
    total = params.doc_ids.numel()
    return {**fields, "total_tokens": total, "seq_idx": slot_index(fields["cu_seqlens_q_padded"], total)}


def to_megatron(params: PackedSeqParams, *, offsets: Offsets = "slots", require: Collection[str] = ()) -> Any:
    """Build the installed Megatron-core's `PackedSeqParams` (form C), with the fields that its class has.

    Args:
        params: the batch's metadata.
        offsets: "slots" (safe and fast under the causal mask) or "real"; see the module's docstring.
        require: fields that the class must have; name `seq_idx` if the model has recurrent layers.

    Raises:
        MetadataError: an unknown recipe.
        ContractError: the class lacks a field without which boundaries would be lost, or one of `require`.
        MissingDependencyError: megatron-core is not installed; `to_megatron_fields` works without it.

    Source: `megatron.core.packed_seq_params.PackedSeqParams`.
    """
    theirs = attribute_of("megatron.core.packed_seq_params", "PackedSeqParams", feature="to_megatron", install="megatron-core")
    return theirs(**select_fields(theirs, to_megatron_fields(params, offsets=offsets), require))


def select_fields(theirs: type, fields: dict[str, Any], require: Collection[str] = ()) -> dict[str, Any]:
    """Keep the `fields` that the dataclass `theirs` has; refuse to drop one that its boundaries depend on.

    Args:
        theirs: a `PackedSeqParams` class of Megatron-core, of any version.
        fields: from `to_megatron_fields`.
        require: fields that the class must have in any case.

    Raises:
        ContractError: a field that is needed is missing; names the class's fields.
    """
    known = {field.name for field in dataclasses.fields(theirs)}
    needed = {"qkv_format", "cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv", *require}
    if fields["pad_between_seqs"]:
        needed |= {"cu_seqlens_q_padded", "cu_seqlens_kv_padded", "pad_between_seqs"}
    missing = sorted(needed - known)
    if missing:
        raise ContractError(
            f"{theirs.__module__}.{theirs.__qualname__} has no field {', '.join(missing)}, so boundaries would be lost; it has "
            f"{', '.join(sorted(known))}. Update megatron-core; attention alone needs no more than offsets='slots' gives."
        )
    return {name: value for name, value in fields.items() if name in known}


def slot_index(cu_seqlens: torch.Tensor, total_tokens: int) -> torch.Tensor:
    """Number the slot of every token (form C) from 0, tokens past the last offset as one more slot: `[1, T] int32`.

    Example:
        >>> slot_index(torch.tensor([0, 5, 7, 11]), 16).tolist()
        [[0, 0, 0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 3]]
    """
    positions = torch.arange(total_tokens, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), positions, right=True, out_int32=True)[None]


def _thd(params: PackedSeqParams, offsets: Offsets) -> dict[str, Any]:
    """The fields that TransformerEngine and Megatron share."""
    if offsets not in ("slots", "real"):
        raise MetadataError(f"offsets is {offsets!r}; use 'slots' or 'real'.")
    layout = slots(params)
    real = cumulative(layout.lengths)
    # One object where the two agree: equal but distinct tensors send some versions down the slow path.
    padded = offsets == "real" and not torch.equal(real, layout.cu_seqlens)
    plain = real if padded else layout.cu_seqlens
    return {
        "qkv_format": "thd",
        "cu_seqlens_q": plain,
        "cu_seqlens_kv": plain,
        "cu_seqlens_q_padded": layout.cu_seqlens,
        "cu_seqlens_kv_padded": layout.cu_seqlens,
        "max_seqlen_q": layout.max_slot,
        "max_seqlen_kv": layout.max_slot,
        "pad_between_seqs": padded,
    }
