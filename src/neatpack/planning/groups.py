"""Groups that stay together: the documents of a preference pair (or any group) in one row, in the order given.

A group is planned as one unit of its members' added lengths, and opened up into its members afterwards; so everything that
holds for documents holds for groups, and what comes out is an ordinary plan of documents.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np

from neatpack.errors import PlanError
from neatpack.planning.lengths import check_lengths, fingerprint_lengths
from neatpack.planning.options import check_align, check_choice, check_number
from neatpack.planning.plan import PackPlan, PlanCounts

__all__ = ["plan_groups"]


class _Groups(NamedTuple):
    """Documents in group order `[D]`, the groups' offsets into them `[G+1]`, and each group's id `[G]`."""

    members: np.ndarray
    offsets: np.ndarray
    ids: np.ndarray


def plan_groups(
    lengths: object,
    group_ids: object,
    capacity: int,
    *,
    strategy: Literal["best_fit", "in_order"] = "best_fit",
    overflow: Literal["error", "drop"] = "error",
    seed: int | None = None,
    max_docs_per_row: int | None = None,
    align: int = 1,
) -> PackPlan:
    """Plan which groups of documents share a row; the members of a group lie side by side, in the order given.

    Args:
        lengths: tokens of each document, `[D]` integers of one or more.
        group_ids: the group of each document, `[D]` integers; equal ids are one group, wherever they stand.
        capacity: tokens a row can hold; a group must fit as a whole.
        strategy: "best_fit" (fewest rows) or "in_order" (groups in order of their first document).
        overflow: what to do with a group longer than `capacity`: "error" names it, "drop" leaves all its documents out.
        seed: shuffles rows and ties, as in `plan_rows`.
        max_docs_per_row: the most documents in one row; groups must then be of one size.
        align: round the slot of every document up to a multiple of this many tokens.

    Returns:
        A plan of documents, as `plan_rows` makes it; `lower_bound` is that of whole groups.

    Raises:
        PlanError: lengths, ids or options that no plan can honour, an empty document (half a pair is none), groups of several
            sizes under `max_docs_per_row`, or an overlong group under `overflow="error"`.

    Example:
        >>> plan = plan_groups([5, 3, 4, 2, 2, 1], [0, 0, 1, 1, 2, 2], capacity=11)
        >>> [[slice_.doc for slice_ in row] for row in plan]
        [[0, 1, 4, 5], [2, 3]]
    """
    # From the package at the time of the call, so that the package itself may hand this function on.
    from neatpack.planning import plan_rows

    check_choice("strategy for groups", strategy, ("best_fit", "in_order"))
    check_choice("overflow policy for groups", overflow, ("error", "drop"))
    check_align(check_number("capacity", capacity, "tokens"), check_number("align", align, "tokens"))
    array = check_lengths(lengths).astype(np.int64, copy=False)
    groups = _grouped(array, group_ids)
    slots = np.add.reduceat(-(-array[groups.members] // align) * align, groups.offsets[:-1]) if len(groups.ids) else array
    if overflow == "error":
        _refuse_overlong(groups, slots, capacity)
    plan = plan_rows(
        slots,
        capacity,
        strategy=strategy,
        overflow=overflow,
        seed=seed,
        max_docs_per_row=_groups_per_row(groups, max_docs_per_row),
        align=align,
    )
    return _opened(plan, groups, array, max_docs_per_row)


def _grouped(lengths: np.ndarray, group_ids: object) -> _Groups:
    ids = np.asarray(group_ids)
    if ids.shape != lengths.shape or (ids.size and ids.dtype.kind not in "iu"):
        raise PlanError(
            f"group_ids must be one integer a document, {len(lengths)} in all; got shape {ids.shape} of {ids.dtype}. "
            "For pairs that alternate: numpy.arange(documents) // 2."
        )
    if len(lengths) and int(lengths.min()) < 1:
        doc = int(np.argmin(lengths))
        raise PlanError(
            f"document {doc} of group {ids[doc]} is empty, and a plan places no empty documents: its group would lose a "
            "member. Leave the whole group out."
        )
    values, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")  # groups in order of their first document
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    unit = rank[inverse.reshape(-1)]
    offsets = np.concatenate(([0], np.cumsum(np.bincount(unit, minlength=len(values)))))
    return _Groups(np.argsort(unit, kind="stable"), offsets, values[order])


def _refuse_overlong(groups: _Groups, slots: np.ndarray, capacity: int) -> None:
    overlong = np.flatnonzero(slots > capacity)
    if len(overlong):
        group = int(overlong[0])
        documents = groups.members[groups.offsets[group] : groups.offsets[group + 1]].tolist()
        raise PlanError(
            f"{len(overlong)} groups are longer than capacity={capacity}; the first is group {groups.ids[group]} with "
            f"{slots[group]} tokens (documents {', '.join(map(str, documents[:8]))}). Raise capacity, cut the documents, or "
            "choose overflow='drop' to leave such groups out."
        )


def _groups_per_row(groups: _Groups, max_docs_per_row: int | None) -> int | None:
    if max_docs_per_row is None or not len(groups.ids):
        return None
    sizes = np.diff(groups.offsets)
    if sizes.min() != sizes.max():
        raise PlanError(
            f"max_docs_per_row needs groups of one size, and these have {sizes.min()} to {sizes.max()} documents. "
            "Leave it out, or plan each size by itself."
        )
    limit = check_number("max_docs_per_row", max_docs_per_row, "documents") // int(sizes[0])
    if not limit:
        raise PlanError(f"max_docs_per_row={max_docs_per_row} holds no group of {sizes[0]} documents. Raise it.")
    return limit


def _opened(plan: PackPlan, groups: _Groups, lengths: np.ndarray, max_docs_per_row: int | None) -> PackPlan:
    """The plan of groups as a plan of their documents."""
    sizes = np.diff(groups.offsets)[plan.doc]
    ends = np.concatenate(([0], np.cumsum(sizes)))
    take = np.arange(ends[-1]) + np.repeat(groups.offsets[:-1][plan.doc] - ends[:-1], sizes)
    doc = groups.members[take].astype(np.int32)
    tokens = int(lengths.sum())
    return replace(
        plan,
        row_offsets=ends[plan.row_offsets],
        doc=doc,
        start=np.broadcast_to(np.int32(0), doc.shape),
        length=lengths[doc].astype(np.int32),
        counts=PlanCounts(
            documents=len(lengths),
            tokens=tokens,
            dropped=len(lengths) - len(doc),
            dropped_tokens=tokens - int(lengths[doc].sum()),
        ),
        max_docs_per_row=max_docs_per_row,
        fingerprint=fingerprint_lengths(lengths),
    )
