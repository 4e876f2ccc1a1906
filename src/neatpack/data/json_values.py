"""Further columns of JSON Lines: JSON has no types, so they are taken from the records.

A column is what its first values show: whole numbers, numbers, true and false, or text. Whole numbers and fractions mix; a
document column may be null, or missing, in any record.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from itertools import islice
from typing import Any

import pyarrow as pa

from neatpack.data.records import Layout

LOOK_AT = 1000
"""Records that are looked at for types; a column without a value in them is read record by record."""

_KINDS: dict[type, pa.DataType] = {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string()}
_NUMBERS = (pa.int64(), pa.float64())
_DEEPEST = 8  # Arrow's reader runs out of stack where types are nested by the thousand
_WORDS = {pa.bool_(): "true or false", pa.string(): "a string"}


class BadLineError(Exception):
    """A line that cannot be used: a short reason, and what is wrong."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def is_number_list(value: object) -> bool:
    """Whether a JSON value is a list of numbers, and not an empty one."""
    return isinstance(value, list) and bool(value) and all(isinstance(entry, int | float) for entry in value)


def find_kinds(records: Iterable[dict[str, Any]], layout: Layout) -> dict[str, pa.DataType]:
    """Types of the further columns, as far as the first records show them; lists for token columns."""
    kinds: dict[str, pa.DataType] = {}
    wanted = {*layout.token_columns, *layout.document_columns}
    for record in islice(records, LOOK_AT) if wanted else ():
        for name in wanted - kinds.keys():
            value = record.get(name)
            if name in layout.token_columns:
                entries = value if isinstance(value, list) else []
                if kind := _KINDS.get(_type_of(entries)):
                    kinds[name] = pa.list_(kind)
            elif kind := _KINDS.get(type(value)):
                kinds[name] = kind
        if not wanted - kinds.keys():
            break
    return kinds


def find_types(records: Iterable[dict[str, Any]], names: Collection[str]) -> dict[str, pa.DataType]:
    """Arrow types of columns that are left out, as far as the first records show them; none of those nested deeply."""
    values: dict[str, list[Any]] = {name: [] for name in names}
    for record in islice(records, LOOK_AT) if names else ():
        for name in values.keys() & record.keys():
            values[name].append(record[name])
    types = {}
    for name, column in values.items():
        try:
            kind = pa.infer_type(column) if _depth(column) <= _DEEPEST else pa.null()
        except (pa.ArrowException, OverflowError):
            continue
        if not pa.types.is_null(kind):
            types[name] = kind
    return types


def _depth(values: Iterable[Any]) -> int:
    """How many lists and objects lie in each other, counted up to where it is too deep anyway."""
    depth = 0
    while depth <= _DEEPEST:
        nested = [value for value in values if isinstance(value, list | dict)]
        if not nested:
            break
        values = [entry for value in nested for entry in (value.values() if isinstance(value, dict) else value)]
        depth += 1
    return depth


def _type_of(entries: list[Any]) -> type:
    """The type of a list's entries: the wider one of numbers."""
    types = {type(entry) for entry in entries}
    if types == {int, float}:
        return float
    return types.pop() if len(types) == 1 else type(None)


def check_further(record: dict[str, Any], layout: Layout, kinds: dict[str, pa.DataType]) -> None:
    """Check the further columns of a record; `kinds` learns what a first value shows.

    Raises:
        BadLineError: a value of another type than those before it, or of none that can be carried.
    """
    for name in layout.document_columns:
        value = record.get(name)
        if value is not None:
            _check_value(f"{name!r}", value, kinds.setdefault(name, _kind(f"{name!r}", value)))
    for name in layout.token_columns:
        values = record[name]
        if not isinstance(values, list):
            raise BadLineError("not a list", f"{name!r} is {show(values)}, expected a list of numbers, one a token.")
        for position, value in enumerate(values):
            where = f"{name!r}[{position}]"
            kind = kinds.setdefault(name, pa.list_(_kind(where, value))).value_type
            if isinstance(value, str):
                raise BadLineError("not a number", f"{where} is {show(value)}, expected a number.")
            _check_value(where, value, kind)


def _kind(where: str, value: object) -> pa.DataType:
    kind = _KINDS.get(type(value))
    if kind is None:
        raise BadLineError("not a value", f"{where} is {show(value)}, expected a number, true, false or text.")
    return kind


def _check_value(where: str, value: object, kind: pa.DataType) -> None:
    found = _kind(where, value)
    if found != kind and not (found in _NUMBERS and kind in _NUMBERS):
        raise BadLineError("not a value", f"{where} is {show(value)}, expected {_WORDS.get(kind, 'a number')}, as before.")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise BadLineError("not a value", f"{where} is {value}, which does not fit 64 bits.")
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            detail = f"{where} holds half of a surrogate pair at character {error.start}."
            raise BadLineError("invalid UTF-8", detail) from error


def show(value: object) -> str:
    """A JSON value for a message, cut where it is long."""
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
