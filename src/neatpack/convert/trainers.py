"""Metadata of other training code, under its own names: torchtitan, OLMo-core, MagiAttention."""

from __future__ import annotations

from typing import Any

import torch

from neatpack.convert.segments import segment_index, segment_lengths
from neatpack.packed_seq import PackedSeqParams


def to_torchtitan(params: PackedSeqParams) -> dict[str, Any]:
    """Convert to the fields of torchtitan's `VarlenMetadata` (form A, or B on unpadded params), for folded `[1, B*S]` batches.

    Returns:
        `cu_seq_q`, `cu_seq_k` (one `[N+1] int32` tensor), `max_q`, `max_k`; `[0, 2, 5, 6, 7, 9, 12]` and 3 on the worked
        example.

    Source: `torchtitan/models/common/attention.py` of torchtitan.
    """
    longest = params.max_seqlen
    return {"cu_seq_q": params.cu_seqlens, "cu_seq_k": params.cu_seqlens, "max_q": longest, "max_k": longest}


def to_olmo(params: PackedSeqParams) -> dict[str, Any]:
    """Convert to OLMo-core's `doc_lens` and `max_doc_lens` (form A, by row): lengths from the left, padded with zeros.

    It drops zeros and expects each row's lengths to sum to S, so padding runs are listed like documents. On an accelerator
    this reports to the host.

    Returns:
        `doc_lens [B, most segments in a row] int32` and `max_doc_lens`, the longest of each row, Python ints;
        `[[2, 3, 1], [1, 2, 3]]` and `[3, 3]` on the worked example.

    Source: `src/olmo_core/nn/attention/ring.py` of OLMo-core.
    """
    batch, length = params.doc_ids.shape
    starts = params.cu_seqlens[:-1].long()
    columns = segment_index(params).reshape(-1)[starts].long()
    width = int(columns.max()) + 1 if len(columns) else 0
    doc_lens = torch.zeros(batch, width, dtype=torch.int32, device=params.cu_seqlens.device)
    doc_lens[starts // max(length, 1), columns] = segment_lengths(params)
    return {"doc_lens": doc_lens, "max_doc_lens": doc_lens.amax(1).tolist() if width else [0] * batch}


def to_magi(params: PackedSeqParams) -> dict[str, Any]:
    """Convert to MagiAttention's rectangles (form A, or B on unpadded params): one causal square a segment.

    Returns:
        `q_ranges` and `k_ranges`, each `[N, 2] int32` of `[start, end)`, and `attn_mask_type`, "causal" N times. On the worked
        example the first three are `[0, 2]`, `[2, 5]`, `[5, 6]`.
    """
    ranges = torch.stack([params.cu_seqlens[:-1], params.cu_seqlens[1:]], dim=1)
    return {"q_ranges": ranges, "k_ranges": ranges, "attn_mask_type": ["causal"] * len(ranges)}
