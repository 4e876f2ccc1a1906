"""The Trainer's last gate: before the first step, prove on its own first batch that documents stay apart."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from neatpack.errors import ContractError, MetadataError, MissingDependencyError
from neatpack.hf.contracts import contract_for
from neatpack.isolation import IsolationReport, accepted, check_isolation, evaluating, on_model_device
from neatpack.packed_seq import PackedSeqParams
from neatpack.train.labels import IGNORE_INDEX

if TYPE_CHECKING:
    from transformers import TrainerCallback

# What half precision may do to a logit under autocast, in parts of the largest; weights and outputs then look like float32.
_AUTOCAST_ROUNDING = {"bf16": 4e-2, "fp16": 5e-3}

# Two losses of the same logits differ by less, in parts, whatever the dtype they were summed in.
_SAME_LOSS = 1e-3
# What a model is told about its loss, and nothing else: with these some answer with a loss or log-probabilities and no logits
# (TRL's fused head, Liger's kernels).
_LOSS_ARGUMENTS = frozenset({"labels", "shift_labels", "num_items_in_batch", "fused_lm_head", "skip_logits"})


def require_isolation(
    model: torch.nn.Module, batch: Mapping[str, Any], *, tolerance: float | None = None, max_documents: int = 8
) -> IsolationReport:
    """Stop unless `model` has a contract and keeps the documents of `batch` apart, as measured.

    Args:
        model: a causal language model; see `contract_for`.
        batch: what the collator gives, with `cu_seq_lens_q` or `doc_ids`; see `check_isolation`.
        tolerance: what counts as rounding, in logits; by default by dtype.
        max_documents: documents to probe; two forward passes each.

    Returns:
        The report. Its verdict is `inconclusive` where no row holds two documents: such a batch proves nothing.

    Raises:
        ContractError: no contract, rows longer than it allows, no document map in the batch, documents of one row that were
            not shown to stay apart, or a loss that asks for the token itself and not for the next one.
        MissingDependencyError: transformers is not installed.
    """
    contract = contract_for(model)
    if isinstance(batch.get("input_ids"), torch.Tensor):
        contract.refuse_longer_rows(batch["input_ids"].shape[-1])
    try:
        doc_ids = _without_padding(batch)
        report = check_isolation(
            model,
            _without_loss(batch),
            doc_ids=doc_ids,
            tolerance=tolerance,
            max_documents=max_documents,
            position_start=contract.position_start,
        )
    except MetadataError as error:
        raise ContractError(f"{contract.model}: isolation cannot be checked on this batch: {error}") from error
    if not report.isolated and not (report.verdict == "inconclusive" and report.control is None):
        raise ContractError(f"{report}\n  this model's contract: {contract}\n  build the collator with collator_for(model)")
    _refuse_loss_of_the_token_itself(model, batch)
    return report


def isolation_callback(*, probe: bool = True, tolerance: float | None = None, max_documents: int = 8) -> TrainerCallback:
    """Build the `TrainerCallback` that checks a training run once, before its first step.

    When training begins it asks for the model's contract, and looks for what would take the boundaries away from the
    collator or its batch: `remove_unused_columns`, and Accelerate's `dispatch_batches`. Then the first batch that the model
    is called with (the real one: no batch is drawn twice, no random number consumed) goes through `check_isolation`. A batch
    whose rows hold one document each proves nothing, and the next one is taken.

    Args:
        probe: measure; turn it off for models sharded by FSDP or DeepSpeed, whose ranks must call the model in step.
        tolerance: what counts as rounding, in logits; by default by dtype, autocast included.
        max_documents: documents to probe; two forward passes each.

    Raises:
        ContractError: from `trainer.train()`, with what leaks and what to do instead.
        MissingDependencyError: transformers is not installed.

    Example:
        >>> trainer = Trainer(model, args, train_dataset=rows, data_collator=collator_for(model),  # doctest: +SKIP
        ...                   callbacks=[isolation_callback()])
    """
    try:
        from transformers import TrainerCallback
    except ImportError as error:
        raise MissingDependencyError("transformers", "neatpack.hf.isolation_callback", "neatpack[hf]") from error

    class IsolationCallback(TrainerCallback):  # type: ignore[misc]
        """Checks one run; a Trainer takes it in `callbacks`."""

        def __init__(self) -> None:
            self.report: IsolationReport | None = None
            self._hook: Any = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            model = kwargs["model"]
            contract_for(model)
            refuse_lost_columns(args, kwargs.get("train_dataloader"))
            refuse_dispatched_batches(kwargs.get("train_dataloader"))
            if probe:
                _refuse_sharded(args)
                self._hook = model.register_forward_pre_hook(self._first_batch(args), prepend=True, with_kwargs=True)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._unhook()

        def _unhook(self) -> None:
            if self._hook is not None:
                self._hook.remove()
                self._hook = None

        def _first_batch(self, args: Any) -> Any:
            def check(model: torch.nn.Module, positional: Any, batch: dict[str, Any]) -> None:
                self._unhook()
                limit = _autocast_tolerance(model, batch, args) if tolerance is None else tolerance
                self.report = require_isolation(model, batch, tolerance=limit, max_documents=max_documents)
                if self.report.control is None:
                    self._hook = model.register_forward_pre_hook(check, prepend=True, with_kwargs=True)

            return check

    return IsolationCallback()


def _refuse_loss_of_the_token_itself(model: torch.nn.Module, batch: Mapping[str, Any]) -> None:
    """Refuse a model that was measured to compare the logits of a place with the label there: it would learn to repeat."""
    labels = batch.get("labels")
    if not isinstance(labels, torch.Tensor) or not bool((labels != IGNORE_INDEX).any()):
        return
    call = accepted(model, on_model_device(model, {**_without_loss(batch), "labels": labels}))
    if "labels" not in call:
        return  # it has no loss
    labels = call["labels"]
    with evaluating(model):
        result = model(**call)
    loss, logits = getattr(result, "loss", None), getattr(result, "logits", None)
    if loss is None or logits is None or logits.shape[:2] != labels.shape:
        return
    itself, following = _mean_loss(logits, labels), _mean_loss(logits[:, :-1], labels[:, 1:])
    if abs(float(loss) - itself) <= _SAME_LOSS * itself and abs(itself - following) > 2 * _SAME_LOSS * itself:
        raise ContractError(
            f"{type(model).__name__} compares the logits of a token with the label of the same token: its loss is "
            f"{float(loss):.4f} here, and that of next tokens {following:.4f}. The labels of a packed batch are aligned with "
            "its tokens, so it would learn to repeat them. Shift labels in its forward, or compute the loss outside "
            "(neatpack.train.packed_cross_entropy)."
        )


def _mean_loss(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """Cross-entropy a label, a row at a time: whole logits in float32 may not fit."""
    total = 0.0
    for row, own in zip(logits, labels, strict=True):
        total += float(functional.cross_entropy(row.float(), own, ignore_index=IGNORE_INDEX, reduction="sum"))
    return total / max(int((labels != IGNORE_INDEX).sum()), 1)


def _without_loss(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch as the model is asked for logits with it."""
    return {name: value for name, value in batch.items() if name not in _LOSS_ARGUMENTS}


def _without_padding(batch: Mapping[str, Any]) -> torch.Tensor | None:
    """The document map `[B, S]` of a batch that carries offsets but no map, padding left out; None for other batches.

    Padding is a segment where nothing is learned and one id repeats: behind a row's documents, or (of two tokens or more; one
    may be a short document) behind each in its aligned slot. As a document it would be probed, and a mask that keeps pads to
    themselves would look like a fault.
    """
    offsets, ids, labels = batch.get("cu_seq_lens_q"), batch.get("input_ids"), batch.get("labels")
    given = [batch.get("doc_ids"), *(value for value in batch.values() if isinstance(value, PackedSeqParams))]
    if any(value is not None for value in given) or offsets is None or ids is None or labels is None:
        return None
    flat, learned, bounds = ids.flatten(), labels.flatten() != IGNORE_INDEX, offsets.tolist()
    doc_ids = torch.zeros_like(flat)
    if not bounds or bounds[0] != 0 or bounds[-1] != len(flat):
        return None  # the probe says what is wrong with them
    for index, (start, end) in enumerate(itertools.pairwise(bounds), start=1):
        nothing = not bool(learned[start:end].any()) and bool((flat[start:end] == flat[start]).all())
        if not nothing or (end - start == 1 and end % ids.shape[1]):
            doc_ids[start:end] = index
    return doc_ids.view_as(ids)


def refuse_lost_columns(args: Any, dataloader: Any) -> None:
    """Refuse a Trainer that takes `seq_lengths` out of the rows before the collator sees them.

    Raises:
        ContractError: `remove_unused_columns` is on and the column is gone.
    """
    if not getattr(args, "remove_unused_columns", False) or dataloader is None:
        return
    columns = getattr(getattr(dataloader, "dataset", None), "column_names", None)
    kept = getattr(getattr(dataloader, "collate_fn", None), "signature_columns", None)
    for names in (columns, kept):
        if names is not None and "seq_lengths" not in names:
            raise ContractError(
                f"the Trainer leaves rows the columns {sorted(names)} and drops the others, seq_lengths among them, before the "
                "collator sees them: document boundaries would be gone. Set TrainingArguments(remove_unused_columns=False)."
            )


def refuse_dispatched_batches(dataloader: Any) -> None:
    """Refuse Accelerate's dispatching of batches: it cuts offsets like rows, and cannot send the maximum at all.

    Raises:
        ContractError: the loader collates on one process and sends pieces to the others.
    """
    try:
        from accelerate.data_loader import DataLoaderDispatcher
    except ImportError:
        return
    if isinstance(dataloader, DataLoaderDispatcher):
        raise ContractError(
            "Accelerate dispatches batches from one process to the others (the default for an IterableDataset): it would cut "
            "cu_seq_lens along rows. Set TrainingArguments(accelerator_config={'dispatch_batches': False})."
        )


def _refuse_sharded(args: Any) -> None:
    if getattr(args, "fsdp", None) or getattr(args, "deepspeed", None):
        raise ContractError(
            "the probe calls the model once for each document, and ranks of a sharded model must call it in step. Use "
            "isolation_callback(probe=False), and prove isolation once on one process with require_isolation(model, batch)."
        )


def _autocast_tolerance(model: torch.nn.Module, batch: Mapping[str, Any], args: Any) -> float | None:
    """The rounding of half precision, in logits of this batch; None where the dtypes of weights and logits say it all."""
    rounding = next((size for name, size in _AUTOCAST_ROUNDING.items() if getattr(args, name, False)), None)
    if rounding is None:
        return None
    with torch.no_grad():
        logits = model(**_without_loss(batch)).logits
    return rounding * max(1.0, float(logits.abs().max()))
