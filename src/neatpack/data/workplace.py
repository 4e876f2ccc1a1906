"""Where a run works before it is done: DIR.partial, with what was asked for and everything finished so far.

    DIR.partial/work/job.json       what the run was asked to do; another run must ask for the same to go on
    DIR.partial/work/part-*, unit-* finished work, each with a record that was written last
    DIR.partial/data-*              finished shards

The folder itself is locked while a run works in it. A killed process gives the lock back and leaves finished work, so the
same command goes on where it stopped; when all is done the folder is renamed to DIR.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from neatpack.data.options import FORMATS
from neatpack.data.store import publish
from neatpack.data.tokens import write_json
from neatpack.errors import PlanError, SourceError, StoreError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Workplace:
    """The .partial folder of a run, locked; make one with `open_workplace`.

    Attributes:
        folder: DIR.partial.
        work: the folder below it for everything that is not output.
        resumed: whether an earlier run of the same job left work here.
    """

    def __init__(self, folder: Path, job: dict[str, Any]) -> None:
        self.folder = folder
        self.work = folder / "work"
        self.resumed = False
        self._flushes: list[Future[None]] = []
        self._flusher = ThreadPoolExecutor(2, "neatpack-flush")
        self._claim(job)

    def _claim(self, job: dict[str, Any]) -> None:
        record = self.work / "job.json"
        if record.exists():
            _check_same_job(self.folder, json.loads(record.read_bytes()), job)
            self.resumed = True
            for entry in self.folder.iterdir():  # what a killed run was writing when it had all its shards
                if entry != self.work and entry.suffix[1:] not in FORMATS:
                    entry.unlink()
            return
        for entry in self.folder.iterdir():  # a run that was killed before it had begun
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        self.work.mkdir()
        write_json(record, job)

    def flush_later(self, path: Path) -> None:
        """Start forcing a finished file to the disk; `finish` waits for it."""
        self._flushes.append(self._flusher.submit(_flush, path))

    def finish(self, out: Path) -> None:
        """Force everything to the disk and rename the folder to `out`."""
        for flush in self._flushes:
            flush.result()
        shutil.rmtree(self.work)
        for path in self.folder.iterdir():
            _flush(path)
        publish(self.folder, out)

    def discard(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder)

    def close(self) -> None:
        """Stop flushing; what is not yet on the disk gets there in the system's own time."""
        self._flusher.shutdown(cancel_futures=True)


@contextmanager
def open_workplace(out: Path, job: dict[str, Any], *, restart: bool) -> Iterator[Workplace]:
    """Lock the .partial folder of `out` for one run.

    It is removed when the run ends with an error that running again would repeat (in the source or the options), and kept
    when it is interrupted.

    Args:
        out: the folder that the run is to make.
        job: plain JSON values: everything that decides the output.
        restart: throw away what an unfinished run left.

    Raises:
        StoreError: another run works there, an unfinished run was asked for something else, or nothing can be written.
    """
    folder = out.with_name(f"{out.name}.partial")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder), writing(folder):
        if restart:
            for entry in folder.iterdir():
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        place = Workplace(folder, job)
        try:
            yield place
        except (SourceError, PlanError):
            place.discard()
            raise
        finally:
            place.close()


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the system says about a failed write into our own errors: a full disk has a message of its own."""
    try:
        yield
    except OSError as error:
        where = error.filename or path
        if error.errno in FULL:
            raise StoreError(
                f"{where}: the disk is full ({error.strerror}). Finished work is kept: free space, then run the same command "
                "again."
            ) from error
        raise StoreError(
            f"{where}: cannot be written ({error.strerror or error}). Check the path and its permissions."
        ) from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, which the system gives back when the process ends, however it ends."""
    try:
        import fcntl
    except ImportError:  # no such locks on this system: two runs on one folder are not noticed there
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StoreError(
                f"{folder}: another run is working here. Wait for it to end, or choose another --out for this one."
            ) from error
        if not folder.exists():
            raise StoreError(f"{folder}: another run finished here just now. Check its output, then run again if needed.")
        yield
    finally:
        os.close(descriptor)


def _check_same_job(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    if before == now:
        return
    ways = "Run the first command again to go on with it, or pass --restart to throw its work away."
    if before.get("source") != now["source"]:
        raise StoreError(f"{folder}: the source has changed since an unfinished run began here. {ways}")
    was, is_ = before.get("options", {}), now["options"]
    changed = [f"{name} was {was.get(name)!r}, is {value!r}" for name, value in is_.items() if was.get(name) != value]
    what = "; ".join(changed) or "the tokenizer or neatpack itself has changed"
    raise StoreError(f"{folder}: an unfinished run here was asked for something else: {what}. {ways}")


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
