"""Slices of memory in, one buffer out: the copy that makes rows of documents.

A copy of a kilobyte takes a fifth of a microsecond, and Python takes twice that to name what is to be copied. So many slices
go to Arrow as one array of binary views (16 bytes that say where a slice lies), whose cast to plain binary is a loop of
memcpy in C. Fewer are joined as memory views, since getting Arrow to start takes as long as a few hundred of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import string_at
from operator import getitem
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

FEW_SLICES = 320
"""Up to so many slices, joining memory views is as fast as a call to Arrow."""

_WINDOW_BITS = 30  # a view counts its offset into a buffer with 31 bits: slices start in the first half of a window
_FEW_WINDOWS = 64
_INLINE_BYTES = 12  # a shorter view holds the bytes themselves


class SliceCopier:
    """Copies slices out of chunks that stay where they are.

    Args:
        chunks: 1-D contiguous arrays of one dtype.
    """

    def __init__(self, chunks: Sequence[np.ndarray]) -> None:
        self._chunks: list[Any] = [chunk.data for chunk in chunks]
        self._width = chunks[0].itemsize if chunks else 1
        addresses = np.array([chunk.ctypes.data for chunk in chunks], np.int64)
        self._sizes = np.array([chunk.nbytes for chunk in chunks], np.int64)
        self._lowest = int(addresses.min(initial=np.iinfo(np.int64).max))
        self._distances = addresses - self._lowest  # of the chunks, in bytes
        windows = 1 + (int((self._distances + self._sizes).max(initial=0)) >> _WINDOW_BITS)
        self._windows = list(map(self._window, range(windows))) if windows <= _FEW_WINDOWS else None
        self._cast, self._to_binary = pc.get_function("cast"), pc.CastOptions(pa.binary())

    def _window(self, number: int) -> pa.Buffer:
        """A name for a range of addresses; only the slices in it are ever read."""
        return pa.foreign_buffer(self._lowest + (number << _WINDOW_BITS), 2 << _WINDOW_BITS)

    def copy(self, chunks: np.ndarray | None, begins: np.ndarray, lengths: np.ndarray) -> Any:
        """The slices one after the other, as a writable buffer.

        Args:
            chunks: `[N]` which chunk each slice lies in; None is the first one for all.
            begins: `[N]` its first value there.
            lengths: `[N]` its values.

        Raises:
            IndexError: one of many slices leads outside of its chunk.
        """
        if len(lengths) <= FEW_SLICES:
            return self._join(chunks, begins, lengths)
        begins, sizes = (numbers.astype(np.int64) * self._width for numbers in (begins, lengths))
        ends = begins + sizes
        room = (self._sizes[0] if chunks is None else self._sizes[chunks]) - ends
        if int(sizes.min()) < 0 or int((begins | room).min()) < 0:
            raise IndexError("a slice leads outside of the memory that it is to be copied from")
        apart = begins[1:] != ends[:-1]
        if chunks is not None:
            apart |= chunks[1:] != chunks[:-1]
        if not apart.all():  # neighbours, as in rows that are packed already, are copied as one
            first = np.concatenate(([0], np.flatnonzero(apart) + 1))
            begins, sizes = begins[first], np.add.reduceat(sizes, first)
            chunks = None if chunks is None else chunks[first]
        largest = int(sizes.max())
        if len(sizes) <= FEW_SLICES or largest >> _WINDOW_BITS or largest * len(sizes) >> 31:
            return self._join(chunks, begins // self._width, sizes // self._width)
        return self._copy(begins + self._distances[0 if chunks is None else chunks], sizes)

    def _join(self, chunks: np.ndarray | None, begins: np.ndarray, lengths: np.ndarray) -> bytearray:
        slices = map(slice, begins.tolist(), (begins + lengths).tolist())
        if chunks is None:
            return bytearray().join(map(self._chunks[0].__getitem__, slices))
        return bytearray().join(map(getitem, map(self._chunks.__getitem__, chunks.tolist()), slices))

    def _copy(self, distances: np.ndarray, sizes: np.ndarray) -> pa.Buffer:
        """Copy `sizes [N]` bytes from `distances [N]` above the lowest address; they are known to be readable."""
        buffers = self._windows
        views = np.zeros((len(sizes), 4), np.int32)
        views[:, 0] = sizes
        views[:, 3] = distances & ((1 << _WINDOW_BITS) - 1)
        if buffers is None:  # far apart, as a heap and a mapped file are
            distinct, views[:, 2] = np.unique(distances >> _WINDOW_BITS, return_inverse=True)
            buffers = list(map(self._window, distinct.tolist()))
        elif len(buffers) > 1:
            views[:, 2] = distances >> _WINDOW_BITS
        if int(sizes.min()) <= _INLINE_BYTES:
            _put_inline(views, distances + self._lowest)
        array = pa.Array.from_buffers(pa.binary_view(), len(sizes), [None, pa.py_buffer(views), *buffers])
        return self._cast.call([array], self._to_binary).buffers()[2]


def _put_inline(views: np.ndarray, addresses: np.ndarray) -> None:
    """Put the bytes of short slices into their views `[N, 4] int32`, where Arrow looks for them."""
    short = np.flatnonzero(views[:, 0] <= _INLINE_BYTES)
    inline = views.view(np.uint8)
    for index, address, size in zip(short.tolist(), addresses[short].tolist(), views[short, 0].tolist(), strict=True):
        inline[index, 4 : 4 + size] = memoryview(string_at(address, size))
