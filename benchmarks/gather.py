"""How fast rows are gathered, as a share of memcpy: `python benchmarks/gather.py`.

Documents in a memory-mapped Arrow file, planned into rows of 2048 tokens, drawn in random order in batches, as a DataLoader
draws them. Four ways are timed in turn, so that a drift of the machine hits all alike: `PackedDataset.__getitems__` (rows as
dicts, boundaries included), its inner `take` alone, an Arrow `take` of the documents, and the least that any way has to do: a
call of memcpy for each document, in a loop in C that somebody else has prepared. memcpy copies a million tokens in one piece,
from a random place into memory that is mapped already. A turn is eight calls one after the other, as a worker makes them;
their mean counts. No batch is one that another way has just brought into the cache, and batches are drawn from more memory
than any cache holds. Ratios are bandwidth over memcpy's, in CPU time, by the best of several turns.

What limits: memcpy of one piece reads ahead, and a copy a document begins with a miss of the cache and of the page table, so
that even the loop in C comes to half of memcpy where documents are short. What Python adds is a fixed time a call (some twenty
calls of NumPy), a third of a microsecond a document, and a microsecond a row for its dict and two arrays.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from neatpack import PackedDataset, lengths_of, plan_rows

CAPACITY = 2048
PIECE = 1 << 20
DRAWN_ROWS = 1 << 14
CALLS_A_TURN = 8
LENGTHS = {
    "about 390": lambda rng, tokens: np.minimum(rng.lognormal(5.5, 1.0, tokens // 400).astype(np.int32) + 1, CAPACITY),
    "2048": lambda rng, tokens: np.full(tokens // CAPACITY, CAPACITY, np.int32),
}


def write_source(path: Path, lengths: np.ndarray, chunks: int) -> None:
    rng = np.random.default_rng(0)
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    ids = rng.integers(0, 50_000, offsets[-1], dtype=np.int32)
    table = pa.table({"input_ids": pa.ListArray.from_arrays(pa.array(offsets), pa.array(ids))})
    with path.open("wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=-(-len(lengths) // chunks))


def best_rates(ways: dict[str, Callable[[], int]], repeats: int) -> dict[str, float]:
    """Most tokens a CPU second of each way, each called in its turn and returning the tokens it moved."""
    rates = dict.fromkeys(ways, 0.0)
    for _ in range(repeats):
        for name, way in ways.items():
            begin = time.process_time()
            tokens = sum(way() for _ in range(CALLS_A_TURN))
            rates[name] = max(rates[name], tokens / (time.process_time() - begin))
    return rates


def copies_in_c(tokens: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> Callable[[], object]:
    """A loop of memcpy over these slices, all set up: Arrow's cast of binary views to plain binary."""
    views = np.zeros((len(starts), 4), np.int32)
    views[:, 0], views[:, 3] = lengths * tokens.itemsize, starts * tokens.itemsize
    buffers = [None, pa.py_buffer(views), pa.py_buffer(tokens)]
    array = pa.Array.from_buffers(pa.binary_view(), len(starts), buffers)
    cast, options = pc.get_function("cast"), pc.CastOptions(pa.binary())
    return lambda: cast.call([array], options)


def measure(dataset: PackedDataset, path: Path, batch_rows: int, repeats: int) -> dict[str, float]:
    rng = np.random.default_rng(1)
    plan, column = dataset.plan, dataset._tokens["input_ids"]
    starts = (np.cumsum(dataset.lengths, dtype=np.int64) - dataset.lengths)[plan.doc]
    with pa.memory_map(str(path)) as file:
        lists = pa.ipc.open_stream(file).read_all().column("input_ids")
    tokens = lists.combine_chunks().values.to_numpy()
    batches = [rng.integers(0, plan.num_rows, batch_rows) for _ in range(DRAWN_ROWS // batch_rows)]
    slices = [np.concatenate([np.arange(*plan.row_offsets[row : row + 2]) for row in rows]) for rows in batches]
    drawn = [(starts[some], plan.length[some].astype(np.int64)) for some in slices]
    documents = [pa.array(plan.doc[some]) for some in slices]
    counts = [int(length.sum()) for _, length in drawn]
    loops = [copies_in_c(tokens, *some) for some in drawn]
    target = np.zeros(PIECE, np.int32)
    begins = rng.integers(0, len(tokens) - PIECE, len(batches)).tolist()

    def in_turn(nth: int, way: Callable[[int], object], count: int | None = None) -> Callable[[], int]:
        turns = iter(range(nth * CALLS_A_TURN, 10**9))

        def once() -> int:
            at = next(turns) % len(batches)
            way(at)
            return count or counts[at]

        return once

    ways = {
        "__getitems__": in_turn(0, lambda at: dataset.__getitems__(batches[at])),
        "take": in_turn(1, lambda at: column.take(*drawn[at])),
        "Arrow take": in_turn(2, lambda at: lists.take(documents[at])),
        "[limit] memcpy a document, in C": in_turn(3, lambda at: loops[at]()),
        "[limit] memcpy": in_turn(4, lambda at: np.copyto(target, tokens[begins[at] : begins[at] + PIECE]), PIECE),
    }
    return best_rates(ways, repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=60_000_000)
    parser.add_argument("--repeats", type=int, default=40)
    options = parser.parse_args()
    print("| of memcpy | M tokens per CPU s | way | rows a batch | tokens a document | chunks of the source |")
    print("|---|---|---|---|---|---|")
    shares: dict[str, list[float]] = {kind: [] for kind in LENGTHS}
    with tempfile.TemporaryDirectory() as folder:
        for kind, make in LENGTHS.items():
            lengths = make(np.random.default_rng(0), options.tokens)
            for chunks in (1, 100):
                path = Path(folder) / "source.arrow"
                write_source(path, lengths, chunks)
                dataset = PackedDataset(path, plan_rows(lengths_of(path), CAPACITY, seed=0))
                for batch_rows in (1, 8, 64, 256):
                    rates = measure(dataset, path, batch_rows, options.repeats)
                    shares[kind].append(rates["__getitems__"] / rates["[limit] memcpy"])
                    for name, rate in rates.items():
                        share = rate / rates["[limit] memcpy"]
                        print(f"| {share:.0%} | {rate / 1e6:.0f} | {name} | {batch_rows} | {kind} | {chunks} |")
    spans = (f"{min(some):.0%} to {max(some):.0%} for documents of {kind} tokens" for kind, some in shares.items())
    print(f"\nheadline: gather: rows come at this share of memcpy's bandwidth: {', '.join(spans)}")


if __name__ == "__main__":
    main()
