"""The output folder: shards, the files that make it a `datasets` folder, and a manifest; whole, or not there.

    DIR/data-00000.arrow ...   rows, one shard a packing unit: Arrow IPC streams, or Parquet
    DIR/state.json, dataset_info.json   what `datasets.load_from_disk` wants (Arrow only)
    DIR/manifest.json          options, source fingerprint, counts, a SHA-256 a shard

Everything is written into DIR.partial, which is renamed to DIR when it is complete.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from neatpack.data.columns import check_offsets
from neatpack.data.further import FurtherColumn, feature_of
from neatpack.data.tokens import aside, write_json
from neatpack.errors import StoreError

MANIFEST = "manifest.json"
_WRITTEN = re.compile(r"data-[0-9]+\.(arrow|parquet)|manifest\.json|state\.json|dataset_info\.json")
MANIFEST_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class ShardRecord:
    """What a shard holds: its file name, rows, tokens, bytes and SHA-256."""

    file: str
    rows: int
    tokens: int
    bytes: int
    sha256: str


def row_schema(dtype: np.dtype, *, labels: bool, further: Sequence[FurtherColumn] = ()) -> pa.Schema:
    """The schema of packed rows: `input_ids`, `seq_lengths`, `labels` where there are any, and further columns."""
    kinds = {"input_ids": pa.from_numpy_dtype(dtype), "seq_lengths": pa.int32()}
    if labels:
        kinds["labels"] = pa.int32()
    kinds.update({column.name: column.arrow_type for column in further})
    features = json.dumps({"info": {"features": _features({name: feature_of(kind) for name, kind in kinds.items()})}})
    return pa.schema([(name, pa.list_(kind)) for name, kind in kinds.items()]).with_metadata({"huggingface": features})


def _features(dtypes: dict[str, str]) -> dict[str, Any]:
    return {name: {"feature": {"dtype": dtype, "_type": "Value"}, "_type": "List"} for name, dtype in dtypes.items()}


class _Tee(io.RawIOBase):
    """A file that hashes what is written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.size = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.digest.update(data)
        written = self._file.write(data)
        self.size += written
        return written


def write_shard(
    path: Path, batches: Iterable[pa.RecordBatch], schema: pa.Schema, *, aside_in: Path | None = None
) -> ShardRecord:
    """Write record batches as one shard: aside, then renamed.

    Args:
        path: the shard.
        batches: its rows; each is written before the next one is asked for.
        schema: of the batches.
        aside_in: folder to write in before the shard is whole; None is the shard's own.
    """
    unfinished = aside((aside_in or path.parent) / path.name)
    rows = tokens = 0
    try:
        with unfinished.open("wb") as file:
            tee = _Tee(file)
            with pa.PythonFile(tee, "w") as sink, _writer(path, sink, schema) as writer:
                for batch in batches:
                    writer.write_batch(batch)
                    rows += batch.num_rows
                    tokens += len(batch.column("input_ids").flatten())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return ShardRecord(file=path.name, rows=rows, tokens=tokens, bytes=tee.size, sha256=tee.digest.hexdigest())


def _writer(path: Path, sink: pa.NativeFile, schema: pa.Schema) -> Any:
    """A writer of record batches; in Parquet each is a row group, small enough for viewers that fetch one at a time."""
    if path.suffix != ".parquet":
        return pa.ipc.new_stream(sink, schema)
    import pyarrow.parquet as pq

    return pq.ParquetWriter(sink, schema, compression="zstd", use_dictionary=False)


def read_batches(path: Path, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
    """Record batches of a shard, in order; only these columns need be decoded, None for all."""
    if path.suffix != ".parquet":
        with pa.memory_map(str(path)) as file:
            for batch in pa.ipc.open_stream(file):
                check_offsets(*batch.columns)
                yield batch
        return
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as table:
        for group in range(table.num_row_groups):
            rows = table.metadata.row_group(group).num_rows
            yield from table.iter_batches(rows, row_groups=[group], columns=columns)


def write_dataset_files(folder: Path, schema: pa.Schema, shards: list[ShardRecord]) -> None:
    """Write what makes the folder one that `datasets.load_from_disk` opens."""
    features = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
    content = hashlib.sha256("".join(shard.sha256 for shard in shards).encode()).hexdigest()
    state: dict[str, Any] = {
        "_data_files": [{"filename": shard.file} for shard in shards],
        "_fingerprint": content[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    info = {"citation": "", "description": "", "features": features, "homepage": "", "license": ""}
    write_json(folder / "dataset_info.json", info)
    write_json(folder / "state.json", state)


def write_manifest(folder: Path, shards: list[ShardRecord], **sections: Any) -> None:
    """Write `manifest.json`: `sections` (options, source, counts and so on) and the shards."""
    manifest = {"format": "neatpack", "version": MANIFEST_VERSION, **sections, "shards": [asdict(shard) for shard in shards]}
    write_json(folder / MANIFEST, manifest)


def describe_content(total: int, pieces: int, *, wrapped: bool) -> dict[str, Any]:
    """The manifest's record of the content hash: over pieces of documents, or over tokens where rows cut documents anywhere."""
    return {"of": "tokens" if wrapped else "pieces", "count": pieces, "hash": f"{total % 2**64:016x}"}


def check_target(out: Path, *, overwrite: bool) -> None:
    """Refuse an output folder that is there already, unless it may be replaced.

    Raises:
        StoreError: `out` exists and `overwrite` is off, or it is something that `neatpack pack` did not write.
    """
    if not out.exists() and not out.is_symlink():
        return
    if not overwrite:
        raise StoreError(
            f"{out}: already exists. Choose another --out, or pass --overwrite to replace it when the run is done."
        )
    if not out.is_dir():
        raise StoreError(f"{out}: exists and is not a folder. Remove it yourself, or choose another --out.")
    entries = sorted(entry.name for entry in out.iterdir())
    if entries and not is_packed_folder(out):
        raise StoreError(f"{out}: exists and was not written by neatpack pack (no {MANIFEST} of ours). Remove it yourself.")
    strange = [name for name in entries if not _WRITTEN.fullmatch(name)]
    if strange:
        raise StoreError(
            f"{out}: holds {strange[0]!r}, which neatpack pack did not write and --overwrite would delete. Move it elsewhere, "
            "or choose another --out."
        )


def is_packed_folder(folder: Path) -> bool:
    """Whether a folder holds a manifest of ours, whatever else it may claim or lack."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(manifest, dict) and manifest.get("format") == "neatpack"


def publish(partial: Path, out: Path) -> None:
    """Rename the complete folder into place; an old one survives until that moment."""
    old = None
    if out.exists():
        old = out.with_name(f"{out.name}.old.{os.getpid()}")
        out.rename(old)
    partial.rename(out)
    _sync_folder(out.parent)
    if old is not None:
        shutil.rmtree(old)


def _sync_folder(folder: Path) -> None:
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
