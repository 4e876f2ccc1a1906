"""`plan_rows` against other planners, in one process: `PYTHONPATH=src python benchmarks/planning.py [documents ...]`.

Every planner gets the lengths in the form it takes fastest, made before the clock starts, and returns its rows in the form it
has. Times are the median CPU seconds of several runs, planners taking turns (all of them use one core, and CPU time is less
disturbed by other work on the machine than wall time). Ratios are to `plan_rows`. Python planners run three times, once from
a million documents on, and not past that. The last rows are floors: what NumPy takes to sort or copy the lengths and do
nothing else.

Peers are optional; a missing one says so in its row. `make bench` sets up an environment that has them all (`peers.py`).
"""

from __future__ import annotations

import importlib
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from peers import nemo_module

from neatpack.planning import plan_rows

NEMO = "components/datasets/llm/neat_packing"

SIZES = [100_000, 1_000_000, 10_000_000]
PYTHON_LIMIT = 1_000_000


class Planner(NamedTuple):
    """A way to plan: `prepare` turns lengths into what `plan` takes (untimed), `plan` returns the number of rows."""

    name: str
    module: str
    prepare: Callable[[np.ndarray], object]
    plan: Callable[[object, int], int | None]
    limit: int | None = None


def with_neatpack(lengths: object, capacity: int) -> int:
    return plan_rows(lengths, capacity).num_rows


def with_neatpack_seed(lengths: object, capacity: int) -> int:
    return plan_rows(lengths, capacity, seed=0).num_rows


def with_seqpacker(lengths: object, capacity: int) -> int:
    _, splits = importlib.import_module("seqpacker").Packer(capacity=capacity, strategy="obfd").pack_flat(lengths)
    return len(splits) + 1


def with_lightbinpack(lengths: object, capacity: int) -> int:
    return len(importlib.import_module("lightbinpack").obfd(lengths, capacity))


def with_greedy_knapsack(lengths: object, capacity: int) -> int:
    return len(nemo_module(NEMO).greedy_knapsack(lengths, capacity))


def empty_lists(lengths: np.ndarray) -> object:
    """A table whose lists hold nulls: they have lengths and no content, so that only planning takes time."""
    import pyarrow as pa

    offsets = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    column = pa.LargeListArray.from_arrays(pa.array(offsets), pa.nulls(int(offsets[-1])))
    return pa.table({"input_ids": column})


def with_trl(table: object, capacity: int) -> int:
    return len(importlib.import_module("trl.data_utils")._pack_bfd(table, capacity))


def sort_only(lengths: object, capacity: int) -> None:
    np.sort(np.asarray(lengths))


def copy_only(lengths: object, capacity: int) -> None:
    np.array(lengths)


PLANNERS = [
    Planner("neatpack best_fit", "neatpack", np.asarray, with_neatpack),
    Planner("neatpack best_fit, seed=0", "neatpack", np.asarray, with_neatpack_seed),
    Planner("seqpacker obfd, flat (Rust)", "seqpacker", lambda lengths: lengths.astype(np.int64), with_seqpacker),
    Planner("lightbinpack obfd (C++)", "lightbinpack", np.asarray, with_lightbinpack),
    Planner("NeMo greedy_knapsack", "nemo_automodel", np.ndarray.tolist, with_greedy_knapsack, PYTHON_LIMIT),
    Planner("TRL bfd, one window", "trl.data_utils", empty_lists, with_trl, PYTHON_LIMIT),
    Planner("[floor] sort of the lengths", "numpy", np.asarray, sort_only),
    Planner("[floor] copy of the lengths", "numpy", np.asarray, copy_only),
]


def corpora(documents: int) -> dict[str, tuple[int, np.ndarray]]:
    rng = np.random.default_rng(0)
    return {
        "lognormal(6, 1)": (4096, np.clip(rng.lognormal(6, 1, documents), 1, 4096).astype(np.int32)),
        "uniform": (2048, rng.integers(1, 2049, documents).astype(np.int32)),
        "pareto(1.1) * 64": (8192, np.clip(rng.pareto(1.1, documents) * 64, 1, 8192).astype(np.int32)),
    }


def why_not(planner: Planner, documents: int) -> str | None:
    """Why a planner does not run, or None."""
    if planner.limit and documents > planner.limit:
        return f"not run past {planner.limit:,} documents"
    try:
        if planner.module == "nemo_automodel":
            nemo_module(NEMO)
        else:
            importlib.import_module(planner.module)
    except ImportError as error:
        return f"not installed ({error})"
    return None


def measure(planners: list[Planner], lengths: np.ndarray, capacity: int) -> dict[str, tuple[float, int | None]]:
    """Median CPU seconds and rows of each planner; they take turns, the Python ones fewer."""
    prepared = {planner.name: planner.prepare(lengths) for planner in planners}
    seconds: dict[str, list[float]] = {planner.name: [] for planner in planners}
    rows: dict[str, int | None] = {}
    small = len(lengths) < PYTHON_LIMIT
    for turn in range(15 if small else 5):
        for planner in planners:
            if planner.limit and turn >= (3 if small else 1):
                continue
            begin = time.process_time()
            rows[planner.name] = planner.plan(prepared[planner.name], capacity)
            seconds[planner.name].append(time.process_time() - begin)
    return {name: (statistics.median(taken), rows[name]) for name, taken in seconds.items()}


def peak_bytes_a_document(lengths: np.ndarray, capacity: int) -> float:
    tracemalloc.start()
    plan_rows(lengths, capacity)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / len(lengths)


def report(documents: int) -> None:
    for corpus, (capacity, lengths) in corpora(documents).items():
        bound = plan_rows(lengths, capacity).lower_bound
        memory = peak_bytes_a_document(lengths, capacity)
        reasons = {planner.name: why_not(planner, documents) for planner in PLANNERS}
        results = measure([planner for planner in PLANNERS if not reasons[planner.name]], lengths, capacity)
        ours = results[PLANNERS[0].name][0]
        print(f"\n{documents:,} documents, {corpus}, capacity {capacity}: at least {bound:,} rows", end="")
        print(f"; plan_rows takes {memory:.1f} bytes a document at its peak\n")
        print("| times ours | CPU seconds | rows over the bound | planner |")
        print("|---|---|---|---|")
        for name, reason in reasons.items():
            if reason:
                print(f"| - | - | - | {name}: {reason} |")
                continue
            taken, rows = results[name]
            over = "-" if rows is None else f"+{rows - bound}"
            print(f"| {taken / ours:.2f} | {taken:.4f} | {over} | {name} |", flush=True)


def main() -> None:
    for documents in [int(argument) for argument in sys.argv[1:]] or SIZES:
        report(documents)


if __name__ == "__main__":
    main()
