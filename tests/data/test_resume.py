"""A run that is killed at any moment leaves nothing that looks finished, and the same command goes on to the same bytes."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data.corpora import random_ids, same_documents, write_jsonl
from data.test_pipeline import folder_bytes, write_ids
from neatpack.data import pack
from neatpack.errors import StoreError

OPTIONS = {"unit_tokens": 3000, "seed": 5}
PROGRAM = """
import sys
from neatpack.data import pack
if __name__ == "__main__":
    pack(sys.argv[3:], sys.argv[1], 64, workers=int(sys.argv[2]), unit_tokens=3000, seed=5)
"""


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    documents = []
    for number in range(6):
        documents.append(random_ids(number, 400, 60))
        if number == 2:  # read once, into token files; the others are packed from where they lie
            write_jsonl(folder / "2.jsonl", [{"input_ids": ids} for ids in documents[-1]])
        else:
            write_ids(folder / f"{number}.arrow", documents[-1])
    return folder, [document for file in documents for document in file]


class KilledError(BaseException):
    """Stands for the end of the process: no handler of the library may clean up after it."""


def stop_at(step: str, moment: int):
    """A progress callback that ends the run at the `moment`-th report of `step`."""
    seen = 0

    def progress(name: str, done: int, total: int) -> None:
        nonlocal seen
        seen += name == step
        if name == step and seen == moment:
            raise KilledError

    return progress


@pytest.mark.parametrize(("step", "moment"), [("tokenise", 1), ("tokenise", 3), ("pack", 1), ("pack", 2), ("pack", 9)])
def test_an_interrupted_run_goes_on_to_the_same_bytes(tmp_path, corpus, step, moment):
    source, documents = corpus
    pack(source, tmp_path / "whole", 64, **OPTIONS)
    with pytest.raises(KilledError):
        pack(source, tmp_path / "out", 64, progress=stop_at(step, moment), **OPTIONS)
    assert not (tmp_path / "out").exists()
    summary = pack(source, tmp_path / "out", 64, **OPTIONS)
    assert summary.resumed
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "whole")
    assert same_documents(tmp_path / "out", documents)
    assert not (tmp_path / "out.partial").exists()


def test_finished_work_is_not_done_again(tmp_path, corpus):
    source, _ = corpus
    with pytest.raises(KilledError):
        pack(source, tmp_path / "out", 64, progress=stop_at("pack", 5), **OPTIONS)
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out.partial").glob("data-*")}
    assert before
    pack(source, tmp_path / "out", 64, **OPTIONS)
    assert before.items() <= {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}.items()


@pytest.mark.parametrize(
    "victim", ["data-00001.arrow", "work/part-00002.ids", "work/part-00002.lengths", "work/part-00003.lengths"]
)
def test_unfinished_work_that_was_cut_short_is_done_again(tmp_path, corpus, victim):
    source, _ = corpus
    pack(source, tmp_path / "whole", 64, **OPTIONS)
    with pytest.raises(KilledError):
        pack(source, tmp_path / "out", 64, progress=stop_at("pack", 5), **OPTIONS)
    with (tmp_path / "out.partial" / victim).open("r+b") as file:
        file.truncate(10)
    pack(source, tmp_path / "out", 64, **OPTIONS)
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "whole")


def started(out: Path, workers: int, source: Path) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", PROGRAM, str(out), str(workers), str(source)], stderr=subprocess.DEVNULL)


@pytest.mark.parametrize("workers", [1, 2])
def test_kill_9_at_many_moments_still_ends_in_the_same_bytes(tmp_path, corpus, workers):
    """Real processes, really killed, each a little later than the one before; the last one is let live."""
    source, _ = corpus
    pack(source, tmp_path / "whole", 64, **OPTIONS)
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    kills_with_work = 0
    for round_ in range(4):
        process = started(out, workers, source)
        wanted = 2 + 8 * round_  # files finished so far
        deadline = time.monotonic() + 60
        while process.poll() is None and len(list(partial.rglob("*.json")) if partial.exists() else []) < wanted:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.wait()
        if out.exists():
            break
        kills_with_work += partial.exists()
    assert kills_with_work >= 3
    if not out.exists():
        assert started(out, workers, source).wait(60) == 0
    assert folder_bytes(out) == folder_bytes(tmp_path / "whole")
    assert not partial.exists()


def interrupted(source: Path, out: Path) -> None:
    with pytest.raises(KilledError):
        pack(source, out, 64, progress=stop_at("pack", 2), **OPTIONS)


def test_a_source_that_changed_between_runs_is_refused(tmp_path, corpus):
    source, _ = corpus
    interrupted(source, tmp_path / "out")
    write_ids(source / "3.arrow", [[1, 2, 3]])
    with pytest.raises(StoreError, match=r"source has changed.*--restart"):
        pack(source, tmp_path / "out", 64, **OPTIONS)
    assert list((tmp_path / "out.partial").glob("data-*"))
    assert pack(source, tmp_path / "out", 64, restart=True, **OPTIONS).resumed is False


def test_other_options_between_runs_are_refused_by_name(tmp_path, corpus):
    source, _ = corpus
    interrupted(source, tmp_path / "out")
    with pytest.raises(StoreError, match=r"seed was 5, is 6"):
        pack(source, tmp_path / "out", 64, unit_tokens=3000, seed=6)


def test_two_runs_on_one_folder_are_refused(tmp_path, corpus):
    source, _ = corpus
    interrupted(source, tmp_path / "out")
    descriptor = os.open(tmp_path / "out.partial", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        with pytest.raises(StoreError, match="another run is working here"):
            pack(source, tmp_path / "out", 64, **OPTIONS)
    finally:
        os.close(descriptor)
    assert pack(source, tmp_path / "out", 64, **OPTIONS).resumed


def test_a_running_process_holds_the_lock(tmp_path, corpus):
    source, _ = corpus
    messages = []

    def second_run(step: str, done: int, total: int) -> None:
        if not messages:
            with pytest.raises(StoreError, match="another run is working here") as caught:
                pack(source, tmp_path / "out", 64, **OPTIONS)
            messages.append(str(caught.value))

    pack(source, tmp_path / "out", 64, progress=second_run, **OPTIONS)
    assert messages


@pytest.mark.parametrize("limit", [3000, 50_000])
def test_a_full_disk_is_named_and_the_run_goes_on_when_there_is_room(tmp_path, corpus, limit):
    """A limit on file size stands for the full disk; the system reports both in the same way, as a failed write."""
    source, _ = corpus
    program = f"""
import resource, signal, sys
from neatpack.data import pack
from neatpack.errors import StoreError
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
try:
    pack({str(source)!r}, {str(tmp_path / "out")!r}, 64, unit_tokens=30000)
except StoreError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "the disk is full" in result.stdout
    assert "run the same command again" in result.stdout
    assert not (tmp_path / "out").exists()
    assert pack(source, tmp_path / "out", 64, unit_tokens=30000).resumed
    pack(source, tmp_path / "whole", 64, unit_tokens=30000)
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "whole")
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != limit


def test_a_folder_that_cannot_be_written_is_named(tmp_path, corpus):
    source, _ = corpus
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match="cannot be written"):
        pack(source, tmp_path / "file" / "out", 64)


def test_what_a_killed_run_was_writing_is_not_published(tmp_path, corpus):
    source, _ = corpus
    pack(source, tmp_path / "whole", 64, **OPTIONS)
    interrupted(source, tmp_path / "out")
    for stray in ("manifest.json.4711", "work/data-00003.arrow.4711", "work/part-00001.lengths.4711"):
        (tmp_path / "out.partial" / stray).write_bytes(b"half of it")
    pack(source, tmp_path / "out", 64, **OPTIONS)
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "whole")
