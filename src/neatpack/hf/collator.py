"""The collator that a model's contract asks for."""

from __future__ import annotations

from typing import Any

import torch

from neatpack.errors import ContractError
from neatpack.hf.contracts import contract_for
from neatpack.train.collate import PackedCollator


def collator_for(model: torch.nn.Module, **options: Any) -> PackedCollator:
    """Build the `PackedCollator` whose batches keep documents apart in `model`.

    Args:
        model: a causal language model with the attention implementation it will train on; see `contract_for`.
        options: those of `PackedCollator`. `pad_token_id` and `position_limit` are the model's where it has them;
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
    config: Any = getattr(model, "config", None)
    pad = getattr(config, "pad_token_id", None)
    defaults = {"pad_token_id": pad} if isinstance(pad, int) and pad >= 0 else {}
    known = getattr(config, "max_position_embeddings", None)
    if isinstance(known, int) and known > contract.position_start:
        defaults["position_limit"] = known
    return PackedCollator(**{**defaults, **options}, mask_builder=contract.mask_builder, position_start=contract.position_start)


def _padded_length(row_length: int | None, multiple: int | None) -> int | None:
    """The length of every row in a batch; None where it follows from the rows."""
    return row_length if row_length is None or not multiple else -(-row_length // multiple) * multiple
