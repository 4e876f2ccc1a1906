"""Slices of documents in, rows out: the gather, and rows as Arrow record batches.

Tokens move once, a slice at a time, in row order.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from neatpack.data.buffers import array_of, numbers_of
from neatpack.data.slices import SliceCopier
from neatpack.planning import PackPlan

BATCH_TOKENS = 1 << 20
"""Rows are gathered and written in record batches of at most this many tokens (one row at least)."""


def gather(values: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Concatenate the slices `values[starts[i] : starts[i] + lengths[i]]`.

    Args:
        values: `[T]`, contiguous.
        starts: `[N]` first position of each slice.
        lengths: `[N]` positions in each slice.
    """
    return np.frombuffer(SliceCopier([values]).copy(None, starts, lengths), values.dtype)


def row_batches(
    plan: PackPlan, doc_starts: np.ndarray, columns: dict[str, np.ndarray], values: dict[str, pa.Array], schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """Gather the rows of a plan, a record batch at a time.

    Args:
        plan: which slices make which row.
        doc_starts: `[D]` where each document starts in the columns.
        columns: token columns `[T]` by name, such as `input_ids`.
        values: document columns `[D]` by name; a row gets the value of each of its slices' documents.
        schema: of the batches: list columns of those names, and `seq_lengths`.
    """
    starts = doc_starts[plan.doc] + plan.start
    row_ends = np.cumsum(plan.row_lengths())
    row = 0
    while row < plan.num_rows:
        done = int(row_ends[row - 1]) if row else 0
        stop = max(row + 1, int(np.searchsorted(row_ends, done + BATCH_TOKENS, side="right")))
        first, last = int(plan.row_offsets[row]), int(plan.row_offsets[stop])
        offsets = np.concatenate(([0], row_ends[row:stop] - done)).astype(np.int32)
        lengths = plan.length[first:last]
        arrays = {name: _lists(offsets, gather(values, starts[first:last], lengths)) for name, values in columns.items()}
        if "labels" in columns:
            arrays["labels"] = _without_repeats(arrays["labels"], arrays["input_ids"])
        doc_offsets = (plan.row_offsets[row : stop + 1] - first).astype(np.int32)
        arrays["seq_lengths"] = _lists(doc_offsets, lengths.astype(np.int32))
        for name, column in values.items():
            arrays[name] = pa.ListArray.from_arrays(array_of(doc_offsets), column.take(array_of(plan.doc[first:last])))
        yield pa.record_batch([arrays[name] for name in schema.names], schema=schema)
        row = stop


def _without_repeats(labels: pa.ListArray, ids: pa.ListArray) -> pa.ListArray:
    """The labels, null in rows that repeat their ids."""
    offsets = numbers_of(labels.offsets)
    values = numbers_of(labels.values)
    differs = np.logical_or.reduceat(values != numbers_of(ids.values), offsets[:-1])
    if differs.all():
        return labels
    lengths = np.diff(offsets)
    kept = np.concatenate(([0], np.cumsum(np.where(differs, lengths, 0)))).astype(np.int32)
    return pa.ListArray.from_arrays(array_of(kept), array_of(values[np.repeat(differs, lengths)]), mask=array_of(~differs))


def _lists(offsets: np.ndarray, values: np.ndarray) -> pa.ListArray:
    """A list array over NumPy buffers, without copying them."""
    return pa.ListArray.from_arrays(array_of(offsets), array_of(values))
