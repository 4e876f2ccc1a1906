"""The page of a model's audit: a heat map of document against document for every attention implementation."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import neatpack
from neatpack.report.embed import build_page

if TYPE_CHECKING:
    from neatpack.audit import ModelAudit

_MEANINGS = {
    "isolated": "no document moves another, and without the boundaries they would",
    "leaking": "documents move each other: do not pack for it this way",
    "differing": "documents are not what they are alone: check their positions",
    "inconclusive": "nothing was shown",
    "refused": "neatpack refuses to pack for it; below is what a packed batch would do",
    "unsupported": "the model does not run this way",
}
_SCRIPTS = ("page.js", "audit.js")


def audit_page(audit: ModelAudit) -> str:
    """The self-contained HTML page of `audit_model(..., control=True)`; without the control, its maps are left out."""
    from neatpack.audit.influence import influence_map  # torch, which the other pages do without

    results = [
        {
            "attention": result.attention,
            "verdict": result.verdict,
            "meaning": _MEANINGS[result.verdict],
            "payload": result.payload,
            "why": result.refusal or result.reason,
            "report": None if result.report is None else str(result.report),
            "documents": [] if result.report is None else [asdict(document) for document in result.report.documents],
            "map": None if result.report is None else influence_map(result.report).to_dict(),
            "removed": None if result.removed is None else result.removed.to_dict(),
        }
        for result in audit.results
    ]
    values = {**audit.to_dict(), "results": results, "version": neatpack.__version__}
    return build_page(f"{audit.model} · neatpack audit", "audit.html", _SCRIPTS, values)
