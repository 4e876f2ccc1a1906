"""`neatpack audit` prints a verdict that a person can read, and its exit code is the answer."""

import json
import re

import numpy as np
import pytest
import transformers
from typer.testing import CliRunner

from neatpack.cli import app, main
from neatpack.data import pack
from neatpack.errors import SourceError


def run(*arguments):
    return CliRunner().invoke(app, ["audit", *map(str, arguments)])


def test_an_isolated_model_exits_with_zero(tmp_path):
    transformers.LlamaConfig(num_key_value_heads=8).save_pretrained(tmp_path)
    result = run(tmp_path, "--attn", "packed_varlen", "--seq-len", 32)
    assert result.exit_code == 0, result.output
    assert "isolated:" in result.output
    assert "a small random model of its kind" in result.output


def test_a_leaking_model_exits_with_one_and_says_what_to_do(tmp_path):
    transformers.Mamba2Config().save_pretrained(tmp_path)
    result = run(tmp_path, "--attn", "eager")
    assert result.exit_code == 1
    assert "refused: Mamba2ForCausalLM carries a state" in result.output
    assert "moves document" in result.output
    assert "Leaks on eager (documents move each other by" in result.output
    assert "Do not pack for this model" in result.output
    assert "packed_varlen" not in result.output  # no advice that the refusal has just ruled out


def test_a_checkpoint_is_told_how_long_its_rows_may_be(tmp_path):
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    rope |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, rope_parameters=rope)).save_pretrained(tmp_path)
    result = run(tmp_path, "--attn", "packed_varlen", "--seq-len", 32)
    assert result.exit_code == 0, result.output
    assert "sent: offsets, in rows of at most 32 tokens" in result.output
    result = run(tmp_path, "--attn", "packed_varlen", "--seq-len", 64)
    assert result.exit_code == 1
    assert "refused: LlamaForCausalLM keeps documents as they are alone in rows of at most 32 tokens" in result.output


def test_a_config_is_told_how_long_the_rows_of_its_own_model_may_be(tmp_path):
    """Not those of the small model that stands for it, which are shorter."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    transformers.LlamaConfig(max_position_embeddings=4096, rope_parameters=rope).save_pretrained(tmp_path)
    result = run(tmp_path, "--attn", "packed_varlen", "--seq-len", 32)
    assert result.exit_code == 0, result.output
    assert "sent: offsets, in rows of at most 4096 tokens" in result.output


def test_an_attention_that_nobody_registered_is_an_error_that_names_those_there_are(tmp_path):
    transformers.LlamaConfig().save_pretrained(tmp_path)
    result = run(tmp_path, "--attn", "sdpa", "--attn", "packed")
    assert isinstance(result.exception, SourceError)
    assert "no attention implementation is called 'packed'. There are eager," in str(result.exception)
    assert "packed_varlen" in str(result.exception)


def test_a_model_that_needs_a_mask_is_said_to_leak_without_it(tmp_path):
    transformers.OPTConfig().save_pretrained(tmp_path)
    result = run(tmp_path, "--attn", "sdpa")
    assert result.exit_code == 0, result.output
    assert "sent: mask; without the mask leaking: documents move each other by" in result.output
    assert "Isolated on sdpa (mask): pack for it with neatpack.hf.collator_for(model)." in result.output


def test_packed_rows_are_audited_and_faults_exit_with_one(tmp_path):
    source = tmp_path / "ids.jsonl"
    source.write_text("".join(json.dumps({"input_ids": [i, i + 1, i + 2]}) + "\n" for i in range(20)))
    pack(source, tmp_path / "packed", 8)
    result = run(tmp_path / "packed", "--source", source, "--vocab-size", 22)
    assert result.exit_code == 0, result.output
    assert "20 documents, 60 tokens" in result.output
    assert "the content is that of the source" in result.output
    result = run(tmp_path / "packed", "--vocab-size", 10, "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert [finding["check"] for finding in found["findings"]] == ["vocabulary"]
    result = run(tmp_path / "packed", "--vocab-size", 10)
    assert "fault vocabulary: token id 21 is past the vocabulary of 10" in result.output


def test_options_of_another_kind_of_audit_are_refused_by_name(tmp_path):
    source = tmp_path / "ids.jsonl"
    source.write_text(json.dumps({"input_ids": [1, 2, 3]}) + "\n")
    pack(source, tmp_path / "packed", 8)
    transformers.LlamaConfig().save_pretrained(tmp_path / "model")
    for arguments, refused in (
        ([tmp_path / "packed", "--attn", "sdpa"], "--attn is for a model, and .*packed is packed rows. Leave it out"),
        ([tmp_path / "packed", "--seed", "0"], "--seed is for a model"),
        ([tmp_path / "packed", "--write", "x.md"], "--write is for --zoo, and .*packed is packed rows"),
        ([tmp_path / "model", "--vocab-size", "5"], "--vocab-size is for packed rows, and .*model is a model"),
        ([tmp_path / "model", "--only", "llama"], "--only is for --zoo"),
        (["--zoo", "--only", "llama", "--pad-id", "0"], "--pad-id is for packed rows, and --zoo audits every model"),
    ):
        result = run(*arguments)
        assert isinstance(result.exception, SourceError), result.output
        assert re.search(refused, str(result.exception)), result.exception


def test_a_model_type_that_transformers_does_not_know_is_one_sentence_and_the_way_out(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "nobodys"}')
    result = run(tmp_path)
    assert isinstance(result.exception, SourceError)
    assert re.fullmatch(
        r".*config\.json: transformers cannot read this config: [^\n.]*`nobodys`[^\n.]*\. Check the file, or update "
        r"transformers \([\d.]+\) if the model is newer\.",
        str(result.exception),
    ), result.exception


def test_a_corrupt_shard_is_one_finding_with_one_way_out(tmp_path):
    source = tmp_path / "ids.jsonl"
    source.write_text("".join(json.dumps({"input_ids": [i, i + 1, i + 2]}) + "\n" for i in range(20)))
    pack(source, tmp_path / "packed", 8)
    (shard,) = (tmp_path / "packed").glob("data-*.arrow")
    data = bytearray(shard.read_bytes())
    data[data.index(np.array([5, 6, 7], np.int32).tobytes())] = 9
    shard.write_bytes(data)
    result = run(tmp_path / "packed")
    assert result.exit_code == 1
    (line,) = [line for line in result.output.splitlines() if line.startswith("fault")]
    assert re.search(r"conservation: .*altered since it was written.*Restore it, or pack again\.$", line)
    assert line.lower().count("pack again") == 1


def test_the_zoo_is_audited_by_name_and_written_as_a_page(tmp_path):
    result = run("--zoo", "--only", "llama", "--write", tmp_path / "page.md", "--workers", 1)
    assert result.exit_code == 0, result.output
    assert "packed_varlen: 1 isolated" in result.output
    assert "| `llama` | isolated" in (tmp_path / "page.md").read_text()


def test_one_thing_is_audited_at_a_time(tmp_path):
    for arguments in ([], [tmp_path, "--zoo"]):
        result = run(*arguments)
        assert isinstance(result.exception, SourceError)
        assert "name one thing to audit" in str(result.exception)


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
    assert "does not exist: expected a model (a config.json, or a folder that holds one) or a folder of packed rows" in error
    assert "Traceback" not in error
