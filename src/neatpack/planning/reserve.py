"""Rows out of documents that wait, limited in documents as well as in tokens.

A row begins with the longest document; then comes, again and again, the longest that leaves room for as many of the shortest
as the row should still take. How many it should take is what those that wait need on average, so that neither tokens nor
documents run out before the other. That is the rule of `capped`, for a window of a stream: a few hundred documents, mostly of
lengths of their own, in one loop without counts. Cost: about a microsecond a document while a thousand wait; what is taken
from the middle of a list moves the rest, so tens of thousands cost several times that.
"""

from __future__ import annotations

from bisect import bisect_right

from neatpack.planning.plan import Slice

Row = list[Slice]


def fill_rows(waiting: list[Slice], slots: list[int], capacity: int, max_docs_per_row: int, keep: int) -> list[tuple[Row, int]]:
    """Fill rows until at most `keep` documents wait.

    Args:
        waiting: the documents, from short to long; those that are in a row afterwards are taken out.
        slots: the room that each of them needs, at most `capacity`; kept in step with `waiting`.
        capacity: room of a row.
        max_docs_per_row: documents a row holds.
        keep: documents to leave waiting, so that those to come find partners.

    Returns:
        Rows, each with the room it has left. No document that waits then fits into one that holds another.
    """
    rows: list[tuple[Row, int]] = []
    total = sum(slots)
    while len(slots) > keep:
        wanted = min(-(-len(slots) * capacity // total), max_docs_per_row)
        reserve = slots[: wanted - 1]
        reserved = sum(reserve)
        room = capacity - slots.pop()
        row = [waiting.pop()]
        while slots and slots[0] <= room and len(row) < max_docs_per_row:
            if reserve:
                reserved -= reserve.pop()
            at = (bisect_right(slots, room - reserved) or 1) - 1
            room -= slots.pop(at)
            row.append(waiting.pop(at))
        total -= capacity - room
        rows.append((row, room))
    return rows
