"""Plans on disk: one `.npz` file that NumPy opens without pickle, written aside and renamed.

Members: `row_offsets`, `doc`, `length`, `start` (absent where every slice starts at 0) as in `PackPlan`, and `header`, a
JSON text with the format's name and version, capacity, options, counts and the fingerprint of the lengths. About 8 bytes a
document; the same plan gives the same bytes.
"""

from __future__ import annotations

import json
import math
import os
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from neatpack.errors import StoreError
from neatpack.planning.plan import PackPlan, PlanCounts

_FORMAT = "neatpack plan"
_VERSION = 1
_OPTIONS = ("capacity", "lower_bound", "strategy", "overflow", "seed", "align", "max_docs_per_row", "fingerprint")
_EPOCH = (1980, 1, 1, 0, 0, 0)  # every member's time stamp, so that equal plans are equal files


def save_plan(plan: PackPlan, path: str | os.PathLike[str]) -> None:
    """Write a plan to `path` (customarily `.npz`); a file there is replaced at once, and never half.

    Args:
        plan: what to write.
        path: where to, in a folder that exists.

    Raises:
        OSError: the file cannot be written.

    Example:
        >>> save_plan(plan_rows([5, 3, 4, 2, 2], capacity=8), "plan.npz")
        >>> plan = load_plan("plan.npz")
        >>> plan.check_source([5, 3, 4, 2, 2])
    """
    target = Path(path)
    header = {"format": _FORMAT, "version": _VERSION, "counts": asdict(plan.counts)}
    header |= {name: getattr(plan, name) for name in _OPTIONS}
    members = {"header": np.array(json.dumps(header)), "row_offsets": plan.row_offsets, "doc": plan.doc, "length": plan.length}
    if plan.start.any():
        members["start"] = plan.start
    aside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with aside.open("wb") as file:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
                for name, array in members.items():
                    with archive.open(zipfile.ZipInfo(f"{name}.npy", _EPOCH), "w", force_zip64=True) as member:
                        np.lib.format.write_array(member, np.asarray(array), allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(target)
    finally:
        aside.unlink(missing_ok=True)


def load_plan(path: str | os.PathLike[str]) -> PackPlan:
    """Read a plan that `save_plan` wrote, checked against itself; `plan.check_source(lengths)` checks it against a source.

    Raises:
        StoreError: no file, not a plan, a damaged one, or one of a later version.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = {name.removesuffix(".npy"): _read_member(archive, name) for name in archive.namelist()}
        header = json.loads(str(members["header"]))
        if header["format"] != _FORMAT:
            raise StoreError(_not_a_plan(path, f"its format is {header['format']!r}"))
        if header["version"] != _VERSION:
            raise StoreError(f"{path} is a plan of version {header['version']}; this release reads version {_VERSION}. Update.")
        plan = _plan_from(members, header)
    except FileNotFoundError as error:
        raise StoreError(f"there is no plan at {path}. Write one with save_plan(plan, path).") from error
    except (OSError, zipfile.BadZipFile, zlib.error, EOFError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise StoreError(_not_a_plan(path, str(error) or type(error).__name__)) from error
    _check_plan(path, plan)
    return plan


def _read_member(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """An array of the file, if the file is as large as the array says: neither may ask for more memory than lies there."""
    if archive.getinfo(name).compress_type != zipfile.ZIP_STORED:
        raise ValueError("its members are compressed, and save_plan stores them as they are")
    with archive.open(name) as member:
        headers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        shape, _, dtype = headers[np.lib.format.read_magic(member)](member)
        claimed = math.prod(shape) * dtype.itemsize
        if claimed > os.fstat(archive.fp.fileno()).st_size:  # type: ignore[union-attr]
            raise ValueError(f"its array {name} claims {claimed} bytes, more than the file has")
    with archive.open(name) as member:
        array: np.ndarray = np.lib.format.read_array(member, allow_pickle=False)
        return array


def _plan_from(members: Mapping[str, np.ndarray], header: Mapping[str, Any]) -> PackPlan:
    doc = members["doc"]
    return PackPlan(
        row_offsets=members["row_offsets"],
        doc=doc,
        length=members["length"],
        start=members.get("start", np.broadcast_to(np.int32(0), doc.shape)),
        counts=PlanCounts(**header["counts"]),
        **{name: header[name] for name in _OPTIONS},
    )


def _check_plan(path: object, plan: PackPlan) -> None:
    arrays = (plan.row_offsets, plan.doc, plan.length, plan.start)
    whole = (
        all(array.ndim == 1 and array.dtype.kind == "i" for array in arrays)
        and len(plan.doc) == len(plan.length) == len(plan.start)
        and len(plan.row_offsets) > 0
        and plan.row_offsets[0] == 0
        and plan.row_offsets[-1] == len(plan.doc)
        and bool((np.diff(plan.row_offsets) > 0).all())
    )
    if not whole:
        raise StoreError(_not_a_plan(path, "its arrays do not describe rows"))
    inside = plan.doc.min(initial=0) >= 0 and plan.doc.max(initial=-1) < plan.counts.documents
    positive = plan.length.min(initial=1) > 0 and plan.start.min(initial=0) >= 0
    if not inside or not positive or plan.sum_rows(plan.slot_lengths()).max(initial=0) > plan.capacity:
        raise StoreError(_not_a_plan(path, "its slices do not fit its rows or its documents"))


def _not_a_plan(path: object, why: str) -> str:
    return f"{path} is not a whole neatpack plan: {why}. Plan the rows anew and save them with save_plan."
