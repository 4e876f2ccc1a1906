"""`neatpack audit`: does this model keep packed documents apart?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from neatpack.audit import ModelAudit

_COLOURS = {"isolated": "green", "leaking": "red", "differing": "red", "inconclusive": "yellow", "unsupported": "yellow"}


def audit(
    model: Annotated[Path, typer.Argument(help="A checkpoint folder, a config folder, or a config.json.")],
    attn: Annotated[
        list[str] | None, typer.Option("--attn", help="Attention implementation to try; repeat for several.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything measured as JSON.")] = False,
    seq_len: Annotated[int, typer.Option("--seq-len", help="Tokens a row of the packed batch.", min=8)] = 64,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the batch and of random weights.")] = 0,
) -> None:
    """Measure whether a model keeps packed documents apart; exit code 0 if it does on every implementation tried.

    A checkpoint is audited with its weights; a config alone as a small random model that keeps the config's traits.
    Without --attn the implementations packed_varlen, sdpa and eager are tried, where the model supports them.
    """
    from neatpack.audit import audit_model

    result = audit_model(model, attention=attn or (), row_length=seq_len, seed=seed)
    if as_json:
        typer.echo(json.dumps(result.to_dict(), indent=2, allow_nan=False))
    else:
        _print(result)
    raise typer.Exit(0 if result.passed else 1)


def _print(result: ModelAudit) -> None:
    console = Console(highlight=False, soft_wrap=True)
    what = "its weights" if result.weights == "checkpoint" else "a small random model of its kind"
    console.print(f"[bold]{escape(result.model)}[/] ({escape(result.model_type)}), audited with {what}")
    for each in result.results:
        colour = _COLOURS[each.verdict]
        console.print(f"\n[bold {colour}]{escape(each.attention)}[/]")
        console.print(escape(str(each.report) if each.report is not None else f"unsupported: {each.reason}"))
    if not result.passed and any(each.report is not None and each.report.isolated for each in result.results):
        safe = ", ".join(each.attention for each in result.results if each.report is not None and each.report.isolated)
        console.print(f"\nPack this model on {escape(safe)} only.")
