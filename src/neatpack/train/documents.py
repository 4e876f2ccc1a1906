"""Per-document values out of a packed batch: spans, sums, pooled states, log-probabilities' places, documents one by one.

What preference, reward, embedding and classification objectives need from a packed row. Every function skips padding
and keeps one order: rows from the top, documents from the left. `document_spans` maps that order back to (row, index),
where `index` counts the documents of a row from 0, as `seq_lengths` does.

On the worked example (`doc_ids = [[1, 1, 2, 2, 2, 0], [1, 2, 2, 3, 3, 3]]`) there are five documents: rows
`[0, 0, 1, 1, 1]`, indices `[0, 1, 0, 1, 2]`. The number of documents depends on the data, so on an accelerator each
function reports to the host once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from neatpack.convert.segments import segment_documents, segment_index, segment_lengths
from neatpack.errors import MetadataError, MetadataTypeError
from neatpack.packed_seq import PackedSeqParams

Pooling = Literal["last", "mean"]


@dataclass(frozen=True, eq=False)
class DocumentSpans:
    """Where every document of a batch lies; five `[num_docs] int64` tensors in document order.

    Attributes:
        row: the row it lies in.
        index: its number within the row, from 0: `rows[row]["seq_lengths"][index]` is its length.
        start: its first position within the row.
        length: its tokens.
        segment: its number among all segments (form A), padding runs counted.
    """

    row: torch.Tensor
    index: torch.Tensor
    start: torch.Tensor
    length: torch.Tensor
    segment: torch.Tensor

    def __len__(self) -> int:
        return len(self.row)


def document_spans(params: PackedSeqParams) -> DocumentSpans:
    """Find the documents of a batch (form A in), padding left out.

    Args:
        params: the batch's metadata.

    Returns:
        Five `[num_docs] int64` tensors on the device of the params.

    Example:
        >>> from neatpack.packed_seq import packed_seq_params_from_doc_ids
        >>> spans = document_spans(packed_seq_params_from_doc_ids(torch.tensor([[1, 1, 2, 2, 2, 0], [1, 2, 2, 3, 3, 3]])))
        >>> spans.row.tolist(), spans.index.tolist(), spans.length.tolist()
        ([0, 0, 1, 1, 1], [0, 1, 0, 1, 2], [2, 3, 1, 2, 3])
    """
    width = max(params.doc_ids.shape[1], 1)
    segment = torch.nonzero(segment_documents(params)).reshape(-1)
    begin = params.cu_seqlens[:-1].long()[segment]
    row = begin // width
    # The first document of each row, found by binary search: rows are in order.
    index = torch.arange(len(row), device=row.device) - torch.searchsorted(row, row)
    return DocumentSpans(row, index, begin % width, segment_lengths(params).long()[segment], segment)


def segment_sums(values: torch.Tensor, params: PackedSeqParams) -> torch.Tensor:
    """Sum `values [B, S, ...]` over every segment (form A), padding runs included: `[N, ...]`; differentiable, no sync."""
    check_batch_shape("values", values, params)
    segments = len(params.cu_seqlens) - 1
    sums = values.new_zeros((segments, *values.shape[2:]))
    return sums.index_add(0, segment_index(params, flat=True)[0], values.flatten(0, 1))


def pool_documents(
    hidden: torch.Tensor, params: PackedSeqParams, how: Pooling = "last", *, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Pool hidden states to one vector a document (form A in).

    Args:
        hidden: `[B, S, ...]`: states `[B, S, D]`, scores `[B, S]`; padded positions are never read into a result, whatever
            they hold. Floating, for "mean".
        params: the batch's metadata.
        how: "last" takes the state of the last token (reward and embedding models with causal attention), "mean" the
            mean over its tokens, summed in float32 for narrower dtypes.
        mask: `[B, S]` bool, the tokens that take part (an embedding that leaves out its instruction); None for all.

    Returns:
        `[num_docs, ...]` in the dtype of `hidden`, in the order of `document_spans`. A document whose every token is
        masked out has no state to give: zeros, and no gradient.

    Raises:
        MetadataError: shapes that do not fit the metadata, or an unknown `how`.
        MetadataTypeError: a mean of numbers that are not floating, or what is given is no tensor.

    Example:
        >>> from neatpack.packed_seq import packed_seq_params_from_doc_ids
        >>> params = packed_seq_params_from_doc_ids(torch.tensor([[1, 1, 2, 2, 2, 0]]))
        >>> hidden = torch.tensor([[[1.0], [3.0], [5.0], [6.0], [7.0], [99.0]]])
        >>> pool_documents(hidden, params, "last").tolist(), pool_documents(hidden, params, "mean").tolist()
        ([[3.0], [7.0]], [[2.0], [6.0]])
    """
    check_batch_shape("hidden", hidden, params)
    taken = params.doc_ids != 0
    if mask is not None:
        check_batch_shape("mask", mask, params)
        taken = taken & mask.bool()
    if how == "last":
        return _pool_last(hidden, params, taken)
    if how == "mean":
        if not hidden.is_floating_point():
            raise MetadataTypeError(f"a mean needs floating hidden, got {hidden.dtype}: it would be cut to whole numbers.")
        return _pool_mean(hidden, params, taken)
    raise MetadataError(f"unknown pooling {how!r}: choose 'last' or 'mean'.")


def unpack_documents(tensor: torch.Tensor, params: PackedSeqParams) -> list[torch.Tensor]:
    """Cut a batch into its documents (form A in); `repack_documents` is the inverse.

    Args:
        tensor: `[B, S, ...]`, one entry a token.
        params: the batch's metadata.

    Returns:
        One view `[length, ...]` a document, in the order of `document_spans`; padding is left out.

    Raises:
        MetadataError: a tensor whose first axes are not those of the batch.

    Example:
        >>> from neatpack.packed_seq import packed_seq_params_from_doc_ids
        >>> params = packed_seq_params_from_doc_ids(torch.tensor([[1, 1, 2, 2, 2, 0]]))
        >>> [part.tolist() for part in unpack_documents(torch.tensor([[11, 12, 21, 22, 23, 0]]), params)]
        [[11, 12], [21, 22, 23]]
    """
    check_batch_shape("tensor", tensor, params)
    spans = document_spans(params)
    places = zip(spans.row.tolist(), spans.start.tolist(), spans.length.tolist(), strict=True)
    return [tensor[row, start : start + length] for row, start, length in places]


def pad_documents(tensor: torch.Tensor, params: PackedSeqParams, fill: float = 0) -> torch.Tensor:
    """Give every document a row of its own, filled up at the end (form A in): what code for padded batches expects.

    Args:
        tensor: `[B, S, ...]`, one entry a token.
        params: the batch's metadata.
        fill: what the positions past the end of a document hold.

    Returns:
        `[num_docs, longest document, ...]` in the order of `document_spans`; its `length` says what is real.

    Raises:
        MetadataError: a tensor whose first axes are not those of the batch.

    Example:
        >>> from neatpack.packed_seq import packed_seq_params_from_doc_ids
        >>> params = packed_seq_params_from_doc_ids(torch.tensor([[1, 1, 2, 2, 2, 0]]))
        >>> pad_documents(torch.tensor([[11, 12, 21, 22, 23, 0]]), params).tolist()
        [[11, 12, 0], [21, 22, 23]]
    """
    check_batch_shape("tensor", tensor, params)
    spans = document_spans(params)
    longest = int(spans.length.max()) if len(spans.length) else 0
    offset = torch.arange(longest, device=spans.start.device)
    real = offset < spans.length[:, None]
    flat_start = spans.row * params.doc_ids.shape[1] + spans.start
    padded = tensor.new_full((len(spans), longest, *tensor.shape[2:]), fill)
    padded[real] = tensor.flatten(0, 1)[(flat_start[:, None] + offset)[real]]
    return padded


def repack_documents(documents: Sequence[torch.Tensor], params: PackedSeqParams, fill: float = 0) -> torch.Tensor:
    """Put per-document tensors back in their places of the batch (form A in): the inverse of `unpack_documents`.

    Args:
        documents: one `[length, ...]` a document, in the order of `document_spans`.
        params: the batch's metadata.
        fill: what padded positions hold.

    Returns:
        `[B, S, ...]` with the dtype and device of the documents.

    Raises:
        MetadataError: another number of documents, or of tokens in one (names row and index); documents that differ in dtype
            or further axes; or a batch without documents, whose dtype nobody knows.

    Example:
        >>> from neatpack.packed_seq import packed_seq_params_from_doc_ids
        >>> params = packed_seq_params_from_doc_ids(torch.tensor([[1, 1, 2, 2, 2, 0]]))
        >>> repack_documents([torch.tensor([11, 12]), torch.tensor([21, 22, 23])], params).tolist()
        [[11, 12, 21, 22, 23, 0]]
    """
    spans = document_spans(params)
    if len(documents) != len(spans):
        raise MetadataError(f"{len(documents)} documents given for a batch that holds {len(spans)}; give all, in order.")
    if not documents:
        raise MetadataError("the batch has no documents, so their trailing shape and dtype are unknown. Skip empty batches.")
    for number, (document, length) in enumerate(zip(documents, spans.length.tolist(), strict=True)):
        if len(document) != length:
            raise MetadataError(
                f"document {number} (row {int(spans.row[number])}, index {int(spans.index[number])}) has {len(document)} "
                f"entries; its place in the batch has {length} tokens."
            )
    first = documents[0]
    _check_alike(documents)
    batch = first.new_full((*params.doc_ids.shape, *first.shape[1:]), fill)
    batch[params.doc_ids != 0] = torch.cat(list(documents))
    return batch


def check_batch_shape(name: str, tensor: torch.Tensor, params: PackedSeqParams) -> None:
    """Refuse a tensor whose first two axes are not `[B, S]` of the metadata, or that lies on another device."""
    if not isinstance(tensor, torch.Tensor):
        raise MetadataTypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}.")
    if not isinstance(getattr(params, "doc_ids", None), torch.Tensor):
        raise MetadataTypeError(
            f"params must be the PackedSeqParams of the batch, got {type(params).__name__}. PackedCollator(return_params=True) "
            "sends them, packed_seq_params_from_doc_ids makes them."
        )
    if tensor.shape[:2] != params.doc_ids.shape or tensor.dim() < 2:
        raise MetadataError(
            f"{name} has shape {tuple(tensor.shape)}, but the metadata describes [B, S] = {list(params.doc_ids.shape)}. "
            "Use the metadata of this batch; for a batch flattened to one row, flatten_params gives it."
        )
    if tensor.device != params.cu_seqlens.device:
        raise MetadataError(
            f"{name} is on {tensor.device}, the metadata on {params.cu_seqlens.device}. Move it once: params.to({name}.device)."
        )


def _check_alike(documents: Sequence[torch.Tensor]) -> None:
    first = documents[0]
    for number, document in enumerate(documents):
        if document.dtype != first.dtype or document.shape[1:] != first.shape[1:]:
            raise MetadataError(
                f"document {number} is {list(document.shape)} of {document.dtype}, document 0 {list(first.shape)} of "
                f"{first.dtype}: all must agree but for their length, or numbers would be cut to fit."
            )


def _pool_last(hidden: torch.Tensor, params: PackedSeqParams, taken: torch.Tensor) -> torch.Tensor:
    spans = document_spans(params)
    tokens = torch.arange(1, taken.numel() + 1, device=taken.device).reshape(taken.shape)
    last = torch.zeros(len(params.cu_seqlens) - 1, dtype=torch.long, device=taken.device)
    index = segment_index(params, flat=True)[0].long()
    last.scatter_reduce_(0, index, (tokens * taken).reshape(-1), "amax")
    position = last[spans.segment]
    pooled = hidden.flatten(0, 1)[(position - 1).clamp(min=0)]
    return pooled.masked_fill(_spread(position == 0, pooled), 0)


def _pool_mean(hidden: torch.Tensor, params: PackedSeqParams, taken: torch.Tensor) -> torch.Tensor:
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    # Filled, not multiplied by zero: what lies in padding may be infinite or NaN.
    sums = segment_sums(hidden.to(wide).masked_fill(_spread(~taken, hidden), 0), params)
    counts = segment_sums(taken.to(wide), params).clamp(min=1)
    return (sums / _spread(counts, sums))[document_spans(params).segment].to(hidden.dtype)


def _spread(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """One value a token or document, with as many axes as `like`."""
    return values.reshape(*values.shape, *(1,) * (like.dim() - values.dim()))
