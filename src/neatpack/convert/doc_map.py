"""Document maps from the lengths of each row, and the positions that restart with them. The library's own way in.

A row stores `seq_lengths`, the run-length code of its document map (8 bytes a document); the map and its positions are
rebuilt for every batch, in NumPy on the CPU, where the data-loader worker builds it. Boundaries that came from elsewhere
(offsets, positions, masks, tokens) enter through `neatpack.convert.foreign`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from neatpack.errors import MetadataError, MetadataOverflowError, MetadataTypeError
from neatpack.packed_seq import MAX_TOKENS, packed_seq_params_from_doc_ids

Lengths = Sequence[int] | np.ndarray | torch.Tensor


def doc_ids_from_seq_lengths(seq_lengths: Sequence[Lengths], row_length: int | None = None) -> torch.Tensor:
    """Build a document map from the document lengths of each row, the map's run-length code.

    Args:
        seq_lengths: for each row, the lengths of its documents from left to right; an empty row is all padding.
        row_length: `S`; shorter rows are padded with 0 at the end, as one run. None: the longest row.

    Returns:
        `[B, S] int64` on the CPU: documents 1, 2, ... in each row, 0 for padding.

    Raises:
        MetadataError: a length below 1, or a row that holds more than `row_length` tokens; names row and index.
        MetadataTypeError: lengths that are not integers.
        MetadataOverflowError: a document of more tokens than int32 offsets count.

    Example:
        >>> doc_ids_from_seq_lengths([[2, 3], [1, 2, 3]], row_length=6).tolist()
        [[1, 1, 2, 2, 2, 0], [1, 2, 2, 3, 3, 3]]
    """
    rows = [_row_lengths(row, lengths) for row, lengths in enumerate(seq_lengths)]
    totals = [int(lengths.sum()) for lengths in rows]
    width = max(totals, default=0) if row_length is None else row_length
    for row, total in enumerate(totals):
        if total > width:
            raise MetadataError(
                f"seq_lengths[{row}] sums to {total} tokens, more than the row length {width}. "
                "Pack the documents into shorter rows, or raise row_length."
            )
    doc_ids = np.zeros((len(rows), width), np.int64)
    for row, lengths in enumerate(rows):
        doc_ids[row, : totals[row]] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    return torch.from_numpy(doc_ids)


def position_ids_from_doc_ids(doc_ids: torch.Tensor, start: int = 0) -> torch.Tensor:
    """Number the tokens of every segment (form A) from `start`; a padding run is a segment and restarts too.

    Args:
        doc_ids: `[B, S]` integer document map, any device (the host is asked for offsets once: prefer the CPU).
        start: the first position of a document; `padding_idx + 1` for models of the RoBERTa kind.

    Returns:
        `[B, S] int64` on the device of `doc_ids`.

    Raises:
        MetadataError: what `packed_seq_params_from_doc_ids` refuses.

    Example:
        >>> position_ids_from_doc_ids(torch.tensor([[1, 1, 2, 2, 2, 0], [1, 2, 2, 3, 3, 3]])).tolist()
        [[0, 1, 0, 1, 2, 0], [0, 0, 1, 0, 1, 2]]
    """
    offsets = packed_seq_params_from_doc_ids(doc_ids).cu_seqlens.cpu().numpy()
    positions = np.arange(start, start + doc_ids.numel())
    positions -= np.repeat(offsets[:-1], np.diff(offsets))
    return torch.from_numpy(positions.reshape(doc_ids.shape)).to(doc_ids.device)


def _row_lengths(row: int, lengths: Lengths) -> np.ndarray:
    """The lengths of one row as `[N] int64`, each at least 1."""
    array = integer_vector(f"seq_lengths[{row}]", lengths)
    if array.size and array.min() < 1:
        index = int(np.argmax(array < 1))
        raise MetadataError(
            f"seq_lengths[{row}][{index}] is {array[index]}: a document has at least one token. "
            "Drop empty documents; padding is what the lengths leave of row_length."
        )
    if array.size and array.max() > MAX_TOKENS:
        raise MetadataOverflowError(
            f"seq_lengths[{row}] has a document of {array.max()} tokens; int32 offsets count at most {MAX_TOKENS}. "
            "Split the document."
        )
    return array.astype(np.int64, copy=False)


def integer_vector(name: str, values: object) -> np.ndarray:
    """`values` as a 1-D integer array on the host, or an error that names them."""
    try:
        array = np.asarray(values.detach().cpu() if isinstance(values, torch.Tensor) else values)
    except ValueError as error:
        raise MetadataTypeError(f"{name} must be a flat list of integers, got nested lists of unequal length.") from error
    if array.ndim == 1 and not array.size:
        return np.empty(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise MetadataTypeError(
            f"{name} must be a flat list of integers, got shape {array.shape} of {array.dtype}. "
            "Pass one list of whole numbers of tokens."
        )
    return array
