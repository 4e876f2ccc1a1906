"""The map of segment starts: what stand-in layers read where no mask builder is told positions."""

from __future__ import annotations

import torch

from neatpack.packed_seq import PackedSeqParams


def segment_starts(params: PackedSeqParams) -> torch.Tensor:
    """Mark where the segments of a batch begin (form A), in the four dimensions of a finished mask.

    Args:
        params: the batch's metadata.

    Returns:
        bool `[B, 1, 1, S]`, True at the first token of every document and of every stretch of padding.

    Example:
        >>> from neatpack.packed_seq import packed_seq_params_from_doc_ids
        >>> segment_starts(packed_seq_params_from_doc_ids(torch.tensor([[1, 1, 2, 0]]))).int().tolist()
        [[[[1, 0, 1, 1]]]]
    """
    starts = torch.zeros(params.doc_ids.numel(), dtype=torch.bool, device=params.doc_ids.device)
    starts[params.cu_seqlens[:-1].long()] = True
    return starts.view(len(params.doc_ids), 1, 1, -1)
