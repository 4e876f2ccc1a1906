"""How fast rows are gathered, as a share of memcpy: `python benchmarks/gather.py`.

Documents of lognormal lengths in a memory-mapped Arrow file, planned into rows of 2048 tokens, drawn in random order in
batches, as a DataLoader draws them. Three ways of gathering are timed in turn, so that a drift of the machine hits all
alike: `PackedDataset.__getitems__` (rows as dicts, boundaries included), its inner `take` alone, and an Arrow `take` of the
documents. memcpy copies a million tokens at a time, from a random place into memory that is mapped already.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa

from neatpack import PackedDataset, lengths_of, plan_rows

CAPACITY = 2048


def write_source(path: Path, tokens: int, chunks: int) -> int:
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(5.5, 1.0, tokens // 400).astype(np.int32) + 1, CAPACITY)
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    ids = rng.integers(0, 50_000, offsets[-1], dtype=np.int32)
    table = pa.table({"input_ids": pa.ListArray.from_arrays(pa.array(offsets), pa.array(ids))})
    with path.open("wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=-(-len(lengths) // chunks))
    return int(offsets[-1])


def best_rates(ways: dict[str, Callable[[], int]], repeats: int) -> dict[str, float]:
    """Most tokens a second of each way, each called in turn and returning the tokens it moved."""
    rates = dict.fromkeys(ways, 0.0)
    for _ in range(repeats):
        for name, way in ways.items():
            begin = time.perf_counter()
            tokens = way()
            rates[name] = max(rates[name], tokens / (time.perf_counter() - begin))
    return rates


def measure(dataset: PackedDataset, path: Path, batch_rows: int, repeats: int) -> dict[str, float]:
    rng = np.random.default_rng(1)
    plan, column = dataset.plan, dataset._tokens["input_ids"]
    starts = (np.cumsum(dataset.lengths, dtype=np.int64) - dataset.lengths)[plan.doc]
    with pa.memory_map(str(path)) as file:
        lists = pa.ipc.open_stream(file).read_all().column("input_ids")
    tokens = lists.combine_chunks().values.to_numpy()
    target = np.zeros(1 << 20, np.int32)

    def draw() -> np.ndarray:
        return rng.integers(0, plan.num_rows, batch_rows)

    def slices_of(rows: np.ndarray) -> np.ndarray:
        return np.concatenate([np.arange(plan.row_offsets[row], plan.row_offsets[row + 1]) for row in rows])

    prepared = [slices_of(draw()) for _ in range(64)]
    drawn = [(starts[slices], plan.length[slices].astype(np.int64), pa.array(plan.doc[slices])) for slices in prepared]
    lengths = [int(length.sum()) for _, length, _ in drawn]
    turn = {"take": 0, "arrow": 0}

    def rows() -> int:
        return sum(len(row["input_ids"]) for row in dataset.__getitems__(draw()))

    def take() -> int:
        turn["take"] = at = (turn["take"] + 1) % len(drawn)
        column.take(*drawn[at][:2])
        return lengths[at]

    def arrow_take() -> int:
        turn["arrow"] = at = (turn["arrow"] + 1) % len(drawn)
        lists.take(drawn[at][2])
        return lengths[at]

    def memcpy() -> int:
        begin = int(rng.integers(0, len(tokens) - len(target)))
        np.copyto(target, tokens[begin : begin + len(target)])
        return len(target)

    return best_rates({"__getitems__": rows, "take": take, "Arrow take": arrow_take, "memcpy": memcpy}, repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=60_000_000)
    parser.add_argument("--repeats", type=int, default=200)
    options = parser.parse_args()
    print(f"{'chunks':>6} {'batch':>5} {'way':>14} {'Mtok/s':>8} {'of memcpy':>10}")
    with tempfile.TemporaryDirectory() as folder:
        for chunks in (1, 100):
            path = Path(folder) / f"{chunks}.arrow"
            write_source(path, options.tokens, chunks)
            dataset = PackedDataset(path, plan_rows(lengths_of(path), CAPACITY, seed=0))
            for batch_rows in (1, 8, 64, 256):
                rates = measure(dataset, path, batch_rows, options.repeats)
                for name, rate in rates.items():
                    print(f"{chunks:>6} {batch_rows:>5} {name:>14} {rate / 1e6:>8.0f} {rate / rates['memcpy']:>10.0%}")


if __name__ == "__main__":
    main()
