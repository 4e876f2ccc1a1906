"""`kill -9` at random moments: `python benchmarks/kills.py [--kills 100] [--workers 2]`.

A run of `neatpack pack` is started, killed with all its workers at a random moment, and started again, until one comes to its
end; then its folder must equal an uninterrupted run's byte for byte, and the next round begins. Prints how many kills were
tried, in which step of the run they fell, and how many folders came out equal.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa

PROGRAM = """
import sys
from neatpack.data import pack
if __name__ == "__main__":
    pack(sys.argv[1], sys.argv[2], 256, workers=int(sys.argv[3]), unit_tokens=60_000, seed=5)
"""


def write_source(folder: Path) -> None:
    rng = np.random.default_rng(0)
    folder.mkdir()
    for number in range(6):
        offsets = np.concatenate(([0], np.cumsum(rng.integers(1, 256, 6000)))).astype(np.int32)
        ids = rng.integers(0, 50_000, int(offsets[-1]), dtype=np.int32)
        table = pa.table({"input_ids": pa.ListArray.from_arrays(offsets, ids)})
        if number % 2:  # packed from where they lie; the others are read into token files first
            with pa.OSFile(str(folder / f"{number}.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
                writer.write_table(table, max_chunksize=1000)
        else:
            import pyarrow.parquet as pq

            pq.write_table(table, folder / f"{number}.parquet")


def start(source: Path, out: Path, workers: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", PROGRAM, str(source), str(out), str(workers)]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)


def step_of(out: Path) -> str:
    partial = out.with_name(f"{out.name}.partial")
    if not partial.exists():
        return "done" if out.exists() else "starting"
    if (partial / "manifest.json").exists():
        return "finishing"
    return "packing" if list(partial.glob("data-*")) else "reading"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    moments = random.Random(options.seed)
    steps: Counter[str] = Counter()
    folders = equal = 0
    with tempfile.TemporaryDirectory() as name:
        source, whole, out = (Path(name) / part for part in ("source", "whole", "out"))
        write_source(source)
        begin = time.perf_counter()
        if start(source, whole, options.workers).wait():
            raise SystemExit("the uninterrupted run failed")
        longest = 1.2 * (time.perf_counter() - begin)
        while steps.total() < options.kills:
            process = start(source, out, options.workers)
            time.sleep(moments.uniform(0.3, 1) * longest)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                steps[step_of(out)] += 1
            process.wait()
            if out.exists():
                folders += 1
                equal += contents(out) == contents(whole)
                shutil.rmtree(out)
                continue
            if process.returncode not in (0, -signal.SIGKILL):
                raise SystemExit(f"a resumed run failed with exit code {process.returncode}")
        if start(source, out, options.workers).wait():
            raise SystemExit("the last run failed")
        folders, equal = folders + 1, equal + (contents(out) == contents(whole))
    print(f"{equal} of {folders} folders equal the uninterrupted run's, after {steps.total()} kills: {dict(steps)}")
    print(f"\nheadline: kills: {equal} of {folders} resumed folders equal the uninterrupted run's, after {steps.total()} kills")
    if equal < folders:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
