"""The numbers people log about packed batches: tokens, targets, documents, fill, and the spread of document losses.

A packed batch hides what a padded one shows: how many documents it holds, and whether the loss moved because documents got
longer or because the model learned. Both means, over tokens and over documents, are given, so that a change of reduction
is not taken for a leak.

    metrics = batch_metrics(params, labels, document_losses=packed_cross_entropy(..., reduction="none"))
    step = sum(micro_batch_metrics, BatchMetrics())            adds up over batches
    everyone = gather_metrics(step)                            and over ranks
    log(everyone.as_dict())
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from neatpack.convert.segments import longest
from neatpack.errors import MetadataError
from neatpack.packed_seq import PackedSeqParams
from neatpack.train.documents import document_spans
from neatpack.train.labels import IGNORE_INDEX, count_targets

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

QUANTILES = (0.1, 0.5, 0.9)


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchMetrics:
    """What one batch, or the sum of several, held. `a + b` adds two up; `BatchMetrics()` is nothing yet.

    Attributes:
        tokens: real tokens, padding left out.
        slots: token slots, padding included.
        target_tokens: tokens that the loss counts; 0 if no labels were given.
        documents: documents.
        documents_with_targets: those that have a target token.
        longest_document: tokens of the longest.
        losses: `[K] float64` mean token loss of the documents with a target, if they were given.
        loss_tokens: `[K] int64` target tokens of each of those.
    """

    tokens: int = 0
    slots: int = 0
    target_tokens: int = 0
    documents: int = 0
    documents_with_targets: int = 0
    longest_document: int = 0
    losses: np.ndarray = field(default_factory=lambda: np.empty(0))
    loss_tokens: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))

    @property
    def fill(self) -> float:
        """Real tokens over slots, 0 to 1; what is left is padding. Without slots nothing is wasted: 1.0."""
        return self.tokens / self.slots if self.slots else 1.0

    @property
    def token_loss(self) -> float:
        """Mean loss over target tokens; NaN without losses."""
        total = int(self.loss_tokens.sum())
        return float(self.losses @ self.loss_tokens) / total if total else float("nan")

    @property
    def document_loss(self) -> float:
        """Mean over documents of their mean losses; NaN without losses."""
        return float(self.losses.mean()) if len(self.losses) else float("nan")

    def loss_quantiles(self, quantiles: Sequence[float] = QUANTILES) -> list[float]:
        """Quantiles of the documents' mean losses; NaN without losses."""
        return np.quantile(self.losses, quantiles).tolist() if len(self.losses) else [float("nan")] * len(quantiles)

    def as_dict(self, prefix: str = "", quantiles: Sequence[float] = QUANTILES) -> dict[str, float]:
        """Return the numbers by name, for a logger: `fill` for the slots, losses as means and quantiles where there are any.

        Args:
            prefix: put before every name ("train/").
            quantiles: which quantiles of the documents' losses, named `document_loss_p10` and so on.
        """
        numbers: dict[str, float] = {
            "tokens": self.tokens,
            "target_tokens": self.target_tokens,
            "documents": self.documents,
            "documents_with_targets": self.documents_with_targets,
            "longest_document": self.longest_document,
            "fill": self.fill,
        }
        if len(self.losses):
            numbers |= {"token_loss": self.token_loss, "document_loss": self.document_loss}
            values = self.loss_quantiles(quantiles)
            numbers |= {f"document_loss_p{100 * q:g}": value for q, value in zip(quantiles, values, strict=True)}
        return {prefix + name: value for name, value in numbers.items()}

    def __add__(self, other: BatchMetrics) -> BatchMetrics:
        return BatchMetrics(
            tokens=self.tokens + other.tokens,
            slots=self.slots + other.slots,
            target_tokens=self.target_tokens + other.target_tokens,
            documents=self.documents + other.documents,
            documents_with_targets=self.documents_with_targets + other.documents_with_targets,
            longest_document=max(self.longest_document, other.longest_document),
            losses=np.concatenate([self.losses, other.losses]),
            loss_tokens=np.concatenate([self.loss_tokens, other.loss_tokens]),
        )


def batch_metrics(
    params: PackedSeqParams,
    labels: torch.Tensor | None = None,
    *,
    document_losses: torch.Tensor | None = None,
    shift: bool = True,
    ignore_index: int = IGNORE_INDEX,
) -> BatchMetrics:
    """Measure a packed batch (form A in). On an accelerator this reports to the host: call it as often as you log.

    Args:
        params: the batch's metadata.
        labels: `[B, S]` aligned labels; with `shift=False`, shifted ones. None counts no targets.
        document_losses: `[num_docs]` mean token loss of each document: `packed_cross_entropy(..., reduction="none")`.
        shift: whether the labels are aligned.
        ignore_index: the label that does not count.

    Returns:
        The numbers, on the host.

    Raises:
        MetadataError: shapes that do not fit the metadata, or losses without the labels that say whose count.
        MetadataTypeError: labels that are no integers.

    Example:
        >>> from neatpack.packed_seq import packed_seq_params_from_doc_ids
        >>> params = packed_seq_params_from_doc_ids(torch.tensor([[1, 1, 2, 2, 2, 0], [1, 2, 2, 3, 3, 3]]))
        >>> metrics = batch_metrics(params, torch.zeros(2, 6, dtype=torch.int64))
        >>> metrics.tokens, metrics.target_tokens, metrics.documents, round(metrics.fill, 3)
        (11, 6, 5, 0.917)
    """
    spans = document_spans(params)
    metrics = BatchMetrics(
        tokens=int(spans.length.sum()),
        slots=params.doc_ids.numel(),
        documents=len(spans),
        longest_document=longest(spans.length),
    )
    if labels is None:
        if document_losses is not None:
            raise MetadataError(
                "document_losses need the labels they were computed from: a document without a target has none."
            )
        return metrics
    counts = count_targets(labels, params, shift=shift, ignore_index=ignore_index).cpu().numpy()
    real = counts > 0
    metrics = replace(metrics, target_tokens=int(counts.sum()), documents_with_targets=int(real.sum()))
    if document_losses is None:
        return metrics
    if document_losses.shape != (len(spans),):
        raise MetadataError(
            f"document_losses has shape {tuple(document_losses.shape)}, but the batch holds {len(spans)} documents. "
            "Use packed_cross_entropy(..., reduction='none')."
        )
    losses = document_losses.detach().cpu().double().numpy()
    return replace(metrics, losses=losses[real], loss_tokens=counts[real])


def gather_metrics(metrics: BatchMetrics, group: ProcessGroup | None = None) -> BatchMetrics:
    """Add metrics up over the ranks of a process group; every rank gets the sum. One rank alone keeps its own.

    Args:
        metrics: this rank's.
        group: the ranks to add up over; None is all of them.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return metrics
    gathered: list[BatchMetrics | None] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(gathered, metrics, group=group)
    return sum((own for own in gathered if own is not None), BatchMetrics())
