"""`neatpack pack` and `neatpack verify` from the shell."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from datasets import load_dataset, load_from_disk
from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner

import neatpack
from neatpack.cli import app
from neatpack.cli.pack import print_summary
from neatpack.data import pack

runner = CliRunner()


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.py").write_text("print('hello')\n")
    (folder / "b.jsonl").write_text('{"text": "hello", "url": "x"}\n{"text": ""}\n{"text": "and a longer one"}\n')
    (folder / "c.bin").write_bytes(b"x")
    return folder


def shell(*arguments) -> subprocess.CompletedProcess:
    program = "from neatpack.cli import main; main()"
    return subprocess.run([sys.executable, "-c", program, *map(str, arguments)], capture_output=True, text=True)


def test_the_summary_says_what_happened_and_what_to_do_next(corpus, tmp_path):
    result = runner.invoke(app, ["pack", str(corpus), "--out", str(tmp_path / "out"), "--seq-len", "20"])
    assert result.exit_code == 0, result.output
    lines = re.sub(r"[│┃]", " ", result.output)
    for pattern in (
        r"documents +4",
        r"tokens +39 +39 in rows, stored as uint16",
        r"tokenizer +258 ids +bytes \(embedded\), the default",
        r"rows +3",
        r"efficiency +65\.00% +lower bound 3 rows",
        r"padding +21",
        r"empty +1",
        r"ignored files +1 +1 x \.bin",
        r"columns left out +1 +url",
        r"tokens/s",
        r"load_from_disk",
        r"PackedCollator",
    ):
        assert re.search(pattern, lines), (pattern, lines)


def test_json_is_the_whole_summary(corpus, tmp_path):
    result = runner.invoke(app, ["pack", str(corpus), "--out", str(tmp_path / "out"), "--seq-len", "20", "--json"])
    summary = json.loads(result.stdout)
    assert summary["counts"]["documents"] == 4
    assert summary["rows"] == 3
    assert summary["padding"] == 21
    assert (summary["tokenizer"]["name"], summary["tokenizer"]["vocab_size"]) == ("bytes", 258)
    assert summary["tokenizer"] == json.loads((tmp_path / "out" / "manifest.json").read_text())["tokenizer"]


def test_every_option_reaches_the_pipeline(corpus, tmp_path):
    arguments = "--strategy in_order --overflow split --seed 3 --no-eos --include *.py --vocab-size 300 --workers 1 --skip-bad"
    result = runner.invoke(app, ["pack", str(corpus), "--out", str(tmp_path / "out"), "--seq-len", "4", *arguments.split()])
    assert result.exit_code == 0, result.output
    options = json.loads((tmp_path / "out" / "manifest.json").read_text())["options"]
    expected = {"strategy": "in_order", "overflow": "split", "seed": 3, "eos": False, "include": ["*.py"], "vocab_size": 300}
    assert expected.items() <= options.items()
    assert options["skip_bad"] is True
    again = runner.invoke(
        app, ["pack", str(corpus), "--out", str(tmp_path / "out"), "--seq-len", "50", "--overwrite", "--no-shuffle"]
    )
    assert again.exit_code == 0, again.output
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["options"]["seed"] is None


def test_an_error_is_one_message_without_a_traceback(corpus, tmp_path):
    result = shell("pack", corpus, "--out", tmp_path / "out", "--seq-len", 4)
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: documents longer than a row of 4 tokens: ")
    assert "--overflow split" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not list(tmp_path.glob("out*"))


def test_an_error_keeps_its_brackets(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"input_ids": [1, "x"]}')
    result = shell("pack", tmp_path / "a.jsonl", "--out", tmp_path / "out", "--seq-len", 4)
    assert "a.jsonl line 1: 'input_ids'[1] is \"x\"" in result.stderr


def test_an_existing_output_is_refused(corpus, tmp_path):
    pack(corpus, tmp_path / "out", 64)
    result = shell("pack", corpus, "--out", tmp_path / "out", "--seq-len", 64)
    assert result.returncode == 1
    assert "--overwrite" in result.stderr


def test_what_the_policy_did_is_in_the_table(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "aaaaaaaaaa"}\n{"text": "b"}\n{"text": null}\n')
    for overflow, line in (
        ("drop", "dropped +1 +documents, 11 tokens"),
        ("truncate", "truncated +1 +documents, 7 tokens cut off"),
    ):
        summary = pack(tmp_path / "a.jsonl", tmp_path / overflow, 4, overflow=overflow, skip_bad=True)
        console = Console(width=200, record=True, file=None, quiet=False, stderr=True)
        print_summary(summary, console)
        text = console.export_text().replace("│", " ")
        assert re.search(line, text), text
        assert re.search(r"skipped: null text +1 +first: .*a\.jsonl line 3", text), text


def test_verify_says_ok_or_names_the_fault(corpus, tmp_path):
    pack(corpus, tmp_path / "out", 64)
    result = runner.invoke(app, ["verify", str(tmp_path / "out"), "--source", str(corpus)])
    assert result.exit_code == 0, result.output
    assert result.output.startswith("ok 1 shard(s)")
    assert "the source, read again" in result.output
    shard = tmp_path / "out" / "data-00000.arrow"
    shard.write_bytes(shard.read_bytes()[:-1])
    broken = shell("verify", tmp_path / "out")
    assert broken.returncode == 1
    assert "data-00000.arrow: truncated" in broken.stderr


def test_units_and_engine_are_chosen_from_the_shell(corpus, tmp_path, monkeypatch):
    arguments = ["pack", str(corpus), "--seq-len", "20", "--json"]
    result = runner.invoke(app, [*arguments, "--out", str(tmp_path / "out"), "--unit-tokens", "17"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["shards"] == 3  # 16, 6 and 17 tokens, with the ends of sequences
    monkeypatch.setitem(sys.modules, "ray", None)
    result = runner.invoke(app, [*arguments, "--out", str(tmp_path / "ray"), "--engine", "ray", "--ray-address", "auto"])
    assert "pip install 'neatpack[ray]'" in str(result.exception)


def test_the_collator_that_the_summary_prints_takes_the_rows(tmp_path):
    """The printed line is run as it stands: with the further columns of the rows, and all batches of one shape."""
    (tmp_path / "a.jsonl").write_text(
        '{"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "weight": [1, 2, 3], "topic": 4}\n'
        '{"input_ids": [8, 9], "labels": [8, 9], "weight": [4, 5], "topic": 6}\n'
    )
    options = ["--token-columns", "weight", "--document-columns", "topic"]
    result = runner.invoke(app, ["pack", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "out"), "--seq-len", "8", *options])
    assert result.exit_code == 0, result.output
    assert re.search(r"labels[ │]+stored", result.output), result.output
    call = re.search(r"collate_fn=(neatpack\.PackedCollator\(.*\))\)", result.output)
    assert call, result.output
    (row,) = load_from_disk(str(tmp_path / "out"))
    batch = eval(call[1], {"neatpack": neatpack})([row])
    assert batch["input_ids"].shape == batch["weight"].shape == (1, 8)
    assert sorted(batch["topic"].tolist()) == [4, 6]


def test_the_collator_that_the_summary_prints_leaves_out_what_no_batch_can_hold(tmp_path):
    """Text, nulls, and numbers by the name of a model's argument, which are told to be renamed."""
    record = {"input_ids": [5, 6, 7], "url": "x", "score": 0.5, "source": 3, "target": "y", "none": None, "value": [1, 2, 3]}
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n" + json.dumps(record) + "\n")
    options = ["--token-columns", "value", "--document-columns", "url,score,source,target,none", "--format", "parquet"]
    result = runner.invoke(app, ["pack", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "out"), "--seq-len", "8", *options])
    assert result.exit_code == 0, result.output
    assert re.search(r"columns to rename +2 +value, source: ", re.sub(r"[│┃]", " ", result.output)), result.output
    call = re.search(r"collate_fn=(neatpack\.PackedCollator\(.*\))\)", result.output)
    assert call, result.output
    assert "ignore_columns=['value', 'url', 'source', 'target', 'none']" in call[1]
    rows = list(load_dataset("parquet", data_files=f"{tmp_path}/out/*.parquet", split="train", cache_dir=str(tmp_path / "hf")))
    batch = eval(call[1], {"neatpack": neatpack})(rows)
    assert batch["score"].tolist() == [0.5, 0.5]
    assert {"url", "source", "target", "none", "value"}.isdisjoint(batch)


def test_a_source_of_tokens_names_no_tokenizer(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"input_ids": [5, 6, 7]}\n')
    result = runner.invoke(app, ["pack", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "out"), "--seq-len", "8"])
    assert result.exit_code == 0, result.output
    assert "tokenizer" not in result.output
    assert pack(tmp_path / "a.jsonl", tmp_path / "other", 8).to_json()["tokenizer"] is None


def test_rows_with_room_for_slots_are_told_and_collated_as_printed(corpus, tmp_path):
    arguments = ["--seq-len", "32", "--align", "16", "--max-docs-per-row", "2"]
    result = runner.invoke(app, ["pack", str(corpus), "--out", str(tmp_path / "out"), *arguments])
    assert result.exit_code == 0, result.output
    told = re.sub(r"[│┃]", " ", result.output)
    assert re.search(r"documents a row +2 +at most", told), told
    assert re.search(r"align +16 +tokens", told), told
    call = re.search(r"collate_fn=(neatpack\.PackedCollator\(.*\))\)", result.output)
    assert call, result.output
    assert "row_length=32, align=16" in call[1]
    rows = list(load_from_disk(str(tmp_path / "out")))
    assert max(len(row["seq_lengths"]) for row in rows) == 2
    batch = eval(call[1], {"neatpack": neatpack})(rows)
    assert batch["input_ids"].shape == (len(rows), 32)
    second = next(index for index, row in enumerate(rows) if len(row["seq_lengths"]) == 2)
    assert batch["position_ids"][second, 16] == 0
    shown = runner.invoke(app, ["inspect", str(tmp_path / "out")])
    assert "PackedCollator(align=16)" in " ".join(shown.output.split())


def test_verify_shares_the_work_between_processes(corpus, tmp_path):
    pack(corpus, tmp_path / "out", 64, unit_tokens=17)
    reports = [
        runner.invoke(app, ["verify", str(tmp_path / "out"), "--source", str(corpus), "--json", "--workers", workers])
        for workers in ("1", "2")
    ]
    assert [report.exit_code for report in reports] == [0, 0], reports
    assert json.loads(reports[0].stdout) == json.loads(reports[1].stdout)
    assert runner.invoke(app, ["verify", str(tmp_path / "out"), "--workers", "0"]).exit_code == 2


def special_tokenizer(path):
    """Letters, and a special token whose name would be markup to the terminal."""
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "[/INST]": 2, "a": 3}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens(["</s>", "[/INST]"])
    tokenizer.save(str(path))
    return path


def test_special_tokens_that_texts_spell_out_are_told_by_name_and_split_on_request(tmp_path):
    tokenizer = special_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "a.jsonl").write_text('{"text": "a </s> a"}\n{"text": "a [/INST] a </s>"}\n{"text": "a"}\n')
    arguments = ["pack", str(tmp_path / "a.jsonl"), "--seq-len", "32", "--tokenizer", str(tokenizer), "--eos-token", "</s>"]
    result = runner.invoke(app, [*arguments, "--out", str(tmp_path / "one")])
    assert result.exit_code == 0, result.output
    told = " ".join(result.output.split())
    assert re.search(r"special tokens .*2 .*</s> in 1, \[/INST\] in 1", told), told
    assert "--split-special-tokens" in told
    assert re.search(r"tokenizer .* 4 ids .*tokenizer\.json", told), told
    result = runner.invoke(app, [*arguments, "--out", str(tmp_path / "two"), "--split-special-tokens"])
    assert result.exit_code == 0, result.output
    assert "special tokens" not in result.output
    assert json.loads((tmp_path / "two" / "manifest.json").read_text())["options"]["split_special_tokens"] is True


def test_markup_in_names_and_records_is_shown_as_it_is(tmp_path):
    folder = tmp_path / "[bold]"
    folder.mkdir()
    (folder / "[red]x.jsonl").write_text('{"text": "a"}\n{"text": 1}\n{"[/b]": 2, "text": null}\n')
    result = runner.invoke(app, ["pack", str(folder), "--seq-len", "8", "--out", str(tmp_path / "[blue]out"), "--skip-bad"])
    assert result.exit_code == 0, result.output
    told = "".join(result.output.split())
    assert "[red]x.jsonl" in told
    assert "[blue]out" in told
