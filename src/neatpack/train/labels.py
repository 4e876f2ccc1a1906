"""Labels: one convention, the shift that stops at document ends, and what counts as a target.

The convention, everywhere in this library: labels are **aligned** with `input_ids` (`labels[t]` is the label *of* token
`t`) and the model shifts; the first label of every document is -100, so that the shift of a model that knows no documents
cannot ask the last token of one for the first token of the next. Shifted labels (`labels[t]` is what position `t` must
predict) exist under their own name, `shift_labels`, for consumers that do not shift. Giving them to a model that
shifts trains it on the token after next, with a loss that looks fine; `check_labels` tells the two apart.

On the worked example (`doc_ids = [[1, 1, 2, 2, 2, 0], [1, 2, 2, 3, 3, 3]]`) with `input_ids = [[11, 12, 21, 22, 23, 0], ...]`:

    aligned   [-100, 12, -100, 22, 23, -100]        the model shifts
    shifted   [12, -100, 22, 23, -100, -100]        shift_within_documents(aligned, params)
    k = 2     [-100, -100, 23, -100, -100, -100]    what a second prediction head must say
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from neatpack.convert.segments import segment_index
from neatpack.errors import MetadataError, MetadataTypeError
from neatpack.packed_seq import PackedSeqParams
from neatpack.train.documents import check_batch_shape, document_spans, segment_sums

IGNORE_INDEX = -100
"""The label that no loss counts, in torch and in transformers."""

Convention = Literal["aligned", "shifted"]


def shift_within_documents(x: torch.Tensor, params: PackedSeqParams, k: int = 1, fill: float = IGNORE_INDEX) -> torch.Tensor:
    """Shift a batch left by `k` tokens inside each document (form A in).

    With `k=1` aligned labels or `input_ids` become next-token targets; with `k=d` those of multi-token prediction at
    depth `d`. Nothing crosses a document's end, and padding stays empty.

    Args:
        x: `[B, S, ...]`, one entry a token.
        params: the batch's metadata.
        k: how many tokens; negative shifts right (decoder inputs), 0 only empties the padding.
        fill: what positions without a token `k` further on in their document get, and all padding.

    Returns:
        A new tensor like `x`.

    Raises:
        MetadataError: a tensor whose first axes are not those of the batch, a `k` that is no whole number, or a `fill` that
            the dtype of `x` cannot hold (-100 in uint8 would be 156, a target like any other).

    Example:
        >>> from neatpack.packed_seq import packed_seq_params_from_doc_ids
        >>> params = packed_seq_params_from_doc_ids(torch.tensor([[1, 1, 2, 2, 2, 0]]))
        >>> shift_within_documents(torch.tensor([[11, 12, 21, 22, 23, 0]]), params).tolist()
        [[12, -100, 22, 23, -100, -100]]
    """
    check_batch_shape("x", x, params)
    _check_shift(x, k, fill)
    shifted = torch.full_like(x, fill)
    length = x.shape[1]
    if abs(k) >= length:
        return shifted
    segment = segment_index(params, pad=-1)
    to, source = (slice(0, length - k), slice(k, length)) if k >= 0 else (slice(-k, length), slice(0, length + k))
    stays = (segment[:, to] == segment[:, source]) & (segment[:, to] >= 0)
    stays = stays.reshape(*stays.shape, *(1,) * (x.dim() - 2))
    shifted[:, to] = torch.where(stays, x[:, source], shifted[:, to])
    return shifted


def aligned_labels(
    input_ids: torch.Tensor,
    params: PackedSeqParams,
    *,
    loss_mask: torch.Tensor | None = None,
    first: int = IGNORE_INDEX,
    ignore_index: int = IGNORE_INDEX,
) -> torch.Tensor:
    """Make aligned labels from the tokens of a batch (form A in): the model shifts them.

    Args:
        input_ids: `[B, S]` integer.
        params: the batch's metadata.
        loss_mask: `[B, S]`, 0 takes a token out of the loss (prompts); None keeps all.
        first: the label of every document's first token. -100 keeps documents apart under any shift; a separator id of
            your own asks a model that shifts over the whole row to predict it after the document before.
        ignore_index: the label that the loss does not count.

    Returns:
        `[B, S] int64`; padding is `ignore_index`.

    Raises:
        MetadataError: shapes that do not fit the metadata.
        MetadataTypeError: `input_ids` that are no integers.

    Example:
        >>> from neatpack.packed_seq import packed_seq_params_from_doc_ids
        >>> params = packed_seq_params_from_doc_ids(torch.tensor([[1, 1, 2, 2, 2, 0]]))
        >>> aligned_labels(torch.tensor([[11, 12, 21, 22, 23, 0]]), params).tolist()
        [[-100, 12, -100, 22, 23, -100]]
    """
    check_batch_shape("input_ids", input_ids, params)
    labels = _integers("input_ids", input_ids).masked_fill(params.doc_ids == 0, ignore_index)
    if loss_mask is not None:
        check_batch_shape("loss_mask", loss_mask, params)
        labels = labels.masked_fill(loss_mask == 0, ignore_index)
    return labels.masked_fill(_document_starts(params), first)


def mask_from_spans(spans: Sequence[Sequence[tuple[int, int]]], params: PackedSeqParams) -> torch.Tensor:
    """Turn spans counted within each document (an answer, a tool call) into a mask over the batch (form A in).

    Args:
        spans: for each document, in the order of `document_spans`, any number of `(start, end)` with `end` left out,
            counted from the document's own first token.
        params: the batch's metadata.

    Returns:
        `[B, S] bool`, True inside a span; the `loss_mask` of `aligned_labels`.

    Raises:
        MetadataError: another number of documents, or a span that leaves its document; names row and index.

    Example:
        >>> from neatpack.packed_seq import packed_seq_params_from_doc_ids
        >>> params = packed_seq_params_from_doc_ids(torch.tensor([[1, 1, 2, 2, 2, 0]]))
        >>> mask_from_spans([[(1, 2)], [(0, 2)]], params).int().tolist()
        [[0, 1, 1, 1, 0, 0]]
    """
    places = document_spans(params)
    if len(spans) != len(places):
        raise MetadataError(f"spans for {len(spans)} documents, but the batch holds {len(places)}; give one list a document.")
    mask = torch.zeros(params.doc_ids.shape, dtype=torch.bool, device=params.doc_ids.device)
    columns = (column.tolist() for column in (places.row, places.index, places.start, places.length))
    for document_spans_, row, index, start, length in zip(spans, *columns, strict=True):
        for begin, end in document_spans_:
            if not 0 <= begin <= end <= length:
                raise MetadataError(
                    f"span ({begin}, {end}) of document {index} in row {row} leaves its {length} tokens. "
                    "Spans count from the document's own start, and leave their end out."
                )
            mask[row, start + begin : start + end] = True
    return mask


def prediction_targets(
    labels: torch.Tensor, params: PackedSeqParams, *, shift: bool = True, ignore_index: int = IGNORE_INDEX
) -> torch.Tensor:
    """What the logits of every position must predict (form A in): `[B, S] int64`, aligned with the logits.

    Args:
        labels: `[B, S]` aligned labels; with `shift=False`, shifted ones.
        params: the batch's metadata.
        shift: whether the labels are aligned, so that the shift is done here, within documents.
        ignore_index: the label that does not count; padding always gets it.

    Raises:
        MetadataError: shapes that do not fit the metadata.
        MetadataTypeError: labels that are no integers.

    Example:
        >>> from neatpack.packed_seq import packed_seq_params_from_doc_ids
        >>> params = packed_seq_params_from_doc_ids(torch.tensor([[1, 1, 2, 2, 2, 0]]))
        >>> prediction_targets(torch.tensor([[11, 12, 21, 22, 23, 0]]), params).tolist()
        [[12, -100, 22, 23, -100, -100]]
    """
    check_batch_shape("labels", labels, params)
    # Widened before the shift: narrow or unsigned labels could not hold ignore_index.
    return shift_within_documents(_integers("labels", labels), params, int(shift), ignore_index)


def count_targets(
    labels: torch.Tensor, params: PackedSeqParams, *, shift: bool = True, ignore_index: int = IGNORE_INDEX
) -> torch.Tensor:
    """Count the target tokens of every document (form A in); their sum is `num_items` of a mean over tokens.

    The count is the same whether or not the first label of a document is masked already: it has no predecessor either way.

    Args:
        labels: `[B, S]` aligned labels; with `shift=False`, shifted ones.
        params: the batch's metadata.
        shift: whether the labels are aligned.
        ignore_index: the label that does not count.

    Returns:
        `[num_docs] int64` in the order of `document_spans`.

    Raises:
        MetadataError: shapes that do not fit the metadata.
        MetadataTypeError: labels that are no integers.

    Example:
        >>> from neatpack.packed_seq import packed_seq_params_from_doc_ids
        >>> params = packed_seq_params_from_doc_ids(torch.tensor([[1, 1, 2, 2, 2, 0]]))
        >>> count_targets(torch.tensor([[11, 12, 21, 22, 23, 0]]), params).tolist()
        [1, 2]
    """
    targets = prediction_targets(labels, params, shift=shift, ignore_index=ignore_index)
    return segment_sums((targets != ignore_index).long(), params)[document_spans(params).segment]


def check_labels(
    labels: torch.Tensor,
    params: PackedSeqParams,
    *,
    input_ids: torch.Tensor | None = None,
    convention: Convention = "aligned",
    ignore_index: int = IGNORE_INDEX,
) -> None:
    """Refuse labels that would train across a document's end, count padding, or follow the other convention (form A in).

    Args:
        labels: `[B, S]` labels as the model or loss will get them.
        params: the batch's metadata.
        input_ids: `[B, S]` the tokens; with them every counted label must be the token it stands for.
        convention: "aligned" (the model shifts) or "shifted" (it does not).
        ignore_index: the label that does not count.

    Raises:
        MetadataError: such a label (names row and position, what it is and what it should be), shapes that do not fit the
            metadata, or an unknown convention.
        MetadataTypeError: labels or `input_ids` that are no integers.

    Example:
        >>> from neatpack.packed_seq import packed_seq_params_from_doc_ids
        >>> params = packed_seq_params_from_doc_ids(torch.tensor([[1, 1, 2, 2, 2, 0]]))
        >>> check_labels(torch.tensor([[-100, 12, -100, 22, 23, -100]]), params)
        >>> check_labels(torch.tensor([[12, -100, 22, 23, -100, -100]]), params, convention="shifted")
    """
    check_batch_shape("labels", labels, params)
    if convention not in ("aligned", "shifted"):
        raise MetadataError(f"unknown labels convention {convention!r}: choose 'aligned' or 'shifted'.")
    labels = _integers("labels", labels)
    counted = labels != ignore_index
    _refuse_first(counted & (params.doc_ids == 0), labels, "padding is counted by the loss", ignore_index)
    if convention == "aligned":
        why = "the first label of a document is what the last token of the one before would be asked for"
        _refuse_first(counted & _document_starts(params), labels, why, ignore_index)
    else:
        ends = shift_within_documents(params.doc_ids.long(), params, 1, 0) == 0
        _refuse_first(counted & ends, labels, "the last token of a document has no next token to predict", ignore_index)
    if input_ids is not None:
        _check_tokens(labels, params, input_ids, convention, counted)


def _check_tokens(
    labels: torch.Tensor, params: PackedSeqParams, input_ids: torch.Tensor, convention: Convention, counted: torch.Tensor
) -> None:
    check_batch_shape("input_ids", input_ids, params)
    input_ids = _integers("input_ids", input_ids)
    by_convention = {"aligned": input_ids, "shifted": shift_within_documents(input_ids, params)}
    expected = by_convention.pop(convention)
    wrong = counted & (labels != expected)
    if not bool(wrong.any()):
        return
    ((other, others),) = by_convention.items()
    hint = "."
    if not bool((counted & (labels != others)).any()):
        hint = f"; all labels fit the {other} convention. Pass them as such, or let the collator make them."
    row, position = torch.nonzero(wrong)[0].tolist()
    raise MetadataError(
        f"labels[{row}, {position}] is {int(labels[row, position])}, but {convention} labels have "
        f"{int(expected[row, position])} there{hint}"
    )


def _integers(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Token ids or labels as int64; a mask or probabilities in their place are refused, not rounded."""
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise MetadataTypeError(f"{name} must be integers, one token id a position, got {tensor.dtype}.")
    return tensor.long()


def _check_shift(x: torch.Tensor, k: int, fill: float) -> None:
    if not isinstance(k, int):
        raise MetadataError(f"k is {k!r}; it is a whole number of tokens.")
    if x.is_floating_point() or x.is_complex():
        return
    least, most = (0, 1) if x.dtype == torch.bool else (torch.iinfo(x.dtype).min, torch.iinfo(x.dtype).max)
    if not (least <= fill <= most and fill == int(fill)):
        raise MetadataError(f"{x.dtype} cannot hold fill={fill}: pass a fill from {least} to {most}, or x.long().")


def _refuse_first(wrong: torch.Tensor, labels: torch.Tensor, why: str, ignore_index: int) -> None:
    if bool(wrong.any()):
        row, position = torch.nonzero(wrong)[0].tolist()
        raise MetadataError(
            f"labels[{row}, {position}] is {int(labels[row, position])}: {why}. It must be {ignore_index}; "
            "aligned_labels and the collator make it so."
        )


def _document_starts(params: PackedSeqParams) -> torch.Tensor:
    """Bool `[B, S]`: True on the first token of every document."""
    starts = torch.zeros(params.doc_ids.numel(), dtype=torch.bool, device=params.doc_ids.device)
    starts[params.cu_seqlens[:-1].long()] = True
    return starts.reshape(params.doc_ids.shape) & (params.doc_ids != 0)
