"""How `neatpack pack` grows: `python benchmarks/scale.py [--tokens 1000000 10000000 ...] [--workers 1] [--engine local]`.

The source is pre-tokenised Arrow (uint16 ids, lognormal lengths, files of half a gigabyte), written to a temporary folder
before the clock starts and removed afterwards; row length 4096. A size runs in a process of its own. Memory is the peak of
resident memory of any one process, interpreter and libraries included.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

SIZES = [1_000_000, 10_000_000, 100_000_000]
FILE_TOKENS = 250_000_000
BATCH_DOCUMENTS = 1000


def write_source(folder: Path, tokens: int) -> None:
    """Write documents until there are about so many tokens."""
    rng = np.random.default_rng(0)
    schema = pa.schema([("input_ids", pa.list_(pa.uint16()))])
    ids = rng.integers(0, 50_000, 1 << 22, dtype=np.uint16)  # tokens repeat; only their number matters here
    left = tokens
    for number in range(-(-tokens // FILE_TOKENS)):
        with (folder / f"{number:04d}.arrow").open("wb") as file, pa.ipc.new_stream(file, schema) as writer:
            room = min(left, FILE_TOKENS)
            while room > 0:
                lengths = np.clip(rng.lognormal(6, 1, BATCH_DOCUMENTS), 1, 4096).astype(np.int32)
                offsets = np.concatenate(([0], np.cumsum(lengths)[np.cumsum(lengths) <= room])).astype(np.int32)
                if len(offsets) == 1:
                    break
                begin = int(rng.integers(0, 1 << 18))
                values = ids[begin : begin + offsets[-1]]
                writer.write_batch(pa.record_batch([pa.ListArray.from_arrays(offsets, values)], schema=schema))
                room, left = room - int(offsets[-1]), left - int(offsets[-1])


def run_here(source: str, out: str, workers: int, engine: str) -> dict[str, float]:
    from neatpack.data import pack

    before, begin = _cpu_seconds(), time.perf_counter()
    summary = pack(source, out, 4096, workers=workers, engine=engine, overflow="truncate")
    return {
        "wall": time.perf_counter() - begin,
        "cpu": _cpu_seconds() - before,
        "driver": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "worker": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024,
        "tokens": summary.tokens,
        "rows": summary.rows,
        "bound": summary.lower_bound,
        "shards": summary.shards,
    }


def _cpu_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def measure(tokens: int, workers: int, engine: str, place: str | None) -> dict[str, float]:
    """What one size took, in a process of its own, and the bytes it left."""
    with tempfile.TemporaryDirectory(dir=place) as name:
        folder = Path(name)
        (folder / "in").mkdir()
        write_source(folder / "in", tokens)
        command = [sys.executable, __file__, "--run", str(folder / "in"), str(folder / "out"), str(workers), engine]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        run: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
        run["bytes"] = sum(path.stat().st_size for path in (folder / "out").iterdir())
        run["manifest"] = (folder / "out" / "manifest.json").stat().st_size
    return run


def table_row(run: dict[str, float]) -> str:
    speed = f"{run['tokens'] / run['wall'] / 1e6:.1f} | {run['tokens'] / run['cpu'] / 1e6:.1f}"
    return (
        f"| {run['tokens']:,} | {run['wall']:.1f} | {run['cpu']:.1f} | {speed} | {run['driver']:.0f} | {run['worker']:.0f} | "
        f"{run['shards']} | {run['rows'] / run['bound'] - 1:.3%} | {run['bytes'] / run['tokens']:.2f} | {run['manifest']} | "
        f"{os.getloadavg()[0]:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=SIZES)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--engine", default="local")
    parser.add_argument("--place", help="folder with room for twice the largest size, at 2 bytes a token")
    parser.add_argument("--run", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run:
        source, out, workers, engine = given.run
        print(json.dumps(run_here(source, out, int(workers), engine)))
        return
    print(f"workers: {given.workers}, engine: {given.engine}, {os.cpu_count()} cores")
    print(
        "| tokens | wall s | CPU s | M tokens/s | M tokens per CPU s | MB, driver | MB, worker | shards | "
        "rows over the bound | bytes a token | manifest bytes | load |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    runs = []
    for tokens in sorted(given.tokens):
        runs.append(measure(tokens, given.workers, given.engine, given.place))
        print(table_row(runs[-1]), flush=True)
    last, before = runs[-1], runs[-2:][0]
    growth = last["cpu"] / last["tokens"] / (before["cpu"] / before["tokens"])
    memory = max(last["driver"], last["worker"]) / max(before["driver"], before["worker"])
    print(
        f"\nheadline: scale: {last['tokens']:,} tokens take {growth:.2f} times the CPU time a token that {before['tokens']:,} "
        f"do, and {memory:.2f} times the memory: {max(last['driver'], last['worker']):.0f} MB"
    )


if __name__ == "__main__":
    main()
