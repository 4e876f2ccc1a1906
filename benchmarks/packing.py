"""`neatpack pack` against the packers of TRL and NeMo: `python benchmarks/packing.py [--documents 200000]`.

TRL's is `pack_dataset(strategy="bfd")`, NeMo's `neat_pack_dataset`. All pack the same pre-tokenised Arrow file (int32 ids,
int64 labels that repeat them, lognormal lengths) into rows of 4096 tokens and save them as a folder that
`datasets.load_from_disk` opens. Every run is a process of its own, and they take turns.
The clock starts after imports. Memory is the peak of resident memory over what the process held at that moment; mapped
pages of the source count. neatpack also forces its output to the disk, and takes a checksum of every shard and a hash of all
documents; the others do none of that. NeMo's handles tokens as Python numbers, which takes long: it gets a source of
`--nemo-documents` only, and compares by the token. The last row is the limit: the ids copied once and
written once, forced to the disk too, without a thought of rows.
"""

from __future__ import annotations

import argparse
import importlib
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
from peers import nemo_module

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


def prepare_nemo(source: str, out: str, workers: int) -> Callable[[], object]:
    import datasets

    datasets.disable_progress_bars()
    pack = nemo_module("components/datasets/llm/neat_packing").neat_pack_dataset
    return lambda: pack(datasets.Dataset.from_file(source), "train", CAPACITY).save_to_disk(out)


def prepare_limit(source: str, out: str, workers: int) -> Callable[[], object]:
    """Copy the ids of the source, a record batch at a time, and write what was copied."""

    def copy_and_write() -> None:
        Path(out).mkdir()
        with pa.memory_map(source) as mapped, (Path(out) / "ids").open("wb", buffering=0) as file:
            for batch in pa.ipc.open_stream(mapped):
                ids = batch.column("input_ids").values
                file.write(np.frombuffer(ids.buffers()[1], np.int32, len(ids), ids.offset * 4).copy().data)
            os.fsync(file.fileno())

    return copy_and_write


LIMIT = "[limit] the ids copied and written"
PACKERS = {"neatpack": prepare_neatpack, "TRL": prepare_trl, "NeMo": prepare_nemo, LIMIT: prepare_limit}


def run_here(packer: str, source: str, out: str, workers: int) -> dict[str, float]:
    """Pack in this process; seconds of CPU (that of workers too) and wall, and MB of memory."""
    pack = PACKERS[packer](source, out, workers)
    before, memory, begin = _cpu_seconds(), _resident_mb("VmRSS"), time.perf_counter()
    pack()
    wall = time.perf_counter() - begin
    peak = max(_resident_mb("VmHWM"), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024)
    return {"cpu": _cpu_seconds() - before, "wall": wall, "memory": peak - memory}


def _cpu_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _resident_mb(field: str) -> float:
    """Of this process; the peak that getrusage gives would be its parent's too."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{field}:"))


def run_apart(packer: str, source: Path, out: Path, workers: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--run", packer, "--workers", str(workers), str(source), str(out)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    for cached in source.parent.glob("cache-*"):
        cached.unlink()
    shutil.rmtree(out)
    return {**json.loads(result.stdout.splitlines()[-1]), "bytes": size}


def why_not(packer: str) -> str | None:
    """Why a packer does not run, or None."""
    try:
        if packer == "TRL":
            importlib.import_module("trl")
        elif packer == "NeMo":
            nemo_module("components/datasets/llm/neat_packing")
    except ImportError as error:
        return f"not installed ({error})"
    return None


def compare(folder: Path, documents: int, nemo_documents: int, workers: int, turns: int) -> None:
    reasons = {name: why_not(name) for name in PACKERS}
    sources = {name: folder / "documents.arrow" for name, reason in reasons.items() if not reason}
    tokens = dict.fromkeys(sources, write_source(folder / "documents.arrow", documents))
    if "NeMo" in sources:
        sources["NeMo"], nemo_documents = folder / "few.arrow", min(documents, nemo_documents)
        tokens["NeMo"] = write_source(folder / "few.arrow", nemo_documents)
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in sources}
    for _ in range(turns):
        for name, taken in runs.items():
            taken.append(run_apart(name, sources[name], folder / "out", workers))
    middle = {
        name: {key: statistics.median(run[key] / (tokens[name] if key != "memory" else 1) for run in taken) for key in taken[0]}
        for name, taken in runs.items()
    }
    report(middle, tokens, workers)
    for name, reason in reasons.items():
        if reason:
            print(f"| - | {name}: {reason} |")
    ours = middle["neatpack"]
    ratios = [
        f"{name} takes {run['cpu'] / ours['cpu']:.1f} times the CPU time a token, {run['wall'] / ours['wall']:.1f} the time "
        f"and {run['bytes'] / ours['bytes']:.1f} the bytes"
        + (f", and {run['memory'] / ours['memory']:.1f} the memory" if tokens[name] == tokens["neatpack"] else "")
        for name, run in middle.items()
        if name not in ("neatpack", LIMIT)
    ]
    ratios.append(f"copying and writing the ids takes {middle[LIMIT]['cpu'] / ours['cpu']:.2f} times the CPU time")
    print(f"\nheadline: packing: {'; '.join(ratios)}")


def report(middle: dict[str, dict[str, float]], tokens: dict[str, int], workers: int) -> None:
    """Print the table; seconds and bytes are a token's."""
    print(f"workers: {workers}, load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores\n")
    print("| times our CPU s a token | packer | M tokens per CPU s | M tokens/s | peak memory MB | bytes a token | tokens |")
    print("|---|---|---|---|---|---|---|")
    for name, run in middle.items():
        ratio, speeds = run["cpu"] / middle["neatpack"]["cpu"], f"{1e-6 / run['cpu']:.2f} | {1e-6 / run['wall']:.2f}"
        print(f"| {ratio:.2f} | {name} | {speeds} | {run['memory']:.0f} | {run['bytes']:.2f} | {tokens[name]:,} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--nemo-documents", type=int, default=2_000, help="the most that NeMo's packer gets")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--run", choices=PACKERS, help=argparse.SUPPRESS)
    parser.add_argument("paths", nargs="*", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run:
        print(json.dumps(run_here(given.run, *given.paths, given.workers)))
        return
    with tempfile.TemporaryDirectory() as folder:
        compare(Path(folder), given.documents, given.nemo_documents, given.workers, given.turns)


if __name__ == "__main__":
    main()
