"""Checks of the options that the planners share: each returns what it was given, or raises a PlanError."""

from __future__ import annotations

import numpy as np

from neatpack.errors import PlanError


def check_number(name: str, value: object, unit: str) -> int:
    """A count of one or more as a Python int."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 < value < 2**31:
        raise PlanError(f"{name} must be a positive number of {unit} below 2**31, got {value!r}.")
    return int(value)


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """One of the choices."""
    if value not in choices:
        raise PlanError(f"unknown {name} {value!r}: choose one of {', '.join(choices)}.")


def check_seed(seed: object) -> int:
    """A seed as a Python int."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise PlanError(f"seed must be an integer of zero or more, got {seed!r}.")
    return int(seed)


def check_max_docs(max_docs_per_row: object, strategy: str) -> int | None:
    """The most documents of a row as a Python int, or None; refused where rows are cut out of a stream."""
    if max_docs_per_row is None:
        return None
    if strategy == "wrapped":
        raise PlanError("strategy='wrapped' fills every row: choose 'best_fit' or 'in_order' to limit max_docs_per_row.")
    return check_number("max_docs_per_row", max_docs_per_row, "documents")


def check_align(capacity: int, align: int) -> None:
    """Refuse a row that slots of `align` tokens cannot fill."""
    if capacity % align:
        below, above = capacity // align * align, -(-capacity // align) * align
        ways = f"{above}" if not below else f"{below} or {above}"
        raise PlanError(
            f"capacity {capacity} is not a multiple of align={align}: a document that fits a row only unaligned would have "
            f"no slot. Use a capacity of {ways}."
        )


def check_slices(way: str, documents: int, slices: int, capacity: int) -> None:
    """Refuse more slices, made by cutting documents, than a plan counts."""
    if slices >= 2**31:
        raise PlanError(
            f"{way} would cut {documents} documents into {slices} pieces of up to {capacity} tokens: a plan counts at most "
            "2**31 - 1. Raise the capacity, or plan the documents in parts."
        )
