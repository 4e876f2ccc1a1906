"""The collator that a model's contract asks for."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any

import torch

from neatpack.errors import ContractError
from neatpack.hf.contracts import contract_for
from neatpack.train.collate import PackedCollator


def collator_for(model: torch.nn.Module, **options: Any) -> PackedCollator:
    """Build the `PackedCollator` whose batches keep documents apart in `model`.

    Args:
        model: a causal language model with the attention implementation it will train on; see `contract_for`.
        options: those of `PackedCollator`. `pad_token_id`, `position_limit` and `vocab_size` (as many ids as the model has
            embeddings for) are the model's where it has them; `document_columns` cannot have the name of an input of the model;
            `mask_builder` and `position_start` are the contract's and cannot be chosen.

    Returns:
        The collator; it holds nothing of the model and can be sent to data-loader workers.

    Raises:
        ContractError: the model cannot be packed as it is (see `contract_for`) or not in rows of that length, or what the
            contract decides was given.
        MetadataError: options that `PackedCollator` refuses.
        MissingDependencyError: transformers is not installed.

    Example:
        >>> trainer = Trainer(model, args, train_dataset=rows, data_collator=collator_for(model))  # doctest: +SKIP
    """
    for decided in ("mask_builder", "position_start"):
        if decided in options:
            raise ContractError(
                f"collator_for decides on {decided}; to choose it yourself, build PackedCollator(...) directly."
            )
    contract = contract_for(model)
    contract.refuse_longer_rows(_padded_length(options.get("row_length"), options.get("pad_to_multiple_of")))
    chosen = {**_sizes(model, contract.position_start), **options}
    collator = PackedCollator(**chosen, mask_builder=contract.mask_builder, position_start=contract.position_start)
    _refuse_inputs(model, collator.document_columns)
    return collator


def _sizes(model: torch.nn.Module, position_start: int) -> dict[str, int]:
    """Options that the model's config and embeddings decide, where they do."""
    found: dict[str, int] = {}
    config: Any = getattr(model, "config", None)
    known = getattr(config, "max_position_embeddings", None)
    if isinstance(known, int) and known > position_start:
        found["position_limit"] = known
    vocab_size = _num_embeddings(model)
    if vocab_size is not None:
        found["vocab_size"] = vocab_size
    pad = getattr(config, "pad_token_id", None)
    if isinstance(pad, int) and 0 <= pad < (vocab_size or pad + 1):
        found["pad_token_id"] = pad
    return found


def _num_embeddings(model: torch.nn.Module) -> int | None:
    """How many token ids the model has embeddings for; None where it does not say."""
    try:
        size = getattr(model.get_input_embeddings(), "num_embeddings", None)  # type: ignore[operator]
    except (AttributeError, NotImplementedError):  # no model of transformers, or one without such embeddings
        return None
    return size if isinstance(size, int) and size > 0 else None


def _refuse_inputs(model: torch.nn.Module, document_columns: Collection[str]) -> None:
    """Refuse columns with a number a document that the model would take for one of its inputs."""
    inputs = inspect.signature(model.forward).parameters
    taken = [name for name in document_columns if name in inputs]
    if taken:
        raise ContractError(
            f"document_columns names {', '.join(taken)}, which {type(model).__name__}.forward takes for an input of its own: "
            "model(**batch) would mean that. Rename the column in the rows, or leave it out with ignore_columns."
        )


def _padded_length(row_length: int | None, multiple: int | None) -> int | None:
    """The length of every row in a batch; None where it follows from the rows."""
    return row_length if row_length is None or not multiple else -(-row_length // multiple) * multiple
