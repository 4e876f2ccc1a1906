"""Packed rows in, one batch out, with its boundaries in every form that a transformers model reads.

A row is `input_ids`, `seq_lengths` (the lengths of its documents in order) and, where the data has them, `labels` or a
loss mask. The collator pads rows to one length, rebuilds the document map from `seq_lengths`, and derives everything
else from that map: positions that restart at every document, flash-attention offsets, labels. It sends **no**
`attention_mask`: in transformers a mask overrides the offsets without a word, and the detection of packing from
positions works only without one. (Models that honour nothing else get one: `mask_builder`.) Padding is one run at the end
of a row, never a document a pad.

Labels are aligned with `input_ids` (the model shifts), and the first label of every document is -100, so that the
model's shift never asks the last token of one document to predict the first token of the next.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from neatpack.convert.doc_map import doc_ids_from_seq_lengths, position_ids_from_doc_ids
from neatpack.errors import MetadataError, MetadataTypeError
from neatpack.packed_seq import PackedSeqParams, packed_seq_params_from_doc_ids, to_flash_attention_kwargs
from neatpack.train.labels import IGNORE_INDEX, shift_within_documents

MASK_COLUMNS = ("loss_mask", "completion_mask", "assistant_masks")
"""Columns of 0 and 1, one a token; a 0 takes the token out of the loss."""

_COLUMNS = ("input_ids", "seq_lengths", "labels", *MASK_COLUMNS)


@dataclass(frozen=True, kw_only=True)
class PackedCollator:
    """Collate packed rows into a batch whose documents stay apart.

    Attributes:
        pad_token_id: the id in padded slots; it is never attended to by a document and never counted by the loss.
        row_length: pad every row to this many tokens; None pads to the longest row of the batch.
        pad_to_multiple_of: round the padded length up to a multiple of this (tensor cores, context parallelism).
        position_start: the first position of every document; `padding_idx + 1` for models that count from there (the RoBERTa
            family), which degrade silently on positions from 0.
        return_doc_ids: add the document map `doc_ids [B, S] int64` to the batch.
        return_params: add `packed_seq_params`, the `PackedSeqParams` that the offsets come from.
        return_shift_labels: add `shift_labels [B, S] int64`, shifted within documents, for losses that do not shift; `labels`
            stay aligned. transformers' own loss and its count of items take them where they are present.
        token_columns: columns with one number a token (advantages, reference log-probabilities); each becomes `[B, S]`, padded
            with 0, `int64` or `float32`.
        document_columns: columns with one number a document (`group_ids` of preference pairs, class labels, rewards), in
            the order of `seq_lengths`; each becomes `[num_docs]` in the order of `document_spans`.
        ignore_columns: columns of a row to leave out knowingly; any other unknown column is refused by name.
        mask_builder: what makes an `attention_mask` from the batch's `PackedSeqParams`, for models that honour nothing else
            (`neatpack.hf.collator_for` knows which); None, for everyone else, sends no mask.

    Calling it with rows (mappings of lists, arrays or tensors) gives, in this order: `input_ids`, `labels` and
    `position_ids`, each `[B, S] int64`; `cu_seq_lens_q` and `cu_seq_lens_k` `[N+1] int32` (form A) with `max_length_q`
    and `max_length_k`; and `use_cache=False`, because a cache turns packed masks off in transformers.

    Raises:
        MetadataError: a row without boundaries, or whose columns do not fit each other; names the row of the batch.
        MetadataTypeError: a column that is not a flat list of integers.

    Example:
        >>> first = {"input_ids": [11, 12, 21, 22, 23], "seq_lengths": [2, 3]}
        >>> second = {"input_ids": [31, 41, 42, 51, 52, 53], "seq_lengths": [1, 2, 3]}
        >>> batch = PackedCollator()([first, second])
        >>> batch["position_ids"].tolist(), batch["cu_seq_lens_q"].tolist()
        ([[0, 1, 0, 1, 2, 0], [0, 0, 1, 0, 1, 2]], [0, 2, 5, 6, 7, 9, 12])
    """

    pad_token_id: int = 0
    row_length: int | None = None
    pad_to_multiple_of: int | None = None
    position_start: int = 0
    return_doc_ids: bool = False
    return_params: bool = False
    return_shift_labels: bool = False
    token_columns: Collection[str] = ()
    document_columns: Collection[str] = ()
    ignore_columns: Collection[str] = ()
    mask_builder: Callable[[PackedSeqParams], Any] | None = None

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Collate `rows` into one batch; see the class."""
        if not rows:
            raise MetadataError("the collator got no rows: a batch needs at least one. Check the sampler or drop_last.")
        for index, row in enumerate(rows):
            self._check_columns(index, row)
        ids = [_column(i, row, "input_ids") for i, row in enumerate(rows)]
        length = self._padded_length(ids)
        doc_ids = doc_ids_from_seq_lengths([_seq_lengths(i, row, len(ids[i])) for i, row in enumerate(rows)], length)
        params = packed_seq_params_from_doc_ids(doc_ids)
        labels = _pad([_labels(i, row, ids[i]) for i, row in enumerate(rows)], length, IGNORE_INDEX)
        labels.view(-1)[params.cu_seqlens[:-1].long()] = IGNORE_INDEX
        batch: dict[str, Any] = {
            "input_ids": _pad(ids, length, self.pad_token_id),
            "labels": labels,
            "position_ids": position_ids_from_doc_ids(doc_ids, self.position_start),
            **to_flash_attention_kwargs(params),
            "use_cache": False,
        }
        if self.mask_builder is not None:
            batch["attention_mask"] = self.mask_builder(params)
        if self.return_doc_ids:
            batch["doc_ids"] = doc_ids
        if self.return_params:
            batch["packed_seq_params"] = params
        if self.return_shift_labels:
            batch["shift_labels"] = shift_within_documents(labels, params)
        for name in self.token_columns:
            batch[name] = _token_column(rows, name, length)
        for name in self.document_columns:
            batch[name] = _document_column(rows, name)
        return batch

    def _check_columns(self, index: int, row: Mapping[str, Any]) -> None:
        if "input_ids" not in row:
            raise MetadataError(f"row {index} of the batch has no input_ids, only {sorted(row)}.")
        if row.get("seq_lengths") is None:
            raise MetadataError(
                f"row {index} of the batch has no seq_lengths, so its document boundaries are unknown; it has {sorted(row)}. "
                "A Trainer drops the column unless TrainingArguments(remove_unused_columns=False); rows that hold one "
                "document each say so with seq_lengths=[len(input_ids)]."
            )
        known = {*_COLUMNS, *self.token_columns, *self.document_columns, *self.ignore_columns}
        unknown = [name for name in row if name not in known]
        if unknown:
            raise MetadataError(
                f"row {index} of the batch has columns that the collator does not know: {', '.join(unknown)}. "
                f"Remove them from the dataset, or name them in PackedCollator: ignore_columns=... leaves them out, "
                "token_columns=... carries what has one number a token, document_columns=... what has one a document."
            )

    def _padded_length(self, ids: list[np.ndarray]) -> int:
        longest = max(len(row) for row in ids)
        length = longest if self.row_length is None else self.row_length
        if longest > length:
            index = next(i for i, row in enumerate(ids) if len(row) > length)
            raise MetadataError(
                f"row {index} of the batch has {len(ids[index])} tokens, more than row_length={length}. "
                "Pack with that capacity (seq_len), or raise row_length."
            )
        multiple = self.pad_to_multiple_of or 1
        return -(-length // multiple) * multiple


def _column(index: int, row: Mapping[str, Any], name: str) -> np.ndarray:
    """A row's column as a 1-D NumPy array of integers, copying only what is no array or tensor yet."""
    array = np.asarray(row[name])
    if not array.size and array.ndim == 1:
        return np.empty(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iub":
        raise MetadataTypeError(
            f"row {index} of the batch: {name} must be a flat list of integers, got shape {array.shape} of {array.dtype}."
        )
    return array


def _seq_lengths(index: int, row: Mapping[str, Any], tokens: int) -> np.ndarray:
    lengths = _column(index, row, "seq_lengths")
    total = int(lengths.sum())
    if total != tokens:
        raise MetadataError(
            f"row {index} of the batch: seq_lengths add up to {total}, but input_ids has {tokens} tokens. "
            "They must be packed together; was the row padded or truncated after packing?"
        )
    return lengths


def _labels(index: int, row: Mapping[str, Any], ids: np.ndarray) -> np.ndarray:
    """The row's labels, aligned with `ids`: its own or the ids themselves, less what a mask takes out."""
    labels = (ids if row.get("labels") is None else _column(index, row, "labels")).astype(np.int64)
    masks = {name: _column(index, row, name) for name in MASK_COLUMNS if row.get(name) is not None}
    for name, column in {"labels": labels, **masks}.items():
        if len(column) != len(ids):
            raise MetadataError(
                f"row {index} of the batch: {name} has {len(column)} entries, but input_ids has {len(ids)} tokens; "
                "they are aligned one to one (labels are not shifted: the model shifts)."
            )
    for mask in masks.values():
        labels[mask == 0] = IGNORE_INDEX
    return labels


def _token_column(rows: Sequence[Mapping[str, Any]], name: str, length: int) -> torch.Tensor:
    """One number a token, `[B, length] int64` or `float32`, 0 on the padding."""
    columns = []
    for index, row in enumerate(rows):
        if row.get(name) is None:
            raise MetadataError(f"row {index} of the batch has no {name}, which token_columns asks for; it has {sorted(row)}.")
        values, tokens = np.asarray(row[name]), len(row["input_ids"])
        if values.shape != (tokens,) or (tokens and values.dtype.kind not in "iubf"):
            raise MetadataError(
                f"row {index} of the batch: {name} must be one number a token, {tokens} in all, got shape {values.shape} of "
                f"{values.dtype}."
            )
        columns.append(values)
    real = any(len(column) and column.dtype.kind == "f" for column in columns)
    return _pad(columns, length, 0, np.float32 if real else np.int64)


def _document_column(rows: Sequence[Mapping[str, Any]], name: str) -> torch.Tensor:
    """One number a document, `[num_docs] int64` or `float32`, row after row."""
    parts = []
    for index, row in enumerate(rows):
        if row.get(name) is None:
            raise MetadataError(
                f"row {index} of the batch has no {name}, which document_columns asks for; it has {sorted(row)}."
            )
        values, documents = np.asarray(row[name]), len(row["seq_lengths"])
        if values.shape != (documents,) or values.dtype.kind not in "iubf":
            raise MetadataError(
                f"row {index} of the batch: {name} must be one number a document, {documents} in all, got shape "
                f"{values.shape} of {values.dtype}."
            )
        parts += [values] if documents else []  # an empty list has no dtype to go by
    column = np.concatenate(parts) if parts else np.empty(0, np.int64)
    return torch.from_numpy(column.astype(np.float32 if column.dtype.kind == "f" else np.int64))


def _pad(columns: list[np.ndarray], length: int, fill: int, dtype: type[np.generic] = np.int64) -> torch.Tensor:
    """Rows of different lengths as `[B, length]`, filled at the end."""
    padded = np.full((len(columns), length), fill, dtype)
    for row, column in zip(padded, columns, strict=True):
        row[: len(column)] = column
    return torch.from_numpy(padded)
