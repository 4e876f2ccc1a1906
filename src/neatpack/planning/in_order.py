"""Plans that keep documents in the order given: next-fit rows, and the concatenated stream cut into rows."""

from __future__ import annotations

import numpy as np

from neatpack.planning.plan import Rows


def plan_next_fit(lengths: np.ndarray, capacity: int) -> Rows:
    """Fill one row at a time, in the order given, and open the next when a piece does not fit."""
    pieces = np.flatnonzero(lengths).astype(np.int32)
    sizes = lengths[pieces].astype(np.int32, copy=False)
    ends = np.cumsum(sizes, dtype=np.int64)
    # Where the next row starts if a row starts here; following these pointers visits every row once.
    following = np.searchsorted(ends, ends - sizes + capacity, side="right").data
    offsets = [0]
    while offsets[-1] < len(pieces):
        offsets.append(following[offsets[-1]])
    return Rows(pieces, sizes, np.array(offsets, np.int64))


def plan_wrapped(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Concatenate everything and cut at every `capacity` tokens; a document cut at a row end goes on in the next row.

    Returns:
        Document, first token and length of every slice `[N]`, and `row_offsets [R+1] int64`.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    row_starts = np.arange(0, total, capacity)
    slice_ends = np.union1d(ends[lengths > 0], np.append(row_starts[1:], total) if total else row_starts)
    slice_starts = np.concatenate(([0], slice_ends[:-1])) if total else slice_ends
    doc = np.searchsorted(ends, slice_starts, side="right").astype(np.int32)
    start = slice_starts - (ends[doc] - lengths[doc])
    row_offsets = np.append(np.searchsorted(slice_starts, row_starts), len(slice_starts)).astype(np.int64)
    return doc, start, (slice_ends - slice_starts).astype(np.int32), row_offsets
