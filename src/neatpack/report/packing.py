"""What there is to look at: a packed folder or a saved plan, opened as one record with rows, numbers and (if at hand) text."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from neatpack.data.manifest import load_manifest
from neatpack.data.opening import OpenedSource, open_source
from neatpack.data.options import PackOptions
from neatpack.data.records import IDS
from neatpack.data.sources import format_of
from neatpack.data.store import MANIFEST
from neatpack.data.tokenize import Tokenizer, load_tokenizer
from neatpack.errors import PackError, SourceError, StoreError
from neatpack.planning import PackPlan, load_plan
from neatpack.report.folder import FolderTokens, plan_of_folder

Progress = Callable[[str, int, int], None]


class TokenReader(Protocol):
    """Where the tokens of rows are read."""

    def read(self, rows: np.ndarray) -> list[np.ndarray]:
        """Tokens of each of `rows [K]`, ascending row numbers."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Packing:
    """A packing to report on.

    Attributes:
        path: as the user gave it.
        kind: "folder" or "plan".
        plan: the rows. In a folder, which does not record where documents came from, documents are numbered through the
            rows, and each piece of one that was cut counts.
        source: what was packed, in words, or None where that is not known.
        source_bytes: its size, or None.
        stored_bytes: size of the shards or the plan file.
        tokenizer: the tokenizer's name, or None where token ids were packed as they came.
        tokens: where the rows' tokens are read; None for a plan without its source.
        decoder: turns them into text; None where there is none.
        notes: what the reader should know, such as why there is no text.
    """

    path: str
    kind: str
    plan: PackPlan
    source: str | None
    source_bytes: int | None
    stored_bytes: int
    tokenizer: str | None
    tokens: TokenReader | None
    decoder: Tokenizer | None
    notes: tuple[str, ...] = ()


def open_packing(
    path: str | os.PathLike[str],
    *,
    source: str | os.PathLike[str] | None = None,
    tokenizer: str | None = None,
    progress: Progress | None = None,
) -> Packing:
    """Open a folder that `neatpack pack` wrote, or a plan that `save_plan` wrote.

    Args:
        path: the folder or the file.
        source: the documents that a plan was made for, as `PackedDataset` opens them: their tokens can then be shown.
        tokenizer: what decodes the tokens, as for `neatpack pack`. None is the one that the folder was packed with; if
            that cannot be loaded, a note says so.
        progress: told how far reading the folder is, in bytes.

    Raises:
        StoreError: neither of the two, or a damaged one.
        SourceError: a source or tokenizer that was asked for and cannot be used.
        PlanError: a plan that was made for another source.
    """
    place = Path(path)
    if not place.exists():
        raise StoreError(f"{place}: not found. Pass a folder that neatpack pack wrote, or a file that save_plan wrote.")
    if place.is_dir():
        if source is not None:
            raise SourceError(f"{place} is a packed folder and holds its tokens itself: a source is for plans. Leave it out.")
        return _open_folder(place, tokenizer, progress)
    return _open_plan(place, source, tokenizer)


def _open_folder(folder: Path, tokenizer: str | None, progress: Progress | None) -> Packing:
    manifest = load_manifest(folder)
    plan = plan_of_folder(folder, manifest, progress)
    info = manifest.get("tokenizer")
    info = info if isinstance(info, dict) else None
    recorded = None if info is None else replace(PackOptions.from_json(manifest["options"]), trust_remote_code=False)
    decoder, note = _decoder(tokenizer, recorded, str(info.get("fingerprint")) if info else "")
    described = manifest.get("source")
    described = described if isinstance(described, dict) else {}
    return Packing(
        path=str(folder),
        kind="folder",
        plan=plan,
        source=_source_in_words(described),
        source_bytes=described["bytes"] if isinstance(described.get("bytes"), int) else None,
        stored_bytes=sum(shard["bytes"] for shard in manifest["shards"]),
        tokenizer=None if recorded is None else recorded.tokenizer,
        tokens=FolderTokens(folder, manifest, plan.row_lengths()),
        decoder=decoder,
        notes=tuple(filter(None, (note, _slots_in_words(plan), _skipped_in_words(manifest["counts"].get("skipped"))))),
    )


def _refuse_no_plan(file: Path) -> None:
    """Say what a file is that cannot be a plan, not even a damaged one."""
    with file.open("rb") as stream:
        if stream.read(2) == b"PK":
            return
    if (file.parent / MANIFEST).is_file() and format_of(file):
        raise StoreError(f"{file}: a shard of a packed folder. Pass the folder: neatpack inspect {file.parent}")
    kind = format_of(file)
    what = "no .npz archive of save_plan" if kind is None else f"documents ({kind})"
    hint = "" if kind is None else f" Pack them first: neatpack pack {file} --out DIR --seq-len N"
    raise StoreError(f"{file}: {what}, expected a folder that neatpack pack wrote, or a file that save_plan wrote.{hint}")


def _open_plan(file: Path, source: str | os.PathLike[str] | None, tokenizer: str | None) -> Packing:
    _refuse_no_plan(file)
    plan = load_plan(file)
    opened = None
    if source is not None:
        opened = open_source(source)
        plan.check_source(opened.table.lengths())
    elif tokenizer is not None:
        raise SourceError(f"{file} is a plan and holds no tokens to decode: pass its source too (--source).")
    note = None
    if opened is None:
        note = "A plan holds no tokens: pass the documents it was made for with --source (and --tokenizer) to read them here."
    elif tokenizer is None:
        note = "Tokens are shown as ids: pass --tokenizer to read them as text."
    return Packing(
        path=str(file),
        kind="plan",
        plan=plan,
        source=None if source is None else os.fspath(source),
        source_bytes=None,
        stored_bytes=file.stat().st_size,
        tokenizer=tokenizer,
        tokens=None if opened is None else _SourceTokens(opened, plan),
        decoder=None if tokenizer is None else _load(tokenizer),
        notes=tuple(filter(None, (note, _slots_in_words(plan)))),
    )


def _decoder(chosen: str | None, recorded: PackOptions | None, fingerprint: str) -> tuple[Tokenizer | None, str | None]:
    """The tokenizer that the user chose, or else the recorded one where it is still what it was; and what to note."""
    if chosen is not None:
        return _load(chosen), None
    if recorded is None:
        return None, "The rows were packed from token ids, shown as they are: pass --tokenizer to read them as text."
    try:
        loaded = load_tokenizer(recorded)
    except PackError as error:
        return None, f"Tokens are shown as ids, since {error} Name it with --tokenizer."
    if loaded.info.fingerprint != fingerprint:
        return None, (
            f"Tokens are shown as ids: the tokenizer {recorded.tokenizer!r} is no longer the one that packed these rows. Name "
            "the right one with --tokenizer."
        )
    return loaded, None


def _load(tokenizer: str) -> Tokenizer:
    return load_tokenizer(PackOptions(seq_len=1, tokenizer=tokenizer, eos=False))


def _source_in_words(described: dict[str, Any]) -> str | None:
    given, files = described.get("given"), described.get("files")
    if not isinstance(given, list) or not given:
        return None
    names = [str(name) for name in given]
    shown = names[0] if len(names) == 1 else f"{os.path.commonpath(names) if _comparable(names) else names[0]}, and below"
    count = f" ({files:,} file{'s' if files != 1 else ''})" if isinstance(files, int) else ""
    return shown + count


def _slots_in_words(plan: PackPlan) -> str | None:
    if plan.align == 1:
        return None
    return (
        f"Documents lie in slots of a multiple of {plan.align} tokens: batch the rows with PackedCollator(align={plan.align})."
    )


def _skipped_in_words(skipped: object) -> str | None:
    if not isinstance(skipped, dict) or not skipped:
        return None
    return "Skipped while packing: " + ", ".join(f"{count} records ({reason})" for reason, count in skipped.items()) + "."


def _comparable(names: list[str]) -> bool:
    return len({Path(name).is_absolute() for name in names}) == 1 and bool(os.path.commonpath(names))


class _SourceTokens:
    """The rows of a plan, read from its source."""

    def __init__(self, opened: OpenedSource, plan: PackPlan) -> None:
        self._table, self._plan = opened.table, plan

    def read(self, rows: np.ndarray) -> list[np.ndarray]:
        """See `TokenReader.read`."""
        plan = self._plan.take_rows(rows)
        starts = self._table.starts[self._table.where(plan.doc)] + plan.start.astype(np.int64)
        ids = self._table.tokens[IDS].take(starts, plan.length.astype(np.int64))
        return np.split(ids, np.cumsum(plan.row_lengths())[:-1])
