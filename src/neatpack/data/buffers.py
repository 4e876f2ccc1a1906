"""NumPy views of Arrow arrays of numbers, and back, without a copy.

`to_numpy` and `pa.array` do the same, but import pandas for it where it is installed, which takes longer than packing ten
million tokens.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa


def numbers_of(array: pa.Array) -> np.ndarray:
    """The numbers `[N]` of an Arrow array without nulls."""
    dtype = np.dtype(array.type.to_pandas_dtype())
    data = array.buffers()[1]
    if data is None:
        return np.empty(0, dtype)
    return np.frombuffer(data, dtype, len(array), array.offset * dtype.itemsize)


def array_of(values: np.ndarray) -> pa.Array:
    """An Arrow array over numbers `[N]`; booleans are packed into bits, which copies them."""
    if values.dtype == bool:
        bits = np.packbits(values, bitorder="little")
        return pa.Array.from_buffers(pa.bool_(), len(values), [None, pa.py_buffer(bits)])
    return pa.Array.from_buffers(
        pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(np.ascontiguousarray(values))]
    )
