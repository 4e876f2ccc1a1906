"""A packed row's columns, checked and as NumPy arrays; every error names the row of the batch and the column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from neatpack.errors import MetadataError, MetadataOverflowError, MetadataTypeError
from neatpack.train.labels import IGNORE_INDEX

MASK_COLUMNS = ("loss_mask", "completion_mask", "assistant_masks")
"""Columns of 0 and 1, one a token; a 0 takes the token out of the loss."""

KNOWN_COLUMNS = ("input_ids", "seq_lengths", "labels", *MASK_COLUMNS)
"""Columns that a row may have without being asked for them."""


def token_ids(index: int, row: Mapping[str, Any]) -> np.ndarray:
    """`input_ids`: whole numbers of zero or more that int64 holds."""
    ids = _integers(index, row, "input_ids", kinds="iu")
    if ids.size and ids.dtype.kind == "i" and ids.min() < 0:
        where = int(np.argmax(ids < 0))
        raise MetadataError(
            f"row {index} of the batch: input_ids[{where}] is {ids[where]}; a token id is zero or more. "
            "-100 belongs into labels, and padding is the collator's own (pad_token_id)."
        )
    return ids


def check_vocabulary(ids: Sequence[np.ndarray], vocab_size: int) -> None:
    """Refuse an id that the model has no embedding for; `ids` are those of each row of the batch, zero or more.

    Raises:
        MetadataError: names the first of them by row and place.
    """
    for index, row in enumerate(ids):
        if row.size and row.max() >= vocab_size:
            where = int(np.argmax(row >= vocab_size))
            raise MetadataError(
                f"row {index} of the batch: input_ids[{where}] is {row[where]}, expected 0 to {vocab_size - 1} "
                f"(vocab_size={vocab_size}). Pack with the model's own tokenizer (neatpack pack --tokenizer ...), or give the "
                "model more embeddings (model.resize_token_embeddings)."
            )


def document_lengths(index: int, row: Mapping[str, Any], tokens: int) -> np.ndarray:
    """`seq_lengths` as int64 (unsigned types do not subtract); they must add up to the row's tokens."""
    lengths = _integers(index, row, "seq_lengths", kinds="iu").astype(np.int64, copy=False)
    total = int(lengths.sum())
    if total != tokens:
        raise MetadataError(
            f"row {index} of the batch: seq_lengths add up to {total}, but input_ids has {tokens} tokens. "
            "They must be packed together; was the row padded or truncated after packing?"
        )
    return lengths


def row_labels(index: int, row: Mapping[str, Any], ids: np.ndarray) -> np.ndarray:
    """Labels aligned with `ids`, `[tokens] int64`: the row's own or the ids themselves, less what a mask takes out."""
    labels = (ids if row.get("labels") is None else _integers(index, row, "labels", kinds="iu")).astype(np.int64)
    masks = {name: _integers(index, row, name, kinds="iub") for name in MASK_COLUMNS if row.get(name) is not None}
    for name, column in {"labels": labels, **masks}.items():
        if len(column) != len(ids):
            raise MetadataError(
                f"row {index} of the batch: {name} has {len(column)} entries, but input_ids has {len(ids)} tokens; "
                "they are aligned one to one (labels are not shifted: the model shifts)."
            )
    for mask in masks.values():
        labels[mask == 0] = IGNORE_INDEX
    return labels


def token_column(rows: Sequence[Mapping[str, Any]], name: str) -> list[np.ndarray]:
    """A column with one number a token, an array a row."""
    return [_numbers(index, row, name, "token", "input_ids") for index, row in enumerate(rows)]


def document_column(rows: Sequence[Mapping[str, Any]], name: str) -> np.ndarray:
    """A column with one number a document, `[num_docs] int64` or `float32`, row after row."""
    parts = [_numbers(index, row, name, "document", "seq_lengths") for index, row in enumerate(rows)]
    filled = [part for part in parts if part.size]  # an empty list has no dtype to go by
    column = np.concatenate(filled) if filled else np.empty(0, np.int64)
    return column.astype(np.float32 if column.dtype.kind == "f" else np.int64)


def _numbers(index: int, row: Mapping[str, Any], name: str, unit: str, counted_by: str) -> np.ndarray:
    """One number for each of a row's tokens or documents."""
    if row.get(name) is None:
        raise MetadataError(f"row {index} of the batch has no {name}, which {unit}_columns asks for; it has {sorted(row)}.")
    values, count = np.asarray(row[name]), len(row[counted_by])
    if values.shape != (count,) or (count and values.dtype.kind not in "iubf"):
        raise MetadataError(
            f"row {index} of the batch: {name} must be one number a {unit}, {count} in all, got shape {values.shape} of "
            f"{values.dtype}. Bring the rows' column to numbers, or leave it out: ignore_columns=[{name!r}] in place of "
            f"{unit}_columns."
        )
    return values


def _integers(index: int, row: Mapping[str, Any], name: str, kinds: str) -> np.ndarray:
    """A column as a 1-D NumPy array of integers, copying only what is no array or tensor yet."""
    array = np.asarray(row[name])
    if not array.size and array.ndim == 1:
        return np.empty(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in kinds:
        raise MetadataTypeError(
            f"row {index} of the batch: {name} must be a flat list of integers, got shape {array.shape} of {array.dtype}."
        )
    if array.dtype == np.uint64 and array.max() > np.iinfo(np.int64).max:
        raise MetadataOverflowError(
            f"row {index} of the batch: {name} holds {array.max()}, more than int64 does; torch has no type for it."
        )
    return array
