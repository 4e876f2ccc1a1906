"""`neatpack audit` prints a verdict that a person can read, and its exit code is the answer."""

import json

import pytest
import transformers
from typer.testing import CliRunner

from neatpack.cli import app, main


def run(*arguments):
    return CliRunner().invoke(app, ["audit", *map(str, arguments)])


def test_an_isolated_model_exits_with_zero(tmp_path):
    transformers.LlamaConfig(num_key_value_heads=8).save_pretrained(tmp_path)
    result = run(tmp_path, "--attn", "packed_varlen", "--seq-len", 32)
    assert result.exit_code == 0, result.output
    assert "isolated:" in result.output
    assert "a small random model of its kind" in result.output


def test_a_leaking_model_exits_with_one_and_says_what_to_use(tmp_path):
    transformers.OPTConfig().save_pretrained(tmp_path)
    result = run(tmp_path)
    assert result.exit_code == 1
    assert "leaking:" in result.output
    assert "moves document" in result.output
    assert "Pack this model on packed_varlen only." in result.output


def test_json_holds_everything_measured(tmp_path):
    transformers.LlamaConfig(num_key_value_heads=8).save_pretrained(tmp_path)
    result = run(tmp_path / "config.json", "--attn", "packed_varlen", "--attn", "eager", "--json", "--seed", 4)
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["passed"] is True
    assert list(found["results"]) == ["packed_varlen", "eager"]
    report = found["results"]["packed_varlen"]["report"]
    assert report["max_influence"] == 0.0
    assert len(report["influence"]) == len(report["documents"]) == len(report["difference"])
    assert found["batch"] == {"rows": 2, "row_length": 64, "seed": 4}


def test_a_missing_model_is_one_message_and_exit_code_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["neatpack", "audit", str(tmp_path / "nowhere")])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 1
    error = capsys.readouterr().err
    assert "does not exist: expected a config.json" in error
    assert "Traceback" not in error
