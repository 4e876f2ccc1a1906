"""Dense 4-D masks: bool for `scaled_dot_product_attention`, additive for eager attention, and the dict of mixed models.

A mask costs B*S*S bytes (times the size of its dtype when additive) and every layer reads it, so it is for short rows and
for checking; a size guard refuses large ones before anything is allocated. In eager attention a bool mask is *added* as
zeros and ones and hides nothing: give it the additive one.
"""

from __future__ import annotations

import torch

from neatpack.convert.segments import check_window, segment_index
from neatpack.errors import MetadataError
from neatpack.packed_seq import PackedSeqParams

DEFAULT_MAX_BYTES = 2**31
"""The largest mask built without asking: 2 GiB."""


def to_dense_mask(
    params: PackedSeqParams, *, pad_self: bool = True, window: int | None = None, max_bytes: int = DEFAULT_MAX_BYTES
) -> torch.Tensor:
    """Build the block-causal mask of every row (form A): bool `[B, 1, S, S]`, True = may attend.

    For `scaled_dot_product_attention` (`attn_mask=`, with `is_causal=False`) and for transformers' sdpa attention.

    Args:
        params: the batch's metadata.
        pad_self: let a pad see itself, so that no row of the mask is empty: an empty row is NaN in softmaxes over `-inf`.
        window: sliding window in tokens, the query's own included; None for unlimited.
        max_bytes: refuse a mask larger than this.

    Returns:
        The mask, on the device of the params. On the worked example 19 pairs without `pad_self`, 20 with it.

    Raises:
        MetadataError: a mask above `max_bytes`, or a window below 1.

    Example:
        >>> from neatpack.packed_seq import packed_seq_params_from_doc_ids
        >>> params = packed_seq_params_from_doc_ids(torch.tensor([[1, 1, 2, 0]]))
        >>> to_dense_mask(params).int().tolist()
        [[[[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]]]
    """
    check_window(window)
    _check_size(params, 1, max_bytes)
    # Pads get numbers that differ between the two sides, so that no pad equals anything.
    queries, keys = segment_index(params, pad=-1), segment_index(params, pad=-2)
    mask = queries[:, :, None] == keys[:, None, :]
    mask.tril_()
    if window is not None and window < mask.shape[-1]:
        mask.triu_(1 - window)
    if pad_self:
        mask.diagonal(dim1=1, dim2=2).logical_or_(params.doc_ids == 0)
    return mask[:, None]


def to_additive_mask(
    params: PackedSeqParams,
    *,
    dtype: torch.dtype = torch.float32,
    pad_self: bool = True,
    window: int | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> torch.Tensor:
    """Build the mask that eager attention adds to its scores (form A): `[B, 1, S, S]` of 0 and the dtype's lowest number.

    Args:
        params: the batch's metadata.
        dtype: floating dtype of the scores.
        pad_self: let a pad see itself; without it a pad attends to everything evenly, since all its scores are equally low.
        window: sliding window in tokens, the query's own included; None for unlimited.
        max_bytes: refuse a mask larger than this.

    Returns:
        The mask, on the device of the params.

    Raises:
        MetadataError: a mask above `max_bytes`, a window below 1, or a dtype that is not floating.
    """
    if not dtype.is_floating_point:
        raise MetadataError(f"an additive mask must be floating, got {dtype}. Use to_dense_mask for a bool mask.")
    _check_size(params, dtype.itemsize, max_bytes)
    allowed = to_dense_mask(params, pad_self=pad_self, window=window, max_bytes=max_bytes)
    mask = torch.full(allowed.shape, torch.finfo(dtype).min, dtype=dtype, device=allowed.device)
    return mask.masked_fill_(allowed, 0.0)


def to_mask_dict(
    params: PackedSeqParams,
    window: int,
    *,
    dtype: torch.dtype | None = None,
    pad_self: bool = True,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> dict[str, torch.Tensor]:
    """Build the masks that transformers' mixed models take as one `attention_mask` (form A), by layer type.

    A single explicit mask would switch the windows of the sliding layers off.

    Args:
        params: the batch's metadata.
        window: sliding window of the sliding layers (`config.sliding_window`), in tokens, the query's own included.
        dtype: None for bool masks (sdpa), a floating dtype for additive ones (eager).
        pad_self: let a pad see itself.
        max_bytes: refuse masks that are together larger than this.

    Returns:
        `full_attention` and `sliding_attention`, each `[B, 1, S, S]`.

    Raises:
        MetadataError: masks above `max_bytes`, a window below 1, or a dtype that is not floating.
    """
    each = max_bytes // 2
    windows = {"full_attention": None, "sliding_attention": window}
    if dtype is None:
        return {kind: to_dense_mask(params, pad_self=pad_self, window=w, max_bytes=each) for kind, w in windows.items()}
    return {
        kind: to_additive_mask(params, dtype=dtype, pad_self=pad_self, window=w, max_bytes=each) for kind, w in windows.items()
    }


def _check_size(params: PackedSeqParams, itemsize: int, max_bytes: int) -> None:
    batch, length = params.doc_ids.shape
    needed = batch * length * length * itemsize
    if needed > max_bytes:
        raise MetadataError(
            f"a dense mask of {batch} x {length} x {length} needs {needed:,} bytes, more than max_bytes = {max_bytes:,}. "
            "Give the offsets to a varlen kernel (neatpack.convert.flash, or neatpack's packed_varlen attention), use "
            "to_block_mask, pack shorter rows, or raise max_bytes."
        )
