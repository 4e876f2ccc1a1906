"""Values of many documents, one after the other, in the chunks they lie in: how tokens get into rows.

Nothing is copied until a row asks for its slices; then they are copied in row order, see `slices`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from neatpack.data.slices import SliceCopier


class Column(Protocol):
    """A per-token column: positions count its values from the first one of the first document."""

    dtype: np.dtype
    size: int

    def take(self, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """The slices of `lengths [N]` values from `starts [N]` on, one after the other, as one writable array.

        Every slice lies in one chunk: a chunk holds whole documents.
        """


class NumberColumn:
    """Numbers of one dtype, in chunks.

    Args:
        chunks: 1-D arrays; those of another dtype than the first are cast to the common one, which copies them.
    """

    def __init__(self, chunks: Sequence[np.ndarray]) -> None:
        kinds = {chunk.dtype for chunk in chunks if chunk.size} or {np.dtype(np.int64)}
        self.dtype = kinds.pop() if len(kinds) == 1 else np.result_type(*kinds)
        same = [np.ascontiguousarray(chunk, self.dtype) for chunk in chunks]
        self._copier = SliceCopier(same)
        self._firsts = _firsts(same)
        self.size = int(self._firsts[-1])

    def take(self, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """See `Column.take`."""
        chunks, begins = None, starts
        if len(self._firsts) > 2:
            chunks = _chunk_of(self._firsts, starts)
            begins = starts - self._firsts[chunks]
        return np.frombuffer(self._copier.copy(chunks, begins, lengths), self.dtype)

    def whole(self) -> np.ndarray:
        """All values, copied."""
        return self.take(self._firsts[:-1], np.diff(self._firsts))


class BitColumn:
    """Booleans, eight a byte as Arrow keeps them; a slice is unpacked when it is taken."""

    dtype = np.dtype(bool)

    def __init__(self, chunks: Sequence[pa.BooleanArray]) -> None:
        self._bits = [np.frombuffer(chunk.buffers()[1] or b"", np.uint8) for chunk in chunks]
        self._offsets = [chunk.offset for chunk in chunks]
        self._firsts = _firsts(chunks)
        self.size = int(self._firsts[-1])

    def take(self, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """See `Column.take`."""
        chunks = _chunk_of(self._firsts, starts)
        begins = starts - self._firsts[chunks]
        parts = [self._unpack(*slice_) for slice_ in zip(chunks.tolist(), begins.tolist(), lengths.tolist(), strict=True)]
        return np.concatenate(parts) if parts else np.empty(0, bool)

    def _unpack(self, chunk: int, begin: int, length: int) -> np.ndarray:
        first = self._offsets[chunk] + begin
        bits = np.unpackbits(self._bits[chunk][first // 8 : (first + length + 7) // 8], bitorder="little")
        return bits[first % 8 : first % 8 + length].view(bool)


class ValueColumn:
    """One value a document: numbers as an array, anything else (text, numbers with gaps) as Python objects.

    Args:
        chunks: Arrow arrays or lists of Python values.
    """

    def __init__(self, chunks: Sequence[Any]) -> None:
        self._chunks = list(chunks)
        self._firsts = _firsts(self._chunks)
        self.size = int(self._firsts[-1])
        self._numbers = as_numbers(self._chunks)

    def take(self, documents: np.ndarray) -> np.ndarray | list[Any]:
        """The values of `documents [N]`."""
        if self._numbers is not None:
            values: np.ndarray | list[Any] = self._numbers[documents]
            return values
        chunks = _chunk_of(self._firsts, documents)
        within = (documents - self._firsts[chunks]).tolist()
        found = [self._chunks[chunk][index] for chunk, index in zip(chunks.tolist(), within, strict=True)]
        return [value.as_py() if isinstance(value, pa.Scalar) else value for value in found]


def as_numbers(chunks: list[Any]) -> np.ndarray | None:
    """All values as one array, or None where they are no plain numbers."""
    if not chunks:
        return None
    if isinstance(chunks[0], pa.Array):
        kind = chunks[0].type
        plain = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
        if not plain or any(chunk.null_count for chunk in chunks):
            return None
        arrays = [chunk.to_numpy(zero_copy_only=False) for chunk in chunks]
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    values = [value for chunk in chunks for value in chunk]
    if not all(isinstance(value, bool | int | float | np.number | np.bool_) for value in values):
        return None
    numbers = np.array(values)
    return numbers if numbers.dtype.kind in "biuf" else None  # integers beyond 64 bits stay as they are


def _firsts(chunks: Sequence[Any]) -> np.ndarray:
    """How many values lie before each chunk, and in all, `[C+1] int64`."""
    return np.concatenate(([0], np.cumsum([len(chunk) for chunk in chunks], dtype=np.int64))).astype(np.int64)


def _chunk_of(firsts: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The chunk that holds each position; of empty chunks, none does."""
    return np.searchsorted(firsts, positions, side="right") - 1
