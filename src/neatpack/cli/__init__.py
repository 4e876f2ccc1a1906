"""The command line: one command a module, each a thin layer over public functions.

neatpack pack    documents in, packed rows out
neatpack verify  is a packed folder whole, and does it hold what was packed?
neatpack audit   does this model keep packed documents apart?
"""

from __future__ import annotations

import sys

import typer
from rich.console import Console
from rich.markup import escape

from neatpack.cli.audit import audit
from neatpack.cli.pack import pack
from neatpack.cli.verify import verify
from neatpack.errors import PackError

app = typer.Typer(
    name="neatpack",
    help="Sequence packing for LLM training that cannot leak.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

app.command("pack")(pack)
app.command("audit")(audit)
app.command("verify")(verify)


@app.callback()
def _commands() -> None:
    """Keep `neatpack pack` a command of its own, however many there are."""


def main() -> None:
    """Run the command line; an expected error is one message on stderr and exit code 1."""
    try:
        app()
    except PackError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(1)
