"""What happens to a document longer than a row: error, drop, truncate or split."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from neatpack.errors import PlanError
from neatpack.planning.options import check_slices
from neatpack.planning.plan import PlanCounts

Overflow = Literal["error", "drop", "truncate", "split"]
"""What to do with a document longer than a row; see `plan_rows`."""

POLICIES = ("error", "drop", "truncate", "split")


@dataclass(frozen=True, kw_only=True, eq=False)
class Pieces:
    """What is to be placed: pieces of documents, none longer than a row.

    Attributes:
        length: `[P]` tokens of a piece; zero where nothing of it is placed (an empty or dropped document).
        doc: `[P]` document of a piece, or None where piece `i` is document `i`.
        start: `[P]` first token of a piece within its document, or None where all start at 0.
        counts: what the policy did.
    """

    length: np.ndarray
    doc: np.ndarray | None
    start: np.ndarray | None
    counts: PlanCounts


def apply_overflow(lengths: np.ndarray, capacity: int, overflow: Overflow, first_doc: int = 0) -> Pieces:
    """Turn document lengths into pieces that fit a row, under the policy the user chose.

    Args:
        lengths: checked lengths.
        capacity: tokens a piece may have.
        overflow: the policy.
        first_doc: what the message calls the first document.

    Raises:
        PlanError: a document is longer than `capacity` and the policy is "error", which names the first of them; or "split"
            would make more pieces than a plan counts.
    """
    given = {
        "documents": len(lengths),
        "tokens": int(lengths.sum(dtype=np.int64)),
        "empty": len(lengths) - int(np.count_nonzero(lengths)),
    }
    if not len(lengths) or int(lengths.max()) <= capacity:
        return Pieces(length=lengths, doc=None, start=None, counts=PlanCounts(**given))
    too_long = np.flatnonzero(lengths > capacity)
    excess = int((lengths[too_long].astype(np.int64) - capacity).sum())
    if overflow == "error":
        raise PlanError(_too_long_message(lengths, too_long, capacity, first_doc))
    if overflow == "drop":
        kept = lengths.copy()
        kept[too_long] = 0
        dropped = excess + capacity * len(too_long)
        return Pieces(
            length=kept, doc=None, start=None, counts=PlanCounts(**given, dropped=len(too_long), dropped_tokens=dropped)
        )
    if overflow == "truncate":
        counts = PlanCounts(**given, truncated=len(too_long), truncated_tokens=excess)
        return Pieces(length=np.minimum(lengths, capacity), doc=None, start=None, counts=counts)
    doc, start, length = _split(lengths, capacity)
    return Pieces(length=length, doc=doc, start=start, counts=PlanCounts(**given, split=len(too_long)))


def _split(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut every document into full rows and a rest: 121 tokens at capacity 60 become 60, 60, 1."""
    pieces = np.maximum(-(-lengths.astype(np.int64) // capacity), 1)
    check_slices("split", len(lengths), int(pieces.sum()), capacity)
    first = np.cumsum(pieces) - pieces
    doc = np.repeat(np.arange(len(lengths), dtype=np.int32), pieces)
    start = (np.arange(len(doc)) - np.repeat(first, pieces)) * capacity
    length = np.minimum(lengths[doc] - start, capacity)
    return doc, start, length


def _too_long_message(lengths: np.ndarray, too_long: np.ndarray, capacity: int, first_doc: int) -> str:
    shown = ", ".join(f"document {first_doc + i} ({int(lengths[i])} tokens)" for i in too_long[:5].tolist())
    more = f" and {len(too_long) - 5} more" if len(too_long) > 5 else ""
    return (
        f"{len(too_long)} of {len(lengths)} documents are longer than the row capacity of {capacity} tokens: {shown}{more}. "
        "Raise the capacity, or choose overflow='split' (pieces become documents), 'truncate' or 'drop'."
    )
