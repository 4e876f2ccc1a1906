"""List every public name of a module on its page when the docs are built: `<!-- api: neatpack.planning -->`."""

from __future__ import annotations

import importlib
import re
from types import ModuleType
from typing import Any

import neatpack

MARKER = re.compile(r"<!-- api: (?P<modules>[\w., ]+) -->")
TOP_LEVEL = "<!-- top-level names -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the markers by one `:::` block a name; called by mkdocs for every page."""
    markdown = markdown.replace(TOP_LEVEL, top_level() if TOP_LEVEL in markdown else "")
    return MARKER.sub(lambda match: "\n".join(map(blocks, re.split(r",\s*", match["modules"]))), markdown)


def blocks(name: str) -> str:
    """The names of one module, and a link that opens its own first lines."""
    module = importlib.import_module(name)
    lines = [
        f"## {name}",
        "",
        *(f"::: {name}.{public}\n    options: {{heading_level: 3}}\n" for public in public_names(module)),
    ]
    return "\n".join(lines)


def public_names(module: ModuleType) -> list[str]:
    """What a module offers: its `__all__`, or what neatpack defined and is not private."""
    names = getattr(module, "__all__", None) or [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", "").split(".")[0] == "neatpack"
    ]
    return [name for name in names if not name.startswith("__")]


def top_level() -> str:
    """A line a name of `import neatpack`, linked to where it is described."""
    rows = []
    for name in public_names(neatpack):
        value = getattr(neatpack, name)
        summary = (value.__doc__ or "").strip().split("\n")[0]
        rows.append(f"| [`neatpack.{name}`][{value.__module__}.{name}] | {summary} |")
    return "\n".join(["| name | |", "|---|---|", *rows])
