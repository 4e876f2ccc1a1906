"""`neatpack verify` answers scripts too, whatever it finds."""

import json

import pytest
from typer.testing import CliRunner

from neatpack.cli import app
from neatpack.data import pack
from neatpack.errors import StoreError


@pytest.fixture
def packed(tmp_path):
    source = tmp_path / "ids.jsonl"
    source.write_text("".join(json.dumps({"input_ids": [i, i + 1, i + 2]}) + "\n" for i in range(20)))
    pack(source, tmp_path / "packed", 8)
    return tmp_path / "packed"


def test_json_says_that_a_folder_passed(packed):
    result = CliRunner().invoke(app, ["verify", str(packed), "--json"])
    found = json.loads(result.stdout)
    assert (result.exit_code, found["passed"], found["fault"], found["rows"]) == (0, True, None, 10)


def test_json_names_the_first_fault_as_stderr_does(packed):
    (shard,) = packed.glob("data-*.arrow")
    shard.write_bytes(shard.read_bytes()[:-1])
    result = CliRunner().invoke(app, ["verify", str(packed), "--json"])
    assert result.exit_code == 1
    assert isinstance(result.exception, StoreError)
    fault = str(result.exception)
    assert f"{shard}: truncated" in fault
    assert json.loads(result.stdout) == {"folder": str(packed), "passed": False, "fault": fault}
