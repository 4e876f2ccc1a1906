"""Losses that count documents as documents: a mean over tokens, over documents, or in between.

Each reduction is a weight for every target token, divided by the sum of all weights. With n_d the target tokens of
document d and mean_d the mean of its token losses:

| reduction | weight of a token | divisor (`count_items`) | value |
|---|---|---|---|
| `token` | 1 | target tokens | mean over tokens |
| `document` | 1 / n_d | documents with a target | mean over documents of mean_d |
| `sqrt_document` | 1 / sqrt(n_d) | sum of sqrt(n_d) | sum of sqrt(n_d) mean_d over sum of sqrt(n_d) |
| `none` | | | mean_d of every document |

Padding, prompts and the first token of a document are no targets; a document without a target has weight 0.

**One step of many batches.** The divisor belongs to the optimizer step, not to the batch: with gradient accumulation or
several ranks, add `count_items` up over all of them and pass it as `num_items`; add the losses up (on ranks whose gradients
are averaged, as DDP does, multiply by their number). The step then equals one batch of all its documents:

    num_items = sum(count_items(b["labels"], b["packed_seq_params"], reduction=how) for b in micro_batches)
    torch.distributed.all_reduce(num_items)
    for b in micro_batches:
        loss = packed_cross_entropy(model_logits(b), b["labels"], b["packed_seq_params"], reduction=how, num_items=num_items)
        (loss * world_size).backward()

**Tokens on several ranks** (context parallel): make `prediction_targets` and `target_weights` from the whole rows, shard
both like any `[B, S]` tensor, and add up `(token_cross_entropy(...) * weights).sum()` over the ranks.
"""

from __future__ import annotations

from numbers import Real
from typing import Literal, NamedTuple

import torch

from neatpack.convert.segments import segment_index
from neatpack.errors import MetadataError, MetadataTypeError
from neatpack.packed_seq import PackedSeqParams
from neatpack.train.cross_entropy import token_cross_entropy
from neatpack.train.documents import document_spans, segment_sums
from neatpack.train.labels import IGNORE_INDEX, prediction_targets

Reduction = Literal["token", "document", "sqrt_document", "none"]
REDUCTIONS = ("token", "document", "sqrt_document", "none")


class DocumentLogprobs(NamedTuple):
    """Log-probabilities of the targets of every document; three `[num_docs]` tensors in document order.

    Attributes:
        sum: of the log-probabilities of its targets, 0 without one (DPO, KTO); float32 (float64 for float64 logits).
        mean: the same over its number of targets, 0 without one (length-normalised objectives).
        tokens: its number of targets, int64.
    """

    sum: torch.Tensor
    mean: torch.Tensor
    tokens: torch.Tensor


def packed_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    params: PackedSeqParams,
    *,
    reduction: Reduction = "token",
    shift: bool = True,
    ignore_index: int = IGNORE_INDEX,
    num_items: float | torch.Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunk_size: int | None = None,
) -> torch.Tensor:
    """Compute the loss of a packed batch as that of its documents run alone (form A in).

    Memory is that of the logits and their gradient, in their own dtype; see `neatpack.train.cross_entropy`.

    Args:
        logits: `[B, S, V]`, any floating dtype and strides.
        labels: `[B, S]` aligned labels; with `shift=False`, shifted ones. A label that the documents' boundaries forbid (the
            first of a document, padding) never counts, masked or not.
        params: the batch's metadata, on the device of the logits.
        reduction: "token", "document", "sqrt_document" or "none"; see the table in `neatpack.train.loss`.
        shift: whether the labels are aligned, so that the shift is done here, within documents.
        ignore_index: the label that does not count.
        num_items: divisor of the whole optimizer step, the sum of `count_items` over its micro-batches and ranks. None
            takes that of this batch.
        label_smoothing: as in `torch.nn.functional.cross_entropy`.
        z_loss: weight of the squared log-sum-exp.
        chunk_size: tokens worked on at a time; None takes as many as make 2**24 logits.

    Returns:
        A scalar, float32 (float64 for float64 logits); for "none" `[num_docs]`, the mean of each document's token losses in
        the order of `document_spans`. Without any target: 0, with gradients of 0.

    Raises:
        MetadataError: shapes or devices that do not fit, a label outside the vocabulary or `num_items` of 0 or less for a
            batch with targets (both checked on the CPU in eager mode), `num_items` of several numbers or with "none", options
            out of range, or an unknown reduction; from backward, if it is asked for second derivatives.
        MetadataTypeError: logits that are not floating, labels that are no integers, or `num_items` that is no number.

    Example:
        >>> from neatpack.packed_seq import packed_seq_params_from_doc_ids
        >>> params = packed_seq_params_from_doc_ids(torch.tensor([[1, 1, 2, 2, 2, 0]]))
        >>> labels = torch.tensor([[0, 1, 0, 1, 1, 0]])
        >>> packed_cross_entropy(torch.zeros(1, 6, 2), labels, params, reduction="none")
        tensor([0.6931, 0.6931])
    """
    check_reduction(reduction)
    targets = prediction_targets(labels, params, shift=shift, ignore_index=ignore_index)
    losses = token_cross_entropy(
        logits, targets, ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss, chunk_size=chunk_size
    )
    return reduce_token_losses(losses, targets != ignore_index, params, reduction=reduction, num_items=num_items)


def reduce_token_losses(
    losses: torch.Tensor,
    counted: torch.Tensor,
    params: PackedSeqParams,
    *,
    reduction: Reduction = "token",
    num_items: float | torch.Tensor | None = None,
) -> torch.Tensor:
    """Reduce a loss a token to a loss of the batch (form A in): any objective of tokens, as documents count.

    Args:
        losses: `[B, S]`, floating; what it holds where nothing counts is not looked at.
        counted: `[B, S]` bool, the positions that count.
        params: the batch's metadata.
        reduction: as in `packed_cross_entropy`.
        num_items: divisor of the whole optimizer step; None takes that of this batch.

    Returns:
        A scalar, or `[num_docs]` for "none", in the dtype of the losses.

    Raises:
        MetadataError: an unknown reduction, losses of another batch where documents are counted, `num_items` with "none" or
            of several numbers, or of 0 or less although this batch has targets (checked on the CPU in eager mode).
        MetadataTypeError: `num_items` that is no number.

    Example:
        >>> from neatpack.packed_seq import packed_seq_params_from_doc_ids
        >>> params = packed_seq_params_from_doc_ids(torch.tensor([[1, 1, 2, 2, 2, 0]]))
        >>> losses, counted = torch.tensor([[1.0, 9, 2, 4, 9, 9]]), torch.tensor([[True, False, True, True, False, False]])
        >>> [float(reduce_token_losses(losses, counted, params, reduction=how)) for how in ("token", "document")]
        [2.3333332538604736, 2.0]
    """
    check_reduction(reduction)
    losses = losses.masked_fill(~counted, 0)
    if reduction == "none":
        if num_items is not None:
            raise MetadataError("reduction='none' gives each document its own mean: there is nothing for num_items to divide.")
        sums, counts = _document_sums(losses, counted, params)
        return sums / counts.clamp(min=1)
    weights = _weights(counted, params, reduction, losses.dtype)
    own = weights.sum()
    divisor = own if num_items is None else _divisor(num_items, own)
    # Without a target the sum is zero, and so must the loss be, whatever there is to divide by.
    return (losses * weights).sum() / torch.where(own > 0, divisor, 1)


def target_weights(
    labels: torch.Tensor,
    params: PackedSeqParams,
    *,
    reduction: Reduction = "token",
    shift: bool = True,
    ignore_index: int = IGNORE_INDEX,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Give every position the weight of its target (form A in): `[B, S]`, aligned with the logits, 0 where none counts.

    Args:
        labels: `[B, S]` aligned labels; with `shift=False`, shifted ones.
        params: the batch's metadata.
        reduction: "token", "document" or "sqrt_document".
        shift: whether the labels are aligned.
        ignore_index: the label that does not count.
        dtype: floating dtype of the weights.

    Raises:
        MetadataError: shapes that do not fit the metadata, or a reduction without weights.
        MetadataTypeError: labels that are no integers.

    Example:
        >>> from neatpack.packed_seq import packed_seq_params_from_doc_ids
        >>> params = packed_seq_params_from_doc_ids(torch.tensor([[1, 1, 2, 2, 2, 0]]))
        >>> target_weights(torch.tensor([[0, 1, 0, 1, 1, 0]]), params, reduction="document").tolist()
        [[1.0, 0.0, 0.5, 0.5, 0.0, 0.0]]
    """
    check_reduction(reduction)
    targets = prediction_targets(labels, params, shift=shift, ignore_index=ignore_index)
    return _weights(targets != ignore_index, params, reduction, dtype)


def count_items(
    labels: torch.Tensor,
    params: PackedSeqParams,
    *,
    reduction: Reduction = "token",
    shift: bool = True,
    ignore_index: int = IGNORE_INDEX,
) -> torch.Tensor:
    """Count what a batch adds to the divisor of its optimizer step, `num_items` (form A in).

    Args:
        labels: `[B, S]` aligned labels; with `shift=False`, shifted ones.
        params: the batch's metadata.
        reduction: "token" (target tokens), "document" (documents with a target) or "sqrt_document" (sum of sqrt(n_d)).
        shift: whether the labels are aligned.
        ignore_index: the label that does not count.

    Returns:
        A scalar, float64 (float32 where the device has no float64). Add it up over micro-batches, `all_reduce` over ranks.

    Raises:
        MetadataError: shapes that do not fit the metadata, or a reduction without a divisor.
        MetadataTypeError: labels that are no integers.

    Example:
        >>> from neatpack.packed_seq import packed_seq_params_from_doc_ids
        >>> params = packed_seq_params_from_doc_ids(torch.tensor([[1, 1, 2, 2, 2, 0], [1, 2, 2, 3, 3, 3]]))
        >>> labels = torch.zeros(2, 6, dtype=torch.int64)
        >>> [count_items(labels, params, reduction=how).item() for how in ("token", "document")]
        [6.0, 4.0]
    """
    dtype = torch.float32 if labels.device.type == "mps" else torch.float64
    weights = target_weights(labels, params, reduction=reduction, shift=shift, ignore_index=ignore_index, dtype=dtype)
    return weights.sum()


def document_logprobs(
    logits: torch.Tensor,
    labels: torch.Tensor,
    params: PackedSeqParams,
    *,
    shift: bool = True,
    ignore_index: int = IGNORE_INDEX,
    chunk_size: int | None = None,
) -> DocumentLogprobs:
    """Add up the log-probabilities of each document's targets (form A in): what preference objectives compare.

    Args:
        logits: `[B, S, V]`, any floating dtype and strides.
        labels: `[B, S]` aligned labels (`input_ids` themselves, or with prompts masked); with `shift=False`, shifted ones.
        params: the batch's metadata.
        shift: whether the labels are aligned.
        ignore_index: the label that does not count.
        chunk_size: tokens worked on at a time; None takes as many as make 2**24 logits.

    Returns:
        Sum, mean and number of targets, each `[num_docs]` in the order of `document_spans`; differentiable.

    Raises:
        MetadataError: what `packed_cross_entropy` refuses.
        MetadataTypeError: logits that are not floating, or labels that are no integers.

    Example:
        >>> from neatpack.packed_seq import packed_seq_params_from_doc_ids
        >>> params = packed_seq_params_from_doc_ids(torch.tensor([[1, 1, 2, 2, 2, 0]]))
        >>> document_logprobs(torch.zeros(1, 6, 2), torch.tensor([[0, 1, 0, 1, 1, 0]]), params).sum
        tensor([-0.6931, -1.3863])
    """
    targets = prediction_targets(labels, params, shift=shift, ignore_index=ignore_index)
    losses = token_cross_entropy(logits, targets, ignore_index=ignore_index, chunk_size=chunk_size)
    sums, counts = _document_sums(-losses, targets != ignore_index, params)
    return DocumentLogprobs(sums, sums / counts.clamp(min=1), counts)


def _document_sums(values: torch.Tensor, counted: torch.Tensor, params: PackedSeqParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of the values and number of targets of every document."""
    segment = document_spans(params).segment
    return segment_sums(values, params)[segment], segment_sums(counted.long(), params)[segment]


def _weights(counted: torch.Tensor, params: PackedSeqParams, reduction: Reduction, dtype: torch.dtype) -> torch.Tensor:
    if reduction == "none":
        raise MetadataError("reduction='none' has no weights: choose 'token', 'document' or 'sqrt_document'.")
    weights = counted.to(dtype)
    if reduction == "token":
        return weights
    counts = segment_sums(weights, params).clamp(min=1)
    power = -1.0 if reduction == "document" else -0.5
    return weights * counts.pow(power)[segment_index(params, flat=True)[0].long()].reshape(weights.shape)


def _divisor(num_items: object, own: torch.Tensor) -> torch.Tensor:
    """`num_items` as a scalar like `own`, what this batch adds to it."""
    if isinstance(num_items, torch.Tensor):
        if num_items.numel() != 1:
            raise MetadataError(
                f"num_items has shape {tuple(num_items.shape)}, but a step has one divisor. Add count_items up over its "
                "batches and ranks; nn.DataParallel repeats it once a device: start one process a device instead."
            )
        divisor = num_items.reshape(()).to(own)
    elif not isinstance(num_items, bool) and isinstance(num_items, Real):
        divisor = torch.as_tensor(num_items, dtype=own.dtype, device=own.device)
    else:
        raise MetadataTypeError(f"num_items must be a number or a tensor of one, got {num_items!r}.")
    # Elsewhere the look would cost a sync, and under torch.compile break the graph.
    if own.device.type == "cpu" and not torch.compiler.is_compiling() and bool((own > 0) & ~(divisor > 0)):
        raise MetadataError(
            f"num_items is {divisor.item():g}, but this batch alone adds {own.item():g} to it. It is the sum of "
            "count_items(labels, params, reduction=...) over all batches of the optimizer step."
        )
    return divisor


def check_reduction(reduction: str) -> None:
    """Refuse what is no reduction."""
    if reduction not in REDUCTIONS:
        raise MetadataError(f"unknown reduction {reduction!r}: choose one of {', '.join(REDUCTIONS)}.")
