"""A part of the source, tokenised: a flat file of ids, one of lengths, one of labels where there are any.

Plain little-endian arrays and a small JSON record, written last: without the record the part does not exist. Token files
use the narrowest dtype that holds the vocabulary. What is read back is a slice of documents, straight into the caller's
buffer.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from neatpack.data.columns import Documents
from neatpack.data.further_file import FurtherWriter
from neatpack.errors import StoreError


def narrowest_dtype(vocab_size: int | None) -> np.dtype:
    """The narrowest of uint8, uint16, int32, int64 that holds ids below `vocab_size`; int32 where that is unknown."""
    if vocab_size is None:
        return np.dtype(np.int32)
    for dtype in (np.uint8, np.uint16, np.int32):
        if vocab_size - 1 <= np.iinfo(dtype).max:
            return np.dtype(dtype)
    return np.dtype(np.int64)


@dataclass(kw_only=True)
class PartRecord:
    """What a tokenised part holds.

    Attributes:
        documents: documents, empty ones included.
        tokens: their tokens.
        dtype: of the ids file.
        labels: whether there is a labels file (int32); there is none where all labels repeat the ids.
        labelled: whether the source has labels or masks.
        in_place: whether the tokens stay in the source, and only lengths are kept here.
        text: whether the tokens come from text, by the tokenizer.
        skipped: records left out, by reason, and `examples` the first message for each.
        spelled: documents whose text spells out a special token, by its name.
        ignored_columns: columns of the source that are not carried.
        types: of the values of further columns, and `further_bytes` the size of the file that holds them.
        content: order-free hash of what the rows must hold of the documents, and `pieces` how many pieces that is.
        too_long: documents longer than a row, where that is an error, and `too_long_examples` the first few by place.
    """

    documents: int = 0
    tokens: int = 0
    dtype: str = "int32"
    labels: bool = False
    labelled: bool = False
    in_place: bool = False
    text: bool = False
    skipped: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)
    spelled: dict[str, int] = field(default_factory=dict)
    ignored_columns: list[str] = field(default_factory=list)
    types: dict[str, str] = field(default_factory=dict)
    further_bytes: int = 0
    content: int = 0
    pieces: int = 0
    too_long: int = 0
    too_long_examples: list[str] = field(default_factory=list)


class PartFiles:
    """Where a part's files lie: `part-00012.ids`, `.lengths`, `.labels`, `.further` and `.json` in the work folder."""

    def __init__(self, folder: Path, index: int) -> None:
        self._stem = folder / f"part-{index:05d}"

    def path(self, kind: str) -> Path:
        """The file of one kind: "ids", "lengths", "labels", "further" or "json"."""
        return self._stem.with_suffix(f".{kind}")

    def load_record(self) -> PartRecord | None:
        """The record of a finished part, or None where it is not finished or its files do not fit it."""
        try:
            record = PartRecord(**json.loads(self.path("json").read_bytes()))
            expected = self._expected_sizes(record)
            sizes = {kind: self.path(kind).stat().st_size for kind in expected}
        except FileNotFoundError:
            return None
        return record if sizes == expected else None

    def _expected_sizes(self, record: PartRecord) -> dict[str, int]:
        sizes = {"lengths": record.documents * 8}
        if not record.in_place:
            sizes["ids"] = record.tokens * np.dtype(record.dtype).itemsize
            if record.labels:
                sizes["labels"] = record.tokens * 4
            if record.types:
                sizes["further"] = record.further_bytes
        return sizes

    def lengths(self, first: int, count: int) -> np.ndarray:
        """Lengths `[count] int64` of documents `first` on."""
        return np.fromfile(self.path("lengths"), "<i8", count, offset=first * 8)

    def read_ids(self, dtype: np.dtype, first_token: int, into: np.ndarray) -> None:
        """Fill `into` with the ids from `first_token` on; the file holds `dtype`, the buffer may be wider."""
        _read(self.path("ids"), dtype, first_token, into)

    def read_labels(self, first_token: int, into: np.ndarray) -> None:
        """Fill `into` `int32` with the labels from `first_token` on."""
        _read(self.path("labels"), np.dtype("<i4"), first_token, into)


def _read(path: Path, dtype: np.dtype, first: int, into: np.ndarray) -> None:
    with path.open("rb", buffering=0) as file:
        file.seek(first * dtype.itemsize)
        if dtype == into.dtype:
            view = into.view(np.uint8).data
            done = 0
            while done < len(view) and (count := file.readinto(view[done:])):
                done += count
            complete = done == len(view)
        else:
            values = np.fromfile(file, dtype, len(into))
            complete = len(values) == len(into)
            if complete:
                into[:] = values
    if not complete:
        raise StoreError(f"{path}: shorter than its record says. Delete the .partial folder and run the command again.")


class PartWriter:
    """Writes a part; leaving the `with` block without an error, and `finish`, make it exist.

    Args:
        files: where to.
        dtype: of the ids.
        tokens: False where only lengths are kept.
    """

    def __init__(self, files: PartFiles, dtype: np.dtype, *, tokens: bool = True) -> None:
        self._files = files
        self._kinds = ("ids", "lengths") if tokens else ("lengths",)
        self._dtype = dtype.newbyteorder("<")
        self._open: dict[str, BinaryIO] = {}
        self._further = FurtherWriter(aside(files.path("further")))

    def __enter__(self) -> PartWriter:
        for kind in self._kinds:
            self._start(kind)
        return self

    def _start(self, kind: str) -> BinaryIO:
        path = self._files.path(kind)
        return self._open.setdefault(kind, aside(path).open("wb"))

    def append(self, documents: Documents) -> None:
        """Append documents."""
        self._open["ids"].write(np.ascontiguousarray(documents.ids, self._dtype).view(np.uint8).data)
        self.append_lengths(documents.lengths)
        if documents.labels is not None:
            file = self._open.get("labels") or self._start("labels")
            file.write(np.ascontiguousarray(documents.labels, "<i4").view(np.uint8).data)
        self._further.append(documents)

    def append_lengths(self, lengths: np.ndarray) -> None:
        """Append the lengths `[D]` of documents whose tokens are not kept here."""
        self._open["lengths"].write(np.ascontiguousarray(lengths, "<i8").view(np.uint8).data)

    def finish(self, record: PartRecord) -> None:
        """Move the files to their names, the record last; labels that all repeat the ids are not kept."""
        if "labels" in self._open and not record.labels:
            unwanted = self._open.pop("labels")
            unwanted.close()
            Path(unwanted.name).unlink()
        for kind, file in self._open.items():
            file.close()
            Path(file.name).replace(self._files.path(kind))
        self._open.clear()
        if self._further.types:
            self._further.close()
            record.types, record.further_bytes = self._further.types, self._further.path.stat().st_size
            self._further.path.replace(self._files.path("further"))
        write_json(self._files.path("json"), asdict(record))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for file in self._open.values():
            file.close()
            Path(file.name).unlink(missing_ok=True)
        self._further.close()
        self._further.path.unlink(missing_ok=True)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON file aside, then rename it: it is whole or not there."""
    unfinished = aside(path)
    with unfinished.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1, sort_keys=True)
        file.write("\n")
    unfinished.replace(path)


def aside(path: Path) -> Path:
    """A name beside `path` to write to before the file is whole; never the same one.

    A worker that outlives a killed run, or was given up for lost on another machine, may still be writing the same file.
    """
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}")
