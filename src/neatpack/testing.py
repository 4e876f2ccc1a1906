"""The slow, obvious twins that every fast path is compared with, and packings to compare them on. NumPy only.

- `WORKED_EXAMPLE`: the document map used on every page.
- `allowed_pairs`: who may attend to whom, entry by entry from the definition.
- `segment_offsets`: form A offsets, token by token.
- `textbook_best_fit`: best-fit decreasing, document by document.
- `random_doc_ids`, `random_lengths`: generated packings.
"""

from __future__ import annotations

import numpy as np

__all__ = [
    "WORKED_EXAMPLE",
    "allowed_pairs",
    "random_doc_ids",
    "random_lengths",
    "segment_offsets",
    "textbook_best_fit",
]

WORKED_EXAMPLE = [[1, 1, 2, 2, 2, 0], [1, 2, 2, 3, 3, 3]]
"""`doc_ids [2, 6]`: five documents, eleven real tokens, one pad. Form A offsets `[0, 2, 5, 6, 7, 9, 12]`, longest 3."""


def allowed_pairs(doc_ids: object, *, window: int | None = None, pad_self: bool = True) -> np.ndarray:
    """Who may attend to whom: the oracle for every mask, offset and kernel.

    Query `i` may see key `j` of its row when both belong to one document, `j` is not in the future, and (with a window)
    `j` is one of the last `window` tokens up to and including `i`. Distances count within the row, which for two tokens
    of one document is the distance within the document.

    Args:
        doc_ids: `[B, S]` document map, 1-based, 0 is padding; each document one run.
        window: sliding-window size in tokens, the query's own token included; None for unlimited.
        pad_self: let a pad see itself, so that no row of the mask is empty.

    Returns:
        Bool `[B, S, S]`, True = may attend.

    Example:
        >>> int(allowed_pairs(WORKED_EXAMPLE).sum()), int(allowed_pairs(WORKED_EXAMPLE, pad_self=False).sum())
        (20, 19)
    """
    ids = np.asarray(doc_ids)
    batch, length = ids.shape
    allowed = np.zeros((batch, length, length), bool)
    for row in range(batch):
        for query in range(length):
            for key in range(query + 1):
                same = ids[row, query] == ids[row, key] != 0
                near = window is None or query - key < window
                own = pad_self and query == key and ids[row, query] == 0
                allowed[row, query, key] = (same and near) or own
    return allowed


def segment_offsets(doc_ids: object) -> list[int]:
    """Form A offsets `[N+1]` over the flattened batch, token by token from the definition.

    Args:
        doc_ids: `[B, S]` document map; a padding run is a segment like any other.

    Example:
        >>> segment_offsets(WORKED_EXAMPLE)
        [0, 2, 5, 6, 7, 9, 12]
    """
    offsets, position = [], 0
    for row in np.asarray(doc_ids).tolist():
        previous = None
        for index in row:
            if previous is None or index != previous:
                offsets.append(position)
            previous = index
            position += 1
    return [*offsets, position]


def textbook_best_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """Best-fit decreasing one document at a time; returns the lengths in each row. Quadratic: for small inputs.

    Args:
        lengths: tokens of each document, none over `capacity`; those of zero are left out.
        capacity: tokens a row can hold.

    Example:
        >>> textbook_best_fit([5, 3, 4, 2, 2], 8)
        [[5, 3], [4, 2, 2]]
    """
    rows: list[list[int]] = []
    for length in sorted((length for length in lengths if length), reverse=True):
        fitting = [row for row in rows if sum(row) + length <= capacity]
        if fitting:
            max(fitting, key=sum).append(length)
        else:
            rows.append([length])
    return rows


def random_lengths(rng: np.random.Generator, row_length: int, *, fill: float = 1.0) -> list[int]:
    """Document lengths that sum to at most `row_length`: any mix from single tokens to one document a row.

    Args:
        rng: draws them.
        row_length: tokens a row can hold, one or more.
        fill: the part of the row to use at most, 0 to 1; one token at least.
    """
    target = max(1, int(row_length * fill))
    cuts = np.unique(rng.integers(1, target + 1, rng.integers(1, max(2, min(target, 12)))))
    return [int(length) for length in np.diff(cuts, prepend=0)]


def random_doc_ids(rng: np.random.Generator, batch: int, length: int) -> np.ndarray:
    """A valid document map `[batch, length] int64`: documents 1, 2, ... from the left, padding at the end of a row.

    Args:
        rng: draws it.
        batch: B.
        length: S, one or more.
    """
    ids = np.zeros((batch, length), np.int64)
    for row in range(batch):
        lengths = random_lengths(rng, length, fill=float(rng.choice([0.0, 0.5, 0.9, 1.0])))
        ids[row, : sum(lengths)] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    return ids
