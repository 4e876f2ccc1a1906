"""Docstrings as mkdocstrings reads them: our `Example:` is its `Examples:`, whose doctests are shown as code."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Rename the section; one without doctests is prose, or code that becomes a fence."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for everything that is loaded."""
        if obj.docstring:
            obj.docstring.value = re.sub(
                r"^Example:\n((?:(?:    .*)?\n?)+)", lambda found: section(found[1]), obj.docstring.value, flags=re.MULTILINE
            )


def section(body: str) -> str:
    """The body of an example under a heading that suits it."""
    if ">>>" in body:
        return f"Examples:\n{body}"
    if re.search(r"^ +\w.* = |^ +class ", body, re.MULTILINE):
        return f"Example:\n    ```python\n{body.rstrip()}\n    ```\n\n"
    return f"Example:\n{body}"
