"""A packing in numbers: everything here counts all rows, whatever a page draws."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from neatpack.planning import PlanCounts
from neatpack.report.histogram import Histogram, count_fill, count_values
from neatpack.report.packing import Packing
from neatpack.report.rank_work import RankComparison, compare_ranks


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What there is to know of a packing.

    Attributes:
        path: of the folder or the plan.
        kind: "folder" or "plan".
        strategy: how rows were planned.
        overflow: what was done with documents longer than a row.
        capacity: tokens a row holds.
        rows: rows.
        lower_bound: fewest rows that any plan of these documents can have.
        pieces: documents in rows; where some were cut, each piece of them.
        tokens: tokens in rows.
        padding: tokens that fill the rows up.
        padding_alone: tokens of padding that one document (or piece) a row would need.
        max_docs_in_row: most documents in a row.
        attention_pairs: pairs of a query and a key that causal attention within documents computes.
        attention_dense: the same for causal attention over whole rows.
        counts: what became of the documents.
        source: what was packed, in words, or None.
        source_bytes: its size, or None.
        stored_bytes: bytes of the shards or of the plan.
        tokenizer: its name, or None.
        lengths: histogram of document lengths.
        fill: histogram of row lengths.
        docs_in_row: histogram of documents a row.
        ranks: work of data-parallel ranks.
        notes: what the reader should know.
    """

    path: str
    kind: str
    strategy: str
    overflow: str
    capacity: int
    rows: int
    lower_bound: int
    pieces: int
    tokens: int
    padding: int
    padding_alone: int
    max_docs_in_row: int
    attention_pairs: int
    attention_dense: int
    counts: PlanCounts
    source: str | None
    source_bytes: int | None
    stored_bytes: int
    tokenizer: str | None
    lengths: Histogram
    fill: Histogram
    docs_in_row: Histogram
    ranks: RankComparison
    notes: tuple[str, ...]

    @property
    def efficiency(self) -> float:
        """Tokens over what the rows hold, 0 to 1."""
        return self.tokens / max(self.tokens + self.padding, 1)

    @property
    def padding_saved(self) -> int:
        """Tokens of padding less than with one document a row."""
        return self.padding_alone - self.padding

    @property
    def docs_per_row(self) -> float:
        """Mean of documents in a row."""
        return self.pieces / max(self.rows, 1)

    @property
    def kept_whole(self) -> int:
        """Documents that are in a row as they came."""
        counts = self.counts
        return counts.documents - counts.empty - counts.dropped - counts.truncated - counts.split

    @property
    def source_bytes_per_token(self) -> float | None:
        """Bytes of the source's files for a token that was read from them."""
        return None if self.source_bytes is None or not self.counts.tokens else self.source_bytes / self.counts.tokens

    @property
    def stored_bytes_per_token(self) -> float | None:
        """Bytes of the shards for a token in them; None for a plan, which holds no tokens."""
        return self.stored_bytes / max(self.tokens, 1) if self.kind == "folder" else None

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values for JSON."""
        plain = {name: value for name, value in vars(self).items() if isinstance(value, int | str | None)}
        return {
            **plain,
            "efficiency": self.efficiency,
            "padding_saved": self.padding_saved,
            "docs_per_row": self.docs_per_row,
            "source_bytes_per_token": self.source_bytes_per_token,
            "stored_bytes_per_token": self.stored_bytes_per_token,
            "counts": {**asdict(self.counts), "kept_whole": self.kept_whole},
            "histograms": {
                "document_length": self.lengths.to_dict(),
                "row_tokens": self.fill.to_dict(),
                "documents_in_row": self.docs_in_row.to_dict(),
            },
            "ranks": self.ranks.to_dict(),
            "notes": list(self.notes),
        }


def summarise(packing: Packing, *, world_size: int = 8, batch_rows: int = 1) -> Summary:
    """Measure a packing.

    Args:
        packing: from `open_packing`.
        world_size: data-parallel ranks to compare the work of.
        batch_rows: rows that each takes in a step.

    Raises:
        PlanError: a world size or batch size below one.
    """
    plan = packing.plan
    tokens, slots = plan.num_tokens, plan.num_rows * plan.capacity
    in_row = np.diff(plan.row_offsets)
    length = plan.length.astype(np.int64)
    return Summary(
        path=packing.path,
        kind=packing.kind,
        strategy=plan.strategy,
        overflow=plan.overflow,
        capacity=plan.capacity,
        rows=plan.num_rows,
        lower_bound=plan.lower_bound,
        pieces=len(length),
        tokens=tokens,
        padding=slots - tokens,
        padding_alone=len(length) * plan.capacity - tokens,
        max_docs_in_row=int(in_row.max(initial=0)),
        attention_pairs=_causal_pairs(length),
        attention_dense=plan.num_rows * (plan.capacity * (plan.capacity + 1) // 2),
        counts=plan.counts,
        source=packing.source,
        source_bytes=packing.source_bytes,
        stored_bytes=packing.stored_bytes,
        tokenizer=packing.tokenizer,
        lengths=count_values(length),
        fill=count_fill(plan.row_lengths(), plan.capacity),
        docs_in_row=count_values(in_row),
        ranks=compare_ranks(plan, world_size, batch_rows),
        notes=packing.notes,
    )


def _causal_pairs(length: np.ndarray) -> int:
    """Pairs of all documents; summed by length, in Python's integers, so that nothing overflows."""
    lengths, counts = np.unique(length, return_counts=True)
    return sum(count * (n * (n + 1) // 2) for n, count in zip(lengths.tolist(), counts.tolist(), strict=True))
