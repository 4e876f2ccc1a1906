"""The page of a packing: numbers of all rows, the rows themselves, and a row's attention mask."""

from __future__ import annotations

from pathlib import Path

import neatpack
from neatpack.report.embed import build_page
from neatpack.report.packing import Packing
from neatpack.report.sample import sample_rows
from neatpack.report.summary import Summary

_SCRIPTS = ("page.js", "charts.js", "numbers.js", "rows.js", "search.js", "detail.js", "inspect.js")


def inspect_page(packing: Packing, summary: Summary, *, rows: range | None = None) -> str:
    """The self-contained HTML page of a packing; below 2 MB however large the packing is.

    Args:
        packing: from `open_packing`.
        summary: of it, from `summarise`.
        rows: draw these, as far as a page holds them, instead of a sample of all.

    Raises:
        PlanError: rows that the packing does not have.
        StoreError: a damaged shard.
    """
    sample = sample_rows(packing, wanted=rows)
    values = {
        "version": neatpack.__version__,
        "align": packing.plan.align,
        "wanted": rows is not None,
        "summary": summary.to_dict(),
        "rows": sample.to_dict(),
    }
    return build_page(f"{Path(packing.path).name or packing.path} · neatpack inspect", "inspect.html", _SCRIPTS, values)
