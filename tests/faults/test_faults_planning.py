"""Planning: the strategy that was named, limits in every row, tiny and huge data, streams and groups."""

import json
import time

import datasets
import numpy as np
import torch
from fault_cases import joined, refuses, runs

from neatpack.data import pack
from neatpack.planning import StreamPlanner, balance_rows, plan_rows
from neatpack.train import PackedCollator

KIND = "planning"


def lengths_of(plan):
    return [[slice_.length for slice_ in row] for row in plan]


def documents_of(plan):
    return [[slice_.doc for slice_ in row] for row in plan]


@runs(KIND, "wrapped_stream")
def test_a_wrapped_stream_holds_every_token_once(case, tmp_path):
    documents = datasets.Dataset.from_dict({"input_ids": case.input["documents"]})
    first, last = case.input["select"]
    for name, source in {"rows": documents, "selected": documents.select(range(first, last))}.items():
        source.save_to_disk(str(tmp_path / name))
        options = {"strategy": "wrapped", "seed": None, "unit_tokens": case.input["unit_tokens"]}
        pack(tmp_path / name, tmp_path / f"{name}.out", case.input["capacity"], **options)
        rows = datasets.load_from_disk(str(tmp_path / f"{name}.out"))["input_ids"]
        assert list(rows) == case.expected[name]
        assert joined(rows) == joined(source["input_ids"])


@runs(KIND, "best_fit")
def test_best_fit_puts_a_document_into_the_fullest_row(case):
    assert lengths_of(plan_rows(case.input["lengths"], case.input["capacity"])) == case.expected["rows"]


@runs(KIND, "document_cap")
def test_a_cap_on_documents_holds_for_every_row(case):
    lengths, capacity, most = (case.input[name] for name in ("lengths", "capacity", "max_docs_per_row"))
    for strategy in ("best_fit", "in_order"):
        plan = plan_rows(lengths, capacity, strategy=strategy, max_docs_per_row=most)
        assert lengths_of(plan) == case.expected["rows"]
    planner = StreamPlanner(capacity, max_docs_per_row=most)
    streamed = [*planner.extend(lengths), *planner.flush()]
    assert max(map(len, streamed)) == most
    assert len(streamed) == len(case.expected["rows"])


@runs(KIND, "tiny_data")
def test_data_smaller_than_a_batch_makes_one(case):
    plan = plan_rows(case.input["lengths"], case.input["capacity"])
    assert plan.num_rows == case.expected["rows"]
    assert plan.num_tokens == case.expected["tokens"]
    assert plan.num_rows * plan.capacity - plan.num_tokens == case.expected["padding"]
    rows = [{"input_ids": [1] * plan.num_tokens, "seq_lengths": [slice_.length for slice_ in plan[0]]}]
    collate = PackedCollator(row_length=plan.capacity)
    batches = list(torch.utils.data.DataLoader(rows, case.input["batch_rows"], collate_fn=collate))
    assert len(batches) == case.expected["batches"]
    assert batches[0]["input_ids"].shape == (1, plan.capacity)
    if "error" in case.expected:
        with refuses(case.expected):
            balance_rows(plan, 1, case.input["batch_rows"], tail="drop")
    assert balance_rows(plan, 1, case.input["batch_rows"], tail="repeat").num_steps == 1


@runs(KIND, "many_halves")
def test_documents_over_half_a_row_cost_no_scan_of_all_rows(case):
    seconds = {}
    for factor in (1, 10):
        lengths = np.full(factor * case.input["documents"], case.input["length"])
        begin = time.process_time()
        plan = plan_rows(lengths, case.input["capacity"])
        seconds[factor] = time.process_time() - begin
        assert plan.num_rows == factor * case.expected["rows"]
    assert seconds[10] < 40 * max(seconds[1], 0.01)  # quadratic would be a hundredfold


@runs(KIND, "grouped_units")
def test_units_planned_by_themselves_fill_their_rows(case, tmp_path):
    source = tmp_path / "ids.jsonl"
    source.write_text("".join(json.dumps({"input_ids": [1] * length}) + "\n" for length in case.input["lengths"]))
    options = {"unit_tokens": case.input["unit_tokens"], "seed": None}
    summary = pack(source, tmp_path / "out", case.input["capacity"], **options)
    assert datasets.load_from_disk(str(tmp_path / "out"))["seq_lengths"][:] == case.expected["rows"]
    assert summary.efficiency == case.expected["efficiency"]
    assert summary.shards == 2


@runs(KIND, "stream")
def test_a_stream_keeps_a_bounded_number_of_rows_open(case):
    planner = StreamPlanner(case.input["capacity"], open_rows=case.input["open_rows"], lookahead=1)
    rows = []
    for length in case.input["lengths"]:
        rows += planner.add(length)
        assert len(planner.state_dict()["open_rows"]) <= case.input["open_rows"]
    rows += planner.flush()
    assert len(rows) == case.expected["rows"]
    assert sorted(slice_.doc for row in rows for slice_ in row) == list(range(len(case.input["lengths"])))


@runs(KIND, "rows_of_one_group")
def test_groups_planned_by_themselves_never_share_a_row(case):
    lengths, groups = np.array(case.input["lengths"]), np.array(case.input["groups"])
    pure = []
    for group in dict.fromkeys(case.input["groups"]):
        members = np.flatnonzero(groups == group)
        plan = plan_rows(lengths[members], case.input["capacity"])
        pure += [sorted(members[row].tolist()) for row in documents_of(plan)]
    assert sorted(pure) == sorted(case.expected["pure"])
    free = documents_of(plan_rows(lengths, case.input["capacity"], strategy="in_order"))
    assert free == case.expected["free"]  # rows that no key keeps apart
    best = documents_of(plan_rows(lengths, case.input["capacity"]))
    assert [sum(lengths[row]) for row in best] == [sum(lengths[row]) for row in case.expected["free"]] == [8, 8]
