"""Checks of the collator's options, made when it is built: a data-loader worker is a bad place to learn of a typo."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

import numpy as np

from neatpack.errors import MetadataError
from neatpack.reserved import BATCH_KEYS, MODEL_ARGUMENTS
from neatpack.train.row_columns import KNOWN_COLUMNS

if TYPE_CHECKING:
    from neatpack.train.collate import PackedCollator


def check_options(collator: PackedCollator) -> None:
    """Refuse options that no batch could honour.

    Raises:
        MetadataError: names the option, what it got and what it takes.
    """
    _check_pad_token_id(collator.pad_token_id)
    _check_vocabulary(collator.vocab_size, collator.pad_token_id)
    _check_number("position_start", collator.position_start, least=0)
    _check_number("align", collator.align, least=1)
    if collator.position_limit is not None:
        _check_number("position_limit", collator.position_limit, least=collator.position_start + 1)
    for name in ("row_length", "pad_to_multiple_of"):
        if getattr(collator, name) is not None:
            _check_number(name, getattr(collator, name), least=1)
    if collator.mask_builder is not None and not callable(collator.mask_builder):
        raise MetadataError(
            f"mask_builder must be a function of PackedSeqParams or None, got {collator.mask_builder!r}. "
            "neatpack.hf.collator_for(model) knows which one a model needs."
        )
    _check_columns(collator)


def _check_pad_token_id(value: object) -> None:
    if not _is_integer(value) or value < 0:
        raise MetadataError(
            f"pad_token_id must be a token id of zero or more, got {value!r}. Where the tokenizer has no padding token, pass "
            "its eos_token_id or 0: padded slots are never attended to by a document and never counted."
        )


def _check_vocabulary(vocab_size: int | None, pad_token_id: int) -> None:
    if vocab_size is None:
        return
    _check_number("vocab_size", vocab_size, least=1)
    if pad_token_id >= vocab_size:
        raise MetadataError(
            f"pad_token_id={pad_token_id} is outside of the vocabulary: ids are 0 to {vocab_size - 1} "
            f"(vocab_size={vocab_size}). Pass the eos_token_id or 0: padded slots are never attended to by a document and "
            "never counted."
        )


def _check_number(name: str, value: object, least: int) -> None:
    if not _is_integer(value) or value < least:
        raise MetadataError(f"{name} must be a whole number of {least} or more, got {value!r}.")


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _check_columns(collator: PackedCollator) -> None:
    """Each column named once, in a list, and none that has a meaning already."""
    options: dict[str, str] = {}
    for option in ("token_columns", "document_columns", "ignore_columns"):
        names = getattr(collator, option)
        if isinstance(names, str):
            raise MetadataError(f"{option} must be a list of column names, got the text {names!r}. Pass [{names!r}].")
        for name in names:
            if name in options:
                raise MetadataError(f"column {name!r} is in {options[name]} and in {option}; it can be one of them.")
            options[name] = option
            if name in KNOWN_COLUMNS:
                raise MetadataError(
                    f"{option} names {name!r}, which the collator reads by itself. Leave it out; to train without the column, "
                    "remove it from the rows."
                )
            if option != "ignore_columns":
                _check_name(option, name)


def _check_name(option: str, name: str) -> None:
    """Refuse a name by which a batch, or the model that is called with it, means something else."""
    if name not in BATCH_KEYS | MODEL_ARGUMENTS:
        return
    who = (
        "the collator makes itself" if name in BATCH_KEYS else "transformers' models, attention and losses take for an argument"
    )
    raise MetadataError(
        f"{option} names {name!r}, which {who}: model(**batch) would mean that. Rename the column in the rows "
        f"(datasets: rows.rename_column({name!r}, {name + '_column'!r})), or leave it out with ignore_columns=[{name!r}]."
    )
