"""How evenly context-parallel schemes spread attention, and what they cost: `python benchmarks/context_parallel_balance.py`.

Real lengths: the files of Python's own standard library, one token a byte, longer ones cut to the row. Rows of one batch
each are planned best-fit (for the per-document scheme with every document aligned to `2 * cp`) and cut over the ranks.

    work      the slowest rank's (query, key) pairs over the mean rank's, row by row, as all wait for it in every layer
    fetched   keys that a rank receives from others, a token it holds: the traffic of one layer
    gathered  the same for an implementation that gathers all keys on every rank
    padding   tokens that are not in any document, of all tokens
"""

from __future__ import annotations

import argparse
import dataclasses
import sysconfig
from pathlib import Path

import numpy as np
import torch

from neatpack import PackPlan, packed_seq_params_from_doc_ids, plan_rows
from neatpack.train.context_parallel import ContextShard, Scheme, shard_params
from neatpack.train.context_parallel.exchange import plan_exchange

SCHEMES: tuple[Scheme, ...] = ("contiguous", "zigzag", "per_document_zigzag")


def library_lengths(capacity: int) -> np.ndarray:
    """Sizes in bytes of the standard library's sources, capped at the row."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [path for path in sorted(root.rglob("*.py")) if "site-packages" not in path.parts]
    sizes = np.array([path.stat().st_size for path in files])
    return np.minimum(sizes[sizes > 0], capacity)


def row_map(plan: PackPlan, row: int) -> torch.Tensor:
    """The document map `[1, capacity]` of one planned row: each document at the start of its slot."""
    doc_ids = torch.zeros(1, plan.capacity, dtype=torch.int64)
    span = slice(plan.row_offsets[row], plan.row_offsets[row + 1])
    for number, (start, length) in enumerate(zip(plan.slot_starts()[span], plan.length[span], strict=True), 1):
        doc_ids[0, start : start + length] = number
    return doc_ids


def measure(plan: PackPlan, rows: np.ndarray, cp_size: int, scheme: Scheme) -> tuple[float, float, float]:
    """Work of the slowest rank over the mean, keys fetched a token, share of padding."""
    slowest = total = fetched = padding = 0
    for row in rows.tolist():
        doc_ids = row_map(plan, row)
        padding += int((doc_ids == 0).sum())
        first = shard_params(packed_seq_params_from_doc_ids(doc_ids), cp_size, 0, scheme=scheme)
        shards = [dataclasses.replace(first, rank=rank, plans={}) for rank in range(cp_size)]
        pairs = [shard.attended_pairs() for shard in shards]
        slowest, total = slowest + max(pairs), total + sum(pairs)
        fetched += sum(keys_from_others(shard) for shard in shards)
    tokens = len(rows) * plan.capacity
    return slowest * cp_size / total, fetched / tokens, padding / tokens


def keys_from_others(shard: ContextShard) -> int:
    counts = plan_exchange(shard, None, True).receive_counts
    return sum(counts) - counts[shard.rank]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capacity", type=int, default=32768)
    parser.add_argument("--rows", type=int, default=48, help="how many of the planned rows to measure")
    options = parser.parse_args()
    lengths = library_lengths(options.capacity)
    print(f"{len(lengths)} files, median {int(np.median(lengths))}, longest {lengths.max()} tokens; rows of {options.capacity}")
    print("\n| cp | scheme | work | fetched | gathered | padding |\n|---|---|---|---|---|---|")
    heads = []
    for cp_size in (2, 4, 8, 16):
        for scheme in SCHEMES:
            plan = plan_rows(lengths, options.capacity, align=2 * cp_size if scheme == "per_document_zigzag" else 1)
            rows = np.random.default_rng(0).permutation(plan.num_rows)[: options.rows]
            work, fetched, padding = measure(plan, rows, cp_size, scheme)
            print(f"| {cp_size} | {scheme} | {work:.3f} | {fetched:.2f} | {cp_size - 1:.2f} | {padding:.2%} |", flush=True)
            heads += [f"{scheme} {work:.3f}"] if cp_size == 8 else []
    print(f"\nheadline: context parallel over 8 ranks, slowest rank over mean: {', '.join(heads)}")


if __name__ == "__main__":
    main()
