"""`neatpack audit`: does this model keep packed documents apart, is this data packed right, and does every model?"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from neatpack.cli.progress import progress_bar
from neatpack.errors import SourceError

if TYPE_CHECKING:
    from neatpack.audit import DataAudit, ModelAudit, Zoo
    from neatpack.audit.model_audit import AttentionAudit

_OPTIONS = {
    "a model": ("attn", "seq_len", "seed", "html"),
    "packed rows": ("vocab_size", "pad_id", "source"),
    "--zoo": ("only", "write", "workers"),
}
"""The options of each kind of audit; the others would be ignored, and are refused."""

_COLOURS = {"isolated": "green", "leaking": "red", "differing": "red", "wrong": "red"}
_OTHERWISE = "yellow"

EXAMPLES = (
    "neatpack audit path/to/checkpoint",
    "neatpack audit path/to/config.json --attn packed_varlen --html audit.html",
    "neatpack audit packed --vocab-size 32000 --source corpus/ --json",
    "neatpack audit --zoo --only llama --only mamba2",
)

_model_option = partial(typer.Option, rich_help_panel="A model")
_data_option = partial(typer.Option, rich_help_panel="Packed rows")
_zoo_option = partial(typer.Option, rich_help_panel="Every model of transformers")


def audit(
    context: typer.Context,
    target: Annotated[
        Path | None,
        typer.Argument(
            metavar="MODEL|DATA",
            help="A checkpoint folder, a config folder or a config.json; or a folder of packed rows.",
            show_default=False,
        ),
    ] = None,
    zoo: Annotated[bool, _zoo_option("--zoo", help="Audit every causal language model that transformers ships.")] = False,
    only: Annotated[list[str] | None, _zoo_option("--only", help="This model type only; repeat for several.")] = None,
    write: Annotated[Path | None, _zoo_option("--write", help="Write the matrix as a Markdown page.")] = None,
    workers: Annotated[int, _zoo_option("--workers", help="Processes at a time.", min=1)] = 2,
    attn: Annotated[
        list[str] | None, _model_option("--attn", help="Attention implementation to try; repeat for several.")
    ] = None,
    seq_len: Annotated[int, _model_option("--seq-len", help="Tokens a row of the packed batch.", min=8)] = 64,
    seed: Annotated[int, _model_option("--seed", help="Seed of the batch and of random weights.")] = 0,
    vocab_size: Annotated[int | None, _data_option("--vocab-size", help="Ids from here on are faults.", min=1)] = None,
    pad_id: Annotated[int | None, _data_option("--pad-id", help="The id that padding would have.", min=0)] = None,
    source: Annotated[
        list[Path] | None, _data_option("--source", help="What it was packed from, to compare with; repeat for several.")
    ] = None,
    html: Annotated[
        Path | None,
        _model_option(
            "--html", metavar="FILE", help="Write a page, a heat map of document against document.", show_default=False
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything measured as JSON.")] = False,
) -> None:
    """Measure whether a model keeps packed documents apart, or check packed rows.

    A model: change one document, and see whether another one's logits move. A checkpoint is audited with its weights; a
    config alone as a small random model that keeps the config's traits. Nothing is downloaded.

    Packed rows: boundaries, labels, padding stored as documents, the vocabulary, and (in folders of neatpack pack) that
    nothing was lost or doubled.

    Exit code 0 if nothing is wrong, else 1.
    """
    from neatpack.audit import audit_data, audit_model, is_packed_folder

    if html is not None and (target is None or is_packed_folder(target)):
        raise SourceError("--html draws how a model's documents move each other: name a model (neatpack inspect draws data).")
    if zoo == (target is not None):
        raise SourceError("name one thing to audit: a model, a folder of packed rows, or --zoo for every model there is.")
    _refuse_other_kinds(context, target)
    if target is None:
        matrix = _zoo(only or [], workers, write)
        _finish({"entries": list(matrix.entries), "totals": matrix.totals()}, not matrix.wrong, as_json, _print_zoo, matrix)
    elif is_packed_folder(target):
        data = audit_data(target, vocab_size=vocab_size, pad_token_id=pad_id, sources=source or ())
        _finish(data.to_dict(), data.passed, as_json, _print_data, data)
    else:
        with progress_bar() as progress:
            model = audit_model(
                target, attention=attn or (), row_length=seq_len, seed=seed, control=html is not None, progress=progress
            )
        if html is not None:
            _write_page(model, html)
        _finish(model.to_dict(), model.passed, as_json, _print_model, model)


def _refuse_other_kinds(context: typer.Context, target: Path | None) -> None:
    """Refuse options that were given and are for another kind of audit than the target asks for."""
    from neatpack.audit import is_packed_folder

    if target is None:
        kind, found = "--zoo", "--zoo audits every model"
    elif is_packed_folder(target):
        kind, found = "packed rows", f"{target} is packed rows"
    elif target.exists():
        kind, found = "a model", f"{target} is a model (no folder with .arrow or .parquet files)"
    else:
        return  # reading it says what is missing
    for other, names in _OPTIONS.items():
        given = [name for name in names if getattr(context.get_parameter_source(name), "name", "DEFAULT") != "DEFAULT"]
        if other != kind and given:
            raise SourceError(f"--{given[0].replace('_', '-')} is for {other}, and {found}. Leave it out.")


def _finish(values: dict[str, Any], passed: bool, as_json: bool, show: Any, result: Any) -> None:
    if as_json:
        typer.echo(json.dumps(values, indent=2, allow_nan=False))
    else:
        show(Console(highlight=False, soft_wrap=True), result)
    raise typer.Exit(0 if passed else 1)


def _write_page(result: ModelAudit, path: Path) -> None:
    from neatpack.report import audit_page, write_page

    size = write_page(audit_page(result), path)
    Console(stderr=True).print(f"Page: {escape(str(path))} ({size:,} bytes)", highlight=False, soft_wrap=True)


def _print_model(console: Console, result: ModelAudit) -> None:
    what = "its weights" if result.weights == "checkpoint" else "a small random model of its kind"
    console.print(f"[bold]{escape(result.model)}[/] ({escape(result.model_type)}), audited with {what}")
    for each in result.results:
        console.print(f"\n[bold {_COLOURS.get(each.verdict, _OTHERWISE)}]{escape(each.attention)}[/]")
        console.print(escape(_in_words(each)))
    console.print("\n" + escape("\n".join(_verdict(result))))


def _in_words(each: AttentionAudit) -> str:
    if each.refusal is not None:
        found = f"unsupported: {each.reason}" if each.report is None else each.report.measured
        return f"refused: {each.refusal}\nregardless of that, {found}"
    measured = str(each.report) if each.report is not None else f"unsupported: {each.reason}"
    sent = "" if each.payload is None else f"\n  sent: {each.payload}"
    sent += "" if each.row_limit is None else f", in rows of at most {each.row_limit} tokens"
    if each.bare is not None:
        sent += f"; without the mask {each.bare.verdict}: documents move each other by {each.bare.max_influence:.2g}"
    return measured + sent


def _verdict(result: ModelAudit) -> list[str]:
    """What to do, in a line or two."""
    safe = [f"{each.attention} ({each.payload})" for each in result.results if each.isolated]
    moved = [
        f"{each.attention} (documents move each other by {each.report.max_influence:.2g})"
        for each in result.results
        if each.report is not None and each.report.verdict == "leaking"
    ]
    lines = [f"Isolated on {', '.join(safe)}: pack for it with neatpack.hf.collator_for(model)."] if safe else []
    lines += [f"Leaks on {', '.join(moved)}: do not pack there."] if moved else []
    return lines if safe else [*lines, "Do not pack for this model: nothing tried keeps its documents apart."]


def _print_data(console: Console, result: DataAudit) -> None:
    console.print(
        f"[bold]{escape(result.folder)}[/]: {result.rows:,} rows, {result.documents:,} documents, {result.tokens:,} tokens"
    )
    for finding in result.findings:
        console.print(f"[bold red]fault[/] {escape(str(finding))}")
    for missing in result.not_checked:
        console.print(f"[yellow]not checked[/] {escape(missing)}")
    if result.passed:
        against = f", and the content is that of the {result.conserved}" if result.conserved else ""
        console.print(f"[bold green]ok[/] boundaries, labels and padding are right{against}.")


def _zoo(only: list[str], workers: int, write: Path | None) -> Zoo:
    from rich.progress import Progress

    from neatpack.audit import audit_zoo
    from neatpack.audit.zoo_page import page

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("models", total=None)
        matrix = audit_zoo(only, workers=workers, progress=lambda done, total, _: bar.update(task, completed=done, total=total))
    if write is not None:
        write.write_text(page(matrix), encoding="utf-8")
    return matrix


def _print_zoo(console: Console, matrix: Zoo) -> None:
    for attention, counts in matrix.totals().items():
        console.print(f"{attention}: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count))
    for cell in matrix.wrong:
        console.print(f"[bold red]wrong[/] {escape(cell)}: the contract accepts what was not isolated")
