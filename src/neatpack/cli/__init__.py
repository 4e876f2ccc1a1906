"""The command line: one command a module, each a thin layer over public functions.

neatpack pack     documents in, packed rows out
neatpack inspect  what does it look like?
neatpack verify   is a packed folder whole, and does it hold what was packed?
neatpack audit    does this model keep packed documents apart?
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

import neatpack.cli.audit as audit_module
import neatpack.cli.inspect as inspect_module
import neatpack.cli.pack as pack_module
import neatpack.cli.verify as verify_module
from neatpack import __version__
from neatpack.errors import PackError

_LINES, _CHARACTERS = 16, 1600  # of an error: one screen


def _examples(commands: tuple[str, ...]) -> str:
    """What help prints below the options: paragraphs, which it sets as lines."""
    return "\n\n".join(["[bold]Examples[/]", *(f"[dim]$[/] {escape(command)}" for command in commands)])


def _reflowed(docstring: str | None) -> str:
    """A docstring whose paragraphs are one line each, for help to break where the terminal ends."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in (docstring or "").split("\n\n"))


app = typer.Typer(
    name="neatpack",
    help="Sequence packing for LLM training that cannot leak: documents in, full rows out, and proof that they stay apart.",
    epilog=_examples(
        (
            "neatpack pack corpus/ --out packed --seq-len 4096 --overflow split",
            "neatpack inspect packed --html packed.html",
            "neatpack verify packed --source corpus/",
            "neatpack audit path/to/model --html audit.html",
        )
    ),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

for _module, _command in (
    (pack_module, pack_module.pack),
    (inspect_module, inspect_module.inspect),
    (verify_module, verify_module.verify),
    (audit_module, audit_module.audit),
):
    app.command(_command.__name__, help=_reflowed(_command.__doc__), epilog=_examples(_module.EXAMPLES))(_command)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"neatpack {__version__}")
        raise typer.Exit


@app.callback()
def _commands(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Keep `neatpack pack` a command of its own, however many there are."""


def one_screen(message: str) -> str:
    """A message with its middle left out where it would scroll its beginning away, as those of other libraries may."""
    lines = message.splitlines()
    if len(lines) > _LINES:
        message = "\n".join([*lines[: _LINES - 4], f"... {len(lines) - _LINES + 1} lines ...", *lines[-3:]])
    if len(message) > _CHARACTERS:
        message = f"{message[: _CHARACTERS * 3 // 4]} ... {message[-_CHARACTERS // 4 :]}"
    return message


def main() -> None:
    """Run the command line; an expected error is one message on stderr and exit code 1."""
    try:
        app()
    except PackError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {escape(one_screen(str(error)))}", highlight=False, soft_wrap=True)
        sys.exit(1)
