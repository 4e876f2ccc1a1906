"""Plans that keep documents in the order given: next-fit rows, and the concatenated stream cut into rows."""

from __future__ import annotations

import numpy as np

from neatpack.planning.overflow import index_dtype


def next_fit(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Fill one row at a time, in the order given, and open the next when a piece does not fit.

    Returns:
        The non-empty pieces in row order `[N]`, and `row_offsets [R+1] int64` into them.
    """
    pieces = np.flatnonzero(lengths).astype(index_dtype(len(lengths)))
    ends = np.cumsum(lengths[pieces], dtype=np.int64)
    if not len(pieces):
        return pieces, np.zeros(1, np.int64)
    begins = np.concatenate(([0], ends[:-1]))
    # Where the next row starts if a row starts here; following these pointers visits every row once.
    following = memoryview(np.searchsorted(ends, begins + capacity, side="right"))
    offsets = [0]
    while offsets[-1] < len(pieces):
        offsets.append(following[offsets[-1]])
    return pieces, np.array(offsets, np.int64)


def wrapped(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Concatenate everything and cut at every `capacity` tokens; a document cut at a row end goes on in the next row.

    Returns:
        Document, first token and length of every slice `[N]`, and `row_offsets [R+1] int64`.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    row_starts = np.arange(0, total, capacity)
    slice_ends = np.union1d(ends[lengths > 0], np.append(row_starts[1:], total) if total else row_starts)
    slice_starts = np.concatenate(([0], slice_ends[:-1])) if total else slice_ends
    doc = np.searchsorted(ends, slice_starts, side="right").astype(index_dtype(len(lengths)))
    start = slice_starts - (ends[doc] - lengths[doc])
    row_offsets = np.append(np.searchsorted(slice_starts, row_starts), len(slice_starts)).astype(np.int64)
    return doc, start, (slice_ends - slice_starts).astype(np.int32), row_offsets
