"""`neatpack verify`: is a packed folder whole, and does it hold what was packed?"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from neatpack.cli.progress import progress_bar
from neatpack.data.verify import verify as verify_folder
from neatpack.errors import StoreError

EXAMPLES = (
    "neatpack verify packed",
    "neatpack verify packed --source corpus/ --workers 2 --json",
)


def verify(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that neatpack pack wrote.", show_default=False)],
    source: Annotated[
        list[Path] | None,
        typer.Option(help="Read the source again and compare; repeat for several, in any order.", show_default=False),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes that share the shards, and the files of the source.")] = 1,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="With --source: let a hub tokenizer run the code that it ships.")
    ] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print the report, or the first fault, as JSON.")] = False,
) -> None:
    """Check checksums, boundaries and counts of a packed folder, and that nothing was lost or doubled.

    Exit code 0 if all is right; else 1, with the first fault on stderr.
    """
    try:
        with progress_bar() as progress:
            report = verify_folder(folder, source, workers=workers, trust_remote_code=trust_remote_code, progress=progress)
    except StoreError as error:
        if json_output:
            _print_json({"folder": str(folder), "passed": False, "fault": str(error)})
        raise
    if json_output:
        _print_json({**asdict(report), "passed": True, "fault": None})
        return
    against = "the source, read again" if report.source else "the documents that were packed"
    Console().print(
        f"[bold green]ok[/] {report.shards:,} shard(s), {report.rows:,} rows, {report.tokens:,} tokens: checksums, boundaries "
        f"and counts are right, and the content is that of {against} (hash {report.content}).",
        highlight=False,
        soft_wrap=True,
    )


def _print_json(values: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(values, indent=1) + "\n")
