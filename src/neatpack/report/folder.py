"""A packed folder as a plan, and the tokens of some of its rows: lengths of every row are read, tokens only of those shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from neatpack.data.columns import list_parts
from neatpack.data.manifest import options_of
from neatpack.data.options import PackOptions
from neatpack.data.records import IDS, SEQ_LENGTHS
from neatpack.data.store import read_batches
from neatpack.errors import StoreError
from neatpack.planning import PackPlan, PlanCounts

_WAY_OUT = "Run neatpack verify on the folder."


def plan_of_folder(folder: Path, manifest: dict[str, Any], progress: Callable[[str, int, int], None] | None = None) -> PackPlan:
    """The rows of a packed folder as they lie, documents numbered through them.

    Raises:
        StoreError: a shard that is missing or damaged, options that mean nothing, or lengths that are not those of rows.
    """
    options, counts = options_of(folder, manifest), manifest["counts"]
    lengths: list[np.ndarray] = []
    sizes: list[np.ndarray] = []
    total, done = sum(shard["bytes"] for shard in manifest["shards"]), 0
    for shard in manifest["shards"]:
        with _readable(folder / shard["file"]):
            for batch in read_batches(folder / shard["file"], [SEQ_LENGTHS]):
                pieces, offsets = list_parts(batch.column(SEQ_LENGTHS))
                lengths.append(pieces.astype(np.int32))
                sizes.append(np.diff(offsets))
        done += shard["bytes"]
        if progress:
            progress("read", done, total)
    length = np.concatenate([np.zeros(0, np.int32), *lengths])
    documents_in_rows = np.concatenate([np.zeros(0, np.int64), *sizes])
    _check(folder, options, length, documents_in_rows)
    return PackPlan(
        capacity=options.seq_len,
        row_offsets=np.concatenate(([0], np.cumsum(documents_in_rows, dtype=np.int64))),
        doc=np.arange(len(length), dtype=np.int32),
        start=np.broadcast_to(np.int32(0), length.shape),
        length=length,
        lower_bound=_number(folder, counts, "lower_bound"),
        counts=PlanCounts(**{field.name: _number(folder, counts, field.name) for field in fields(PlanCounts)}),
        strategy=options.strategy,
        overflow=options.overflow,
        seed=options.seed,
        align=options.align,
        max_docs_per_row=options.max_docs_per_row,
    )


class FolderTokens:
    """The tokens of rows of a packed folder.

    Args:
        folder: the folder.
        manifest: its manifest.
        row_lengths: `[R]` what `seq_lengths` says of each row, which is checked.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any], row_lengths: np.ndarray) -> None:
        self._shards = [folder / shard["file"] for shard in manifest["shards"]]
        self._row_lengths = row_lengths

    def read(self, rows: np.ndarray) -> list[np.ndarray]:
        """Tokens of each of `rows [K]`, ascending row numbers; nothing after the last of them is read.

        Raises:
            StoreError: a damaged shard, or a row of another length than its documents.
        """
        found: list[np.ndarray] = []
        first = 0
        for path in self._shards:
            if len(found) == len(rows):
                break
            with _readable(path):
                for batch in read_batches(path, [IDS]):
                    inside = rows[(rows >= first) & (rows < first + batch.num_rows)]
                    if len(inside):
                        ids, offsets = list_parts(batch.column(IDS))
                        found += [ids[offsets[row - first] : offsets[row - first + 1]] for row in inside.tolist()]
                    first += batch.num_rows
                    if len(found) == len(rows):
                        break
        for row, ids in zip(rows.tolist(), found, strict=True):
            if len(ids) != self._row_lengths[row]:
                raise StoreError(f"row {row} has {len(ids)} tokens, expected {self._row_lengths[row]}. {_WAY_OUT}")
        return found


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowException, KeyError, ValueError) as error:
        raise StoreError(f"{path}: not readable as a shard of packed rows ({error}). {_WAY_OUT}") from error


def _check(folder: Path, options: PackOptions, length: np.ndarray, documents_in_rows: np.ndarray) -> None:
    if not len(documents_in_rows):
        raise StoreError(f"{folder}: no rows: nothing to look at. {_WAY_OUT}")
    if int(documents_in_rows.min()) < 1 or int(length.min()) < 1:
        raise StoreError(f"{folder}: a row without documents, or a document without tokens. {_WAY_OUT}")
    firsts = np.cumsum(documents_in_rows) - documents_in_rows
    slots = -(-length.astype(np.int64) // options.align) * options.align
    longest = int(np.add.reduceat(slots, firsts).max())
    if longest > options.seq_len:
        slots_of = f" in slots of {options.align}" if options.align > 1 else ""
        raise StoreError(f"{folder}: a row of {longest} tokens{slots_of}, expected {options.seq_len} at most. {_WAY_OUT}")


def _number(folder: Path, counts: dict[str, Any], name: str) -> int:
    value = counts.get(name)
    if type(value) is not int or value < 0:
        raise StoreError(f"{folder}: the manifest's counts.{name} is {value!r}, expected a number. {_WAY_OUT}")
    return value
