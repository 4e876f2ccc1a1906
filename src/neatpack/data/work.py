"""The units of work: tokenise a part of the source, pack a unit of documents. Each leaves a record; `job` does them.

A unit of documents (a packing unit) is a run of consecutive documents up to a token budget. Where parts and units are cut
follows from the source alone, so that the bytes of the output do not depend on who does the work, or on how often it was
interrupted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from neatpack.data.further import FurtherColumn, join_types
from neatpack.data.records import ColumnChoice
from neatpack.data.sources import Part
from neatpack.data.store import ShardRecord
from neatpack.data.tokens import PartFiles, PartRecord
from neatpack.planning import PlanCounts


@dataclass(frozen=True)
class TokenizeTask:
    """Tokenise part `index` of the source."""

    index: int
    part: Part


@dataclass(frozen=True)
class UnitSlice:
    """Consecutive documents of one part that belong to a packing unit.

    They are read from the part's files, or from `source` where that is given; `further` says whether there is a file of
    further columns.
    """

    part: int
    dtype: str
    labels: bool
    first_document: int
    documents: int
    first_token: int
    tokens: int
    source: Part | None = None
    further: bool = False


@dataclass(frozen=True)
class PackTask:
    """Plan packing unit `index` and write it as one shard."""

    index: int
    slices: tuple[UnitSlice, ...]
    dtype: str
    labels: bool
    further: tuple[FurtherColumn, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens of the unit."""
        return sum(slice_.tokens for slice_ in self.slices)


@dataclass(frozen=True)
class UnitRecord:
    """What became of a packing unit.

    Attributes:
        shard: what was written; None where no row came of it.
        counts: those of the plan, and `lower_bound` its fewest rows.
        content: hash of what the rows must hold of documents that were read in place, and `pieces` how many pieces that is.
    """

    shard: ShardRecord | None
    counts: PlanCounts
    lower_bound: int
    content: int = 0
    pieces: int = 0

    @classmethod
    def load(cls, path: Path, folder: Path) -> UnitRecord | None:
        """The record of a finished unit, or None where it is not finished or its shard in `folder` is not whole."""
        try:
            record = json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        shard = ShardRecord(**record["shard"]) if record["shard"] else None
        if shard and not _has_size(folder / shard.file, shard.bytes):
            return None
        return cls(**{**record, "shard": shard, "counts": PlanCounts(**record["counts"])})


def _has_size(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except FileNotFoundError:
        return False


def join_columns(parts: Sequence[PartRecord], sources: Sequence[Part], choice: ColumnChoice) -> tuple[FurtherColumn, ...]:
    """The further columns of the output, each of a type that holds its values in every part.

    Raises:
        SourceError: a column that has numbers in one part and text in another.
    """
    found = [(part, source) for part, source in zip(parts, sources, strict=True) if part.documents]
    columns = []
    for name in (*choice.tokens, *choice.documents):
        kind = join_types(name, ((source.files[0], part.types[name]) for part, source in found))
        columns.append(FurtherColumn(name, name in choice.tokens, kind))
    return tuple(columns)


def cut_units(
    parts: Sequence[PartRecord], sources: Sequence[Part], work: Path, budget: int, further: tuple[FurtherColumn, ...] = ()
) -> Iterator[PackTask]:
    """Cut the documents of all parts into packing units: consecutive, at most `budget` tokens each, one document at least.

    Args:
        parts: what the parts hold.
        sources: the parts themselves.
        work: where their lengths are.
        budget: tokens of a unit.
        further: further columns of the output.
    """
    dtype = max((np.dtype(part.dtype) for part in parts if part.documents), key=lambda kind: kind.itemsize)
    labels = any(part.labels for part in parts)
    index, filled = 0, 0
    slices: list[UnitSlice] = []
    for number, part in enumerate(parts):
        ends = np.cumsum(PartFiles(work, number).lengths(0, part.documents))
        source = sources[number] if part.in_place else None
        first = done = 0
        while first < part.documents:
            stop = int(np.searchsorted(ends, done + budget - filled, side="right"))
            if stop == first and not filled:
                stop = first + 1
            if stop > first:
                tokens = int(ends[stop - 1]) - done
                slices.append(
                    UnitSlice(number, part.dtype, part.labels, first, stop - first, done, tokens, source, bool(further))
                )
                first, done, filled = stop, done + tokens, filled + tokens
            if first < part.documents:
                yield PackTask(index, tuple(slices), dtype.name, labels, further)
                index, filled, slices = index + 1, 0, []
    if slices:
        yield PackTask(index, tuple(slices), dtype.name, labels, further)


def sum_counts(counts: Sequence[PlanCounts]) -> PlanCounts:
    """The counts of all units together."""
    return PlanCounts(**{field.name: sum(getattr(count, field.name) for count in counts) for field in fields(PlanCounts)})
