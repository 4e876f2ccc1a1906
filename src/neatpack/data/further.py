"""Further columns of the source, carried along with the documents when the user asks for them.

A token column has a number a token (weights, advantages) and is packed as `input_ids` are. A document column has a number or
text a document (an id, a score, a language); in a packed row it is a list with one entry for each of `seq_lengths`. Everything
else is left out, and reported by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from neatpack.data.records import SEQ_LENGTHS, BadRecordsError, Chunk
from neatpack.errors import SourceError


@dataclass(frozen=True)
class FurtherColumn:
    """A further column of the output: its name, whether it has a value a token or one a document, and their type."""

    name: str
    of_tokens: bool
    type: str

    @property
    def arrow_type(self) -> pa.DataType:
        """The type of its values."""
        return pa.type_for_alias(self.type)

    @property
    def numeric(self) -> bool:
        """Whether its values are numbers, which a batch can hold."""
        return self.type not in ("string", "large_string", "null")


def token_values(name: str, parts: tuple[np.ndarray, np.ndarray], lengths: np.ndarray) -> np.ndarray:
    """Values `[T]` of a token column, given its flat values and offsets, and the tokens of each record.

    Raises:
        BadRecordsError: another number of values than tokens.
    """
    values, offsets = parts
    wrong = np.diff(offsets) != lengths
    if wrong.any():
        first = int(np.argmax(wrong))
        detail = f"{name!r} has {offsets[first + 1] - offsets[first]} values, expected {lengths[first]}, one a token."
        raise BadRecordsError(wrong, "length mismatch", detail)
    return values


def document_values(chunk: Chunk, name: str) -> pa.Array:
    """Values `[D]` of a document column; nulls stay.

    Raises:
        BadRecordsError: values that are neither numbers nor text, or lists of another length than `seq_lengths`.
    """
    column = chunk.columns[name]
    if SEQ_LENGTHS in chunk.columns:  # rows that are packed already have a list of them
        column = _flattened(chunk, name, column)
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if str(column.type) == "string_view":
        column = column.cast(pa.string())
    if not _is_plain(column.type):
        detail = f"{name!r} has values of type {column.type}, expected numbers or text, one a document."
        raise BadRecordsError(np.ones(len(chunk), bool), "not a value", detail)
    return column


def _flattened(chunk: Chunk, name: str, column: pa.Array) -> pa.Array:
    everything = np.ones(len(chunk), bool)
    if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
        detail = f"{name!r} has type {column.type}, expected lists with a value for each of {SEQ_LENGTHS!r}."
        raise BadRecordsError(everything, "not a list", detail)
    counts = column.value_lengths().fill_null(-1).to_numpy()
    expected = chunk.columns[SEQ_LENGTHS].value_lengths().fill_null(0).to_numpy()
    wrong = counts != expected
    if wrong.any():
        first = int(np.argmax(wrong))
        detail = f"{name!r} has {max(counts[first], 0)} values, expected {expected[first]}, one for each of {SEQ_LENGTHS!r}."
        raise BadRecordsError(wrong, "length mismatch", detail)
    return column.flatten()


def _is_plain(kind: pa.DataType) -> bool:
    tests: tuple[Callable[[pa.DataType], bool], ...] = (
        pa.types.is_integer,
        pa.types.is_floating,
        pa.types.is_boolean,
        pa.types.is_string,
        pa.types.is_large_string,
        pa.types.is_null,
    )
    return any(test(kind) for test in tests)


def join_types(name: str, types: Iterable[tuple[str, str]]) -> str:
    """The type that holds a column's values from everywhere.

    Args:
        name: of the column.
        types: where it was seen, and the type there.

    Raises:
        SourceError: there is no such type; names the two places.
    """
    joined, first = "null", ""
    for where, kind in types:
        both = _joined(joined, kind)
        if both is None:
            raise SourceError(
                f"the column {name!r} has {joined} values in {first} and {kind} values in {where}. Bring them to one type, or "
                "leave the column out."
            )
        joined, first = both, first or where
    return joined


def _joined(one: str, other: str) -> str | None:
    if "null" in (one, other) or one == other:
        return other if one == "null" else one
    texts = {"string", "large_string"}
    if one in texts or other in texts:
        return "large_string" if {one, other} <= texts else None
    kinds = [np.dtype(pa.type_for_alias(kind).to_pandas_dtype()) for kind in (one, other)]
    result = np.result_type(*kinds)
    if result.kind == "f" and "f" not in (kinds[0].kind, kinds[1].kind):
        return None  # signed and unsigned numbers of 64 bits
    return str(pa.from_numpy_dtype(result))


def concat_values(arrays: Sequence[pa.Array], kind: pa.DataType) -> pa.Array:
    """Document values as one array of one type."""
    cast = [array.cast(kind) for array in arrays]
    return pa.concat_arrays(cast) if cast else pa.array([], kind)


def feature_of(kind: pa.DataType) -> str:
    """The name that `datasets` has for a type of values."""
    names: dict[Any, str] = {pa.float64(): "float64", pa.float32(): "float32", pa.float16(): "float16"}
    return names.get(kind, str(kind))
