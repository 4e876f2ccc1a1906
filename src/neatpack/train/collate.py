"""Packed rows in, one batch out, with its boundaries in every form that a transformers model reads.

A row is `input_ids`, `seq_lengths` (the lengths of its documents in order) and, where the data has them, `labels` or a
loss mask. The collator pads rows to one length, rebuilds the document map from `seq_lengths`, and derives everything
else from that map: positions that restart at every document, flash-attention offsets, labels. It sends **no**
`attention_mask`: in transformers a mask overrides the offsets without a word, and the detection of packing from
positions works only without one. (Models that honour nothing else get one: `mask_builder`.) Padding is one run at the end
of a row (with `align`, of each document's slot too), never a document a pad.

Labels are aligned with `input_ids` (the model shifts), and the first label of every document is -100, so that the
model's shift never asks the last token of one document to predict the first token of the next.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from neatpack.convert.doc_map import doc_ids_from_seq_lengths, position_ids_from_doc_ids
from neatpack.errors import MetadataError
from neatpack.packed_seq import PackedSeqParams, packed_seq_params_from_doc_ids, to_flash_attention_kwargs
from neatpack.train.collate_options import check_options
from neatpack.train.labels import IGNORE_INDEX, shift_within_documents
from neatpack.train.row_columns import (
    KNOWN_COLUMNS,
    check_vocabulary,
    document_column,
    document_lengths,
    row_labels,
    token_column,
    token_ids,
)


@dataclass(frozen=True, kw_only=True)
class PackedCollator:
    """Collate packed rows into a batch whose documents stay apart.

    Attributes:
        pad_token_id: the id in padded slots; it is never attended to by a document and never counted by the loss.
        row_length: pad every row to this many tokens; None pads to the longest row of the batch.
        pad_to_multiple_of: round the padded length up to a multiple of this (tensor cores, context parallelism).
        align: give every document a slot of a multiple of this many tokens, padded at its end, as `plan_rows(align=...)`
            reckons with: context parallelism by document and fp8 need it. 1 lays documents side by side.
        position_start: the first position of every document; `padding_idx + 1` for models that count from there (the RoBERTa
            family), which degrade silently on positions from 0.
        position_limit: how many positions the model knows; those of padding stay at the last one, since a table of learned
            positions has no entry past it. Documents are left as they are.
        vocab_size: how many ids the model knows; rows with an id at or above it are refused, instead of an IndexError (on a
            GPU, a dead process) in the model. None does not look. `neatpack.hf.collator_for` knows it.
        return_doc_ids: add the document map `doc_ids [B, S] int64` to the batch.
        return_params: add `packed_seq_params`, the `PackedSeqParams` that the offsets come from.
        return_shift_labels: add `shift_labels [B, S] int64`, shifted within documents, for losses that do not shift; `labels`
            stay aligned. transformers' own loss and its count of items take them where they are present.
        token_columns: columns with one number a token (advantages, reference log-probabilities); each becomes `[B, S]`, padded
            with 0, `int64` or `float32`.
        document_columns: columns with one number a document (`group_ids` of preference pairs, class labels, rewards), in
            the order of `seq_lengths`; each becomes `[num_docs]`, `int64` or `float32`, in the order of `document_spans`.
            Neither can have the name of an argument of a model (`source`, `value`); take both out of the batch before
            `model(**batch)`.
        ignore_columns: columns of a row to leave out knowingly; any other unknown column is refused by name.
        mask_builder: what makes an `attention_mask` from the batch's `PackedSeqParams`, for models that honour nothing else
            (`neatpack.hf.collator_for` knows which); None, for everyone else, sends no mask.

    A row is a mapping of lists, arrays or tensors: `input_ids`, `seq_lengths`, and if it has them `labels` (aligned) and
    `loss_mask`, `completion_mask` or `assistant_masks`, whose zeros take tokens out of the labels.

    Calling it with rows gives, in this order: `input_ids`, `labels` and
    `position_ids`, each `[B, S] int64`; `cu_seq_lens_q` and `cu_seq_lens_k` `[N+1] int32` (form A) with `max_length_q`
    and `max_length_k`; and `use_cache=False`, because a cache turns packed masks off in transformers.

    Raises:
        MetadataError: options that no batch could honour (when made); no rows, a row without boundaries, longer than
            `row_length`, with a column of no known meaning or whose columns do not fit each other; names the row of the batch.
        MetadataTypeError: a column that is not a flat list of integers.
        MetadataOverflowError: an id that int64 does not hold, or more tokens than int32 offsets count.

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
    align: int = 1
    position_start: int = 0
    position_limit: int | None = None
    vocab_size: int | None = None
    return_doc_ids: bool = False
    return_params: bool = False
    return_shift_labels: bool = False
    token_columns: Collection[str] = ()
    document_columns: Collection[str] = ()
    ignore_columns: Collection[str] = ()
    mask_builder: Callable[[PackedSeqParams], Any] | None = None

    def __post_init__(self) -> None:
        """Refuse options that no batch could honour, before a worker meets them."""
        check_options(self)

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Collate `rows` into one batch; see the class."""
        if not rows:
            raise MetadataError("the collator got no rows: a batch needs at least one. Check the sampler or drop_last.")
        for index, row in enumerate(rows):
            self._check_columns(index, row)
        ids = [token_ids(i, row) for i, row in enumerate(rows)]
        if self.vocab_size is not None:
            check_vocabulary(ids, self.vocab_size)
        lengths = [document_lengths(i, row, len(ids[i])) for i, row in enumerate(rows)]
        dense = doc_ids_from_seq_lengths(lengths).numpy()
        layout = self._layout(lengths)
        doc_ids = _pad([row[: len(tokens)] for row, tokens in zip(dense, ids, strict=True)], layout, 0)
        params = packed_seq_params_from_doc_ids(doc_ids)
        labels = _pad([row_labels(i, row, ids[i]) for i, row in enumerate(rows)], layout, IGNORE_INDEX)
        labels.view(-1)[params.cu_seqlens[:-1].long()] = IGNORE_INDEX
        batch: dict[str, Any] = {
            "input_ids": _pad(ids, layout, self.pad_token_id),
            "labels": labels,
            "position_ids": self._position_ids(doc_ids),
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
            columns = token_column(rows, name)
            real = any(len(column) and column.dtype.kind == "f" for column in columns)
            batch[name] = _pad(columns, layout, 0, np.float32 if real else np.int64)
        for name in self.document_columns:
            batch[name] = torch.from_numpy(document_column(rows, name))
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
        known = {*KNOWN_COLUMNS, *self.token_columns, *self.document_columns, *self.ignore_columns}
        unknown = [name for name in row if name not in known]
        if unknown:
            raise MetadataError(
                f"row {index} of the batch has columns that the collator does not know: {', '.join(unknown)}. "
                f"Remove them from the dataset, or name them in PackedCollator: ignore_columns=... leaves them out, "
                "token_columns=... carries what has one number a token, document_columns=... what has one a document."
            )

    def _position_ids(self, doc_ids: torch.Tensor) -> torch.Tensor:
        positions = position_ids_from_doc_ids(doc_ids, self.position_start)
        if self.position_limit is None:
            return positions
        return torch.where(doc_ids == 0, positions.clamp(max=self.position_limit - 1), positions)

    def _layout(self, lengths: list[np.ndarray]) -> _Layout:
        """Where the tokens of each row go, and the length that all rows are padded to."""
        widths = [int(_slots(row, self.align).sum()) for row in lengths]
        longest = max(widths)
        length = longest if self.row_length is None else self.row_length
        if longest > length:
            index = next(i for i, width in enumerate(widths) if width > length)
            slots, way = (f" in slots of {self.align}", f" and align={self.align}") if self.align > 1 else ("", "")
            raise MetadataError(
                f"row {index} of the batch has {widths[index]} tokens{slots}, more than row_length={length}. "
                f"Pack with that capacity (seq_len){way}, or raise row_length."
            )
        multiple = self.pad_to_multiple_of or 1
        return _Layout(-(-length // multiple) * multiple, [_places(row, self.align) for row in lengths])


class _Layout(NamedTuple):
    """Every row's length, and for each row the places of its tokens."""

    length: int
    places: list[np.ndarray | slice]


def _places(lengths: np.ndarray, align: int) -> np.ndarray | slice:
    """Where in its padded row each token of a row goes: one after the other, or every document to a slot of its own."""
    if align == 1:
        return slice(0, int(lengths.sum()))
    shift = _slots(lengths, align) - lengths
    places: np.ndarray = np.arange(lengths.sum()) + np.repeat(np.cumsum(shift) - shift, lengths)
    return places


def _slots(lengths: np.ndarray, align: int) -> np.ndarray:
    """Tokens of its row that each document takes."""
    return -(-lengths // align) * align


def _pad(columns: list[np.ndarray], layout: _Layout, fill: int, dtype: type[np.generic] = np.int64) -> torch.Tensor:
    """One number a token as `[B, S]`, with `fill` wherever no document is."""
    padded = np.full((len(columns), layout.length), fill, dtype)
    for row, column, places in zip(padded, columns, layout.places, strict=True):
        row[places] = column
    return torch.from_numpy(padded)
