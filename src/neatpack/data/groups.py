"""Groups of documents in, packed rows out: preference pairs and other groups that a loss compares within one row.

For data that fits in memory, as preference data does. The rows carry `group_ids`, one number a document, which
`PackedCollator(document_columns=["group_ids"])` hands on and `neatpack.train.group_documents` reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from neatpack.errors import SourceError
from neatpack.planning.groups import plan_groups

__all__ = ["pack_groups", "pack_pairs"]

Document = Sequence[int] | np.ndarray | Mapping[str, Any]


def pack_groups(
    groups: Sequence[Sequence[Document]],
    capacity: int,
    *,
    strategy: Literal["best_fit", "in_order"] = "best_fit",
    overflow: Literal["error", "drop"] = "error",
    seed: int | None = None,
    max_docs_per_row: int | None = None,
) -> list[dict[str, np.ndarray]]:
    """Pack groups of documents into rows; a group lies in one row, its documents side by side in the order given.

    Args:
        groups: each a sequence of documents; a document is its token ids, or a mapping with `input_ids` and further columns
            of one integer a token (`labels`, `loss_mask`), the same ones in every document.
        capacity: tokens a row can hold.
        strategy: "best_fit" (fewest rows) or "in_order".
        overflow: "error" names a group longer than `capacity`, "drop" leaves it out.
        seed: shuffles rows and ties.
        max_docs_per_row: the most documents in one row; groups must then be of one size.

    Returns:
        Rows of `input_ids` and the further columns, `seq_lengths`, and `group_ids`: for each document the number of its
        group in `groups`.

    Raises:
        SourceError: a document without tokens, or whose columns do not fit it or the others; names group and member.
        PlanError: what `plan_groups` refuses.

    Example:
        >>> rows = pack_groups([[[1, 2], [1, 3, 4]], [[5], [6]]], capacity=8)
        >>> rows[0]["input_ids"].tolist(), rows[0]["seq_lengths"].tolist(), rows[0]["group_ids"].tolist()
        ([1, 2, 1, 3, 4, 5, 6], [2, 3, 1, 1], [0, 0, 1, 1])
    """
    documents: list[dict[str, np.ndarray]] = []
    group_ids: list[int] = []
    for group, members in enumerate(groups):
        for member, document in enumerate(members):
            columns = _columns(document, f"document {member} of group {group}")
            if documents and columns.keys() != documents[0].keys():
                raise SourceError(
                    f"document {member} of group {group} has columns {', '.join(columns)}; the first has "
                    f"{', '.join(documents[0])}. Give every document the same."
                )
            documents.append(columns)
            group_ids.append(group)
    plan = plan_groups(
        [len(document["input_ids"]) for document in documents],
        group_ids,
        capacity,
        strategy=strategy,
        overflow=overflow,
        seed=seed,
        max_docs_per_row=max_docs_per_row,
    )
    rows = []
    for row in plan:
        own = [documents[piece.doc] for piece in row]
        columns = {name: np.concatenate([document[name] for document in own]) for name in own[0]}
        lengths = np.array([piece.length for piece in row], np.int64)
        rows.append(
            {**columns, "seq_lengths": lengths, "group_ids": np.array([group_ids[piece.doc] for piece in row], np.int64)}
        )
    return rows


def pack_pairs(
    chosen: Sequence[Document],
    rejected: Sequence[Document],
    capacity: int,
    *,
    strategy: Literal["best_fit", "in_order"] = "best_fit",
    overflow: Literal["error", "drop"] = "error",
    seed: int | None = None,
) -> list[dict[str, np.ndarray]]:
    """Pack preference pairs into rows: the chosen document first, the rejected one next to it, always in one row.

    Args:
        chosen: the preferred documents, prompt included, as in `pack_groups`.
        rejected: the other document of each pair.
        capacity: tokens a row can hold; a pair must fit as a whole.
        strategy: "best_fit" (fewest rows) or "in_order".
        overflow: "error" names a pair longer than `capacity`, "drop" leaves it out.
        seed: shuffles rows and ties.

    Returns:
        Rows as `pack_groups` makes them; `group_ids` numbers the pairs.

    Raises:
        SourceError: another number of rejected than of chosen documents, or what `pack_groups` refuses.
        PlanError: what `plan_groups` refuses.
    """
    if len(chosen) != len(rejected):
        raise SourceError(f"{len(chosen)} chosen but {len(rejected)} rejected documents: a pair has one of each.")
    pairs = list(zip(chosen, rejected, strict=True))
    return pack_groups(pairs, capacity, strategy=strategy, overflow=overflow, seed=seed)


def _columns(document: Document, where: str) -> dict[str, np.ndarray]:
    """A document's columns as integer arrays of one length, `input_ids` first."""
    given = document if isinstance(document, Mapping) else {"input_ids": document}
    if "input_ids" not in given:
        raise SourceError(f"{where} has no input_ids, only {', '.join(map(str, given))}.")
    columns = {name: np.asarray(given[name]) for name in ("input_ids", *(name for name in given if name != "input_ids"))}
    tokens = columns["input_ids"].size
    if not tokens:
        raise SourceError(f"{where} has no tokens, so its group would lose a member. Leave the whole group out.")
    for name, values in columns.items():
        if values.shape != (tokens,) or values.dtype.kind not in "iub":
            raise SourceError(
                f"{where}: {name} must be a flat list of {tokens} integers, got shape {values.shape} of {values.dtype}."
            )
    return columns
