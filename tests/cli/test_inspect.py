"""`neatpack inspect` shows a packing in the terminal, to scripts and as a page; help has examples, errors fit a screen."""

from __future__ import annotations

import json
import re

import pytest
from typer.testing import CliRunner

import neatpack
from data.test_pipeline import write_ids
from neatpack.cli import app, main, one_screen
from neatpack.data import pack
from neatpack.errors import PlanError, SourceError, StoreError
from neatpack.planning import plan_rows, save_plan

COMMANDS = ("pack", "inspect", "verify", "audit")


def run(*arguments, **environment):
    return CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "100", **environment})


@pytest.fixture
def packed(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(40):
        (texts / f"{number}.txt").write_text(f"text {number} " * (number + 1))
    pack([texts], tmp_path / "packed", 128, overflow="truncate")
    return tmp_path / "packed"


def test_the_terminal_shows_a_summary_and_three_histograms(packed):
    result = run("inspect", packed, COLUMNS="240")
    assert result.exit_code == 0, result.output
    for pattern in (
        r"documents +40",
        r"fill +\d+\.\d+%",
        r"padding saved +[\d,]+",
        r"documents a row +\d",
        r"overflow +truncate +\d+ documents whole; \d+ cut off, [\d,]+ tokens lost",
        r"source +[\d,]+ bytes +.*texts.*40 files",
        r"tokenizer +bytes",
        r"bytes a token +[01]\.\d\d",
        r"Document lengths \(tokens\)",
        r"Fill per row",
        r"Documents per row",
        r"█ +",
    ):
        assert re.search(pattern, result.output), (pattern, result.output)


def test_json_holds_the_numbers_that_the_terminal_shows(packed):
    found = json.loads(run("inspect", packed, "--json", "--world-size", 2).stdout)
    manifest = json.loads((packed / "manifest.json").read_text())
    assert found["rows"] == manifest["counts"]["rows"]
    assert found["tokens"] == manifest["counts"]["tokens_in_rows"]
    assert found["padding"] == manifest["counts"]["padding"]
    assert found["counts"]["truncated"] == manifest["counts"]["truncated"]
    assert sum(found["histograms"]["document_length"]["counts"]) == found["pieces"] == 40
    assert found["ranks"]["world_size"] == 2
    assert found["page"] is None


def test_a_page_is_written_and_named(packed, tmp_path):
    result = run("inspect", packed, "--html", tmp_path / "page.html", "--rows", "0:2")
    size = (tmp_path / "page.html").stat().st_size
    assert f"({size:,} bytes)" in result.output
    assert '"rows":{"rows":[0,1],' in (tmp_path / "page.html").read_text()
    found = json.loads(run("inspect", packed, "--html", tmp_path / "page.html", "--json").stdout)
    assert found["page"]["bytes"] == (tmp_path / "page.html").stat().st_size


def test_a_plan_is_looked_at_too(tmp_path):
    save_plan(plan_rows([5, 3, 4, 2, 2], 8), tmp_path / "plan.npz")
    result = run("inspect", tmp_path / "plan.npz")
    assert result.exit_code == 0, result.output
    assert re.search(r"rows +2 +of 8 tokens, best_fit; lower bound 2", result.output)
    assert "A plan holds no tokens: pass the documents" in result.output


@pytest.mark.parametrize("rows", ["3", "5:2", "a:b", "-1:4"])
def test_rows_that_are_no_range_are_refused(packed, tmp_path, rows):
    result = run("inspect", packed, "--html", tmp_path / "page.html", f"--rows={rows}")
    assert isinstance(result.exception, SourceError)
    assert "expected FIRST:STOP" in str(result.exception)
    without = run("inspect", packed, "--rows", "0:2")
    assert "name the page with --html" in str(without.exception)


def test_a_missing_packing_is_one_message_and_exit_code_one(tmp_path, monkeypatch, capsys):
    assert isinstance(run("inspect", tmp_path / "nowhere").exception, StoreError)
    monkeypatch.setattr("sys.argv", ["neatpack", "inspect", str(tmp_path / "nowhere")])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 1
    assert "not found. Pass a folder that neatpack pack wrote" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("ids.jsonl", b'{"input_ids": [1]}\n', r"ids\.jsonl: documents \(jsonl\), expected .* Pack them first: neatpack pack"),
        ("note.txt", b"a text", r"note\.txt: no \.npz archive of save_plan, expected a folder that neatpack pack wrote"),
        ("plan.npz", b"", r"plan\.npz: no \.npz archive of save_plan"),
    ],
)
def test_a_file_that_is_no_plan_is_named_with_what_inspect_takes(tmp_path, name, content, what):
    (tmp_path / name).write_bytes(content)
    result = run("inspect", tmp_path / name)
    assert isinstance(result.exception, StoreError)
    assert re.search(what, str(result.exception)), result.exception
    assert "Plan the rows anew" not in str(result.exception)


def test_a_shard_is_told_from_its_folder(packed):
    result = run("inspect", next(packed.glob("data-*.arrow")))
    assert str(result.exception).endswith(f"a shard of a packed folder. Pass the folder: neatpack inspect {packed}")


@pytest.mark.parametrize("manifest", [None, '{"made by": "another tool"}'])
@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_folder_that_something_else_packed_is_pointed_to_the_audit(tmp_path, command, manifest):
    write_ids(tmp_path / "rows.arrow", [[1, 2, 3]])
    if manifest:
        (tmp_path / "manifest.json").write_text(manifest)
    result = run(command, tmp_path)
    assert isinstance(result.exception, StoreError)
    assert str(result.exception).endswith(f"Rows that something else packed are checked by: neatpack audit {tmp_path}")


def test_rows_beyond_the_end_are_refused_with_the_number_of_rows(packed, tmp_path):
    rows = json.loads((packed / "manifest.json").read_text())["counts"]["rows"]
    result = run("inspect", packed, "--html", tmp_path / "page.html", "--rows", "3:9999")
    assert isinstance(result.exception, PlanError)
    assert str(result.exception) == (
        f"rows 3 to 9998 were asked for, and the packing has {rows} rows, 0 to {rows - 1}. Ask for rows within 0:{rows}."
    )


def test_the_version_is_printed():
    result = run("--version")
    assert (result.exit_code, result.output) == (0, f"neatpack {neatpack.__version__}\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_examples_and_json(command):
    text = run(command, "--help").output
    assert f"$ neatpack {command} " in text
    assert "--json" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_the_examples_of_help_name_only_options_that_there_are(command):
    text = run(command, "--help", COLUMNS="200").output
    options, examples = text.split(" Examples")
    for option in re.findall(r"(--[a-z-]+)", examples):
        assert option in options, option


def test_help_names_every_command_and_shows_a_way_through():
    text = run("--help").output
    for command in COMMANDS:
        assert re.search(rf"│ {command} ", text)
        assert f"$ neatpack {command} " in text


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_can_be_shown_for_a_shell(shell, monkeypatch):
    from typer import completion

    monkeypatch.setattr(completion, "_get_shell_name", lambda: shell)
    result = CliRunner().invoke(app, ["--show-completion"], prog_name="neatpack")
    assert result.exit_code == 0, result.output
    assert "_NEATPACK_COMPLETE" in result.output


def test_an_error_fits_one_screen_and_keeps_its_way_out():
    deep = "\n".join(f"line {number}" for number in range(400))
    assert one_screen("short. Do this.") == "short. Do this."
    assert len(one_screen(deep).splitlines()) <= 16
    assert one_screen(deep).endswith("line 399")
    wide = "x" * 100_000 + " Do this."
    assert len(one_screen(wide)) < 1_700
    assert one_screen(wide).endswith("Do this.")
