"""Arrow columns in, flat NumPy arrays out: values and lengths, checked, without a Python object a token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from neatpack.data.buffers import numbers_of
from neatpack.data.further import document_values, token_values
from neatpack.data.records import ATTENTION_MASK, IDS, LABELS, MASKS, SEQ_LENGTHS, BadRecordsError, Chunk, Places, Problems

IGNORE_LABEL = -100
"""The label of a token that is not learned; the field's convention."""

UNREADABLE = (OSError, pa.ArrowException, UnicodeDecodeError)
"""What Arrow raises where a file is not what it should be; the last one where a name in its schema is no UTF-8."""

_AS_BYTES = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}


@dataclass(frozen=True)
class Documents:
    """Tokenised documents, one after the other.

    Attributes:
        ids: `[T]` integers, the tokens of all documents.
        lengths: `[D] int64` tokens of each document.
        labels: `[T]` integers aligned with `ids` (unshifted), or None where they repeat the ids.
        places: where each document came from.
        tokens: further token columns `[T]`.
        values: further document columns `[D]`.
    """

    ids: np.ndarray
    lengths: np.ndarray
    labels: np.ndarray | None
    places: Places
    tokens: Mapping[str, np.ndarray] = field(default_factory=dict)
    values: Mapping[str, pa.Array] = field(default_factory=dict)

    def take(self, first: int, stop: int) -> Documents:
        """Documents `first` to `stop`."""
        if first == 0 and stop == len(self.lengths):
            return self
        begin, end = int(self.lengths[:first].sum()), int(self.lengths[:stop].sum())
        return Documents(
            self.ids[begin:end],
            self.lengths[first:stop],
            None if self.labels is None else self.labels[begin:end],
            self.places.take(np.arange(first, stop)),
            {name: values[begin:end] for name, values in self.tokens.items()},
            {name: values[first:stop] for name, values in self.values.items()},
        )

    def outline(self) -> Outline:
        """What there is to know of them without their tokens."""
        differs = self.labels is not None and not np.array_equal(self.labels, self.ids)
        return Outline(self.lengths, self.places, self.labels is not None, differs, self.further_types())

    def further_types(self) -> dict[str, str]:
        """Types of the values of further columns."""
        return _types(self.tokens, self.values)


@dataclass(frozen=True)
class Outline:
    """Where tokenised documents lie, before anybody has looked at their tokens.

    Attributes:
        lengths: `[D] int64` tokens of each document.
        places: where each document came from.
        labelled: whether there are labels or masks.
        differs: whether those say anything that the ids do not.
        types: those of the values of further columns.
    """

    lengths: np.ndarray
    places: Places
    labelled: bool
    differs: bool
    types: dict[str, str]


def _types(tokens: Mapping[str, np.ndarray], values: Mapping[str, pa.Array]) -> dict[str, str]:
    of_tokens = {name: str(pa.from_numpy_dtype(column.dtype)) for name, column in tokens.items()}
    return {**of_tokens, **{name: str(column.type) for name, column in values.items()}}


def column_names(schema: pa.Schema) -> list[str]:
    """The columns of a file. Arrow decodes names when they are looked at, not when the file is opened.

    Raises:
        UnicodeDecodeError: a name that is no UTF-8.
    """
    names: list[str] = schema.names
    return names


def check_offsets(*arrays: pa.Array) -> None:
    """Refuse list and text arrays from a file whose offsets lead outside of their values: Arrow believes them, and crashes.

    One pass over the offsets; of text, whether it is UTF-8 is not looked at.

    Raises:
        ArrowInvalid: damaged offsets, or other buffers that do not fit the array.
    """
    for array in arrays:
        array.validate()
        plain = _AS_BYTES.get(array.type)
        (array if plain is None else array.view(plain)).validate(full=True)


def list_parts(array: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Values `[T]` and offsets `[D+1]` (from 0) of an Arrow list array without nulls, slices included; copies no integers."""
    if isinstance(array, pa.FixedSizeListArray):
        array = array.cast(pa.large_list(array.type.value_type))
    offsets = numbers_of(array.offsets)
    first, last = int(offsets[0]), int(offsets[-1])
    values = array.values.slice(first, last - first)
    if pa.types.is_boolean(values.type):
        return values.to_numpy(zero_copy_only=False), offsets - first
    return numbers_of(values), offsets - first


def text_parts(array: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Bytes `[T] uint8` and offsets `[D+1]` (from 0) of an Arrow large_binary or large_string array, slices included."""
    _, offsets_buffer, data = array.buffers()
    offsets = np.frombuffer(offsets_buffer, np.int64, len(array) + 1, array.offset * 8)
    if data is None:
        return np.empty(0, np.uint8), np.zeros(len(array) + 1, np.int64)
    first, last = int(offsets[0]), int(offsets[-1])
    return np.frombuffer(data, np.uint8, last - first, first), offsets - first


def checked_text(chunk: Chunk, problems: Problems) -> tuple[pa.Array, Chunk]:
    """The text column as valid UTF-8 `large_string`, without nulls, and the chunk less the bad records, which are reported."""
    while True:
        try:
            text = _text(chunk)
            for name in chunk.layout.document_columns:
                document_values(chunk, name)
            return text, chunk
        except BadRecordsError as bad:
            chunk = problems.without_bad(chunk, bad)


def checked_ids(chunk: Chunk, vocab_size: int | None, problems: Problems) -> Documents:
    """The documents of a pre-tokenised chunk; masks are applied to labels, bad records are reported."""
    while True:
        try:
            return _documents(chunk, vocab_size)
        except BadRecordsError as bad:
            chunk = problems.without_bad(chunk, bad)


def checked_outline(chunk: Chunk, problems: Problems, *, compare: bool) -> Outline:
    """The outline of a pre-tokenised chunk, from offsets alone; labels and masks are read only to `compare` them."""
    while True:
        try:
            columns, lengths, places = _structure(chunk)
            tokens, values = _further(chunk, columns)
            labelled = any(name in columns for name in (LABELS, *MASKS))
            return Outline(lengths, places, labelled, compare and _differs(columns), _types(tokens, values))
        except BadRecordsError as bad:
            chunk = problems.without_bad(chunk, bad)


def _text(chunk: Chunk) -> pa.Array:
    name = str(chunk.layout.text)
    column = chunk.columns[name]
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind = column.type
    textual = pa.types.is_string(kind) or pa.types.is_large_string(kind) or kind in (pa.binary(), pa.large_binary())
    if not (textual or str(kind) in ("string_view", "binary_view")):
        raise BadRecordsError(np.ones(len(chunk), bool), "not text", f"{name!r} has type {kind}, expected strings.")
    _refuse_nulls(column, name, "null text", "a string")
    column = column.cast(pa.large_binary())
    text = column.view(pa.large_string())
    try:
        text.validate(full=True)
    except pa.ArrowInvalid as error:
        mask = np.array([not _is_utf8(value.as_buffer()) for value in column])
        position = _bad_byte(column[int(np.argmax(mask))].as_py())
        detail = f"invalid UTF-8 at byte {position}, expected UTF-8 text."
        raise BadRecordsError(mask, "invalid UTF-8", detail) from error
    return text


def _is_utf8(data: pa.Buffer) -> bool:
    try:
        str(memoryview(data), "utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _bad_byte(text: bytes) -> int:
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return error.start
    return len(text)


def _refuse_nulls(column: pa.Array, name: str, reason: str, expected: str) -> None:
    if column.null_count:
        mask = column.is_null().to_numpy(zero_copy_only=False)
        raise BadRecordsError(mask, reason, f"{name!r} is null, expected {expected}.")


def _documents(chunk: Chunk, vocab_size: int | None) -> Documents:
    columns, lengths, places = _structure(chunk)
    ids, offsets = columns[IDS]
    limit = vocab_size or 2**31
    expected = f"0 to {limit - 1} (the vocabulary)" if vocab_size else f"0 to {limit - 1} (32 bits)"
    _check_values(IDS, ids, offsets, 0, limit, "id out of range", expected)
    return Documents(ids, lengths, _labels(columns, offsets, limit), places, *_further(chunk, columns))


def _further(
    chunk: Chunk, columns: dict[str, tuple[np.ndarray, np.ndarray]]
) -> tuple[dict[str, np.ndarray], dict[str, pa.Array]]:
    """Further token columns `[T]` and document columns `[D]`."""
    lengths = np.diff(columns[IDS][1])
    layout = chunk.layout
    tokens = {name: token_values(name, list_values(chunk, name, floats=True), lengths) for name in layout.token_columns}
    return tokens, {name: document_values(chunk, name) for name in layout.document_columns}


def _structure(chunk: Chunk) -> tuple[dict[str, tuple[np.ndarray, np.ndarray]], np.ndarray, Places]:
    """Values and offsets of every list column, checked to fit each other; lengths and places of the documents."""
    if SEQ_LENGTHS in chunk.columns and LABELS in chunk.columns:
        chunk = _fill_labels(chunk)
    columns = {name: list_values(chunk, name) for name in chunk.layout.lists}
    lengths = np.diff(columns[IDS][1]).astype(np.int64)
    for name, (_, other) in columns.items():
        if name != SEQ_LENGTHS:
            _check_lengths(name, np.diff(other), lengths)
    if SEQ_LENGTHS in columns:
        return columns, *_unpack(columns[SEQ_LENGTHS], lengths, chunk.places)
    return columns, lengths, chunk.places


def _differs(columns: dict[str, tuple[np.ndarray, np.ndarray]]) -> bool:
    ids, offsets = columns[IDS]
    _check_attention(columns, offsets)
    differs = LABELS in columns and not np.array_equal(columns[LABELS][0], ids)
    for name in (name for name in MASKS if name in columns):
        differs |= not _checked_mask(name, columns[name][0], offsets).all()
    return differs


def _fill_labels(chunk: Chunk) -> Chunk:
    """Packed rows leave labels null where they repeat the ids."""
    ids = chunk.columns[IDS].cast(chunk.columns[LABELS].type)
    return replace(chunk, columns={**chunk.columns, LABELS: pc.coalesce(chunk.columns[LABELS], ids)})


def list_values(chunk: Chunk, name: str, *, floats: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Flat values and offsets of a list column without nulls; of integers, or with `floats` of any numbers.

    Raises:
        BadRecordsError: nulls, or something else than such lists.
    """
    expected = "numbers" if floats else "integers"
    column = chunk.columns[name]
    kind = column.type
    everything = np.ones(len(chunk), bool)
    listed = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if not listed:
        raise BadRecordsError(everything, "not a list", f"{name!r} has type {kind}, expected lists of {expected}.")
    _refuse_nulls(column, name, "null list", f"a list of {expected}")
    inner = kind.value_type
    boolean = (floats or name in MASKS) and pa.types.is_boolean(inner)
    if not (pa.types.is_integer(inner) or boolean or pa.types.is_null(inner) or (floats and pa.types.is_floating(inner))):
        raise BadRecordsError(everything, "not an integer", f"{name!r} holds {inner} values, expected {expected}.")
    flat = column.flatten()
    if flat.null_count:
        lengths = column.value_lengths().to_numpy()
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        missing = np.flatnonzero(flat.is_null().to_numpy(zero_copy_only=False))
        owners = np.searchsorted(offsets, missing, side="right") - 1
        detail = f"{name!r}[{missing[0] - offsets[owners[0]]}] is null, expected {'a number' if floats else 'an integer'}."
        raise BadRecordsError(_mask(len(chunk), owners), "not an integer", detail)
    if pa.types.is_null(inner):  # only empty lists
        return np.empty(0, np.int64), np.zeros(len(chunk) + 1, np.int64)
    return list_parts(column)


def _mask(size: int, indices: np.ndarray) -> np.ndarray:
    mask = np.zeros(size, bool)
    mask[indices] = True
    return mask


def _check_lengths(name: str, lengths: np.ndarray, expected: np.ndarray) -> None:
    wrong = lengths != expected
    if wrong.any():
        first = int(np.argmax(wrong))
        detail = f"{name!r} has {lengths[first]} values, expected {expected[first]}, one for each of {IDS!r}."
        raise BadRecordsError(wrong, "length mismatch", detail)


def _check_values(name: str, values: np.ndarray, offsets: np.ndarray, low: int, high: int, reason: str, expected: str) -> None:
    """Refuse values outside `low <= value < high`; one pass that allocates nothing where all is well."""
    if not len(values):
        return
    # Seen as unsigned, a negative number is a very large one.
    unsigned = values.view(f"u{values.itemsize}") if values.dtype.kind == "i" else values
    if int(unsigned.max()) < high and (low == 0 or int(values.min()) >= low):
        return
    _refuse_where((values < low) | (values >= high), name, values, offsets, reason, expected)


def _refuse_where(wrong: np.ndarray, name: str, values: np.ndarray, offsets: np.ndarray, reason: str, expected: str) -> None:
    at = np.flatnonzero(wrong)
    owners = np.searchsorted(offsets, at, side="right") - 1
    detail = f"{name!r}[{at[0] - offsets[owners[0]]}] is {values[at[0]]}, expected {expected}."
    raise BadRecordsError(_mask(len(offsets) - 1, owners), reason, detail)


def _labels(columns: dict[str, tuple[np.ndarray, np.ndarray]], offsets: np.ndarray, limit: int) -> np.ndarray | None:
    """Labels with every mask applied, or None where the file has neither."""
    _check_attention(columns, offsets)
    masks = [name for name in MASKS if name in columns]
    if LABELS not in columns and not masks:
        return None
    values = columns[LABELS if LABELS in columns else IDS][0]
    if LABELS in columns:
        wrong = ((values < 0) & (values != IGNORE_LABEL)) | (values >= limit)
        if wrong.any():
            _refuse_where(wrong, LABELS, values, offsets, "label out of range", f"{IGNORE_LABEL} or an id below {limit}")
    labels = values.astype(np.int32)
    for name in masks:
        labels[_checked_mask(name, columns[name][0], offsets) == 0] = IGNORE_LABEL
    return labels


def _check_attention(columns: dict[str, tuple[np.ndarray, np.ndarray]], offsets: np.ndarray) -> None:
    if ATTENTION_MASK in columns:
        expected = "1 everywhere: padding does not belong in a document. Tokenise without padding"
        _check_values(ATTENTION_MASK, columns[ATTENTION_MASK][0], offsets, 1, 2, "padded record", expected)


def _checked_mask(name: str, mask: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    if mask.dtype != bool:
        _check_values(name, mask, offsets, 0, 2, "mask out of range", "0 or 1")
    return mask


def _unpack(seq_lengths: tuple[np.ndarray, np.ndarray], lengths: np.ndarray, places: Places) -> tuple[np.ndarray, Places]:
    """Documents of rows that are packed already: each piece of `seq_lengths` is a document."""
    pieces, offsets = seq_lengths
    _check_values(SEQ_LENGTHS, pieces, offsets, 0, 2**31, "length mismatch", "a length of zero or more")
    ends = np.concatenate(([0], np.cumsum(pieces, dtype=np.int64)))
    sums = ends[offsets[1:]] - ends[offsets[:-1]]
    wrong = sums != lengths
    if wrong.any():
        first = int(np.argmax(wrong))
        detail = f"{SEQ_LENGTHS!r} sums to {sums[first]}, expected {lengths[first]}, the number of {IDS!r}."
        raise BadRecordsError(wrong, "length mismatch", detail)
    return pieces.astype(np.int64), places.take(np.repeat(np.arange(len(lengths)), np.diff(offsets)))
