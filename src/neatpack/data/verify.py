"""A packed folder in, proof or a named fault out: checksums, boundaries, counts, and that nothing was lost or doubled."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from neatpack.data.columns import UNREADABLE, list_parts
from neatpack.data.content import ContentHash
from neatpack.data.documents import DocumentReader
from neatpack.data.job import add_content
from neatpack.data.manifest import load_manifest
from neatpack.data.options import PackOptions
from neatpack.data.records import Problems
from neatpack.data.sources import find_parts
from neatpack.data.store import MANIFEST, describe_content, read_batches
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
    trust_remote_code: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> VerifyReport:
    """Check a folder that `neatpack pack` wrote; nothing in it is trusted, and nothing in it runs.

    Args:
        folder: the packed folder.
        sources: the source it was packed from; it is read and tokenised again under the options of the manifest, and must
            give the same content. None checks against the hash that was taken while packing.
        trust_remote_code: let the tokenizer that the manifest names run the code that it ships, to read the source again;
            what the manifest itself says of this does not count.
        progress: told how far each step is ("shards" and "source", in bytes).

    Raises:
        StoreError: the first thing that is not as it must be: which shard or row, what was got, what was expected.
        SourceError: a source that cannot be read.
    """
    root = Path(folder)
    manifest = load_manifest(root)
    wrapped = manifest["options"]["strategy"] == "wrapped"
    _check_files(root, manifest)
    content = ContentHash()
    rows = tokens = done = 0
    total = sum(shard["bytes"] for shard in manifest["shards"])
    for shard in manifest["shards"]:
        _check_checksum(root / shard["file"], shard)
        found = _check_rows(root / shard["file"], shard, manifest["options"], content)
        rows, tokens, done = rows + found[0], tokens + found[1], done + shard["bytes"]
        if progress:
            progress("shards", done, total)
    _expect(root / MANIFEST, "rows", rows, manifest["counts"]["rows"])
    _expect(root / MANIFEST, "tokens", tokens, manifest["counts"]["tokens_in_rows"])
    got = describe_content(content.total, content.documents, wrapped=wrapped)
    _check_content(f"{root}: the rows", got, manifest["content"])
    if sources is not None:
        _check_source(root, manifest, sources, trust_remote_code, progress)
    return VerifyReport(
        folder=str(root),
        shards=len(manifest["shards"]),
        rows=rows,
        tokens=tokens,
        content=got["hash"],
        source=sources is not None,
    )


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


def _check_rows(path: Path, shard: dict[str, Any], options: dict[str, Any], content: ContentHash) -> tuple[int, int]:
    """Check every row of a shard and add it to the content hash; returns rows and tokens."""
    seq_len, wrapped = options["seq_len"], options["strategy"] == "wrapped"
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
            for name in options["token_columns"]:
                _refuse_lengths(path, rows, name, batch, lengths)
            for name in options["document_columns"]:
                _refuse_lengths(path, rows, name, batch, np.diff(piece_offsets))
            labels = labels_of(batch, ids, offsets)
            content.add(ids, np.ones(len(ids), np.int64) if wrapped else pieces, labels)
            rows, tokens = rows + batch.num_rows, tokens + len(ids)
    except (*UNREADABLE, KeyError) as error:
        raise StoreError(f"{path}: not readable as a shard of packed rows ({error}). Pack again.") from error
    _expect(path, "rows", rows, shard["rows"])
    _expect(path, "tokens", tokens, shard["tokens"])
    return rows, tokens


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


def _check_content(what: str, got: dict[str, Any], expected: dict[str, Any]) -> None:
    if got != expected:
        raise StoreError(
            f"{what} hold {got['count']} {got['of']} with the content hash {got['hash']}, expected {expected['count']} with "
            f"{expected['hash']}: something was lost, doubled or altered. Pack again."
        )


def _check_source(
    root: Path, manifest: dict[str, Any], sources: Sequence[str | Path], trust_remote_code: bool, progress: Any
) -> None:
    options = replace(PackOptions.from_json(manifest["options"]), trust_remote_code=trust_remote_code)
    content = ContentHash()
    reader = DocumentReader(options)
    found = find_parts(sources, options.include)
    done = 0
    for part in found.parts:
        problems = Problems(options.skip_bad)
        for chunk in reader.chunks(part, problems):
            add_content(content, reader.documents(chunk, problems), options)
        done += part.size
        if progress:
            progress("source", done, found.num_bytes)
    wrapped = options.strategy == "wrapped"
    got = describe_content(content.total, content.documents, wrapped=wrapped)
    _check_content(f"{', '.join(map(str, sources))}: the documents, compared with {root},", got, manifest["content"])
