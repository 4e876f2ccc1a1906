"""Plans that keep documents in the order given: next-fit rows, and the concatenated stream cut into rows."""

from __future__ import annotations

from array import array

import numpy as np

from neatpack.planning.histogram import BLOCK
from neatpack.planning.options import check_slices
from neatpack.planning.plan import Rows


def plan_next_fit(lengths: np.ndarray, capacity: int, max_docs_per_row: int | None) -> Rows:
    """Fill one row at a time, in the order given, and open the next when a piece does not fit."""
    pieces = np.flatnonzero(lengths).astype(np.int32)
    sizes = lengths[pieces].astype(np.int32, copy=False)
    ends = np.cumsum(sizes, dtype=np.int64)
    offsets = array("q", [0])
    for begin in range(0, len(pieces), BLOCK):
        block = slice(begin, begin + BLOCK)
        # Where the next row starts if a row starts here; following these pointers visits every row once.
        following = np.searchsorted(ends, ends[block] - sizes[block] + capacity, side="right")
        if max_docs_per_row:
            np.minimum(following, np.arange(begin, begin + len(following)) + max_docs_per_row, out=following)
        pointers, at = following.data, offsets[-1]
        while at < begin + len(following):
            at = pointers[at - begin]
            offsets.append(at)
    return Rows(pieces, sizes, np.frombuffer(offsets, np.int64))


def plan_wrapped(lengths: np.ndarray, capacity: int, align: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Concatenate everything and cut at every `capacity` tokens; a document cut at a row end goes on in the next row.

    With `align`, every document takes a multiple of `align` tokens of the stream, and `capacity` is such a multiple too:
    so a cut never leaves a slice without tokens.

    Returns:
        Document `[N] int32`, first token `[N]` and length `[N] int32` of every slice, and `row_offsets [R+1] int64`.

    Raises:
        PlanError: more slices than a plan counts.
    """
    num_slices, num_tokens = _stream_size(lengths, capacity, align)
    check_slices("wrapped", len(lengths), num_slices, capacity)
    doc, length = np.empty(num_slices, np.int32), np.empty(num_slices, np.int32)
    start = np.empty(num_slices, np.int32 if int(lengths.max(initial=0)) < 2**31 else np.int64)
    per_row = np.zeros(-(-num_tokens // capacity), np.int64)
    position = filled = 0
    for begin in range(0, len(lengths), BLOCK):
        tokens = lengths[begin : begin + BLOCK].astype(np.int64)
        first, slots, slices = _stream_block(tokens, position, capacity, align)
        which = np.repeat(np.arange(len(tokens)), slices)
        nth_slice = np.arange(len(which)) - np.repeat(np.cumsum(slices) - slices, slices)
        row = (first // capacity)[which] + nth_slice
        from_token = np.maximum(row * capacity - first[which], 0)
        out = slice(filled, filled + len(which))
        doc[out] = which + begin
        start[out] = from_token
        length[out] = np.minimum(tokens[which] - from_token, (row + 1) * capacity - first[which] - from_token)
        if len(row):
            per_row[row[0] : row[-1] + 1] += np.bincount(row - row[0])
        position += int(slots.sum())
        filled += len(which)
    return doc, start, length, np.concatenate(([0], np.cumsum(per_row)))


def _stream_size(lengths: np.ndarray, capacity: int, align: int) -> tuple[int, int]:
    """Slices and tokens (alignment included) of the whole stream."""
    num_slices = position = 0
    for begin in range(0, len(lengths), BLOCK):
        _, slots, slices = _stream_block(lengths[begin : begin + BLOCK].astype(np.int64), position, capacity, align)
        num_slices += int(slices.sum())
        position += int(slots.sum())
    return num_slices, position


def _stream_block(tokens: np.ndarray, position: int, capacity: int, align: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where documents start in the stream, the tokens they take of it, and the rows that each lies in."""
    slots = -(-tokens // align) * align
    ends = position + np.cumsum(slots)
    first = ends - slots
    return first, slots, np.where(slots > 0, (ends - 1) // capacity - first // capacity + 1, 0)
