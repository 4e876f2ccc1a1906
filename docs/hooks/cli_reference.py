"""Write the command-line page from the commands themselves, when the docs are built: it cannot go stale."""

from __future__ import annotations

import inspect
from typing import Any

from typer.main import get_command

from neatpack.cli import app

MARKER = "<!-- commands -->"
HEAD = "| argument or option | meaning |\n|---|---|"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in the page that holds the marker; called by mkdocs for every page."""
    return markdown.replace(MARKER, reference()) if MARKER in markdown else markdown


def reference() -> str:
    """Every command: what it does, how it is called, and a table of its arguments and options."""
    return "\n".join(describe(name, command) for name, command in sorted(get_command(app).commands.items()))


def describe(name: str, command: Any) -> str:
    """One command as Markdown."""
    context = command.make_context(name, [], resilient_parsing=True)
    usage = " ".join(["neatpack", name, *command.collect_usage_pieces(context)])
    records = [parameter.get_help_record(context) for parameter in command.params]
    rows = [f"| `{escape(names)}` | {escape(meaning)} |" for names, meaning in filter(None, records)]
    text = inspect.cleandoc((command.help or "").replace("\f", "").replace("\b", ""))
    return "\n".join([f"## neatpack {name}", "", f"    {usage}", "", text, "", HEAD, *rows, ""])


def escape(text: str) -> str:
    """Text that may stand in a cell of a table."""
    return " ".join(text.replace("|", "\\|").split())
