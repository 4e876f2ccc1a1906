"""Documents longer than a row: what each policy keeps, what it loses, and that it says so."""

import json

import pytest
from fault_cases import refuses, runs

from neatpack.data import pack
from neatpack.planning import StreamPlanner, plan_rows

KIND = "overlong documents"


def as_lengths(rows):
    return sorted(sorted(slice_.length for slice_ in row) for row in rows)


@runs(KIND, "rows_and_losses")
def test_every_policy_keeps_and_counts_what_it_says(case):
    lengths, capacity = case.input["lengths"], case.input["capacity"]
    for policy, expected in case.expected.items():
        plans = {
            strategy: plan_rows(lengths, capacity, overflow=policy, strategy=strategy) for strategy in ("best_fit", "in_order")
        }
        planner = StreamPlanner(capacity, overflow=policy)
        streamed = [*planner.extend(lengths), *planner.flush()]
        for rows, counts in [*((plan, plan.counts) for plan in plans.values()), (streamed, planner.counts)]:
            rows = list(rows)
            kept = sum(slice_.length for row in rows for slice_ in row)
            lost = counts.dropped_tokens + counts.truncated_tokens
            assert lost == expected["lost"], policy
            assert kept == expected.get("kept", sum(lengths) - lost), policy
            assert counts.tokens == kept + lost
            assert all(rows), "no row of padding alone"
            if "documents" in expected:
                assert counts.dropped + counts.truncated == expected["documents"]
            if "rows" in expected:
                assert as_lengths(rows) == sorted(sorted(row) for row in expected["rows"]), policy


@runs(KIND, "tokenizer_cuts_nothing")
def test_lengths_are_measured_before_anything_is_cut(case, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"word": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(case.input["capacity"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    source = tmp_path / "texts.jsonl"
    source.write_text("".join(json.dumps({"text": " ".join(["word"] * words)}) + "\n" for words in case.input["words"]))
    options = {"tokenizer": str(tmp_path / "tokenizer.json"), "eos": False, "overflow": "drop"}
    summary = pack(source, tmp_path / "out", case.input["capacity"], **options)
    assert summary.counts.documents - summary.counts.dropped == case.expected["kept_documents"]
    assert summary.tokens == case.expected["kept_tokens"]
    assert summary.counts.dropped == case.expected["dropped"]


@runs(KIND, "default_refuses")
def test_without_a_policy_an_overlong_document_is_refused(case, tmp_path):
    with refuses(case.expected):
        plan_rows(case.input["lengths"], case.input["capacity"])
    with refuses(case.expected):
        StreamPlanner(case.input["capacity"]).extend(case.input["lengths"])
    source = tmp_path / "ids.jsonl"
    source.write_text("".join(json.dumps({"input_ids": [1] * length}) + "\n" for length in case.input["lengths"]))
    with pytest.raises(ValueError, match=r"(?s)12.*split.*truncate.*drop"):
        pack(source, tmp_path / "out", case.input["capacity"])
    assert not (tmp_path / "out").exists()


@runs(KIND, "whole_documents")
def test_documents_that_fit_are_never_cut(case):
    plan = plan_rows(case.input["lengths"], case.input["capacity"])
    assert [[slice_.length for slice_ in row] for row in plan] == case.expected["rows"]
    assert not plan.start.any()
    assert plan.counts.split == plan.counts.truncated == 0
