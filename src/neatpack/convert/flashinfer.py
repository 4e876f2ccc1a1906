"""FlashInfer's ragged prefill: for scoring packed batches, not for training; it has no backward pass."""

from __future__ import annotations

from typing import Any

from neatpack.convert.segments import check_window
from neatpack.packed_seq import PackedSeqParams


def to_flashinfer(params: PackedSeqParams, *, window: int | None = None) -> dict[str, Any]:
    """Convert to the arguments of `BatchPrefillWithRaggedKVCacheWrapper.plan` (form A, or B on unpadded params).

    Add the head counts and sizes, then `run(q, k, v)` with `q [B*S, H, D]`. `plan` copies the offsets to the host.

    Args:
        params: the batch's metadata.
        window: sliding window in tokens, the query's own included; None for unlimited.

    Returns:
        `qo_indptr` and `kv_indptr` (one `[N+1] int32` tensor), `causal` and `window_left`; `[0, 2, 5, 6, 7, 9, 12]` on the
        worked example.

    Raises:
        MetadataError: a window below 1.

    Source: `flashinfer/prefill.py` of FlashInfer.
    """
    check_window(window)
    return {
        "qo_indptr": params.cu_seqlens,
        "kv_indptr": params.cu_seqlens,
        "causal": True,
        "window_left": -1 if window is None else window - 1,
    }
