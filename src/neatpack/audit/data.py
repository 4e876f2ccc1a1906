"""Audit packed rows as they are stored: would a trainer that believes them train on what was meant?

`neatpack verify` proves that a folder holds what `neatpack pack` wrote. The audit asks of any packed folder (a `datasets`
folder, or Arrow and Parquet files, whoever wrote them) whether its rows make sense, and names every kind of fault with the
first place it occurs. On neatpack's own folders it runs the verification too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from neatpack.data.columns import UNREADABLE, column_names, list_parts
from neatpack.data.manifest import load_manifest
from neatpack.data.store import MANIFEST, read_batches
from neatpack.data.verify import verify
from neatpack.errors import SourceError, StoreError

IGNORE_INDEX = -100


@dataclass(frozen=True)
class Finding:
    """A kind of fault: how often, where first, and what to do.

    Attributes:
        check: `boundaries`, `labels`, `padding`, `vocabulary` or `conservation`.
        message: what is wrong.
        count: rows that have it.
        where: the first of them, as `file row N`.
        way_out: what to do.
    """

    check: str
    message: str
    count: int
    where: str
    way_out: str

    def __str__(self) -> str:
        return f"{self.check}: {self.message} ({self.count:,} row(s), first {self.where}). {self.way_out}"


@dataclass(frozen=True)
class DataAudit:
    """What was read and what was found.

    Attributes:
        folder: the packed folder.
        rows: rows read.
        documents: documents in them, as `seq_lengths` has it.
        tokens: tokens in them.
        largest_id: the largest token id; None without tokens.
        vocab_size: what ids were checked against; None where nobody said, and that check did not run.
        conserved: what the content was compared with (`source`, or `manifest`); None where there was nothing to compare.
        findings: faults, one a kind.
    """

    folder: str
    rows: int
    documents: int
    tokens: int
    largest_id: int | None
    vocab_size: int | None
    conserved: str | None
    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        """No fault was found."""
        return not self.findings

    @property
    def not_checked(self) -> list[str]:
        """Checks that did not run, and what they need."""
        missing = []
        if self.vocab_size is None:
            missing.append("ids against the vocabulary: say --vocab-size")
        if self.conserved is None:
            missing.append("conservation: the folder has no manifest of neatpack pack to compare with")
        return missing

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values for JSON."""
        return {**asdict(self), "passed": self.passed, "not_checked": self.not_checked}


def is_packed_folder(path: Path) -> bool:
    """Does a folder hold Arrow or Parquet files (rather than a model)?"""
    return path.is_dir() and any(_files(path))


def audit_data(
    folder: str | Path,
    *,
    vocab_size: int | None = None,
    pad_token_id: int | None = None,
    sources: Sequence[str | Path] = (),
) -> DataAudit:
    """Check the rows of a packed folder.

    Args:
        folder: a folder of `neatpack pack`, or any with Arrow or Parquet files whose rows have `input_ids` and `seq_lengths`.
        vocab_size: ids at or above it are faults; by default the manifest's, where there is one.
        pad_token_id: documents that consist of this id alone are padding stored as documents. Without it, a row that ends in
            two or more one-token documents of one id, or in a document that repeats one id, counts.
        sources: what a folder of `neatpack pack` was packed from, to be read again and compared.

    Returns:
        The audit; `passed` says whether anything was found.

    Raises:
        StoreError: no rows there, or files that cannot be read.
        SourceError: `sources` for a folder without a manifest, or sources that cannot be read.
    """
    root = Path(folder)
    files = list(_files(root))
    if not files:
        raise StoreError(f"{root}: no .arrow or .parquet files: expected a folder of packed rows. Pack it with neatpack pack.")
    manifest = _manifest(root)
    if sources and manifest is None:
        raise SourceError(f"{root}: no {MANIFEST}, so how it was packed from {sources[0]} is unknown. Leave the source out.")
    vocabulary = _vocabulary(manifest) if vocab_size is None else vocab_size
    found = _Findings()
    rows = documents = tokens = 0
    largest: int | None = None
    for path in files:
        for first, batch in _batches(path):
            where = _Place(path, first)
            ids, ends = _list_column(where, batch, "input_ids")
            lengths, length_ends = _list_column(where, batch, "seq_lengths")
            rows, documents, tokens = rows + batch.num_rows, documents + len(lengths), tokens + len(ids)
            largest = max((int(ids.max()), *(() if largest is None else (largest,)))) if len(ids) else largest
            _check_vocabulary(found, where, ids, ends, vocabulary)
            whole = _check_boundaries(found, where, ends, lengths, length_ends)
            if whole:
                _check_padding(found, where, ids, lengths, length_ends, pad_token_id)
                _check_labels(found, where, batch, ids, ends, lengths, length_ends)
    conserved = _check_conservation(found, root, manifest, sources)
    return DataAudit(str(root), rows, documents, tokens, largest, vocabulary, conserved, tuple(found))


# --- reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    """A batch's file and the number of its first row."""

    path: Path
    first: int

    def row(self, index: int) -> str:
        return f"{self.path} row {self.first + index}"


def _files(root: Path) -> Iterator[Path]:
    """Arrow and Parquet files of a folder, those of a split below it included; caches of `datasets` left out."""
    for path in sorted((*root.glob("*"), *root.glob("*/*"))):
        if path.suffix in (".arrow", ".parquet") and path.is_file() and not path.name.startswith(("cache-", "tmp")):
            yield path


def _batches(path: Path) -> Iterator[tuple[int, pa.RecordBatch]]:
    first = 0
    try:
        for batch in read_batches(path):
            column_names(batch.schema)
            yield first, batch
            first += batch.num_rows
    except UNREADABLE as error:
        raise StoreError(f"{path}: not readable as Arrow stream or Parquet ({error}). Restore it, or pack again.") from error


def _list_column(where: _Place, batch: pa.RecordBatch, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Values `[T]` and ends `[rows+1]` of a column of lists of integers."""
    if name not in batch.schema.names:
        raise StoreError(
            f"{where.path}: no column {name}, only {', '.join(batch.schema.names)}. Packed rows have input_ids and seq_lengths "
            "(the lengths of the documents in the row); without them nobody knows where a document ends."
        )
    column = batch.column(name)
    if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)) or column.null_count:
        raise StoreError(f"{where.path}: {name} is {column.type} with {column.null_count} nulls, expected a list in every row.")
    values, ends = list_parts(column)
    if values.dtype.kind not in "iu":
        raise StoreError(f"{where.path}: {name} holds {values.dtype}, expected integers.")
    return values, np.asarray(ends, np.int64)


def _manifest(root: Path) -> dict[str, Any] | None:
    """The manifest of a folder that neatpack packed; None where there is none, or that of somebody else's tool."""
    try:
        foreign = json.loads((root / MANIFEST).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):
        return load_manifest(root)  # says what is wrong with it
    if not isinstance(foreign, dict) or foreign.get("format") != "neatpack":
        return None
    return load_manifest(root)


def _vocabulary(manifest: dict[str, Any] | None) -> int | None:
    """The vocabulary that the folder was packed with: the tokenizer's, or the option's."""
    if manifest is None:
        return None
    size: int | None = manifest["tokenizer"]["vocab_size"] if manifest["tokenizer"] else manifest["options"]["vocab_size"]
    return size


# --- checks -----------------------------------------------------------------------------------------------------------


class _Findings:
    """Faults by kind, in the order of their first occurrence."""

    def __init__(self) -> None:
        self._by_kind: dict[tuple[str, str], list[Any]] = {}

    def add(self, check: str, kind: str, message: str, rows: np.ndarray, where: _Place, way_out: str) -> None:
        """Count the rows of a batch that have a fault; the first occurrence gives the message."""
        if len(rows):
            known = self._by_kind.setdefault((check, kind), [message, 0, where.row(int(rows[0])), way_out])
            known[1] += len(rows)

    def __iter__(self) -> Iterator[Finding]:
        for (check, _), (message, count, where, way_out) in self._by_kind.items():
            yield Finding(check, message, count, where, way_out)


def _rows_of(positions: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """The rows that hold flat positions, each once."""
    return np.unique(np.searchsorted(ends, positions, side="right") - 1)


def _check_vocabulary(found: _Findings, where: _Place, ids: np.ndarray, ends: np.ndarray, vocabulary: int | None) -> None:
    wide = ids.astype(np.int64)
    negative = np.flatnonzero(wide < 0)
    if len(negative):
        message = f"token id {int(wide[negative[0]])} is negative"
        rows = _rows_of(negative, ends)
        found.add("vocabulary", "negative", message, rows, where, "Labels mask tokens with -100, ids never do: pack again.")
    past = np.flatnonzero(wide >= vocabulary) if vocabulary is not None else negative[:0]
    if len(past):
        message = f"token id {int(wide[past].max())} is past the vocabulary of {vocabulary}"
        way_out = "Pack with the model's own tokenizer, or resize the model's embeddings."
        found.add("vocabulary", "past", message, _rows_of(past, ends), where, way_out)


def _check_boundaries(found: _Findings, where: _Place, ends: np.ndarray, lengths: np.ndarray, length_ends: np.ndarray) -> bool:
    """Lengths that are positive and sum to the row; False where the other checks cannot go by them."""
    empty = np.flatnonzero(lengths <= 0)
    if len(empty):
        message = f"a document of {int(lengths[empty[0]])} tokens in seq_lengths"
        found.add("boundaries", "empty", message, _rows_of(empty, length_ends), where, "Leave empty documents out: pack again.")
    cumulative = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    sums, sizes = np.diff(cumulative[length_ends]), np.diff(ends)
    wrong = np.flatnonzero(sums != sizes)
    if len(wrong):
        message = f"seq_lengths add up to {int(sums[wrong[0]])}, the row has {int(sizes[wrong[0]])} tokens"
        way_out = "Cut or pad rows only together with their seq_lengths: pack again."
        found.add("boundaries", "sum", message, wrong, where, way_out)
    return not len(wrong) and not len(empty)


def _check_padding(
    found: _Findings,
    where: _Place,
    ids: np.ndarray,
    lengths: np.ndarray,
    length_ends: np.ndarray,
    pad: int | None,
) -> None:
    """Padding stored as documents: it would be attended to, learned, and counted as data."""
    starts = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)[:-1])) if len(lengths) else lengths
    constant = _constant_documents(ids, starts, lengths)
    if pad is not None:
        padding = constant & (ids[starts] == pad) if len(starts) else constant
    else:
        padding = _trailing_padding(ids, starts, lengths, length_ends, constant)
    at = np.flatnonzero(padding)
    if len(at):
        tokens = int(lengths[at].sum())
        message = f"{len(at):,} documents ({tokens:,} tokens) hold nothing but id {int(ids[starts[at[0]]])}"
        way_out = "Padding belongs to no document: store rows unpadded and let the collator pad them."
        found.add("padding", "documents", message, _rows_of(at, length_ends), where, way_out)


def _constant_documents(ids: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """`[documents]` bool: every token of the document is the same id."""
    if not len(ids):
        return np.zeros(len(lengths), bool)
    same = np.concatenate(([True], ids[1:] == ids[:-1]))
    same[starts] = True
    return np.logical_and.reduceat(same, starts)


def _trailing_padding(
    ids: np.ndarray, starts: np.ndarray, lengths: np.ndarray, length_ends: np.ndarray, constant: np.ndarray
) -> np.ndarray:
    """Documents at the ends of rows that look like padding: one id over and over, in one document or in many of one token."""
    padding = np.zeros(len(lengths), bool)
    for row in range(len(length_ends) - 1):
        first, last = int(length_ends[row]), int(length_ends[row + 1]) - 1
        if last <= first or not constant[last]:
            continue  # a row that is one document is data, whatever it repeats
        index = last
        while index > first and constant[index] and ids[starts[index]] == ids[starts[last]]:
            index -= 1
        tail = slice(index + 1, last + 1)
        if int(lengths[tail].sum()) > 1:
            padding[tail] = True
    return padding


def _check_labels(
    found: _Findings,
    where: _Place,
    batch: pa.RecordBatch,
    ids: np.ndarray,
    ends: np.ndarray,
    lengths: np.ndarray,
    length_ends: np.ndarray,
) -> None:
    """Labels are aligned with their tokens; shifted ones would ask a document's end for the start of the next."""
    if "labels" not in batch.schema.names:
        return
    column = batch.column("labels")
    stored = column.is_valid().to_numpy(zero_copy_only=False)
    labels, label_ends = list_parts(column.filter(pa.array(stored)))
    sizes = np.diff(ends)
    wrong = np.flatnonzero(stored)[np.diff(label_ends) != sizes[stored]]
    if len(wrong):
        message = f"{int(wrong.size)} rows have labels of another length than input_ids"
        found.add("labels", "length", message, wrong, where, "Labels are aligned with input_ids one to one: pack again.")
        return
    all_labels = ids.astype(np.int64)
    all_labels[np.repeat(stored, sizes)] = labels
    last = np.cumsum(lengths, dtype=np.int64) - 1
    inner = np.ones(len(last), bool)
    inner[length_ends[1:][np.diff(length_ends) > 0] - 1] = False  # a row's last document has no next one
    boundary = last[inner]
    given, own, following = all_labels[boundary], ids[boundary], ids[boundary + 1]
    crossing = boundary[(given != IGNORE_INDEX) & (given != own) & (given == following)]
    if len(crossing):
        message = (
            "the label of a document's last token is the first token of the next document "
            f"(id {int(all_labels[crossing[0]])}): labels are shifted already"
        )
        way_out = "Store labels aligned with input_ids (the model or the collator shifts, within documents)."
        found.add("labels", "shifted", message, _rows_of(crossing, ends), where, way_out)


def _check_conservation(
    found: _Findings, root: Path, manifest: dict[str, Any] | None, sources: Sequence[str | Path]
) -> str | None:
    if manifest is None:
        return None
    try:
        verify(root, list(sources) or None)
    except StoreError as error:
        fault, _, way_out = str(error).rpartition(". ")  # a message ends with its way out
        found.add("conservation", "verify", fault, np.zeros(1, int), _Place(root, 0), way_out)
    return "source" if sources else "manifest"
