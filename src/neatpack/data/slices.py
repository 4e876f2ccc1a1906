"""Slices of memory in, one buffer out: the copy that makes rows of documents.

A copy of a kilobyte takes a fifth of a microsecond, and Python takes twice that to name what is to be copied. So many slices
go to Arrow as one array of binary views (16 bytes that say where a slice lies), whose cast to plain binary is a loop of
memcpy in C. Fewer are joined as memory views, since getting Arrow to start takes as long as a hundred of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import string_at
from operator import getitem
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

FEW_SLICES = 512
"""Up to so many slices, joining memory views is as fast as a call to Arrow."""

_WINDOW_BITS = 30  # a view counts its offset into a buffer with 31 bits: slices start in the first half of a window
_INLINE_BYTES = 12  # a shorter view holds the bytes themselves


class SliceCopier:
    """Copies slices out of chunks that stay where they are.

    Args:
        chunks: 1-D contiguous arrays of one dtype.
    """

    def __init__(self, chunks: Sequence[np.ndarray]) -> None:
        self._views: list[Any] = [chunk.view(np.uint8).data for chunk in chunks]
        self._addresses = np.array([chunk.ctypes.data for chunk in chunks], np.int64)
        self._sizes = np.array([chunk.nbytes for chunk in chunks], np.int64)

    def copy(self, chunks: np.ndarray | None, begins: np.ndarray, sizes: np.ndarray) -> Any:
        """The slices one after the other, as a writable buffer.

        Args:
            chunks: `[N]` which chunk each slice lies in; None is the first one for all.
            begins: `[N] int64` its first byte there.
            sizes: `[N] int64` its bytes.

        Raises:
            IndexError: a slice that leads outside of its chunk.
        """
        if len(sizes) <= FEW_SLICES:
            return self._join(chunks, begins, sizes)
        ends = begins + sizes
        bounds = self._sizes[0] if chunks is None else self._sizes[chunks]
        if int(begins.min()) < 0 or int(sizes.min()) < 0 or (ends > bounds).any():
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
            return self._join(chunks, begins, sizes)
        return _copy(begins + (self._addresses[0] if chunks is None else self._addresses[chunks]), sizes)

    def _join(self, chunks: np.ndarray | None, begins: np.ndarray, sizes: np.ndarray) -> bytearray:
        slices = map(slice, begins.tolist(), (begins + sizes).tolist())
        if chunks is None:
            return bytearray().join(map(self._views[0].__getitem__, slices))
        return bytearray().join(map(getitem, map(self._views.__getitem__, chunks.tolist()), slices))


def _copy(addresses: np.ndarray, sizes: np.ndarray) -> pa.Buffer:
    """Copy `sizes [N]` bytes from each of `addresses [N]`, which somebody else keeps alive and knows to be readable."""
    windows = addresses >> _WINDOW_BITS
    first, last = int(windows.min()), int(windows.max())
    used: Sequence[int] = range(first, last + 1)
    windows -= first
    if len(used) > len(sizes):  # far apart, as a heap and a mapped file are
        distinct, windows = np.unique(windows, return_inverse=True)
        used = [first + window for window in distinct.tolist()]
    views = np.zeros((len(sizes), 4), np.int32)
    views[:, 0] = sizes
    views[:, 2] = windows
    views[:, 3] = addresses & ((1 << _WINDOW_BITS) - 1)
    short = np.flatnonzero(sizes <= _INLINE_BYTES)
    inline = views.view(np.uint8)
    for index, address, size in zip(short.tolist(), addresses[short].tolist(), sizes[short].tolist(), strict=True):
        inline[index, 4 : 4 + size] = memoryview(string_at(address, size))
    # A window is a name for a range of addresses; only the slices in it are ever read.
    buffers = [pa.foreign_buffer(window << _WINDOW_BITS, 2 << _WINDOW_BITS) for window in used]
    array = pa.Array.from_buffers(pa.binary_view(), len(sizes), [None, pa.py_buffer(views), *buffers])
    return pc.get_function("cast").call([array], pc.CastOptions(pa.binary())).buffers()[2]
