"""Resuming: the next row, and never the state of another data set."""

import json

import pytest
from fault_cases import refuses, runs

from neatpack.data import pack
from neatpack.engine import LocalEngine
from neatpack.planning import StreamPlanner, plan_rows

KIND = "resume"


@runs(KIND, "another_source")
def test_what_belongs_to_another_source_is_refused(case, tmp_path, monkeypatch):
    plan = plan_rows(case.input["lengths"], 8)
    plan.check_source(case.input["lengths"])
    with refuses(case.expected):
        plan.check_source(case.input["other"])
    source = tmp_path / "ids.jsonl"
    source.write_text("".join(json.dumps({"input_ids": [1] * length}) + "\n" for length in case.input["lengths"]))

    def interrupted(self, tasks, tick):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LocalEngine, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pack(source, tmp_path / "out", 8)
    source.write_text(source.read_text() + json.dumps({"input_ids": [2]}) + "\n")
    with refuses({"error": case.expected["stop"], "way_out": case.expected["stop_way_out"]}):
        pack(source, tmp_path / "out", 8)
    assert pack(source, tmp_path / "out", 8, restart=True).counts.documents == len(case.input["lengths"]) + 1


@runs(KIND, "next_row")
def test_a_resumed_stream_goes_on_with_the_next_document(case):
    lengths, consumed = case.input["lengths"], case.input["consumed"]
    before = StreamPlanner(case.input["capacity"], lookahead=1)
    rows = before.extend(lengths[:consumed])
    state = json.loads(json.dumps(before.state_dict()))
    after = StreamPlanner(case.input["capacity"], lookahead=1)
    after.load_state_dict(state)
    assert after.counts.documents == case.expected["next_document"]
    rows += [*after.extend(lengths[after.counts.documents :]), *after.flush()]
    assert [[slice_.doc for slice_ in row] for row in rows] == case.expected["rows"]
