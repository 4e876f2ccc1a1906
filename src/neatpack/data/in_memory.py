"""A record as Python holds it in, its documents out: each column an array (a value a token) or one value (a document's own)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from neatpack.data.records import ATTENTION_MASK, IDS, SEQ_LENGTHS
from neatpack.errors import SourceError

Document = dict[str, Any]
"""Columns by name: `input_ids` and others with a value a token as 1-D arrays, anything else the document's own value."""


def documents_of(record: Any, where: str, ignore: Collection[str] = ()) -> list[Document]:
    """The documents of a record: itself, or the pieces of its `seq_lengths`.

    Args:
        record: token ids (a sequence, array or CPU tensor), or a mapping with `input_ids` and further columns.
        where: what messages call it.
        ignore: columns to leave out knowingly.

    Raises:
        SourceError: no usable `input_ids`, a column that is neither one value a token nor one a document, or padding.
    """
    given = record if isinstance(record, Mapping) else {IDS: record}
    if IDS not in given:
        raise SourceError(f"{where} has no {IDS!r}, only {', '.join(map(str, given)) or 'nothing'}. Tokenise the text first.")
    ids = _array(given[IDS])
    if ids is None or ids.dtype.kind not in "iu":
        raise SourceError(f"{where}: {IDS!r} must be a flat list of integers, got {_describe(given[IDS])}.")
    packed = given.get(SEQ_LENGTHS)
    pieces = None if packed is None else _pieces(packed, len(ids), where)
    document: Document = {IDS: ids}
    documents = [document] if pieces is None else [{IDS: ids[begin:end]} for begin, end in pieces]
    for name, value in given.items():
        if name in (IDS, SEQ_LENGTHS) or name in ignore:
            continue
        if name == "labels" and value is None and pieces is not None:
            value = ids  # packed rows leave labels out where they repeat the ids
        _add_column(documents, name, value, len(ids), pieces, where)
    for document in documents:
        check_mask(document.pop(ATTENTION_MASK, None), where)
    return documents


def check_mask(mask: np.ndarray | None, where: str) -> None:
    """Refuse an attention mask that hides tokens; one that hides none says nothing, and is left out.

    Raises:
        SourceError: there is padding in a document.
    """
    if mask is not None and not np.all(mask):
        raise SourceError(
            f"{where}: {ATTENTION_MASK!r} hides tokens, and padding does not belong in a document. Tokenise without padding."
        )


def _add_column(
    documents: list[Document], name: str, value: Any, tokens: int, pieces: list[tuple[int, int]] | None, where: str
) -> None:
    array = None if _is_single(value) else _array(value)
    if array is not None and len(array) == tokens:
        for document, (begin, end) in zip(documents, pieces or [(0, tokens)], strict=True):
            document[name] = array[begin:end]
    elif (
        pieces is not None and isinstance(value, Sequence | np.ndarray) and not _is_single(value) and len(value) == len(pieces)
    ):
        for document, own in zip(documents, value, strict=True):
            document[name] = own
    elif pieces is None and _is_single(value):
        documents[0][name] = value
    else:
        ways = f"one value a token ({tokens}) or " + ("a document" if pieces is None else f"a document ({len(pieces)})")
        raise SourceError(
            f"{where}: packed rows cannot carry {name!r}: expected {ways}, got {_describe(value)}. Leave it out with "
            f"ignore_columns=[{name!r}]."
        )


def _pieces(seq_lengths: Any, tokens: int, where: str) -> list[tuple[int, int]]:
    """Where each document of a packed row begins and ends."""
    lengths = _array(seq_lengths)
    if lengths is None or lengths.dtype.kind not in "iu" or (len(lengths) and lengths.min() < 0) or lengths.sum() != tokens:
        raise SourceError(
            f"{where}: {SEQ_LENGTHS!r} must add up to its {tokens} {IDS!r}, got {_describe(seq_lengths)}. Pack the rows again."
        )
    ends = np.cumsum(lengths, dtype=np.int64)
    return list(zip((ends - lengths).tolist(), ends.tolist(), strict=True))


def _is_single(value: Any) -> bool:
    if isinstance(value, np.ndarray) or hasattr(value, "__array__"):
        return np.ndim(value) == 0
    return isinstance(value, str | bytes) or not isinstance(value, Sequence | Mapping | set)


def _array(value: Any) -> np.ndarray | None:
    """A flat list of numbers as an array, or None where it is none."""
    if isinstance(value, str | bytes | Mapping | set) or value is None:
        return None
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, OverflowError):
        return None
    if array.ndim != 1:
        return None
    if not array.size and array.dtype.kind == "f":  # what NumPy makes of an empty list
        return array.astype(np.int64)
    return array if array.dtype.kind in "iubf" else None


def _describe(value: Any) -> str:
    if hasattr(value, "dtype"):
        return f"shape {tuple(value.shape)} of {value.dtype}"
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, Sequence | Mapping | set) else type(value).__name__
