"""Rows a second out of a DataLoader, collated: `python benchmarks/loading.py`.

The same documents three ways, side by side in one run with 0, 1 and 2 spawned workers: virtual rows (`PackedDataset` over the
untouched source), rows that `neatpack pack` stored, and TRL's packed dataset with the collator of transformers that TRL
uses for it. A way's rate is its best of several passes, start of the workers left out (it is printed on its own), all ways
in turn within a pass. `PackedStream` over the same source stands beside them; it packs while it reads. The last row is the
limit: the same tokens copied into batches of int64, in this process, by memcpy's cousin that widens them.
"""

from __future__ import annotations

import argparse
import pickle
import tempfile
import time
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from torch.utils.data import DataLoader

from neatpack import PackedCollator, PackedDataset, PackedStream, lengths_of, plan_rows
from neatpack.data import pack

CAPACITY = 2048
BATCH_ROWS = 8
TRL = "TRL bfd + DataCollatorWithFlattening"


def write_source(folder: Path, documents: int) -> datasets.Dataset:
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(5.5, 1.0, documents).astype(int) + 1, CAPACITY)
    ids = [rng.integers(0, 50_000, length, dtype=np.int32) for length in lengths]
    features = datasets.Features({"input_ids": datasets.List(datasets.Value("int32"))})
    datasets.Dataset.from_dict({"input_ids": ids}, features=features).save_to_disk(folder)
    return datasets.load_from_disk(folder)


def trl_rows(source: datasets.Dataset) -> datasets.Dataset:
    from trl.data_utils import pack_dataset

    return pack_dataset(source.with_format("arrow"), CAPACITY, strategy="bfd").with_format(None)


class CutAndFlatten:
    """Packed rows cut at `seq_lengths` into the documents that transformers' collator flattens into one row."""

    def __init__(self) -> None:
        from transformers import DataCollatorWithFlattening

        self._flatten = DataCollatorWithFlattening(return_flash_attn_kwargs=True)

    def __call__(self, rows: list[dict[str, Any]]) -> Any:
        """Collate packed rows."""
        documents = []
        for row in rows:
            begin = 0
            for length in row["seq_lengths"]:
                documents.append({"input_ids": row["input_ids"][begin : begin + length]})
                begin += length
        return self._flatten(documents)


def run_pass(dataset: Any, collator: Any, workers: int) -> tuple[float, float, int]:
    """Rows a second after the first batch, seconds to the first batch, and tokens seen."""
    context = "spawn" if workers else None
    loader = DataLoader(
        dataset, batch_size=BATCH_ROWS, collate_fn=collator, num_workers=workers, multiprocessing_context=context
    )
    begin = time.perf_counter()
    batches = iter(loader)
    tokens = int((next(batches)["labels"] != -100).sum())
    first = time.perf_counter()
    count = 0
    for batch in batches:
        tokens += int((batch["labels"] != -100).sum())
        count += 1
    return count * BATCH_ROWS / (time.perf_counter() - first), first - begin, tokens


def copy_pass(tokens: int) -> float:
    """Rows a second of nothing but copies: so many int32 tokens, a batch at a time, into int64."""
    source, batch = np.zeros(tokens, np.int32), np.zeros(BATCH_ROWS * CAPACITY, np.int64)
    begin = time.perf_counter()
    for first in range(0, tokens, len(batch)):
        piece = source[first : first + len(batch)]
        np.copyto(batch[: len(piece)], piece)
    return tokens / CAPACITY / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=40_000)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="*", default=[0, 1, 2])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = write_source(folder / "source", options.documents)
        begin = time.perf_counter()
        virtual = PackedDataset(source, plan_rows(lengths_of(source), CAPACITY, seed=0))
        print(f"plan and open {options.documents} documents: {time.perf_counter() - begin:.2f} s; ", end="")
        print(f"pickles into a worker as {len(pickle.dumps(virtual))} bytes")
        pack(folder / "source", folder / "packed", CAPACITY)
        ours = PackedCollator(row_length=CAPACITY)
        ways = {
            "neatpack, virtual rows": (virtual, ours),
            "neatpack, stored rows": (PackedDataset(folder / "packed"), ours),
            "neatpack, stored rows through datasets": (datasets.load_from_disk(folder / "packed"), ours),
            "neatpack, stream": (PackedStream(source.to_iterable_dataset(num_shards=8), CAPACITY, shuffle_buffer=1000), ours),
            TRL: (trl_rows(source), CutAndFlatten()),
        }
        print("| times TRL's rows/s | rows/s | way | workers | first batch s | targets |\n|---|---|---|---|---|---|")
        ratios = []
        for workers in options.workers:
            best: dict[str, tuple[float, float, int]] = {}
            for _ in range(options.passes):
                for way, (dataset, collator) in ways.items():
                    best[way] = max(best.get(way, (0.0, 0.0, 0)), run_pass(dataset, collator, workers))
            theirs = best[TRL][0]
            for way, (rate, first, tokens) in best.items():
                print(f"| {rate / theirs:.2f} | {rate:.0f} | {way} | {workers} | {first:.2f} | {tokens} |", flush=True)
            virtual_rate, stored_rate = (best[f"neatpack, {kind} rows"][0] / theirs for kind in ("virtual", "stored"))
            ratios.append(f"{virtual_rate:.1f} and {stored_rate:.1f} with {workers} worker{'' if workers == 1 else 's'}")
        tokens = int(virtual.plan.num_tokens)
        limit = max(copy_pass(tokens) for _ in range(options.passes))
        print(f"| {limit / theirs:.2f} | {limit:.0f} | [limit] the tokens copied into batches | 0 | - | {tokens} |")
        print(f"\nheadline: loading: times TRL's rows a second, virtual and stored: {', '.join(ratios)}")


if __name__ == "__main__":
    main()
