"""One self-contained HTML file: style, script and data inside it, and a policy that lets nothing else in.

What a document holds may be anything, `</script>` included. It goes into the page as JSON in which no `<` is left, in a
block that browsers do not run, and the page's own script sets it as text, never as markup. The policy names the style and
script by their hashes and forbids everything else, the network included.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from neatpack.errors import StoreError


def embedded_json(values: Any) -> str:
    """JSON that may stand in a `<script>` element: `<` is written as its escape, which JSON's readers undo."""
    text = json.dumps(values, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def embedded_bytes(values: Any) -> int:
    """Bytes that values take in a page."""
    return len(_utf8(embedded_json(values)))


def build_page(title: str, body: str, scripts: Sequence[str], values: Any) -> str:
    """Put a page together.

    Args:
        title: of the window.
        body: file of this package with what the page shows.
        scripts: files of this package, run in this order.
        values: what the scripts read; plain values for JSON.
    """
    style = _file("page.css")
    script = "\n".join(['"use strict";', *map(_file, scripts)])
    policy = f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'; form-action 'none'"
    parts = {
        "policy": policy,
        "title": escape(title),
        "style": style,
        "body": _file(body),
        "data": embedded_json(values),
        "script": script,
    }
    pieces = _file("page.html").split("@@")
    return "".join(parts[piece] if index % 2 else piece for index, piece in enumerate(pieces))


def write_page(page: str, path: str | os.PathLike[str]) -> int:
    """Write a page, aside and then renamed; returns its bytes.

    Raises:
        StoreError: the file cannot be written.
    """
    target, data = Path(path), _utf8(page)
    aside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        aside.write_bytes(data)
        aside.replace(target)
    except OSError as error:
        raise StoreError(f"{target}: the page cannot be written there ({error.strerror}). Name another file.") from error
    finally:
        aside.unlink(missing_ok=True)
    return len(data)


def _file(name: str) -> str:
    return (resources.files("neatpack.report") / "page" / name).read_text(encoding="utf-8").strip()


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _utf8(text: str) -> bytes:
    """UTF-8; half a surrogate pair, which JSON can hold and UTF-8 cannot, becomes a question mark."""
    return text.encode("utf-8", "replace")
