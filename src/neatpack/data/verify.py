"""A packed folder in, proof or a named fault out: checksums, boundaries, counts, and that nothing was lost or doubled."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from neatpack.data.columns import UNREADABLE, list_parts
from neatpack.data.content import ContentHash
from neatpack.data.documents import DocumentReader
from neatpack.data.job import add_content
from neatpack.data.manifest import load_manifest, options_of
from neatpack.data.options import PackOptions
from neatpack.data.records import Problems
from neatpack.data.sources import Part, find_parts
from neatpack.data.store import MANIFEST, describe_content, read_batches
from neatpack.engine import LocalEngine
from neatpack.errors import StoreError


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """What was checked and found right.

    Attributes:
        folder: the packed folder.
        shards: files whose size and SHA-256 are those of the manifest.
        rows: rows whose `seq_lengths` are positive and sum to their length, at most the row length.
        tokens: tokens in them.
        content: hash of their content, which is that of the documents that were packed.
        source: whether the source was read again and gave the same hash.
    """

    folder: str
    shards: int
    rows: int
    tokens: int
    content: str
    source: bool


def verify(
    folder: str | Path,
    sources: Sequence[str | Path] | None = None,
    *,
    workers: int = 1,
    trust_remote_code: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> VerifyReport:
    """Check a folder that `neatpack pack` wrote; nothing in it is trusted, and nothing in it runs.

    Args:
        folder: the packed folder.
        sources: the source it was packed from; it is read and tokenised again under the options of the manifest, and must
            give the same content. None checks against the hash that was taken while packing.
        workers: processes that share the shards, and the parts of the source; the hash adds up in any order. More than one
            starts Python afresh for each, so call this from under `if __name__ == "__main__":` in a script.
        trust_remote_code: let the tokenizer that the manifest names run the code that it ships, to read the source again;
            what the manifest itself says of this does not count.
        progress: told how far each step is ("shards" and "source", in bytes).

    Returns:
        What was checked.

    Raises:
        StoreError: the first thing that is not as it must be: which shard or row, what was got, what was expected.
        SourceError: a source that cannot be read.
        MissingDependencyError: the tokenizer that the manifest names needs a package that is not installed.
    """
    root = Path(folder)
    manifest = load_manifest(root)
    _check_files(root, manifest)
    options = replace(options_of(root, manifest), trust_remote_code=trust_remote_code)
    shards = [ShardTask(root / shard["file"], shard) for shard in manifest["shards"]]
    with LocalEngine(MakeVerifyJob(options), workers) as engine:
        found = _add_up(engine, shards, "shards", sum(task.shard["bytes"] for task in shards), progress)
        _expect(root / MANIFEST, "rows", found.rows, manifest["counts"]["rows"])
        _expect(root / MANIFEST, "tokens", found.tokens, manifest["counts"]["tokens_in_rows"])
        got = _describe(found, options)
        _check_content(f"{root}: the rows", got, manifest["content"])
        if sources is not None:
            parts = find_parts(sources, options.include)
            read = _add_up(engine, parts.parts, "source", parts.num_bytes, progress)
            names = ", ".join(map(str, sources))
            what = f"{names}: the documents, compared with {root},"
            _check_content(what, _describe(read, options), manifest["content"], _all_sources(manifest))
    return VerifyReport(
        folder=str(root),
        shards=len(shards),
        rows=found.rows,
        tokens=found.tokens,
        content=got["hash"],
        source=sources is not None,
    )


class ShardTask(NamedTuple):
    """A shard to check: its file, and what the manifest says of it."""

    path: Path
    shard: dict[str, Any]


class Found(NamedTuple):
    """What is in a shard or in a part of the source: rows and tokens, and the content hash with what it counts."""

    rows: int = 0
    tokens: int = 0
    total: int = 0
    documents: int = 0


@dataclass(frozen=True)
class MakeVerifyJob:
    """Builds the job that checks shards and reads parts of the source; a picklable factory for the engine."""

    options: PackOptions

    def __call__(self) -> VerifyJob:
        """Build the job, in the process that will do it."""
        return VerifyJob(self.options)


class VerifyJob:
    """Checks shards, and reads parts of the source again."""

    def __init__(self, options: PackOptions) -> None:
        self._options = options
        self._reader = DocumentReader(options)

    def __call__(self, task: ShardTask | Part, tick: Callable[[int], None]) -> Found:
        """Do a task.

        Raises:
            StoreError: something in the shard is not as it must be.
            SourceError: the part cannot be read.
        """
        content = ContentHash()
        rows = tokens = 0
        if isinstance(task, ShardTask):
            _check_checksum(task.path, task.shard)
            rows, tokens = _check_rows(task.path, task.shard, self._options, content)
            tick(task.shard["bytes"])
        else:
            problems = Problems(self._options.skip_bad)
            for chunk in self._reader.chunks(task, problems):
                add_content(content, self._reader.documents(chunk, problems), self._options)
            tick(task.size)
        return Found(rows, tokens, content.total, content.documents)


def _add_up(
    engine: LocalEngine,
    tasks: Sequence[ShardTask | Part],
    step: str,
    size: int,
    progress: Callable[[str, int, int], None] | None,
) -> Found:
    done = 0

    def tick(amount: int) -> None:
        nonlocal done
        done += amount
        if progress:
            progress(step, done, size)

    sums = Found()
    for found in engine.run(tasks, tick):
        sums = Found(*(one + other for one, other in zip(sums, found, strict=True)))
    return sums


def _describe(found: Found, options: PackOptions) -> dict[str, Any]:
    return describe_content(found.total, found.documents, wrapped=options.strategy == "wrapped")


def _check_files(root: Path, manifest: dict[str, Any]) -> None:
    listed = [shard["file"] for shard in manifest["shards"]]
    for name in listed:
        if not (root / name).is_file():
            raise StoreError(f"{root / name}: missing, but the manifest lists it. Restore it, or pack again.")
    stray = sorted(path.name for path in root.glob("data-*") if path.name not in listed)
    if stray:
        raise StoreError(f"{root / stray[0]}: not in the manifest, though readers may load it. Remove it, or pack again.")
    state = root / "state.json"
    if manifest["options"]["file_format"] == "arrow":
        try:
            loaded = [entry["filename"] for entry in json.loads(state.read_bytes())["_data_files"]]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise StoreError(f"{state}: not readable ({error}); datasets cannot open the folder. Pack again.") from error
        if loaded != listed:
            strange = next((name for name in loaded if name not in listed), "the shards in another order or number")
            raise StoreError(
                f"{state}: lists {len(loaded)} files, expected the {len(listed)} shards of the manifest; found "
                f"{str(strange)[:80]!r}. Pack again."
            )


def _check_checksum(path: Path, shard: dict[str, Any]) -> None:
    size = path.stat().st_size
    if size != shard["bytes"]:
        what = "truncated" if size < shard["bytes"] else "longer than it was written"
        raise StoreError(f"{path}: {what}: {size} bytes, expected {shard['bytes']}. Restore it, or pack again.")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256") if hasattr(hashlib, "file_digest") else _digest(file)
    if digest.hexdigest() != shard["sha256"]:
        raise StoreError(
            f"{path}: altered since it was written: SHA-256 {digest.hexdigest()}, expected {shard['sha256']}. Restore it, or "
            "pack again."
        )


def _digest(file: Any) -> Any:
    digest = hashlib.sha256()
    while data := file.read(1 << 20):
        digest.update(data)
    return digest


def _check_rows(path: Path, shard: dict[str, Any], options: PackOptions, content: ContentHash) -> tuple[int, int]:
    """Check every row of a shard and add it to the content hash; returns rows and tokens."""
    seq_len, wrapped = options.seq_len, options.strategy == "wrapped"
    rows = tokens = 0
    try:
        for batch in read_batches(path):
            ids, offsets = list_parts(batch.column("input_ids"))
            pieces, piece_offsets = list_parts(batch.column("seq_lengths"))
            lengths = np.diff(offsets)
            ends = np.concatenate(([0], np.cumsum(pieces, dtype=np.int64)))
            sums = ends[piece_offsets[1:]] - ends[piece_offsets[:-1]]
            _refuse(path, rows, sums != lengths, "seq_lengths sum to {0}, expected {1}, the row's length", sums, lengths)
            _refuse(path, rows, lengths > seq_len, "{0} tokens, expected at most " + str(seq_len), lengths)
            _refuse(path, rows, lengths == 0, "an empty row", lengths)
            if len(pieces) and int(pieces.min()) <= 0:
                raise StoreError(f"{path}: a document of {int(pieces.min())} tokens in seq_lengths, expected 1 or more.")
            _check_slots(path, rows, options, pieces, piece_offsets)
            for name in options.token_columns:
                _refuse_lengths(path, rows, name, batch, lengths)
            for name in options.document_columns:
                _refuse_lengths(path, rows, name, batch, np.diff(piece_offsets))
            labels = labels_of(batch, ids, offsets)
            content.add(ids, np.ones(len(ids), np.int64) if wrapped else pieces, labels)
            rows, tokens = rows + batch.num_rows, tokens + len(ids)
    except (*UNREADABLE, KeyError) as error:
        raise StoreError(f"{path}: not readable as a shard of packed rows ({error}). Pack again.") from error
    _expect(path, "rows", rows, shard["rows"])
    _expect(path, "tokens", tokens, shard["tokens"])
    return rows, tokens


def _check_slots(path: Path, row: int, options: PackOptions, pieces: np.ndarray, offsets: np.ndarray) -> None:
    """Refuse rows of more documents than the run allowed, or without the room for slots that it left; none is empty."""
    if options.max_docs_per_row is not None:
        counts = np.diff(offsets)
        allowed = f"expected at most {options.max_docs_per_row}"
        _refuse(path, row, counts > options.max_docs_per_row, "{0} documents, " + allowed, counts)
    if options.align > 1:
        slots = np.concatenate(([0], np.cumsum(-(-pieces // options.align) * options.align, dtype=np.int64)))
        widths = slots[offsets[1:]] - slots[offsets[:-1]]
        allowed = f"in slots of {options.align}, expected at most {options.seq_len}"
        _refuse(path, row, widths > options.seq_len, "{0} tokens " + allowed, widths)


def labels_of(batch: pa.RecordBatch, ids: np.ndarray, offsets: np.ndarray) -> np.ndarray | None:
    """Labels of all tokens of a batch; rows whose labels are null repeat their ids. None where the batch has none."""
    if "labels" not in batch.schema.names:
        return None
    column = batch.column("labels")
    stored = column.is_valid().to_numpy(zero_copy_only=False)
    lengths = np.diff(offsets)
    values, label_offsets = list_parts(column.filter(pa.array(stored)))
    if not np.array_equal(np.diff(label_offsets), lengths[stored]):
        raise StoreError("labels of another length than input_ids. Pack again.")
    labels = ids.astype(np.int64)
    labels[np.repeat(stored, lengths)] = values
    return labels


def _refuse(path: Path, row: int, wrong: np.ndarray, message: str, *values: np.ndarray) -> None:
    if wrong.any():
        at = int(np.argmax(wrong))
        raise StoreError(f"{path} row {row + at}: {message.format(*(value[at] for value in values))}. Pack again.")


def _refuse_lengths(path: Path, row: int, name: str, batch: pa.RecordBatch, expected: np.ndarray) -> None:
    got = batch.column(name).value_lengths().fill_null(-1).to_numpy()
    _refuse(path, row, got != expected, f"{name} has {{0}} values, expected {{1}}", got, expected)


def _expect(path: Path, what: str, got: int, expected: int) -> None:
    if got != expected:
        raise StoreError(f"{path}: {got} {what}, expected {expected}. Pack again.")


def _all_sources(manifest: dict[str, Any]) -> str:
    """The way out where a source is another one: perhaps it is not all of it. A stranger's manifest may name none."""
    source = manifest.get("source")
    given = source.get("given") if isinstance(source, dict) else None
    names = ", ".join(map(str, given)) if isinstance(given, list) and given else "its manifest does not say what"
    return f"Give all that it was packed from ({names[:300]}); if this is all, pack again."


def _check_content(what: str, got: dict[str, Any], expected: dict[str, Any], way: str = "Pack again.") -> None:
    if got != expected:
        raise StoreError(
            f"{what} hold {got['count']} {got['of']} with the content hash {got['hash']}, expected {expected['count']} with "
            f"{expected['hash']}: something was lost, doubled or altered. {way}"
        )
