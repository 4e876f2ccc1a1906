"""Packings to convert, and who may attend to whom in them over the flattened batch `[T, T]`, T = B*S."""

import itertools

import numpy as np
import torch
from hypothesis import strategies as st

from neatpack.packed_seq import PackedSeqParams, packed_seq_params_from_doc_ids
from neatpack.testing import WORKED_EXAMPLE, allowed_pairs, random_doc_ids

EDGES = {
    "worked example": WORKED_EXAMPLE,
    "an all-pad row": [[0, 0, 0, 0], [1, 1, 2, 2]],
    "one document a row": [[1, 1, 1], [1, 1, 1]],
    "one-token documents": [[1, 2, 3, 4], [1, 2, 2, 0]],
    "left padding": [[0, 0, 1, 1, 2], [0, 1, 1, 1, 2]],
    "padding between documents": [[1, 0, 0, 2, 2, 0], [0, 1, 1, 0, 2, 0]],
    "ids that reappear": [[1, 1, 2, 1, 1], [2, 1, 2, 2, 0]],
    "one token": [[1]],
    "one pad": [[0]],
    "rows that share an id": [[1, 1, 1, 1], [1, 1, 2, 2]],
}
EMPTY = [torch.zeros(shape, dtype=torch.int64) for shape in ((0, 6), (2, 0), (0, 0))]


def params_of(doc_ids) -> PackedSeqParams:
    return packed_seq_params_from_doc_ids(torch.as_tensor(doc_ids))


def worked() -> PackedSeqParams:
    return params_of(WORKED_EXAMPLE)


def packings():
    """The edge cases and seeded random packings as `[B, S]` tensors."""
    rng = np.random.default_rng(0)
    yield from (torch.tensor(doc_ids) for doc_ids in EDGES.values())
    for _ in range(12):
        yield torch.from_numpy(random_doc_ids(rng, int(rng.integers(1, 4)), int(rng.integers(1, 24))))


@st.composite
def doc_maps(draw, max_rows=3, max_length=20):
    """Any map of runs: padding anywhere, ids that reappear, one-token documents."""
    batch, length = draw(st.integers(1, max_rows)), draw(st.integers(1, max_length))
    cells = st.lists(st.integers(0, 3), min_size=length, max_size=length)
    stretch = draw(st.integers(1, 4))
    rows = [np.repeat(draw(cells), stretch)[:length] for _ in range(batch)]
    return torch.tensor(np.array(rows), dtype=torch.int64)


def renumbered(doc_ids) -> np.ndarray:
    """Every run a document of its own, token by token: what form A says about ids that reappear."""
    ids = np.asarray(doc_ids)
    numbers = np.zeros_like(ids)
    for row in range(len(ids)):
        current = 0
        for position in range(ids.shape[1]):
            opens = position == 0 or ids[row, position] != ids[row, position - 1]
            current += bool(opens and ids[row, position])
            numbers[row, position] = current if ids[row, position] else 0
    return numbers


def flat_pairs(doc_ids, *, window=None, pad_self=False) -> np.ndarray:
    """The oracle over the flattened batch: bool `[T, T]`, nothing between rows."""
    pairs = allowed_pairs(renumbered(doc_ids), window=window, pad_self=pad_self)
    batch, length = pairs.shape[:2]
    flat = np.zeros((batch * length, batch * length), bool)
    for row in range(batch):
        flat[row * length : (row + 1) * length, row * length : (row + 1) * length] = pairs[row]
    return flat


def flatten_rows(pairs) -> np.ndarray:
    """`[B, S, S]` pairs within rows as `[T, T]` over the flattened batch."""
    pairs = np.asarray(pairs)
    return np.asarray(torch.block_diag(*[torch.from_numpy(row) for row in pairs])) if len(pairs) else np.zeros((0, 0), bool)


def offsets_pairs(offsets, total, *, lengths=None, window=None) -> np.ndarray:
    """Decode offsets as a causal kernel runs them: bool `[total, total]`; tokens outside every segment see nothing."""
    pairs = np.zeros((total, total), bool)
    offsets = np.asarray(offsets).tolist()
    for segment, (start, end) in enumerate(itertools.pairwise(offsets)):
        stop = end if lengths is None else start + int(lengths[segment])
        for query in range(start, stop):
            first = start if window is None else max(start, query - window + 1)
            pairs[query, first : query + 1] = True
    return pairs


def equal_ids_pairs(ids) -> np.ndarray:
    """Decode per-token numbers as recurrences and splash attention read them: same number, causal. `[B, S]` in."""
    ids = np.asarray(ids)
    return flatten_rows((ids[:, :, None] == ids[:, None, :]) & np.tri(ids.shape[1], dtype=bool))


def real(doc_ids) -> np.ndarray:
    return np.asarray(doc_ids).reshape(-1) != 0


def agrees(pairs, doc_ids, *, window=None) -> bool:
    """Does every real token see exactly what the oracle lets it see?"""
    rows = real(doc_ids)
    return bool((np.asarray(pairs)[rows] == flat_pairs(doc_ids, window=window)[rows]).all())


def merged(doc_ids):
    """The map with the first boundary between two documents of a row removed, or None if there is none."""
    ids = renumbered(doc_ids)
    for row, position in np.argwhere((ids[:, 1:] != ids[:, :-1]) & (ids[:, 1:] != 0) & (ids[:, :-1] != 0)).tolist():
        twin = ids.copy()
        twin[row][ids[row] == ids[row, position + 1]] = ids[row, position]
        return torch.from_numpy(twin)
    return None


def assert_isolated(decode, *, window=None) -> None:
    """`decode(params)` gives `[T, T]` pairs; compare on every packing, and show that a dropped boundary is noticed."""
    noticed = 0
    for doc_ids in packings():
        assert agrees(decode(params_of(doc_ids)), doc_ids, window=window), doc_ids.tolist()
        twin = merged(doc_ids)
        if twin is not None and window is None:
            assert not agrees(decode(params_of(twin)), doc_ids), doc_ids.tolist()
            noticed += 1
    assert noticed > 3 or window is not None
