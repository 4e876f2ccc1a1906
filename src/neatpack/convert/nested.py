"""Torch's jagged nested tensors: one component a segment, without padding between them."""

from __future__ import annotations

from typing import Any, Literal

import torch

from neatpack.convert.segments import check_form, segment_lengths, slots
from neatpack.errors import MetadataError
from neatpack.packed_seq import PackedSeqParams


def to_jagged(params: PackedSeqParams, *, form: Literal["A", "C"] = "A") -> dict[str, Any]:
    """Convert to the arguments of `torch.nested.nested_tensor_from_jagged` (form A or C, B on unpadded params).

    The shortest and longest lengths come along, which saves later operations a sync. On an accelerator this reports to
    the host.

    Args:
        params: the batch's metadata.
        form: "C" gives slot offsets and real lengths: components without padding, in a nested tensor with holes, which few
            operations support.

    Returns:
        `offsets [N+1] int32`, `lengths` (None in form A), `min_seqlen`, `max_seqlen`; on the worked example
        `[0, 2, 5, 6, 7, 9, 12]`, 1 and 3, in form C `[0, 2, 6, 7, 9, 12]` with lengths `[2, 3, 1, 2, 3]`.

    Raises:
        MetadataError: another form.
    """
    check_form(form)
    if form == "C":
        layout = slots(params)
        shortest = int(layout.lengths.min()) if len(layout.lengths) else 0
        return {
            "offsets": layout.cu_seqlens,
            "lengths": layout.lengths,
            "min_seqlen": shortest,
            "max_seqlen": layout.max_length,
        }
    lengths = segment_lengths(params)
    shortest = int(lengths.min()) if len(lengths) else 0
    return {"offsets": params.cu_seqlens, "lengths": None, "min_seqlen": shortest, "max_seqlen": params.max_seqlen}


def to_nested(params: PackedSeqParams, values: torch.Tensor, *, form: Literal["A", "C"] = "A") -> torch.Tensor:
    """View a batch `[B, S, ...]` as a jagged nested tensor `[N, j, ...]` (form A or C, B on unpadded params).

    Differentiable, without a copy if `values` is contiguous. For `scaled_dot_product_attention` give it `[B, S, H, D]`,
    transpose the result to `[N, H, j, D]` and pass `is_causal=True`.

    Args:
        params: the batch's metadata.
        values: activations or ids of this batch.
        form: see `to_jagged`.

    Returns:
        One component a segment (form A, lengths `[2, 3, 1, 1, 2, 3]` on the worked example) or a slot (form C).

    Raises:
        MetadataError: `values` of another batch, or an empty batch, which a nested tensor cannot describe.

    Source: `torch.nested.nested_tensor_from_jagged`.
    """
    if tuple(values.shape[:2]) != tuple(params.doc_ids.shape) or not params.doc_ids.numel():
        raise MetadataError(
            f"values has shape {tuple(values.shape)}, the metadata describes {tuple(params.doc_ids.shape)}. Give the "
            "activations of this batch, [B, S, ...] with at least one token."
        )
    return torch.nested.nested_tensor_from_jagged(values.flatten(0, 1), **to_jagged(params, form=form))


def from_nested(params: PackedSeqParams, nested: torch.Tensor) -> torch.Tensor:
    """Bring a nested tensor `[N, j, ...]` of form A back to the batch `[B, S, ...]`; the inverse of `to_nested`.

    Args:
        params: the batch's metadata.
        nested: `[N, j, ...]`, one component a segment.

    Raises:
        MetadataError: a nested tensor that does not hold every token of this batch.
    """
    values = nested.values()
    batch, length = params.doc_ids.shape
    if len(values) != batch * length or nested.size(0) != len(params.cu_seqlens) - 1:
        raise MetadataError(
            f"the nested tensor holds {len(values)} tokens in {nested.size(0)} components, the metadata describes "
            f"{batch * length} in {len(params.cu_seqlens) - 1}. Give the form A nested tensor of this batch."
        )
    return values.reshape(batch, length, *values.shape[1:])
