"""The manifest of a packed folder, read and checked before anything believes it: the folder may come from a stranger."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from neatpack.data.options import PackOptions
from neatpack.data.store import MANIFEST, MANIFEST_VERSION
from neatpack.errors import PackError, StoreError

_SHARD_NAME = re.compile(r"data-[0-9]+\.(arrow|parquet)")

_NUMBER, _TEXT, _FLAG, _LIST = int, str, bool, list
_NONE = type(None)
_SECTIONS: dict[str, dict[str, tuple[type, ...]]] = {
    "options": {
        "seq_len": (_NUMBER,),
        "tokenizer": (_TEXT,),
        "text_column": (_TEXT, _NONE),
        "include": (_LIST,),
        "token_columns": (_LIST,),
        "document_columns": (_LIST,),
        "ignore_columns": (_LIST,),
        "strategy": (_TEXT,),
        "overflow": (_TEXT,),
        "max_docs_per_row": (_NUMBER, _NONE),
        "align": (_NUMBER,),
        "seed": (_NUMBER, _NONE),
        "eos": (_FLAG,),
        "eos_token": (_TEXT, _NONE),
        "split_special_tokens": (_FLAG,),
        "trust_remote_code": (_FLAG,),
        "skip_bad": (_FLAG,),
        "vocab_size": (_NUMBER, _NONE),
        "unit_tokens": (_NUMBER, _NONE),
        "file_format": (_TEXT,),
    },
    "counts": {"rows": (_NUMBER,), "tokens_in_rows": (_NUMBER,)},
    "content": {"of": (_TEXT,), "count": (_NUMBER,), "hash": (_TEXT,)},
}
_SHARD: dict[str, tuple[type, ...]] = {
    "file": (_TEXT,),
    "rows": (_NUMBER,),
    "tokens": (_NUMBER,),
    "bytes": (_NUMBER,),
    "sha256": (_TEXT,),
}


def load_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a packed folder, with everything in it that is read later, and of the right kind.

    Raises:
        StoreError: there is none, it is not one that this version reads, or a shard's name leads out of the folder.
    """
    path = folder / MANIFEST
    if folder.is_file():
        raise StoreError(f"{folder}: a file, expected the folder that neatpack pack wrote. Pass {_folder_of(folder)}.")
    try:
        manifest = json.loads(path.read_bytes(), object_pairs_hook=_named_once, parse_constant=_no_number)
    except FileNotFoundError as error:
        partial = folder.with_name(f"{folder.name}.partial")
        hint = f" An unfinished run is in {partial}: run its command again." if partial.exists() else ""
        raise StoreError(
            f"{path}: not found; {folder} is not a finished folder of neatpack pack.{hint or _packed_elsewhere(folder)}"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise StoreError(f"{path}: not readable ({error}). Pack again, or restore the file.") from error
    foreign = not isinstance(manifest, dict) or manifest.get("format") != "neatpack"
    if foreign or manifest.get("version") != MANIFEST_VERSION:
        way_out = (foreign and _packed_elsewhere(folder)) or " Use the neatpack that wrote it."
        raise StoreError(f"{path}: expected a neatpack manifest of version {MANIFEST_VERSION}.{way_out}")
    checked: dict[str, Any] = manifest
    _check_manifest(path, checked)
    return checked


def _packed_elsewhere(folder: Path) -> str:
    """The way out for a folder of rows that is none of ours."""
    if any(next(folder.glob(pattern), None) for pattern in ("*.arrow", "*.parquet")):
        return f" Rows that something else packed are checked by: neatpack audit {folder}"
    return ""


def options_of(folder: Path, manifest: dict[str, Any]) -> PackOptions:
    """The options that a manifest records.

    Raises:
        StoreError: options that no run can have had.
    """
    try:
        return PackOptions.from_json(manifest["options"])
    except PackError as error:
        raise StoreError(
            f"{folder / MANIFEST}: options that no run can have had ({error}) Restore the file, or pack again."
        ) from error


def align_of(path: Path) -> int:
    """The `align` that the rows of a folder were packed with; 1 for whatever `neatpack pack` did not write.

    Raises:
        StoreError: a folder of `neatpack pack` whose manifest is damaged.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
    except (OSError, ValueError, RecursionError):
        return 1
    if not isinstance(manifest, dict) or manifest.get("format") != "neatpack":
        return 1
    return options_of(path, load_manifest(path)).align


def _named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of the manifest; of a name that is there twice, two readers might each believe another value."""
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise ValueError(f"the name {twice[0][:60]!r} is there twice")
    return dict(pairs)


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number that JSON knows")


def _folder_of(file: Path) -> str:
    return (
        f"the folder it lies in, {file.parent}" if (file.parent / MANIFEST).is_file() else "that folder, the --out of its run"
    )


def _check_manifest(path: Path, manifest: dict[str, Any]) -> None:
    for section, kinds in _SECTIONS.items():
        _check_section(path, section, manifest.get(section), kinds)
    if manifest.get("tokenizer") is not None:
        _check_section(path, "tokenizer", manifest["tokenizer"], {"vocab_size": (_NUMBER,)})
    elif "tokenizer" not in manifest:
        raise StoreError(f"{path}: tokenizer is missing, expected an object or null. Pack again, or restore the file.")
    strange = sorted(set(manifest["options"]) - {field.name for field in fields(PackOptions)})
    if strange:
        raise StoreError(
            f"{path}: options has {strange[0][:60]!r}, which this version does not know. Use the neatpack that wrote it."
        )
    for name in ("include", "token_columns", "document_columns", "ignore_columns"):
        if not all(isinstance(entry, str) for entry in manifest["options"][name]):
            raise StoreError(f"{path}: options.{name} must hold names or patterns. Pack again, or restore the file.")
    shards = manifest.get("shards")
    if not isinstance(shards, list):
        raise StoreError(f"{path}: shards is {_kind(shards)}, expected a list. Pack again, or restore the file.")
    for index, shard in enumerate(shards):
        _check_section(path, f"shards[{index}]", shard, _SHARD)
        if not _SHARD_NAME.fullmatch(shard["file"]):
            raise StoreError(
                f"{path}: shards[{index}].file is {shard['file'][:80]!r}, expected a name like data-00000.arrow in the folder "
                "itself. neatpack pack did not write this: do not use the folder."
            )


def _check_section(path: Path, name: str, section: object, kinds: dict[str, tuple[type, ...]]) -> None:
    if not isinstance(section, dict):
        raise StoreError(f"{path}: {name} is {_kind(section)}, expected an object. Pack again, or restore the file.")
    for key, expected in kinds.items():
        value = section.get(key)
        if key not in section or type(value) not in expected:
            wanted = " or ".join(kind.__name__ for kind in expected)
            raise StoreError(f"{path}: {name}.{key} is {_kind(value)}, expected {wanted}. Pack again, or restore the file.")


def _kind(value: object) -> str:
    return "missing" if value is None else type(value).__name__
