"""How planning grows with documents: `python benchmarks/plan_scale.py [documents ...]`, by default to 10 million.

Each size runs in a process of its own, since peak memory is a number of the process: it is reported above what the process
held with the lengths in place, in bytes a document. 100 million documents (`python benchmarks/plan_scale.py 100000000`) take
about 3 GB in all. Linear means a steady number of nanoseconds a document.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time

import numpy as np

from neatpack.planning import StreamPlanner, plan_rows

SIZES = [100_000, 1_000_000, 10_000_000]
CAPACITY = 4096
STREAM_LIMIT = 1_000_000


def lognormal(documents: int) -> np.ndarray:
    """In blocks, so that making the lengths takes no more memory than planning them."""
    rng, lengths = np.random.default_rng(0), np.empty(documents, np.int32)
    for begin in range(0, documents, 1 << 20):
        block = lengths[begin : begin + (1 << 20)]
        block[:] = np.clip(rng.lognormal(6, 1, len(block)), 1, CAPACITY)
    return lengths


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(documents: int) -> None:
    """Print the row of one size and, for the caller, its numbers as JSON; the body of a child process."""
    lengths = lognormal(documents)
    plan_rows(lengths[:1000], CAPACITY)
    before, begin = peak_bytes(), time.process_time()
    plan = plan_rows(lengths, CAPACITY)
    seconds, memory = time.process_time() - begin, (peak_bytes() - before) / documents
    rows, bound = plan.num_rows, plan.lower_bound
    stream = "-"
    if documents <= STREAM_LIMIT:
        planner, begin = StreamPlanner(CAPACITY), time.process_time()
        stream_rows = len(planner.extend(lengths)) + len(planner.flush())
        taken = time.process_time() - begin
        stream = f"{documents / taken / 1000:,.0f} k documents/s, {lengths.sum() / stream_rows / CAPACITY:.4%} full"
    print(f"| {documents:,} | {seconds:.3f} | {seconds / documents * 1e9:.1f} | {memory:.1f} | +{rows - bound} | {stream} |")
    print(json.dumps({"nanoseconds": seconds / documents * 1e9, "memory": memory}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("documents", nargs="*", type=int, default=SIZES, help="sizes to plan, each in a process of its own")
    parser.add_argument("--run", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run:
        measure(given.run)
        return
    print("| documents | CPU seconds | ns a document | peak bytes a document | rows over the bound | StreamPlanner |")
    print("|---|---|---|---|---|---|", flush=True)
    sizes = sorted(given.documents)
    found = []
    for documents in sizes:
        command = [sys.executable, __file__, "--run", str(documents)]
        row, numbers = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
        print(row, flush=True)
        found.append(json.loads(numbers))
    before = sizes[-2:][0]  # the smallest ones pay mostly for the distinct lengths
    growth = found[-1]["nanoseconds"] / found[sizes.index(before)]["nanoseconds"]
    print(
        f"\nheadline: growth: {growth:.2f} times as long a document at {sizes[-1]:,} documents as at {before:,}, "
        f"{found[-1]['memory']:.1f} bytes a document at the peak"
    )


if __name__ == "__main__":
    main()
