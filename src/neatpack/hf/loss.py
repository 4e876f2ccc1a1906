"""The packed loss under transformers' Trainer, with the divisor of the whole optimizer step.

A Trainer asks its `compute_loss_func` with `(outputs, labels, num_items_in_batch)`: it counts target tokens over all
micro-batches and ranks of the step, and tells the function nothing of documents. So there are two ways in:

- a mean over tokens needs no more than that:

      Trainer(..., data_collator=PackedCollator(), compute_loss_func=PackedLoss())

  On several ranks it relies on `TrainingArguments(average_tokens_across_devices=True)`, the default: without it the Trainer
  counts each rank's tokens alone and averages the ranks' means. The mixin below counts over all ranks by itself.

- means over documents need the boundaries of each batch and the documents of the whole step. The mixin reads the former
  from the batch (`cu_seq_lens_q`) and counts the latter where the Trainer counts tokens (`get_batch_samples`, once a step,
  summed over the ranks), for every reduction:

      class PackedTrainer(PackedLossMixin, Trainer): ...

      PackedTrainer(..., data_collator=PackedCollator(), packed_loss=PackedLoss(reduction="document"))

Both override documented methods only. Either way a step's loss and gradients are those of its documents unpacked, whatever
the batch size, accumulation and number of ranks. Under evaluation each batch is divided by its own count, and the Trainer
averages batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from neatpack.errors import ContractError
from neatpack.packed_seq import PackedSeqParams
from neatpack.train.cross_entropy import check_options
from neatpack.train.labels import IGNORE_INDEX
from neatpack.train.loss import REDUCTIONS, Reduction, count_items, packed_cross_entropy

# For the type checker the mixin stands on a Trainer; at run time it stands on whichever one it is mixed into.
if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object

__all__ = ["PackedLoss", "PackedLossMixin"]

_WAYS_OUT = "Use PackedCollator as the data_collator, with remove_unused_columns=False."


@dataclass(frozen=True, kw_only=True)
class PackedLoss:
    """A `compute_loss_func` for a mean over tokens, and what `PackedLossMixin` computes for the other reductions.

    Attributes:
        reduction: "token", "document" or "sqrt_document"; see `neatpack.train.loss`.
        label_smoothing: as in `torch.nn.functional.cross_entropy`.
        z_loss: weight of the squared log-sum-exp.
        chunk_size: tokens worked on at a time; None takes as many as make 2**24 logits.
        router_loss: weight of a mixture-of-experts model's router loss (`config.router_aux_loss_coef`), which such a model
            adds to its own loss only; each batch's counts by its share of the step. 0.0 leaves it out; None refuses
            outputs that have one.

    Raises:
        ContractError: no per-document reduction (when made), outputs without logits, labels that are no packed labels, or a
            per-document reduction without boundaries (when called).
        MetadataError: a smoothing or z-loss weight out of range (when made), or what `packed_cross_entropy` refuses.
    """

    reduction: Reduction = "token"
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    chunk_size: int | None = None
    router_loss: float | None = None

    def __post_init__(self) -> None:
        if self.reduction not in REDUCTIONS or self.reduction == "none":
            raise ContractError(
                f"a Trainer needs one loss a batch, and reduction={self.reduction!r} is none: "
                "choose 'token', 'document' or 'sqrt_document'."
            )
        check_options(self.label_smoothing, self.z_loss)

    def __call__(
        self, outputs: Any, labels: torch.Tensor | None, num_items_in_batch: float | torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute the mean over target tokens, as the Trainer asks for it.

        Args:
            outputs: the model's, with logits `[B, S, V]` of every position.
            labels: `[B, S]` as PackedCollator makes them: aligned, the first of each document -100.
            num_items_in_batch: target tokens of the optimizer step; None takes those of this batch.

        Returns:
            A scalar.
        """
        if self.reduction != "token":
            raise ContractError(
                f"reduction={self.reduction!r} needs each batch's document boundaries and the documents of the whole optimizer "
                "step, and a compute_loss_func gets neither. Mix PackedLossMixin into the Trainer and give it "
                "packed_loss=PackedLoss(...), or take reduction='token'."
            )
        if labels is None:
            raise ContractError(f"the batch has no labels, so there is no loss. {_WAYS_OUT}")
        if bool((labels[:, :1] != IGNORE_INDEX).any()):
            raise ContractError(
                "the first label of a row is not -100, so these are not packed labels: the first label of every document must "
                f"be -100, or the last token of the document before is asked for it. {_WAYS_OUT}"
            )
        batch, length = labels.shape
        rows = torch.arange(0, (batch + 1) * length, max(length, 1), dtype=torch.int32, device=labels.device)
        return self.of_batch(outputs, labels, _params(labels, rows[: batch + 1], length), num_items_in_batch)

    def of_batch(
        self,
        outputs: Any,
        labels: torch.Tensor,
        params: PackedSeqParams,
        num_items: float | torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute the loss of a batch whose boundaries are known: any reduction, for loops of your own too.

        Args:
            outputs: the model's, with logits `[B, S, V]` of every position.
            labels: `[B, S]` aligned labels.
            params: the batch's metadata (form A).
            num_items: divisor of the optimizer step (the sum of `items`); None takes that of this batch.

        Returns:
            A scalar.
        """
        loss = packed_cross_entropy(
            _logits(outputs),
            labels,
            params,
            reduction=self.reduction,
            num_items=num_items,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            chunk_size=self.chunk_size,
        )
        router = _output(outputs, "aux_loss")
        if router is None or self.router_loss == 0:
            return loss
        if self.router_loss is None:
            raise ContractError(
                "the model returned a router loss (aux_loss), which it adds to its own loss only. Say what becomes of it: "
                "PackedLoss(router_loss=model.config.router_aux_loss_coef), or router_loss=0.0 to leave it out."
            )
        if num_items is not None:
            router = router * (self.items(labels, params) / num_items).to(router.dtype)
        total: torch.Tensor = loss + self.router_loss * router
        return total

    def items(self, labels: torch.Tensor, params: PackedSeqParams) -> torch.Tensor:
        """Count what a batch adds to the divisor of its optimizer step; a scalar as of `count_items`."""
        return count_items(labels, params, reduction=self.reduction)


class PackedLossMixin(_Base):  # type: ignore[misc]
    """Mix into a `Trainer`, or a subclass such as TRL's `SFTTrainer`, to train with `packed_loss` on packed batches.

    The model's own loss is never computed, and metrics that a subclass computes inside `compute_loss` are not either.

    Args:
        *args: the Trainer's.
        packed_loss: what to compute; None is `PackedLoss()`, a mean over tokens.
        **kwargs: the Trainer's.

    Raises:
        ContractError: a setting that would compute another loss (another `compute_loss_func`, the Trainer's own label
            smoothing) or count documents wrongly (`nn.DataParallel`, context or sequence parallelism), or a batch without
            boundaries.

    Example:
        >>> class PackedTrainer(PackedLossMixin, Trainer):                        # doctest: +SKIP
        ...     pass
        >>> trainer = PackedTrainer(                                              # doctest: +SKIP
        ...     model, args, train_dataset=rows, data_collator=PackedCollator(), packed_loss=PackedLoss(reduction="document")
        ... )
    """

    def __init__(self, *args: Any, packed_loss: PackedLoss | None = None, **kwargs: Any) -> None:
        if kwargs.get("compute_loss_func") is not None:
            raise ContractError("give the Trainer either compute_loss_func or packed_loss: two losses cannot both be trained.")
        self.packed_loss = packed_loss or PackedLoss()
        # Tells the Trainer that the loss is divided for the whole step already.
        super().__init__(*args, compute_loss_func=self.packed_loss, **kwargs)
        self._refuse_other_settings()

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], torch.Tensor | int | None]:
        """Take the batches of one optimizer step, and count what divides its loss over all of them and all ranks."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        dtype = torch.float32 if device.type == "mps" else torch.float64
        items = torch.zeros((), dtype=dtype, device=device)
        for batch in batches:
            items += self.packed_loss.items(*_boundaries(batch)).to(device)
        return batches, self.accelerator.reduce(items, reduction="sum")

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        """Compute `packed_loss` of one batch, as its share of the optimizer step; see the class."""
        labels, params = _boundaries(inputs)
        outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
        if not model.training or num_items_in_batch is None:
            # Evaluation counts tokens for num_items_in_batch, whatever the reduction.
            loss = self.packed_loss.of_batch(outputs, labels, params)
        else:
            # Gradients are averaged over the ranks, whose losses are shares of one sum.
            ranks = self.accelerator.num_processes // self.get_tp_size()
            loss = ranks * self.packed_loss.of_batch(outputs, labels, params, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def _refuse_other_settings(self) -> None:
        if self.args.label_smoothing_factor:
            raise ContractError(
                f"TrainingArguments(label_smoothing_factor={self.args.label_smoothing_factor}) smooths the Trainer's own loss, "
                "which is not computed. Set PackedLoss(label_smoothing=...) instead."
            )
        if self.args.n_gpu > 1:
            raise ContractError(
                f"nn.DataParallel over {self.args.n_gpu} devices cuts the offsets of a packed batch along with its rows. "
                "Start one process a device (torchrun, accelerate launch)."
            )
        divided = self.accelerator.gradient_accumulation_steps
        if divided > 1 and str(self.accelerator.distributed_type.value) != "DEEPSPEED":
            raise ContractError(
                f"this version of transformers lets Accelerate divide gradients by the {divided} steps of accumulation, and "
                "the loss is divided for them already. Upgrade transformers (5.24 does not), or train with "
                "gradient_accumulation_steps=1."
            )
        parallel = self.get_cp_size() * self.get_sp_size()
        if parallel > 1:
            raise ContractError(
                f"{parallel} ranks share each row (context or sequence parallelism), and a document's targets would be counted "
                "on each alone. Use target_weights and token_cross_entropy from neatpack.train in a loop of your own."
            )


def _boundaries(batch: Mapping[str, Any]) -> tuple[torch.Tensor, PackedSeqParams]:
    """A batch's labels and metadata, or a refusal."""
    labels, offsets = batch.get("labels"), batch.get("cu_seq_lens_q")
    if labels is None or offsets is None:
        missing = "labels" if labels is None else "cu_seq_lens_q"
        raise ContractError(f"the batch has no {missing}, only {', '.join(batch)}: documents cannot be told apart. {_WAYS_OUT}")
    rows, length = labels.shape
    opened = (offsets[:-1] % max(length, 1) == 0).sum()
    if not bool((offsets[-1] == labels.numel()) & (opened == (rows if length else 0))):
        raise ContractError(
            f"cu_seq_lens_q does not describe labels of shape [{rows}, {length}]: its offsets must end at {rows * length} and "
            f"open every row (form A). {_WAYS_OUT}"
        )
    return labels, _params(labels, offsets, int(batch.get("max_length_q", length)))


def _params(labels: torch.Tensor, offsets: torch.Tensor, longest: int) -> PackedSeqParams:
    """Metadata from form A offsets. Padding runs are numbered like documents: without a target, they weigh nothing."""
    numbers = torch.arange(1, len(offsets), device=offsets.device)
    doc_ids = torch.repeat_interleave(numbers, offsets[1:] - offsets[:-1], output_size=labels.numel())
    return PackedSeqParams(offsets, longest, doc_ids.reshape(labels.shape))


def _logits(outputs: Any) -> torch.Tensor:
    logits = _output(outputs, "logits")
    if not isinstance(logits, torch.Tensor):
        raise ContractError(
            f"the model's outputs ({type(outputs).__name__}) have no logits to compute the loss from. Return a ModelOutput "
            "with logits of every position; losses fused into the model skip them."
        )
    return logits


def _output(outputs: Any, name: str) -> Any:
    return outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)
