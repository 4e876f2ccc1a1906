"""`neatpack pack` against TRL's `pack_dataset(strategy="bfd")`: `python benchmarks/packing.py [--documents 200000]`.

Both pack the same pre-tokenised Arrow file (int32 ids, int64 labels that repeat them, lognormal lengths) into rows of 4096
tokens and save them as a folder that `datasets.load_from_disk` opens. Every run is a process of its own, and they take turns.
The clock starts after imports. Memory is the peak of resident memory over what the process held at that moment; mapped
pages of the source count. neatpack also forces its output to the disk, and takes a checksum of every shard and a hash of all
documents; TRL does none of that.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa

CAPACITY = 4096


def write_source(path: Path, documents: int) -> int:
    """Write documents in record batches of a thousand, as `datasets` does; returns their tokens."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(6, 1, documents), 1, CAPACITY).astype(np.int32)
    schema = pa.schema([("input_ids", pa.list_(pa.int32())), ("labels", pa.list_(pa.int64()))])
    with path.open("wb") as file, pa.ipc.new_stream(file, schema) as writer:
        for begin in range(0, documents, 1000):
            offsets = np.concatenate(([0], np.cumsum(lengths[begin : begin + 1000]))).astype(np.int32)
            ids = rng.integers(0, 50_000, int(offsets[-1]), dtype=np.int32)
            columns = [pa.ListArray.from_arrays(offsets, values) for values in (ids, ids.astype(np.int64))]
            writer.write_batch(pa.record_batch(columns, schema=schema))
    return int(lengths.sum())


def prepare_neatpack(source: str, out: str, workers: int) -> Callable[[], object]:
    from neatpack.data import pack

    return lambda: pack(source, out, CAPACITY, overflow="truncate", workers=workers)


def prepare_trl(source: str, out: str, workers: int) -> Callable[[], object]:
    import datasets
    from trl import pack_dataset

    datasets.disable_progress_bars()
    options = {"num_proc": workers} if workers > 1 else {}
    return lambda: pack_dataset(datasets.Dataset.from_file(source), CAPACITY, "bfd", options).save_to_disk(out)


PACKERS = {"neatpack": prepare_neatpack, "TRL": prepare_trl}


def run_here(packer: str, source: str, out: str, workers: int) -> dict[str, float]:
    """Pack in this process; seconds of CPU (that of workers too) and wall, and MB of memory."""
    pack = PACKERS[packer](source, out, workers)
    before, memory, begin = _cpu_seconds(), _resident_mb(), time.perf_counter()
    pack()
    wall = time.perf_counter() - begin
    peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) / 1024
    return {"cpu": _cpu_seconds() - before, "wall": wall, "memory": peak - memory}


def _cpu_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def run_apart(packer: str, source: Path, out: Path, workers: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--run", packer, "--workers", str(workers), str(source), str(out)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    for cached in source.parent.glob("cache-*"):
        cached.unlink()
    shutil.rmtree(out)
    return {**json.loads(result.stdout.splitlines()[-1]), "bytes": size}


def compare(folder: Path, documents: int, workers: int, turns: int) -> None:
    source = folder / "documents.arrow"
    tokens = write_source(source, documents)
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in PACKERS}
    for _ in range(turns):
        for name, taken in runs.items():
            taken.append(run_apart(name, source, folder / "out", workers))
    print(
        f"{documents:,} documents, {tokens:,} tokens, workers: {workers}, load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores"
    )
    print("| times our CPU s | packer | CPU s | wall s | M tokens per CPU s | M tokens/s | peak memory MB | bytes a token |")
    print("|---|---|---|---|---|---|---|---|")
    middle = {name: {key: statistics.median(run[key] for run in taken) for key in taken[0]} for name, taken in runs.items()}
    for name, run in middle.items():
        speeds = f"{tokens / run['cpu'] / 1e6:.1f} | {tokens / run['wall'] / 1e6:.1f}"
        print(
            f"| {run['cpu'] / middle['neatpack']['cpu']:.2f} | {name} | {run['cpu']:.2f} | {run['wall']:.2f} | {speeds} | "
            f"{run['memory']:.0f} | {run['bytes'] / tokens:.2f} |"
        )
    ours, theirs = middle["neatpack"], middle["TRL"]
    ratios = ", ".join(f"{key} {theirs[key] / ours[key]:.1f}" for key in ("cpu", "wall", "memory", "bytes"))
    print(f"TRL's over ours: {ratios}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--run", choices=PACKERS, help=argparse.SUPPRESS)
    parser.add_argument("paths", nargs="*", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run:
        print(json.dumps(run_here(given.run, *given.paths, given.workers)))
        return
    with tempfile.TemporaryDirectory() as folder:
        compare(Path(folder), given.documents, given.workers, given.turns)


if __name__ == "__main__":
    main()
