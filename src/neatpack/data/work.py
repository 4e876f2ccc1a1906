"""The units of work: tokenise a part of the source, pack a unit of documents. Each is done once and leaves a record.

A unit of documents (a packing unit) is a run of consecutive documents up to a token budget. Where parts and units are cut
follows from the source alone, so that the bytes of the output do not depend on who does the work, or on how often it
was interrupted: work whose record is there is not done again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import chain
from pathlib import Path

import numpy as np

from neatpack.data.columns import Documents
from neatpack.data.content import ContentHash, expected_pieces
from neatpack.data.documents import DocumentReader
from neatpack.data.options import PackOptions
from neatpack.data.records import Problems
from neatpack.data.rows import row_batches
from neatpack.data.sources import Part
from neatpack.data.store import ShardRecord, row_schema, write_shard
from neatpack.data.tokens import PartFiles, PartRecord, PartWriter, narrowest_dtype, write_json
from neatpack.data.workplace import writing
from neatpack.planning import PackPlan, PlanCounts, plan_rows

EXAMPLES = 5
"""How many documents an error about many of them names."""


@dataclass(frozen=True)
class TokenizeTask:
    """Tokenise part `index` of the source."""

    index: int
    part: Part


@dataclass(frozen=True)
class UnitSlice:
    """Consecutive documents of one part that belong to a packing unit."""

    part: int
    dtype: str
    labels: bool
    first_document: int
    documents: int
    first_token: int
    tokens: int


@dataclass(frozen=True)
class PackTask:
    """Plan packing unit `index` and write it as one shard."""

    index: int
    slices: tuple[UnitSlice, ...]
    dtype: str
    labels: bool

    @property
    def tokens(self) -> int:
        """Tokens of the unit."""
        return sum(slice_.tokens for slice_ in self.slices)


@dataclass(frozen=True)
class UnitRecord:
    """What became of a packing unit: its shard (None where no row came of it), the plan's counts and lower bound."""

    shard: ShardRecord | None
    counts: PlanCounts
    lower_bound: int

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
        return cls(shard, PlanCounts(**record["counts"]), record["lower_bound"])


@dataclass(frozen=True)
class MakePackJob:
    """Builds the job that does both kinds of task; a picklable factory for the engine.

    Attributes:
        options: what was asked for.
        folder: the .partial folder; shards go there, everything else into `work` below it.
        work: the work folder.
    """

    options: PackOptions
    folder: Path
    work: Path

    def __call__(self) -> PackJob:
        """Build the job, in the process that will do it."""
        return PackJob(self.options, self.folder, self.work)


class PackJob:
    """Does tasks."""

    def __init__(self, options: PackOptions, folder: Path, work: Path) -> None:
        self._options = options
        self._folder = folder
        self._work = work
        self._reader = DocumentReader(options)

    def __call__(self, task: TokenizeTask | PackTask, tick: Callable[[int], None]) -> PartRecord | UnitRecord:
        """Do a task, unless its record says that it is done."""
        with writing(self._folder):
            return self._do(task, tick)

    def _do(self, task: TokenizeTask | PackTask, tick: Callable[[int], None]) -> PartRecord | UnitRecord:
        if isinstance(task, TokenizeTask):
            files = PartFiles(self._work, task.index)
            done = files.load_record() or self._tokenize(task.part, files)
            tick(task.part.size)
            return done
        record_path = self._work / f"unit-{task.index:05d}.json"
        record = UnitRecord.load(record_path, self._folder) or self._pack(task, record_path)
        tick(task.tokens)
        return record

    def _tokenize(self, part: Part, files: PartFiles) -> PartRecord:
        options = self._options
        problems = Problems(options.skip_bad)
        record = PartRecord(dtype=narrowest_dtype(options.vocab_size).name)
        content = ContentHash()
        chunks = self._reader.read(part, problems)
        first = next(chunks, None)
        if first is not None:
            layout = first[0].layout
            record.text = layout.text is not None
            record.ignored_columns = list(layout.ignored)
            if record.text:
                record.dtype = narrowest_dtype(self._reader.tokenizer.info.vocab_size).name
        with PartWriter(files, np.dtype(record.dtype)) as writer:
            for _, documents in chain([first] if first else [], chunks):
                writer.append(documents.ids, documents.lengths, documents.labels)
                self._count(documents, record)
                add_content(content, documents, options)
            record.skipped, record.examples = problems.counts, problems.examples
            record.content, record.pieces = content.total, content.documents
            writer.finish(record)
        return record

    def _count(self, documents: Documents, record: PartRecord) -> None:
        record.documents += len(documents.lengths)
        record.tokens += len(documents.ids)
        if documents.labels is not None:
            record.labelled = True
            record.labels = record.labels or not np.array_equal(documents.labels, documents.ids)
        if self._options.overflow == "error" and self._options.strategy != "wrapped":
            too_long = np.flatnonzero(documents.lengths > self._options.seq_len)
            record.too_long += len(too_long)
            for index in too_long[: EXAMPLES - len(record.too_long_examples)].tolist():
                record.too_long_examples.append(f"{documents.places.name(index)} ({documents.lengths[index]} tokens)")

    def _pack(self, task: PackTask, record_path: Path) -> UnitRecord:
        lengths, columns = self._load(task)
        plan = self._plan(task, lengths)
        shard = None
        if plan.num_rows:
            schema = row_schema(np.dtype(task.dtype), labels=task.labels)
            doc_starts = np.cumsum(lengths) - lengths
            path = self._folder / f"data-{task.index:05d}.{self._options.file_format}"
            shard = write_shard(path, row_batches(plan, doc_starts, columns, schema), schema)
        record = UnitRecord(shard, plan.counts, plan.lower_bound)
        write_json(record_path, asdict(record))
        return record

    def _plan(self, task: PackTask, lengths: np.ndarray) -> PackPlan:
        options = self._options
        seed = None
        if options.seed is not None:  # units must not all be shuffled alike
            seed = int(np.random.SeedSequence([options.seed, task.index]).generate_state(1)[0])
        return plan_rows(lengths, options.seq_len, strategy=options.strategy, overflow=options.overflow, seed=seed)

    def _load(self, task: PackTask) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Lengths `[D]` and token columns `[T]` of the unit's documents."""
        columns = {"input_ids": np.empty(task.tokens, task.dtype)}
        if task.labels:
            columns["labels"] = np.empty(task.tokens, np.int32)
        lengths = []
        begin = 0
        for slice_ in task.slices:
            files = PartFiles(self._work, slice_.part)
            window = slice(begin, begin + slice_.tokens)
            ids = columns["input_ids"][window]
            lengths.append(files.lengths(slice_.first_document, slice_.documents))
            files.read_ids(np.dtype(slice_.dtype), slice_.first_token, ids)
            if slice_.labels:
                files.read_labels(slice_.first_token, columns["labels"][window])
            elif task.labels:
                columns["labels"][window] = ids
            begin = window.stop
        return np.concatenate(lengths), columns


def add_content(content: ContentHash, documents: Documents, options: PackOptions) -> None:
    """Add what the rows must hold of these documents to a content hash."""
    wrapped = options.strategy == "wrapped"
    overflow = "split" if wrapped and options.overflow == "error" else options.overflow
    pieces, keep = expected_pieces(documents.lengths, options.seq_len, overflow, wrapped=wrapped)
    content.add(documents.ids, pieces, documents.labels, keep)


def _has_size(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except FileNotFoundError:
        return False


def cut_units(parts: Sequence[PartRecord], work: Path, budget: int) -> Iterator[PackTask]:
    """Cut the documents of all parts into packing units: consecutive, at most `budget` tokens each, one document at least."""
    dtype = max((np.dtype(part.dtype) for part in parts if part.documents), key=lambda kind: kind.itemsize)
    labels = any(part.labels for part in parts)
    index, filled = 0, 0
    slices: list[UnitSlice] = []
    for number, part in enumerate(parts):
        ends = np.cumsum(PartFiles(work, number).lengths(0, part.documents))
        first = done = 0
        while first < part.documents:
            stop = int(np.searchsorted(ends, done + budget - filled, side="right"))
            if stop == first and not filled:
                stop = first + 1
            if stop > first:
                tokens = int(ends[stop - 1]) - done
                slices.append(UnitSlice(number, part.dtype, part.labels, first, stop - first, done, tokens))
                first, done, filled = stop, done + tokens, filled + tokens
            if first < part.documents:
                yield PackTask(index, tuple(slices), dtype.name, labels)
                index, filled, slices = index + 1, 0, []
    if slices:
        yield PackTask(index, tuple(slices), dtype.name, labels)


def sum_counts(counts: Sequence[PlanCounts]) -> PlanCounts:
    """The counts of all units together."""
    return PlanCounts(**{field.name: sum(getattr(count, field.name) for count in counts) for field in fields(PlanCounts)})
