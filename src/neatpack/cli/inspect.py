"""`neatpack inspect`: look at a packed folder or a saved plan, in the terminal, as JSON or as a page."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from neatpack.cli.progress import progress_bar
from neatpack.errors import SourceError

EXAMPLES = (
    "neatpack inspect packed",
    "neatpack inspect packed --html packed.html",
    "neatpack inspect plan.npz --source docs.parquet --tokenizer path/to/tokenizer --html plan.html",
    "neatpack inspect packed --json | jq .efficiency",
)


def inspect(
    target: Annotated[
        Path,
        typer.Argument(
            metavar="DIR|PLAN", help="A folder that neatpack pack wrote, or a file that save_plan wrote.", show_default=False
        ),
    ],
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a self-contained page.", show_default=False)
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print every number as JSON.")] = False,
    source: Annotated[
        Path | None,
        typer.Option(
            help="PLAN: the Arrow or Parquet documents it was made for, to read them on the page.", show_default=False
        ),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Decode tokens with this one (default: the one the folder names).", show_default=False)
    ] = None,
    rows: Annotated[
        str | None,
        typer.Option(metavar="FIRST:STOP", help="Draw these rows on the page instead of a sample.", show_default=False),
    ] = None,
    world_size: Annotated[int, typer.Option(min=1, help="Data-parallel ranks whose work to compare.")] = 8,
    batch_rows: Annotated[int, typer.Option(min=1, help="Rows that each rank takes in a step.")] = 1,
) -> None:
    """Look at packed rows: how full they are, what lies in them, what packing saved.

    In the terminal: a summary, and histograms of document lengths, fill and documents a row. On a page: the rows themselves
    too, to scroll, search and read, with the attention mask of each.
    """
    from neatpack.report import inspect_page, open_packing, summarise, write_page
    from neatpack.report.terminal import print_summary

    wanted = None if rows is None else _row_range(rows)
    if wanted is not None and html is None:
        raise SourceError("--rows says which rows the page draws: name the page with --html FILE.")
    with progress_bar() as progress:
        packing = open_packing(target, source=source, tokenizer=tokenizer, progress=progress)
        summary = summarise(packing, world_size=world_size, batch_rows=batch_rows)
        size = None if html is None else write_page(inspect_page(packing, summary, rows=wanted), html)
    if json_output:
        page = None if html is None else {"file": str(html), "bytes": size}
        sys.stdout.write(json.dumps({**summary.to_dict(), "page": page}, indent=1) + "\n")
        return
    console = Console()
    print_summary(summary, console)
    if html is not None:
        console.print(f"\nPage: {escape(str(html))} ({size:,} bytes)", highlight=False, soft_wrap=True)


def _row_range(given: str) -> range:
    first, colon, stop = given.partition(":")
    if not colon or not first.isdecimal() or not stop.isdecimal() or int(first) >= int(stop):
        raise SourceError(f"--rows {given}: expected FIRST:STOP, such as 0:100 for the first hundred rows.")
    return range(int(first), int(stop))
