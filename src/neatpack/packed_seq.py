"""Typed packed-sequence metadata: the document map of a batch as attention-kernel offsets.

Start reading here. A packed batch `[B, S]` carries a document map: position by position, the 1-based index of the
document it belongs to, 0 for padding. The map is the one source of boundaries; this module turns it into
`PackedSeqParams`, and everything in `neatpack.convert` turns those into what one consumer wants.

The worked example, used on every page (B = 2 rows, S = 6 tokens a row, 5 documents, 11 real tokens, 1 pad):

    doc_ids = [[1, 1, 2, 2, 2, 0],
               [1, 2, 2, 3, 3, 3]]       cu_seqlens = [0, 2, 5, 6, 7, 9, 12], max_seqlen = 3

The names, fields, dtypes and semantics are those of `nemo_automodel.components.datasets.packed_seq`, so that code
written for it changes one import line. Cost on the CPU: one pass over the map (memory bandwidth) through NumPy on the
tensor's own memory; on an accelerator: that pass on the device, and one copy of one byte a token to the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from neatpack.errors import MetadataError, MetadataOverflowError, MetadataTypeError

__all__ = ["PackedSeqParams", "packed_seq_params_from_doc_ids", "to_flash_attention_kwargs", "validate_doc_ids"]

MAX_TOKENS = 2**31 - 1
"""The most tokens a batch may hold: offsets are int32."""

_INTEGER_DTYPES = frozenset(
    {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64}
)


@dataclass(eq=False)
class PackedSeqParams:
    """Packed-sequence metadata derived from a document map (form A: segments over the flattened `[B*S]` axis).

    Segment `k` spans the flattened positions `[cu_seqlens[k], cu_seqlens[k + 1])`. Padding runs are segments, and every
    row starts one, so `cu_seqlens[-1] == B * S`.

    Attributes:
        cu_seqlens: `[num_segments + 1] int32`, contiguous, on the device of `doc_ids`: cumulative token counts.
        max_seqlen: length in tokens of the longest segment, padding runs included; a Python int.
        doc_ids: `[B, S]` integer, the very tensor the metadata was built from; 1-based, 0 is padding.

    On the worked example `cu_seqlens` is `[0, 2, 5, 6, 7, 9, 12]` and `max_seqlen` 3.
    """

    cu_seqlens: torch.Tensor
    max_seqlen: int
    doc_ids: torch.Tensor

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> PackedSeqParams:
        """Return the same metadata with both tensors on `device`.

        Args:
            device: where to; anything `torch.Tensor.to` takes as a device.
            non_blocking: let copies from pinned memory overlap with computation.
        """
        return PackedSeqParams(
            self.cu_seqlens.to(device, non_blocking=non_blocking),
            self.max_seqlen,
            self.doc_ids.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> PackedSeqParams:
        """Return the same metadata in page-locked host memory; `DataLoader(pin_memory=True)` calls this."""
        return PackedSeqParams(self.cu_seqlens.pin_memory(), self.max_seqlen, self.doc_ids.pin_memory())


def packed_seq_params_from_doc_ids(doc_ids: torch.Tensor) -> PackedSeqParams:
    """Build packed-sequence metadata (form A) from a document map.

    Segments are the maximal runs of one index within a row; a boundary at every row start keeps equal indices of
    neighbouring rows apart, and padding runs (index 0) are segments of their own.

    Args:
        doc_ids: `[B, S]`, any integer dtype, any strides, any device. Build it on the CPU (in the data-loader worker)
            and move the result once; on an accelerator this makes one device-to-host copy.

    Returns:
        The metadata, with `doc_ids` itself kept. `[0, S]` and `[B, 0]` give `cu_seqlens [0]` and `max_seqlen 0`.

    Raises:
        MetadataError: `doc_ids` is not 2-D (a ValueError).
        MetadataTypeError: `doc_ids` is no dense tensor of integers with values (a TypeError).
        MetadataOverflowError: `B * S` does not fit int32 offsets (an OverflowError); raised before anything is allocated.

    Example:
        >>> params = packed_seq_params_from_doc_ids(torch.tensor([[1, 1, 2, 2, 2, 0], [1, 2, 2, 3, 3, 3]]))
        >>> params.cu_seqlens.tolist(), params.max_seqlen
        ([0, 2, 5, 6, 7, 9, 12], 3)

    Source: https://docs.nvidia.com/nemo/automodel, `nemo_automodel.components.datasets.packed_seq`.
    """
    _check_map(doc_ids)
    batch, length = doc_ids.shape
    starts = _segment_starts(doc_ids)
    cu_seqlens = np.empty(len(starts) + 1, np.int32)
    cu_seqlens[:-1] = starts
    cu_seqlens[-1] = batch * length
    longest = int(np.subtract(cu_seqlens[1:], cu_seqlens[:-1]).max()) if len(starts) else 0
    offsets = torch.from_numpy(cu_seqlens).to(doc_ids.device, non_blocking=True)
    return PackedSeqParams(offsets, longest, doc_ids)


def to_flash_attention_kwargs(params: PackedSeqParams) -> dict[str, Any]:
    """Convert the metadata (form A in, form A out) to Hugging Face `FlashAttentionKwargs`.

    Pass them to a model whose attention implementation reads them, together with `position_ids` that restart at every
    document and **no** `attention_mask`: in transformers a mask overrides these keys without a word.

    Args:
        params: the batch's metadata; queries and keys share it (self-attention).

    Returns:
        `cu_seq_lens_q` and `cu_seq_lens_k` (the same `[num_segments + 1] int32` tensor) and `max_length_q` and
        `max_length_k` (the same int). On the worked example: `[0, 2, 5, 6, 7, 9, 12]` and 3.

    Source: `transformers.modeling_flash_attention_utils.FlashAttentionKwargs`.
    """
    return {
        "cu_seq_lens_q": params.cu_seqlens,
        "cu_seq_lens_k": params.cu_seqlens,
        "max_length_q": params.max_seqlen,
        "max_length_k": params.max_seqlen,
    }


def validate_doc_ids(doc_ids: torch.Tensor, *, unique: bool = False) -> None:
    """Check what the builder takes on trust. Costs one pass over the map (and a device sync on an accelerator).

    Args:
        doc_ids: `[B, S]` integer document map, 1-based, 0 is padding.
        unique: also refuse an index that comes back in a row after another one: `[1, 1, 2, 1]` is three segments to
            this library, and two documents to code that counts indices.

    Raises:
        MetadataError: not 2-D, a negative index, or (with `unique`) an index that reappears; names row and position.
        MetadataTypeError: not a dense tensor of integers with values.
        MetadataOverflowError: too many tokens for int32 offsets.

    Example:
        >>> validate_doc_ids(torch.tensor([[1, 1, 2, 2, 2, 0], [1, 2, 2, 3, 3, 3]]), unique=True)
    """
    _check_map(doc_ids)
    ids = _once(doc_ids).detach().cpu().numpy()
    if int(ids.min(initial=0)) < 0:
        row, position = np.argwhere(ids < 0)[0].tolist()
        raise MetadataError(
            f"doc_ids[{row}, {position}] is {ids[row, position]}: document indices are 1-based and 0 is padding. "
            "Use 0 for padding, not a negative sentinel."
        )
    if unique:
        for row, row_ids in enumerate(ids):
            _check_no_reappearance(row, row_ids)


def _check_no_reappearance(row: int, ids: np.ndarray) -> None:
    starts = np.flatnonzero(np.r_[True, ids[1:] != ids[:-1]]) if len(ids) else np.empty(0, np.int64)
    seen: set[int] = set()
    for start in starts.tolist():
        index = int(ids[start])
        if index and index in seen:
            raise MetadataError(
                f"doc_ids[{row}, {start}]: document {index} comes back after another segment of row {row}; each document "
                "must be one run. Give the second run an index of its own, or call without unique=True."
            )
        seen.add(index)


def _check_map(doc_ids: torch.Tensor) -> None:
    if not isinstance(doc_ids, torch.Tensor):
        raise MetadataTypeError(
            f"doc_ids must be a torch.Tensor of integers, got {type(doc_ids).__name__}. Use torch.as_tensor."
        )
    if doc_ids.is_nested or doc_ids.layout != torch.strided:
        kind = "a nested tensor" if doc_ids.is_nested else f"layout {doc_ids.layout}"
        way_out = "Pad its rows with 0: torch.nested.to_padded_tensor(doc_ids, 0)." if doc_ids.is_nested else "Use .to_dense()."
        raise MetadataTypeError(f"doc_ids must be a dense [batch, sequence] tensor, got {kind}. {way_out}")
    if doc_ids.device.type == "meta":
        raise MetadataTypeError(
            "doc_ids is on the meta device and holds no values to find boundaries in. Build it on the CPU, where the batch is."
        )
    if doc_ids.dim() != 2:
        raise MetadataError(
            f"doc_ids must be a 2D [batch, sequence] document map, got shape {tuple(doc_ids.shape)}. "
            "Add the batch axis with doc_ids[None] if it holds one row."
        )
    if doc_ids.dtype not in _INTEGER_DTYPES:
        raise MetadataTypeError(f"doc_ids must hold integers, got dtype {doc_ids.dtype}. Convert them with doc_ids.long().")
    if doc_ids.numel() > MAX_TOKENS:
        batch, length = doc_ids.shape
        raise MetadataOverflowError(
            f"doc_ids has {batch} x {length} = {doc_ids.numel()} tokens; int32 offsets count at most {MAX_TOKENS}. "
            "Split the batch into smaller ones."
        )


def _once(doc_ids: torch.Tensor) -> torch.Tensor:
    """The map less what `torch.expand` repeated: an axis of stride 0 is looked at once, so that a huge view costs nothing."""
    rows, columns = (1 if stride == 0 else None for stride in doc_ids.stride())
    return doc_ids[:rows, :columns]


def _segment_starts(doc_ids: torch.Tensor) -> np.ndarray:
    """Flat positions at which a segment starts, for a `[B, S]` map of any strides."""
    batch, length = doc_ids.shape
    if not doc_ids.numel():
        return np.empty(0, np.int64)
    ids = _once(doc_ids)
    on_host = ids.device.type == "cpu" and type(ids) is torch.Tensor
    return _flat_positions(_run_starts(ids.numpy()) if on_host else _run_starts_on_device(ids), batch, length)


def _run_starts(ids: np.ndarray) -> np.ndarray:
    """Bool `[B, S]`: True where a run of equal ids starts; the first column is True."""
    starts = np.empty(ids.shape, bool)
    if ids.flags.c_contiguous:
        flat = ids.reshape(-1)
        np.not_equal(flat[1:], flat[:-1], out=starts.reshape(-1)[1:])
    else:
        np.not_equal(ids[:, 1:], ids[:, :-1], out=starts[:, 1:])
    starts[:, :1] = True
    return starts


def _run_starts_on_device(doc_ids: torch.Tensor) -> np.ndarray:
    """The same on the map's own device; the copy to the host is the builder's only sync."""
    starts = torch.ones(doc_ids.shape, dtype=torch.bool, device=doc_ids.device)
    starts[:, 1:] = doc_ids[:, 1:] != doc_ids[:, :-1]
    return starts.cpu().numpy()


def _flat_positions(starts: np.ndarray, batch: int, length: int) -> np.ndarray:
    """Flat positions of the run starts of a `[batch, length]` map, an axis cut to 1 standing for one that repeats."""
    if starts.shape == (batch, length):
        return np.flatnonzero(starts)
    row_starts = np.arange(0, batch * length, length)
    return (row_starts[:, None] + np.flatnonzero(starts[0])).reshape(-1)
