"""Keyword arguments of transformers models: offsets for attention, and `seq_idx` for the recurrent layers of hybrids."""

from __future__ import annotations

from typing import Any

from neatpack.convert.segments import segment_index
from neatpack.packed_seq import PackedSeqParams, to_flash_attention_kwargs


def to_hf_kwargs(params: PackedSeqParams, *, include_seq_idx: bool = False) -> dict[str, Any]:
    """Convert to the keyword arguments that a transformers model passes on to its layers (form A, or B on unpadded params).

    Pass them with `position_ids` that restart and without `attention_mask`, which would override them. All four offsets
    travel together: with one of them missing transformers skips its varlen path.

    Args:
        params: the batch's metadata. A batch that stays `[B, S]` needs form A; form B fits only `[1, n_real]`.
        include_seq_idx: for hybrid models (attention and recurrent layers), whose short convolutions would otherwise see
            the end of the previous document. Their recurrent kernels take batch size 1 only: flatten the batch to
            `[1, B*S]`, for which these arguments are already right.

    Returns:
        `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q`, `max_length_k`, and `seq_idx [1, B*S] int32` if asked for;
        `[0, 2, 5, 6, 7, 9, 12]`, 3 and `[[0, 0, 1, 1, 1, 2, 3, 4, 4, 5, 5, 5]]` on the worked example.

    Source: `transformers.modeling_flash_attention_utils.FlashAttentionKwargs`, `transformers.utils.generic.TransformersKwargs`.
    """
    kwargs = to_flash_attention_kwargs(params)
    return {**kwargs, "seq_idx": segment_index(params, flat=True)} if include_seq_idx else kwargs
