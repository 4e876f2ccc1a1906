"""The rows that a page draws: all of a small packing, and of a large one as many as fit a page, drawn at random.

The rows that stand out are always among them: the emptiest, the one with most documents, and that of the longest document.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from neatpack.errors import PlanError
from neatpack.planning import PackPlan
from neatpack.report.embed import embedded_bytes
from neatpack.report.packing import Packing

MAX_ROWS = 4_000
MAX_DOCUMENTS = 20_000
TEXT_BYTES = 1_200_000
MAX_EXCERPT = 4_000


@dataclass(frozen=True, kw_only=True, eq=False)
class RowSample:
    """Rows to draw.

    Attributes:
        rows: `[K]` their numbers in the packing, ascending.
        plan: just these rows, in this order.
        total: rows of the packing.
        cut: the last row has more documents than a page holds, and ends early.
        marks: what stands out, and the row of it.
        texts: the beginning of each of the plan's slices, or None.
        excerpt: most characters of a document that `texts` holds; None where all are whole.
    """

    rows: np.ndarray
    plan: PackPlan
    total: int
    cut: bool
    marks: dict[str, int]
    texts: list[str] | None
    excerpt: int | None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for the page; starts that are all zero, and documents that count up by one, are left out."""
        return {
            "rows": self.rows.tolist(),
            "total": self.total,
            "cut": self.cut,
            "marks": self.marks,
            "offsets": self.plan.row_offsets.tolist(),
            "doc": self.plan.doc.tolist(),
            "start": self.plan.start.tolist() if self.plan.start.any() else None,
            "length": self.plan.length.tolist(),
            "texts": self.texts,
            "excerpt": self.excerpt,
        }


def sample_rows(packing: Packing, *, wanted: range | None = None, seed: int = 0) -> RowSample:
    """Choose rows to draw, and read the beginnings of their documents.

    Args:
        packing: from `open_packing`.
        wanted: these rows, as far as a page holds them, instead of a sample of all.
        seed: of the draw.

    Raises:
        PlanError: rows that the packing does not have.
        StoreError: a damaged shard.
    """
    plan = packing.plan
    marks = _marks(plan) if wanted is None else {}
    if wanted is not None and not 0 <= wanted.start < wanted.stop <= plan.num_rows:
        raise PlanError(
            f"rows {wanted.start} to {wanted.stop - 1} were asked for, and the packing has {plan.num_rows} rows, 0 to "
            f"{plan.num_rows - 1}. Ask for rows within 0:{plan.num_rows}."
        )
    order = np.arange(wanted.start, wanted.stop) if wanted is not None else _drawn(plan.num_rows, list(marks.values()), seed)
    rows = np.sort(_that_fit(order[:MAX_ROWS], np.diff(plan.row_offsets)))
    taken = plan.take_rows(rows)
    texts, excerpt = _texts(packing, rows, taken)
    cut = len(taken.doc) > MAX_DOCUMENTS
    if cut:
        taken, texts = _cut(taken), None if texts is None else texts[:MAX_DOCUMENTS]
    shown = {name: row for name, row in marks.items() if row in rows}
    return RowSample(rows=rows, plan=taken, total=plan.num_rows, cut=cut, marks=shown, texts=texts, excerpt=excerpt)


def _marks(plan: PackPlan) -> dict[str, int]:
    if not plan.num_rows:
        return {}
    row_of = np.searchsorted(plan.row_offsets, int(plan.length.argmax()), side="right") - 1
    return {
        "emptiest": int(plan.row_lengths().argmin()),
        "most_documents": int(np.diff(plan.row_offsets).argmax()),
        "longest_document": int(row_of),
    }


def _drawn(num_rows: int, first: list[int], seed: int) -> np.ndarray:
    """Row numbers in the order they are taken: those that stand out, then others at random."""
    if num_rows <= MAX_ROWS:
        return np.arange(num_rows)
    draws = np.random.default_rng(seed).choice(num_rows, MAX_ROWS, replace=False)
    return np.array(list(dict.fromkeys([*first, *draws.tolist()])))


def _that_fit(order: np.ndarray, documents: np.ndarray) -> np.ndarray:
    """The longest beginning of `order` whose rows have few enough documents; one row at least."""
    fits = np.cumsum(documents[order]) <= MAX_DOCUMENTS
    return order[: max(int(np.count_nonzero(fits)), 1)]


def _cut(plan: PackPlan) -> PackPlan:
    kept = slice(MAX_DOCUMENTS)
    offsets = np.minimum(plan.row_offsets, MAX_DOCUMENTS)
    return replace(plan, row_offsets=offsets, doc=plan.doc[kept], start=plan.start[kept], length=plan.length[kept])


def _texts(packing: Packing, rows: np.ndarray, plan: PackPlan) -> tuple[list[str] | None, int | None]:
    """The beginning of each slice, as much of it as the page's budget allows, and the most characters of one."""
    if packing.tokens is None or not len(rows):
        return None, None
    most_tokens = _level(plan.length)
    heads = [
        head
        for ids, lengths in zip(packing.tokens.read(rows), np.split(plan.length, plan.row_offsets[1:-1]), strict=True)
        for head in _heads(ids, lengths, most_tokens)
    ]
    whole = [len(head) == length for head, length in zip(heads, plan.length.tolist(), strict=True)]
    decode = _as_ids if packing.decoder is None else packing.decoder.decode
    texts = [decode(head) for head in heads]
    most = min(MAX_EXCERPT, max(map(len, texts), default=0))
    while True:
        cut = [_excerpt(text, most, ended) for text, ended in zip(texts, whole, strict=True)]
        size = embedded_bytes(cut)
        if size <= TEXT_BYTES:
            break
        most = min(most - 1, most * TEXT_BYTES // size)
    complete = all(whole) and most >= max(map(len, texts), default=0)
    return cut, None if complete else most


def _level(lengths: np.ndarray) -> int:
    """How many tokens of each document to decode: as many as the budget has bytes for, shared so that short ones are whole."""
    ascending = np.sort(lengths).astype(np.int64)
    remaining = len(ascending) - np.arange(len(ascending))
    shared = (TEXT_BYTES - np.cumsum(ascending) + ascending) // remaining
    over = np.flatnonzero(ascending > shared)
    return min(MAX_EXCERPT, max(int(shared[over[0]]), 1) if len(over) else MAX_EXCERPT)


def _heads(ids: np.ndarray, lengths: np.ndarray, most: int) -> list[np.ndarray]:
    starts = np.cumsum(lengths) - lengths
    return [ids[start : start + min(length, most)] for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)]


def _as_ids(ids: np.ndarray) -> str:
    return " ".join(map(str, ids.tolist()))


def _excerpt(text: str, most: int, ended: bool) -> str:
    if ended and len(text) <= most:
        return text
    return text[:most].removesuffix("\ufffd") + "…"
