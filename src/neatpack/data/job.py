"""What a worker does with a unit of work; it leaves a record of it, and work whose record is there is not done again.

Text, compressed and repaired sources are read once, into token files. Pre-tokenised Arrow data stays where it lies: the
first step takes lengths from its offsets and compares labels with ids, the second maps the tokens again, checks and hashes
them, and copies them straight to where they are planned.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa

from neatpack.data.columns import Documents, Outline, checked_outline, list_parts
from neatpack.data.content import ContentHash, expected_pieces
from neatpack.data.documents import DocumentReader
from neatpack.data.further import concat_values
from neatpack.data.further_file import read_further
from neatpack.data.options import PackOptions
from neatpack.data.records import Chunk, Problems
from neatpack.data.rows import row_batches
from neatpack.data.sources import Part
from neatpack.data.store import row_schema, write_shard
from neatpack.data.tokens import PartFiles, PartRecord, PartWriter, narrowest_dtype, write_json
from neatpack.data.work import PackTask, TokenizeTask, UnitRecord, UnitSlice
from neatpack.data.workplace import writing
from neatpack.errors import SourceError, StoreError
from neatpack.planning import PackPlan, plan_rows

EXAMPLES = 5
"""How many documents an error about many of them names."""


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
        """Build the job, in the process that will do it.

        Raises:
            StoreError: this machine does not see the folder of the run.
        """
        if not self.work.is_dir():
            raise StoreError(
                f"{self.work}: not there on the machine {platform.node()}. Every machine that works on a run must see the "
                "source and the folder of --out under the same paths: put both on storage that all of them mount."
            )
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
            done = files.load_record() or self._read(task.part, files)
            tick(task.part.size)
            return done
        record_path = self._work / f"unit-{task.index:05d}.json"
        record = UnitRecord.load(record_path, self._folder) or self._pack(task, record_path)
        tick(task.tokens)
        return record

    def _read(self, part: Part, files: PartFiles) -> PartRecord:
        problems = Problems(self._options.skip_bad)
        record = PartRecord()
        content = ContentHash()
        chunks = self._reader.chunks(part, problems)
        first = next(chunks, None)
        if first is not None:
            record.text = first.layout.text is not None
            record.ignored_columns = list(first.layout.ignored)
            record.in_place = part.format == "arrow" and not record.text and not self._options.skip_bad
        dtype = self._dtype(first)
        record.dtype = dtype.name
        with PartWriter(files, dtype, tokens=not record.in_place) as writer:
            for chunk in chain([first] if first else [], chunks):
                record.ignored_columns += [name for name in chunk.late if name not in record.ignored_columns]
                if record.in_place:
                    outline = checked_outline(chunk, problems, compare=not record.labels)
                    writer.append_lengths(outline.lengths)
                    self._count(outline, record)
                    continue
                documents = self._reader.documents(chunk, problems)
                writer.append(documents)
                self._count(documents.outline(), record)
                add_content(content, documents, self._options)
            record.skipped, record.examples = problems.counts, problems.examples
            record.spelled = dict(problems.spelled)
            record.content, record.pieces = content.total, content.documents
            writer.finish(record)
        return record

    def _dtype(self, first: Chunk | None) -> np.dtype:
        """The narrowest that holds the vocabulary; where that is unknown, the source's own if it is a narrow one."""
        size = self._options.vocab_size
        if first is not None and first.layout.text is not None:
            size = self._reader.tokenizer.info.vocab_size
        elif first is not None and size is None:
            size = first.vocab_bound
        return narrowest_dtype(size)

    def _count(self, outline: Outline, record: PartRecord) -> None:
        lengths = outline.lengths
        record.documents += len(lengths)
        record.tokens += int(lengths.sum())
        record.labelled |= outline.labelled
        record.labels |= outline.differs
        record.types = outline.types  # those of an Arrow file are one throughout; the writer of others joins them
        if self._options.overflow == "error" and self._options.strategy != "wrapped":
            too_long = np.flatnonzero(lengths > self._options.seq_len)
            record.too_long += len(too_long)
            for index in too_long[: EXAMPLES - len(record.too_long_examples)].tolist():
                record.too_long_examples.append(f"{outline.places.name(index)} ({lengths[index]} tokens)")

    def _pack(self, task: PackTask, record_path: Path) -> UnitRecord:
        content = ContentHash()
        unit = self._load(task, content)
        lengths = unit.lengths
        plan = self._plan(task, lengths)
        shard = None
        if plan.num_rows:
            schema = row_schema(np.dtype(task.dtype), labels=task.labels, further=task.further)
            doc_starts = np.cumsum(lengths) - lengths
            path = self._folder / f"data-{task.index:05d}.{self._options.file_format}"
            shard = write_shard(
                path, row_batches(plan, doc_starts, unit.columns, unit.values, schema), schema, aside_in=self._work
            )
        record = UnitRecord(shard, plan.counts, plan.lower_bound, content.total, content.documents)
        write_json(record_path, asdict(record))
        return record

    def _plan(self, task: PackTask, lengths: np.ndarray) -> PackPlan:
        options = self._options
        seed = None
        if options.seed is not None:  # units must not all be shuffled alike
            seed = int(np.random.SeedSequence([options.seed, task.index]).generate_state(1)[0])
        return plan_rows(
            lengths,
            options.seq_len,
            strategy=options.strategy,
            overflow=options.overflow,
            seed=seed,
            max_docs_per_row=options.max_docs_per_row,
            align=options.align,
        )

    def _load(self, task: PackTask, content: ContentHash) -> _Unit:
        """The unit's documents; those not hashed before are added to `content`."""
        unit = _Unit(task)
        for slice_ in task.slices:
            files = PartFiles(self._work, slice_.part)
            lengths = files.lengths(slice_.first_document, slice_.documents)
            if slice_.source is not None:
                self._load_in_place(slice_, slice_.source, lengths, unit, content)
            else:
                _load_files(files, slice_, lengths, unit)
        unit.finish()
        return unit

    def _load_in_place(self, slice_: UnitSlice, source: Part, lengths: np.ndarray, unit: _Unit, content: ContentHash) -> None:
        position = 0
        found = self._reader.window(source, slice_.first_document, slice_.documents, labels=slice_.labels)
        for documents in found:
            if not np.array_equal(documents.lengths, lengths[position : position + len(documents.lengths)]):
                break
            add_content(content, documents, self._options)
            unit.append(documents)
            position += len(documents.lengths)
        if position != slice_.documents:
            raise SourceError(f"{source.files[0]}: changed while it was packed. Run the command again when it is at rest.")


class _Unit:
    """The documents of a packing unit, in memory.

    Attributes:
        lengths: `[D] int64` tokens of each.
        columns: token columns `[T]`, `input_ids` among them.
        values: document columns `[D]`.
    """

    def __init__(self, task: PackTask) -> None:
        self._task = task
        self._filled = 0
        self._lengths: list[np.ndarray] = []
        self._values: dict[str, list[pa.Array]] = {column.name: [] for column in task.further if not column.of_tokens}
        kinds = {column.name: column.arrow_type.to_pandas_dtype() for column in task.further if column.of_tokens}
        kinds["input_ids"] = task.dtype
        if task.labels:
            kinds["labels"] = np.int32
        self.columns = {name: np.empty(task.tokens, kind) for name, kind in kinds.items()}
        self.values: dict[str, pa.Array] = {}

    def append(self, documents: Documents) -> None:
        """Append documents."""
        window = self.take_window(documents.lengths)
        window["input_ids"][:] = documents.ids
        if "labels" in window:
            window["labels"][:] = documents.ids if documents.labels is None else documents.labels
        for name, tokens in documents.tokens.items():
            window[name][:] = tokens
        for name, values in documents.values.items():
            self._values[name].append(values)

    def take_window(self, lengths: np.ndarray) -> dict[str, np.ndarray]:
        """Where the tokens of the next documents go, in every token column."""
        begin, self._filled = self._filled, self._filled + int(lengths.sum())
        self._lengths.append(lengths)
        return {name: column[begin : self._filled] for name, column in self.columns.items()}

    def append_further(self, batch: pa.RecordBatch, window: dict[str, np.ndarray], first_token: int) -> int:
        """Further columns of some of the documents of a window, from its token `first_token` on; returns where they end."""
        end = first_token
        for column in self._task.further:
            values = batch.column(column.name)
            if column.of_tokens:
                flat, _ = list_parts(values)
                end = first_token + len(flat)
                window[column.name][first_token:end] = flat
            else:
                self._values[column.name].append(values)
        return end

    def finish(self) -> None:
        """Join what was appended."""
        self.lengths = np.concatenate(self._lengths)
        types = {column.name: column.arrow_type for column in self._task.further}
        self.values = {name: concat_values(arrays, types[name]) for name, arrays in self._values.items()}


def _load_files(files: PartFiles, slice_: UnitSlice, lengths: np.ndarray, unit: _Unit) -> None:
    window = unit.take_window(lengths)
    files.read_ids(np.dtype(slice_.dtype), slice_.first_token, window["input_ids"])
    if slice_.labels:
        files.read_labels(slice_.first_token, window["labels"])
    elif "labels" in window:
        window["labels"][:] = window["input_ids"]
    if slice_.further:
        token = 0
        for batch in read_further(files.path("further"), slice_.first_document, slice_.documents):
            token = unit.append_further(batch, window, token)


def add_content(content: ContentHash, documents: Documents, options: PackOptions) -> None:
    """Add what the rows must hold of these documents to a content hash."""
    wrapped = options.strategy == "wrapped"
    overflow = "split" if wrapped and options.overflow == "error" else options.overflow
    pieces, keep = expected_pieces(documents.lengths, options.seq_len, overflow, wrapped=wrapped)
    content.add(documents.ids, pieces, documents.labels, keep)
