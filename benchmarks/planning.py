"""`plan_rows` against other planners, in one process: `PYTHONPATH=src python benchmarks/planning.py [documents ...]`.

Every planner gets the lengths in the form it takes fastest, made before the clock starts, and returns its rows in the form it
has. Times are the median CPU seconds of several runs, planners taking turns (all of them use one core, and CPU time is less
disturbed by other work on the machine than wall time). Ratios are to `plan_rows`. Python planners run three times, once from
a hundred thousand documents on, and NeMo's not past a million, TRL's not past a hundred thousand. The last rows
are floors: what NumPy takes to sort or copy the lengths and do nothing else.

Three distributions are drawn, and three are measured from text on this machine, drawn from with replacement: bytes of the
standard library's source files, of their functions and classes, and of their docstrings. At ten million documents one of each
kind is left, for time.

Peers are optional; a missing one says so in its row. `make bench` sets up an environment that has them all (`peers.py`).
"""

from __future__ import annotations

import argparse
import ast
import importlib
import statistics
import sysconfig
import time
import tracemalloc
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from peers import nemo_module

from neatpack.planning import plan_rows

NEMO = "components/datasets/llm/neat_packing"

SIZES = [10_000, 100_000, 1_000_000, 10_000_000]
FEW_CORPORA_FROM = 10_000_000
ONCE_FROM = 100_000


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
    Planner("NeMo greedy_knapsack", "nemo_automodel", np.ndarray.tolist, with_greedy_knapsack, 1_000_000),
    Planner("TRL bfd, one window", "trl.data_utils", empty_lists, with_trl, 100_000),
    Planner("[floor] sort of the lengths", "numpy", np.asarray, sort_only),
    Planner("[floor] copy of the lengths", "numpy", np.asarray, copy_only),
]


def corpora(documents: int) -> dict[str, tuple[int, np.ndarray]]:
    rng = np.random.default_rng(0)
    drawn = {
        "lognormal(6, 1)": (4096, np.clip(rng.lognormal(6, 1, documents), 1, 4096).astype(np.int32)),
        "uniform": (2048, rng.integers(1, 2049, documents).astype(np.int32)),
        "pareto(1.1) * 64": (8192, np.clip(rng.pareto(1.1, documents) * 64, 1, 8192).astype(np.int32)),
    }
    capacities = {"source files": 65_536, "functions and classes": 8192, "docstrings": 2048}
    for name, sizes in measured_sizes().items():
        capacity = capacities[name]
        drawn[name] = (capacity, np.minimum(rng.choice(sizes, documents), capacity).astype(np.int32))
    if documents < FEW_CORPORA_FROM:
        return drawn
    return {name: drawn[name] for name in ("lognormal(6, 1)", "functions and classes")}


@cache
def measured_sizes() -> dict[str, np.ndarray]:
    """Bytes of what the standard library's sources are made of, by kind."""
    files, definitions, docstrings = [], [], []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" in path.parts or "test" in path.parts:
            continue
        text = path.read_bytes()
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            continue
        files.append(len(text))
        lines = np.cumsum([0, *map(len, text.splitlines(keepends=True))])
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                definitions.append(int(lines[node.end_lineno or node.lineno] - lines[node.lineno - 1]))
                docstrings.append(len((ast.get_docstring(node) or "").encode()))
    kinds = {"source files": files, "functions and classes": definitions, "docstrings": docstrings}
    return {kind: np.array([size for size in sizes if size]) for kind, sizes in kinds.items()}


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
    turns = {10_000: 15, 100_000: 9, 1_000_000: 5}
    for turn in range(next((number for size, number in turns.items() if len(lengths) <= size), 3)):
        for planner in planners:
            if planner.limit and turn >= (3 if len(lengths) < ONCE_FROM else 1):
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


def report(documents: int) -> list[float]:
    """Print the tables of one size; returns for every corpus the time of the fastest peer over ours."""
    fastest = []
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
        peers = [name for name in results if not name.startswith(("neatpack", "[floor]"))]
        fastest += [min(results[name][0] for name in peers) / ours] if peers else []
        for name, reason in reasons.items():
            if reason:
                print(f"| - | - | - | {name}: {reason} |")
                continue
            taken, rows = results[name]
            over = "-" if rows is None else f"+{rows - bound}"
            print(f"| {taken / ours:.2f} | {taken:.4f} | {over} | {name} |", flush=True)
    return fastest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("documents", nargs="*", type=int, default=SIZES, help="sizes to plan")
    heads = []
    for documents in parser.parse_args().documents:
        fastest = report(documents)
        if fastest:
            heads.append(f"{min(fastest):.2f} to {max(fastest):.2f} times ours at {documents:,} documents")
    print(f"\nheadline: planning: the fastest peer's time is {', '.join(heads) or 'unknown: no peer is installed'}")


if __name__ == "__main__":
    main()
