"""Ranks and workers: the same number of rows on every rank, the same rows from any number of processes."""

import json

import datasets
import pytest
from fault_cases import refuses, runs

from neatpack.data import pack
from neatpack.planning import balance_rows, plan_rows

KIND = "ranks and workers"


@runs(KIND, "equal_rows")
def test_every_rank_gets_the_same_number_of_rows(case):
    world_size = case.input["world_size"]
    plan = plan_rows([4] * case.input["rows"], 4)
    with refuses(case.expected):
        balance_rows(plan, world_size, 1)
    for tail in ("drop", "repeat"):
        balanced = balance_rows(plan, world_size, 1, tail=tail)
        assert [len(balanced.rank_rows(rank)) for rank in range(world_size)] == case.expected[tail]
    assert balance_rows(plan, world_size, 1, tail="drop").dropped_rows == 1


@pytest.mark.slow
@runs(KIND, "any_number_of_workers")
def test_any_number_of_workers_gives_the_same_rows(case, tmp_path):
    for number, length in enumerate(case.input["lengths"]):
        path = tmp_path / "source" / f"{number}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"input_ids": [number] * length}) + "\n")
    found = []
    for workers in case.input["workers"]:
        out = tmp_path / f"out{workers}"
        pack(tmp_path / "source", out, case.input["capacity"], workers=workers, unit_tokens=8)
        rows = datasets.load_from_disk(str(out))
        found.append((rows["input_ids"][:], rows["seq_lengths"][:]))
    assert all(rows == found[0] for rows in found) is case.expected["same"]
