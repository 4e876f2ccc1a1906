"""Sources in, an ordered list of parts out: which files are read, as what, and in which pieces.

The order and the cuts depend on the files alone (never on workers), so that every run sees the same parts: sources in
the order given, folders in sorted order, large JSONL files by byte range, Parquet files by row groups, Arrow files by
record batches, text files (one document each) in groups.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from neatpack.data.store import is_packed_folder
from neatpack.errors import SourceError

PART_BYTES = 1 << 27
"""A part ends at the first natural cut after this many bytes."""

TEXT_GROUP = 4096
"""Most text files in a part."""

MAX_LINKED = 100_000
"""Most folders that are reached through links: a few that link to each other make any number of ways."""

DATA_FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".arrow": "arrow"}
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_TEXT = """
.txt .md .rst .tex .text .log .org .adoc .srt .vtt .html .htm .css .xml .yaml .yml .toml .ini .cfg
.py .pyi .pyx .pxd .ipynb .c .h .cc .cpp .cxx .hpp .cu .cuh .rs .go .java .kt .scala .js .jsx .mjs .ts .tsx .rb .php .pl .pm
.lua .r .jl .m .swift .cs .fs .hs .ml .mli .ex .exs .erl .clj .lisp .el .dart .nim .zig .d .f .f90 .asm .s .v .sv .vhd .tcl
.sh .bash .zsh .ps1 .bat .sql .cmake .proto .vim
"""
TEXT_SUFFIXES = frozenset(_TEXT.split())
"""Files of folders that are read as one text document each."""

TABLE_SUFFIXES = frozenset({".csv", ".tsv"})
"""Suffixes of tables that are not read: as text, all their records would be one document."""

UNREAD_SUFFIXES = frozenset({".xz", ".bz2", ".zip", ".7z", ".tar", ".tgz"})
"""Suffixes of compressed files that are not read."""


@dataclass(frozen=True)
class Part:
    """A piece of the source that one worker reads: whole text files, or one file from `start` to `stop`.

    Attributes:
        format: "text", "jsonl", "parquet" or "arrow".
        files: paths; one, unless the format is "text".
        start: first byte (jsonl), row group (parquet) or record batch (arrow).
        stop: where it ends; None is the end of the file.
        size: bytes to read, for progress.
    """

    format: str
    files: tuple[str, ...]
    start: int = 0
    stop: int | None = None
    size: int = 0


@dataclass(frozen=True)
class SourceList:
    """What was found.

    Attributes:
        parts: pieces to read, in order.
        files: every file that is read, in order, with its size in bytes and its time of change.
        ignored: files in folders that are neither data nor known text, counted by suffix.
    """

    parts: tuple[Part, ...]
    files: tuple[tuple[str, int, int], ...]
    ignored: dict[str, int] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(size for _, size, _ in self.files)

    def fingerprint(self) -> str:
        """Digest of names, sizes and times: another one means that the source changed."""
        digest = hashlib.sha256()
        for entry in self.files:
            digest.update(repr(entry).encode())
        return digest.hexdigest()


def find_parts(sources: Sequence[str | Path], include: Sequence[str] = ()) -> SourceList:
    """Expand files and folders into the parts to read.

    Args:
        sources: files (data by suffix, anything else as one text document, but for tables and archives), folders (walked
            in sorted order; data files and known text suffixes are read, the rest is counted, hidden files and
            `__pycache__` are passed over) and folders that `datasets` saved.
        include: glob patterns that select files in folders, by name or by path below the folder.

    Raises:
        SourceError: a source that does not exist, a file of a kind that is not read, a folder with nothing to read, a
            `DatasetDict` of several splits.
    """
    if not sources:
        raise SourceError("no source was given: name at least one file or folder.")
    ignored: Counter[str] = Counter()
    found: list[tuple[str, str]] = []
    for source in map(Path, sources):
        before = len(found)
        if source.is_dir():
            found += _Walk(source, tuple(include), ignored).files(source)
            if len(found) == before:
                raise SourceError(_nothing_message(source, include, ignored))
        elif source.is_socket() or source.is_char_device() or source.is_block_device():
            raise SourceError(f"{source}: a socket or a device, expected a file or a folder. Write what it gives to a file.")
        elif source.exists():
            _refuse_disguised(source)
            found.append((str(source), format_of(source) or "text"))
        else:
            raise SourceError(f"{source}: no such file or folder. Check the path; patterns are expanded by the shell.")
    files = tuple((path, *_size_and_time(path)) for path, _ in found)
    _refuse_repeated([path for path, _ in found])
    return SourceList(tuple(_cut(found, [size for _, size, _ in files])), files, dict(sorted(ignored.items())))


def refuse_output_within(sources: Sequence[str | Path], out: Path) -> None:
    """Refuse an output folder inside a source: the next run, or the same one resumed, would read its own output.

    Raises:
        SourceError: `out` lies in one of the folders.
    """
    real = out.resolve()
    for source in map(Path, sources):
        if source.is_dir() and real.is_relative_to(source.resolve()):
            raise SourceError(
                f"--out {out} lies inside the source {source}, so that a later run would pack its own output. "
                "Choose a folder outside of every source."
            )


def _refuse_repeated(paths: Sequence[str]) -> None:
    """Refuse a file that is reached twice: its documents would be packed twice."""
    seen: dict[tuple[int, int], str] = {}
    for path in paths:
        status = Path(path).stat()
        first = seen.setdefault((status.st_dev, status.st_ino), path)
        if first is not path and status.st_ino:
            raise SourceError(
                f"{path}: the same file as {first}, so its documents would be packed twice. Name each file once: drop one of "
                "the overlapping sources or links."
            )


def _refuse_disguised(source: Path) -> None:
    """Refuse a file that is named itself and whose suffix says that it is neither text nor a format that is read."""
    suffix = source.suffix.lower()
    if suffix == ".json":
        raise SourceError(f"{source}: .json may be one document or many. Rename JSON Lines to .jsonl, or a text to .txt.")
    if suffix in TABLE_SUFFIXES:
        raise SourceError(
            f"{source}: {suffix} is a table, expected .jsonl, .parquet or .arrow. Convert it, such as with "
            'datasets.load_dataset("csv", ...) and to_parquet; if all of it is one text, rename it to .txt.'
        )
    if suffix in UNREAD_SUFFIXES or (suffix in COMPRESSIONS and format_of(source) is None):
        raise SourceError(f"{source}: compressed, and only .jsonl.gz and .jsonl.zst are read compressed. Decompress it first.")


def format_of(path: Path) -> str | None:
    """The data format that a file name stands for, or None."""
    suffixes = path.suffixes
    if suffixes and suffixes[-1].lower() in COMPRESSIONS:
        suffixes = suffixes[:-1]
        return "jsonl" if suffixes and DATA_FORMATS.get(suffixes[-1].lower()) == "jsonl" else None
    return DATA_FORMATS.get(suffixes[-1].lower()) if suffixes else None


def compression_of(path: str) -> str | None:
    """The compression that a file name stands for, or None."""
    return COMPRESSIONS.get(Path(path).suffix.lower())


def _size_and_time(path: str) -> tuple[int, int]:
    try:
        status = Path(path).stat()
    except OSError as error:
        raise SourceError(f"{path}: cannot be read ({error.strerror}).") from error
    return status.st_size, status.st_mtime_ns


@dataclass
class _Walk:
    """A walk through the folders below `root`, counting what is `ignored`."""

    root: Path
    include: tuple[str, ...]
    ignored: Counter[str]
    linked: int = 0

    def files(self, folder: Path, above: frozenset[Path] = frozenset()) -> Iterator[tuple[str, str]]:
        """Files to read and their formats, in sorted order; `above` is every folder that the way here leads through."""
        if (folder / "dataset_dict.json").is_file():
            yield from self.files(_only_split(folder), above)
            return
        if folder != self.root and is_packed_folder(folder):
            raise SourceError(
                f"{folder}: packed by neatpack already, inside the source {self.root}. Name it as a source of its own if its "
                "documents are meant, or move it out of the source."
            )
        if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
            yield from _saved_dataset(folder)
            return
        try:
            entries = sorted(folder.iterdir(), key=lambda entry: entry.name)
        except OSError as error:
            raise SourceError(f"{folder}: the folder cannot be read ({error.strerror}).") from error
        real = folder.resolve()
        above = above | {real, *real.parents}
        for entry in entries:
            if entry.name.startswith(".") or entry.name == "__pycache__":
                continue
            if entry.is_dir():
                if not entry.is_symlink() or self._leads_on(entry, above):
                    yield from self.files(entry, above)
            elif format_ := self._format(entry):
                yield str(entry), format_

    def _leads_on(self, link: Path, above: frozenset[Path]) -> bool:
        """Whether a linked folder is another one than those that the way to it leads through."""
        self.linked += 1
        if self.linked > MAX_LINKED:
            raise SourceError(
                f"{self.root}: more than {MAX_LINKED} folders are reached through links, the last one {link}. Name the folders "
                "that are meant, without the links."
            )
        return link.resolve() not in above

    def _format(self, file: Path) -> str | None:
        """The format to read a file as; None, and counted, where it is not read."""
        format_ = format_of(file) or ("text" if file.suffix.lower() in TEXT_SUFFIXES or self.include else None)
        special = file.exists() and not file.is_file()  # a pipe, socket or device may never end
        if format_ is None or special or not _included(file, self.root, self.include):
            self.ignored[file.suffix or file.name] += 1
            return None
        return format_


def _included(path: Path, root: Path, include: tuple[str, ...]) -> bool:
    below = path.relative_to(root).as_posix()
    return not include or any(fnmatch(path.name, pattern) or fnmatch(below, pattern) for pattern in include)


def _only_split(folder: Path) -> Path:
    splits = read_json(folder / "dataset_dict.json").get("splits", [])
    if not isinstance(splits, list):
        raise SourceError(f"{folder / 'dataset_dict.json'}: splits is no list. Save or copy the dataset again.")
    if len(splits) != 1:
        ways = ", ".join(str(folder / str(split)) for split in splits)
        raise SourceError(
            f"{folder}: a DatasetDict of {len(splits)} splits ({', '.join(map(str, splits))}); packing them together would mix "
            f"them. Name the splits that are meant: {ways}."
        )
    return _inside(folder, splits[0], folder / "dataset_dict.json")


def _saved_dataset(folder: Path) -> Iterator[tuple[str, str]]:
    state = read_json(folder / "state.json")
    if state.get("_indices_data_files"):
        raise SourceError(f"{folder}: the dataset has an index over its rows. Call flatten_indices() and save it again.")
    entries = state.get("_data_files", [])
    for entry in entries if isinstance(entries, list) else [entries]:
        name = entry.get("filename") if isinstance(entry, dict) else entry
        path = _inside(folder, name, folder / "state.json")
        if not path.is_file():
            raise SourceError(f"{path}: missing, but {folder / 'state.json'} lists it. Save or copy the dataset again.")
        yield str(path), "arrow"


def _inside(folder: Path, name: object, record: Path) -> Path:
    """The entry of a folder that a record in it names; a name that leads elsewhere is refused."""
    if not isinstance(name, str) or name in ("", ".", "..") or not name.isprintable() or any(part in name for part in "/\\"):
        raise SourceError(
            f"{record}: names {str(name)[:80]!r}, expected the plain name of an entry of the folder. Save or copy the dataset "
            "again; if it is not yours, do not use it."
        )
    return folder / name


def read_json(path: Path) -> dict:
    """A JSON object from a file of a saved dataset.

    Raises:
        SourceError: the file cannot be read or is no JSON object.
    """
    import json

    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise SourceError(f"{path}: not readable as JSON ({error}). Save or copy the dataset again.") from error
    if not isinstance(value, dict):
        raise SourceError(f"{path}: expected a JSON object, got {type(value).__name__}.")
    return value


def _cut(found: Iterable[tuple[str, str]], sizes: Sequence[int]) -> Iterator[Part]:
    group: list[str] = []
    group_size = 0
    for (path, format_), size in zip(found, sizes, strict=True):
        if group and (format_ != "text" or len(group) == TEXT_GROUP or group_size + size > PART_BYTES):
            yield Part("text", tuple(group), size=group_size)
            group, group_size = [], 0
        if format_ == "text":
            group.append(path)
            group_size += size
        elif format_ == "jsonl" and compression_of(path) is None and size > PART_BYTES:
            for start in range(0, size, PART_BYTES):
                stop = min(start + PART_BYTES, size)
                yield Part("jsonl", (path,), start, stop, stop - start)
        elif format_ in ("parquet", "arrow") and size > PART_BYTES:
            yield from _cut_blocks(path, format_, size)
        else:
            yield Part(format_, (path,), size=size)
    if group:
        yield Part("text", tuple(group), size=group_size)


def _cut_blocks(path: str, format_: str, size: int) -> Iterator[Part]:
    """Parts of a Parquet or Arrow file, of about equal numbers of row groups or record batches."""
    from neatpack.data.readers import count_blocks

    blocks = count_blocks(path, format_)
    parts = max(1, min(blocks, -(-size // PART_BYTES)))
    for index in range(parts):
        start, stop = blocks * index // parts, blocks * (index + 1) // parts
        yield Part(format_, (path,), start, stop, size * (stop - start) // max(blocks, 1))


def _nothing_message(folder: Path, include: Sequence[str], ignored: Counter[str]) -> str:
    passed = ", ".join(f"{count} x {suffix}" for suffix, count in ignored.most_common(5))
    chosen = f" that match {', '.join(include)}" if include else ""
    return (
        f"{folder}: no readable files{chosen} (expected .jsonl, .parquet, .arrow, text or source files, or a saved dataset; "
        f"found {passed or 'nothing'}). Name files directly, or select them with --include."
    )


def source_names(sources: Sequence[str | Path]) -> list[str]:
    """The sources as given, for the manifest."""
    return [os.fspath(source) for source in sources]
