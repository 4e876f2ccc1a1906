"""The pipeline: documents in, a folder of packed rows out.

    sources ──find_parts──> parts ──tokenise──> token files ──cut_units──> packing units ──plan, gather──> shards ──> DIR

Pre-tokenised Arrow parts need no token files: their tokens are read from where they lie. Parts and units are independent of
each other, so both steps run on any number of workers with the same result; memory is bounded by one unit a worker.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from neatpack.data.job import EXAMPLES, MakePackJob
from neatpack.data.options import PackOptions
from neatpack.data.sources import SourceList, find_parts, refuse_output_within, source_names
from neatpack.data.store import (
    check_target,
    describe_content,
    row_schema,
    write_dataset_files,
    write_manifest,
)
from neatpack.data.tokenize import load_tokenizer
from neatpack.data.tokens import PartRecord
from neatpack.data.work import TokenizeTask, UnitRecord, cut_units, join_columns, sum_counts
from neatpack.data.workplace import Workplace, open_workplace
from neatpack.engine import EngineName, LocalEngine, RayEngine, make_engine
from neatpack.errors import PlanError, SourceError
from neatpack.planning import PlanCounts

Progress = Callable[[str, int, int], None]
"""Called with the step ("tokenise" in bytes, "pack" in tokens), what is done of it and what there is to do."""


@dataclass(frozen=True, kw_only=True)
class PackSummary:
    """What a run did: every document and token is in a row or in one of these numbers.

    Attributes:
        out: the folder that was written.
        counts: documents and tokens read, and what became of those that are not in a row as they were.
        rows: rows written, of `seq_len` tokens at most.
        seq_len: tokens a row can hold.
        tokens: tokens in rows.
        lower_bound: fewest rows that any plan could have, summed over the packing units.
        shards: files written.
        skipped: records left out by `skip_bad`, by reason.
        skipped_examples: the first record of each reason.
        spelled: documents whose text spells out a special token (`</s>`), by its name; it became that token, unless
            `split_special_tokens`.
        ignored_files: files in source folders that were not read, by suffix.
        ignored_columns: columns of the source that are not in the output.
        columns: columns of the output.
        dtype: of `input_ids`.
        seconds: wall time.
        labels_repeat_ids: whether the source has labels that all repeat the ids, and are not stored for that.
        file_format: of the shards.
        token_columns: further columns carried with a number a token.
        document_columns: further columns carried with a value a document.
        text_columns: those of the document columns that have no numbers: text, or nothing but nulls.
        tokenizer: what made tokens of the source's texts, as the manifest has it; None where all of it was tokens already.
        resumed: whether an interrupted run had left work to go on with.
        max_docs_per_row: the most documents that a row may hold, or None.
        align: the multiple of tokens that rows have room to round every document up to, when they are collated.
    """

    out: str
    counts: PlanCounts
    rows: int
    seq_len: int
    tokens: int
    lower_bound: int
    shards: int
    skipped: dict[str, int]
    skipped_examples: dict[str, str]
    spelled: dict[str, int]
    ignored_files: dict[str, int]
    ignored_columns: tuple[str, ...]
    columns: tuple[str, ...]
    dtype: str
    seconds: float
    resumed: bool = False
    labels_repeat_ids: bool = False
    file_format: str = "arrow"
    token_columns: tuple[str, ...] = ()
    document_columns: tuple[str, ...] = ()
    text_columns: tuple[str, ...] = ()
    tokenizer: dict[str, Any] | None = None
    max_docs_per_row: int | None = None
    align: int = 1

    @property
    def efficiency(self) -> float:
        """Tokens in rows over row slots."""
        return self.tokens / (self.rows * self.seq_len)

    @property
    def padding(self) -> int:
        """Slots that a batch of full-length rows fills with padding; nothing of it is stored."""
        return self.rows * self.seq_len - self.tokens

    @property
    def tokens_per_second(self) -> float:
        """Tokens read a second, end to end."""
        return self.counts.tokens / self.seconds

    def to_json(self) -> dict[str, Any]:
        """The summary as plain JSON values."""
        derived = {"efficiency": self.efficiency, "padding": self.padding, "tokens_per_second": self.tokens_per_second}
        return {**asdict(self), **derived}


def pack(
    sources: str | Path | Sequence[str | Path],
    out: str | Path,
    seq_len: int,
    *,
    workers: int | None = 1,
    engine: EngineName = "local",
    ray_address: str | None = None,
    overwrite: bool = False,
    restart: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> PackSummary:
    """Pack documents into rows of at most `seq_len` tokens, in a folder that `datasets.load_from_disk` opens.

    Rows have `input_ids` (the narrowest dtype that holds the vocabulary), `seq_lengths` (tokens of each document of the
    row, in order, summing to the row's length; rows are not padded) and, where labels or masks of the source say so,
    `labels`: null in rows whose labels repeat their ids, and no column at all where they do so everywhere. Further columns
    are carried if `token_columns` or `document_columns` name them; the others are named in the summary and the manifest.

    Args:
        sources: files, folders and saved datasets; see `neatpack.data.sources.find_parts`.
        out: folder to write; it must not exist, unless `overwrite`.
        seq_len: tokens a row holds.
        workers: processes; the output is the same for any number. More than one starts Python afresh for each, so call
            this from under `if __name__ == "__main__":` in a script. None takes as many as the size of the source pays for,
            or with Ray every CPU of the cluster.
        engine: "local", or "ray" to run the same units on a Ray cluster with the same result. Its machines must see the
            source, and the folder that `out` lies in, under the same paths.
        ray_address: the Ray cluster; None starts one on this machine.
        overwrite: replace a folder that neatpack wrote, once the new one is complete.
        restart: throw away what an interrupted run of another kind left in the .partial folder beside `out`; an interrupted
            run of the same kind goes on where it stopped.
        progress: told how far each step is.
        **options: see `neatpack.data.PackOptions`.

    Returns:
        What was read, written and left out.

    Raises:
        SourceError: a source, file or record that cannot be read as asked.
        PlanError: options that no plan can honour, or documents longer than a row under `overflow="error"`.
        StoreError: an output folder that cannot be written.
        PackError: an unknown engine, or a worker that ended.
        MissingDependencyError: the tokenizer or the engine needs a package that is not installed.

    Example:
        >>> summary = pack(["corpus/"], "packed", 4096, overflow="split")  # doctest: +SKIP
    """
    started = time.perf_counter()
    chosen = PackOptions(seq_len=seq_len, **options)
    given = [sources] if isinstance(sources, str | Path) else list(sources)
    target = Path(out).resolve() if Path(out).is_symlink() else Path(out)
    check_target(target, overwrite=overwrite)
    refuse_output_within(given, target)
    tokenizer = load_tokenizer(chosen).info
    found = find_parts(given, chosen.include)
    job = {
        "neatpack": version("neatpack"),
        "options": chosen.to_json(),
        "source": found.fingerprint(),
        "tokenizer": asdict(tokenizer),
    }
    if workers is None and engine == "local":
        workers = _worth_starting(found)
    with open_workplace(target, job, restart=restart) as place:
        make_job = MakePackJob(chosen, place.folder, place.work)
        with make_engine(engine, make_job, workers=workers, ray_address=ray_address) as workforce:
            run = _Run(chosen, found, place, workforce, progress or _no_progress)
            parts = run.tokenize()
            units = run.pack(parts)
        further = join_columns(parts, found.parts, chosen.columns)
        summary = replace(
            _summarize(target, chosen, found, parts, units, started),
            text_columns=tuple(column.name for column in further if not column.numeric),
            tokenizer=asdict(tokenizer) if any(part.text for part in parts) else None,
        )
        shards = [unit.shard for unit in units if unit.shard]
        if chosen.file_format == "arrow":
            schema = row_schema(np.dtype(summary.dtype), labels="labels" in summary.columns, further=further)
            write_dataset_files(place.folder, schema, shards)
        write_manifest(
            place.folder,
            shards,
            options=chosen.to_json(),
            source=_describe(given, found),
            tokenizer=summary.tokenizer,
            counts=_manifest_counts(summary),
            content=describe_content(
                sum(part.content for part in parts) + sum(unit.content for unit in units),
                sum(part.pieces for part in parts) + sum(unit.pieces for unit in units),
                wrapped=chosen.strategy == "wrapped",
            ),
            columns=list(summary.columns),
            dtype=summary.dtype,
        )
        place.finish(target)
    return replace(summary, seconds=time.perf_counter() - started, resumed=place.resumed)


def _no_progress(step: str, done: int, total: int) -> None:
    """Tell nobody."""


def _worth_starting(found: SourceList) -> int:
    """Processes that pay: one for every 64 MB of source, up to the number of CPUs."""
    return max(1, min(os.cpu_count() or 1, found.num_bytes >> 26))


@dataclass(frozen=True)
class _Run:
    options: PackOptions
    found: SourceList
    place: Workplace
    engine: LocalEngine | RayEngine
    progress: Progress

    def tokenize(self) -> list[PartRecord]:
        tasks = [TokenizeTask(index, part) for index, part in enumerate(self.found.parts)]
        parts: list[PartRecord] = []
        for part in self._run(tasks, "tokenise", sum(part.size for part in self.found.parts)):
            if part.too_long:
                raise PlanError(_too_long_message(part, self.options.seq_len))
            parts.append(part)
        if not any(part.tokens for part in parts):
            raise SourceError(_empty_message(parts, self.found))
        return parts

    def pack(self, parts: list[PartRecord]) -> list[UnitRecord]:
        further = join_columns(parts, self.found.parts, self.options.columns)
        tasks = list(cut_units(parts, self.found.parts, self.place.work, self.options.tokens_a_unit, further))
        units: list[UnitRecord] = []
        for unit in self._run(tasks, "pack", sum(task.tokens for task in tasks)):
            units.append(unit)
            if unit.shard:
                self.place.flush_later(self.place.folder / unit.shard.file)
        if not any(unit.shard for unit in units):
            raise PlanError(
                f"every document is longer than {self.options.seq_len} tokens, and overflow='drop' leaves no row. Raise the "
                "row length, or choose 'split' or 'truncate'."
            )
        return units

    def _run(self, tasks: list, step: str, total: int) -> Any:
        done = 0

        def tick(amount: int) -> None:
            nonlocal done
            done += amount
            self.progress(step, done, total)

        self.progress(step, 0, total)
        return self.engine.run(tasks, tick)


def _summarize(
    out: Path, options: PackOptions, found: SourceList, parts: list[PartRecord], units: list[UnitRecord], started: float
) -> PackSummary:
    shards = [unit.shard for unit in units if unit.shard]
    skipped: dict[str, int] = {}
    examples: dict[str, str] = {}
    for part in parts:
        for reason, count in part.skipped.items():
            skipped[reason] = skipped.get(reason, 0) + count
            examples.setdefault(reason, part.examples[reason])
    labels = ("labels",) if any(part.labels for part in parts) else ()
    return PackSummary(
        out=str(out),
        counts=sum_counts([unit.counts for unit in units]),
        rows=sum(shard.rows for shard in shards),
        seq_len=options.seq_len,
        tokens=sum(shard.tokens for shard in shards),
        lower_bound=sum(unit.lower_bound for unit in units),
        shards=len(shards),
        skipped=skipped,
        skipped_examples=examples,
        spelled=dict(sum((Counter(part.spelled) for part in parts), Counter())),
        ignored_files=found.ignored,
        ignored_columns=tuple(dict.fromkeys(name for part in parts for name in part.ignored_columns)),
        columns=("input_ids", "seq_lengths", *labels, *options.token_columns, *options.document_columns),
        token_columns=options.token_columns,
        document_columns=options.document_columns,
        dtype=max((np.dtype(part.dtype) for part in parts if part.documents), key=lambda kind: kind.itemsize).name,
        seconds=time.perf_counter() - started,
        labels_repeat_ids=not labels and any(part.labelled for part in parts),
        file_format=options.file_format,
        max_docs_per_row=options.max_docs_per_row,
        align=options.align,
    )


def _describe(given: Sequence[str | Path], found: SourceList) -> dict[str, Any]:
    return {
        "given": source_names(given),
        "files": len(found.files),
        "bytes": found.num_bytes,
        "fingerprint": found.fingerprint(),
        "ignored_files": found.ignored,
    }


def _manifest_counts(summary: PackSummary) -> dict[str, Any]:
    return {
        **asdict(summary.counts),
        "rows": summary.rows,
        "tokens_in_rows": summary.tokens,
        "lower_bound": summary.lower_bound,
        "padding": summary.padding,
        "skipped": summary.skipped,
        "spelled": summary.spelled,
        "ignored_columns": list(summary.ignored_columns),
    }


def _too_long_message(part: PartRecord, seq_len: int) -> str:
    more = f" and {part.too_long - EXAMPLES} more" if part.too_long > EXAMPLES else ""
    return (
        f"documents longer than a row of {seq_len} tokens: {', '.join(part.too_long_examples)}{more}. Raise --seq-len, or "
        "choose --overflow split (pieces become documents of their own), truncate or drop."
    )


def _empty_message(parts: list[PartRecord], found: SourceList) -> str:
    documents = sum(part.documents for part in parts)
    skipped = sum(sum(part.skipped.values()) for part in parts)
    bad = f", and {skipped} bad records were skipped" if skipped else ""
    return (
        f"nothing to pack: {len(found.files)} files (the first is {found.files[0][0]}) hold {documents} documents, all of them "
        f"empty{bad}. Check the source and the column."
    )
