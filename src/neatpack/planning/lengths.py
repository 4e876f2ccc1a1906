"""Document lengths: what is accepted as such, and a fingerprint to know them again."""

from __future__ import annotations

import zlib

import numpy as np

from neatpack.errors import PlanError

_MAX_DOCUMENTS = 2**31 - 1
_MAX_TOKENS = 2**62
"""Half of what int64 counts: slots rounded up to `align` must fit it too."""

_BLOCK = 1 << 16


def check_lengths(lengths: object, first_doc: int = 0) -> np.ndarray:
    """Return document lengths as a 1-D integer array, copying nothing that already is one.

    Args:
        lengths: what the user gave.
        first_doc: what messages call the first document.

    Raises:
        PlanError: not 1-D, not integers, a negative length, or more documents or tokens than a plan counts.
    """
    array = _as_array(lengths)
    if array.size == 0 and array.ndim == 1:
        return np.zeros(0, np.int32)
    if array.dtype == object and array.ndim == 1 and _all_counts(array.tolist()) and sum(array.tolist()) >= _MAX_TOKENS:
        raise PlanError(_too_many_tokens(array, first_doc))  # integers that no integer dtype holds
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        got = f"shape {array.shape} of dtype {array.dtype}" if array.ndim else f"{type(lengths).__name__}"
        raise PlanError(_not_lengths(got))
    if len(array) > _MAX_DOCUMENTS:
        raise PlanError(f"{len(array)} documents: a plan counts at most 2**31 - 1. Plan them in parts.")
    if array.dtype.kind == "i" and int(array.min()) < 0:
        first = int(np.argmax(array < 0))
        raise PlanError(f"document {first_doc + first} has length {int(array[first])}: a length is zero or more tokens.")
    # A bound first: it is exact for one document, and holds for every plan that fits a machine.
    if int(array.max()) * len(array) >= _MAX_TOKENS and sum(array.tolist()) >= _MAX_TOKENS:
        raise PlanError(_too_many_tokens(array, first_doc))
    # Mixed with signed numbers, NumPy's uint64 turns into floats; below 2**63 the bits are those of int64.
    return array.astype(np.int64) if array.dtype.kind == "u" and array.dtype.itemsize == 8 else array


def fingerprint_lengths(array: np.ndarray) -> str:
    """A checksum of checked lengths and their order; the same for every dtype that holds them."""
    width = np.dtype("<u4") if int(array.max(initial=0)) < 2**32 else np.dtype("<u8")
    checksum = 0
    for begin in range(0, len(array), _BLOCK):
        block = np.ascontiguousarray(array[begin : begin + _BLOCK])
        checksum = zlib.crc32(block.astype(width, copy=False).data, checksum)
    return f"crc32:{checksum:08x}"


def _as_array(lengths: object) -> np.ndarray:
    try:
        return np.asarray(lengths)
    except (ValueError, TypeError, OverflowError) as error:
        raise PlanError(_not_lengths(f"{type(lengths).__name__} ({error})")) from error


def _all_counts(values: list[object]) -> bool:
    return all(isinstance(value, int) and value >= 0 for value in values)


def _too_many_tokens(array: np.ndarray, first_doc: int) -> str:
    longest = int(array.argmax())
    return (
        f"the documents have {sum(array.tolist())} tokens, the longest (document {first_doc + longest}) {array[longest]}: a "
        "plan counts fewer than 2**62. Check that lengths are tokens, not bytes or ids, or plan the documents in parts."
    )


def _not_lengths(got: str) -> str:
    return (
        f"lengths must be a 1-D sequence of integers, one a document; got {got}. "
        "Pass [len(ids) for ids in documents], or a CPU array of those."
    )
