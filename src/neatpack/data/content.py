"""An order-free hash over documents: equal on both sides of a pack, or something was lost, doubled or altered.

A document's hash is the polynomial of its tokens in an odd base, modulo 2**64, mixed with its length; a corpus' hash is the
sum over its documents, so that it does not matter in which order, rows or shards they lie. All documents of a block are
hashed at once: tokens times powers of the base, summed by document, brought to the document's own start by the inverse
power. It finds accidents with a chance of 2**-64 to miss one; it is no protection against an adversary.
"""

from __future__ import annotations

import numpy as np

_BASE = 0x9E3779B97F4A7C15
_INVERSE = pow(_BASE, -1, 1 << 64)
_LABEL_WEIGHT = 0xD1B54A32D192ED03
_BLOCK = 1 << 17
_MASK = (1 << 64) - 1


class ContentHash:
    """The running hash of documents.

    Attributes:
        total: the hash so far, 0 to 2**64 - 1.
        documents: documents in it, empty ones not counted.

    Example:
        >>> forth, back = ContentHash(), ContentHash()
        >>> forth.add(np.array([1, 2, 3]), np.array([2, 1]))
        >>> back.add(np.array([3, 1, 2]), np.array([1, 2]))
        >>> forth.total == back.total
        True
    """

    def __init__(self) -> None:
        self.total = 0
        self.documents = 0
        self._prepare(_BLOCK)

    def _prepare(self, size: int) -> None:
        """Tables and a buffer for blocks of `size` tokens; one buffer for all blocks, small enough to stay in a cache."""
        self._powers = _powers(_BASE, size)
        self._inverses = _powers(_INVERSE, size)
        self._sums_of_powers = np.concatenate((np.zeros(1, np.uint64), np.cumsum(self._powers, dtype=np.uint64)))
        self._terms = np.empty(size, np.uint64)

    def add(
        self, ids: np.ndarray, lengths: np.ndarray, labels: np.ndarray | None = None, keep: np.ndarray | None = None
    ) -> None:
        """Add documents.

        Args:
            ids: `[T]` tokens of all of them, one after the other.
            lengths: `[D]` tokens of each.
            labels: `[T]`, or None where they repeat the ids.
            keep: `[D] bool`, False for documents that are to be passed over; None for all.
        """
        kept = lengths > 0
        ends = np.cumsum(lengths)[kept]
        if keep is not None:
            keep = keep[kept]
        first = done = 0
        while first < len(ends):
            stop = max(first + 1, int(np.searchsorted(ends, done + _BLOCK, side="right")))
            block = slice(done, int(ends[stop - 1]))
            starts = np.concatenate(([0], ends[first : stop - 1] - done))
            hashes = self._hash(ids[block], starts, None if labels is None else labels[block])
            if keep is not None:
                hashes = hashes[keep[first:stop]]
            self.total = (self.total + int(hashes.sum())) & _MASK
            self.documents += len(hashes)
            first, done = stop, block.stop

    def _hash(self, ids: np.ndarray, starts: np.ndarray, labels: np.ndarray | None) -> np.ndarray:
        size = len(ids)
        if size > len(self._terms):
            self._prepare(size)
        powers, terms = self._powers[:size], self._terms[:size]
        if labels is None:
            np.multiply(_unsigned(ids), powers, out=terms)
        else:
            # Weights that add up to one: labels that repeat the ids give the ids themselves.
            np.multiply(labels.astype(np.int64).view(np.uint64), np.uint64(_LABEL_WEIGHT), out=terms)
            terms += _unsigned(ids) * np.uint64((1 - _LABEL_WEIGHT) & _MASK)
            terms *= powers
        ends = np.append(starts[1:], size)
        # Every token counts as one more than it is, so that documents of zeros differ by their lengths even before mixing.
        sums = np.add.reduceat(terms, starts) + self._sums_of_powers[ends] - self._sums_of_powers[starts]
        lengths = (ends - starts).astype(np.uint64)
        hashes: np.ndarray = _mix(sums * self._inverses[starts] + lengths * np.uint64(_LABEL_WEIGHT))
        return hashes


def _unsigned(ids: np.ndarray) -> np.ndarray:
    """Ids, which are never negative, as the unsigned numbers of the same bits: 64-bit products need no copy of them."""
    return ids.view(f"u{ids.itemsize}") if ids.dtype.kind == "i" else ids


def _powers(base: int, count: int) -> np.ndarray:
    powers = np.full(count, base, np.uint64)
    powers[0] = 1
    np.multiply.accumulate(powers, out=powers)
    return powers


def _mix(values: np.ndarray) -> np.ndarray:
    """Spread every bit over the whole word (the finaliser of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


def expected_pieces(lengths: np.ndarray, seq_len: int, overflow: str, *, wrapped: bool) -> tuple[np.ndarray, np.ndarray]:
    """What documents become in the rows of a pack, in the order of their tokens.

    Args:
        lengths: `[D]` tokens of each document.
        seq_len: tokens a row holds.
        overflow: the policy for longer documents.
        wrapped: whether documents were cut wherever a row ended; then only tokens can be told apart, not documents.

    Returns:
        Lengths of the pieces `[P]`, together all tokens, and `[P] bool`: whether the piece is in the rows.
    """
    lengths = lengths.astype(np.int64)
    keep = np.ones(len(lengths), bool)
    pieces = lengths
    if overflow == "drop":
        keep = lengths <= seq_len
    elif overflow in ("truncate", "split"):
        count = np.maximum(-(-lengths // seq_len), 1) if overflow == "split" else 1 + (lengths > seq_len)
        ends = np.cumsum(count)
        within = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - count, count)
        rest = np.repeat(lengths, count) - within * seq_len
        last = within == np.repeat(count, count) - 1
        pieces = np.where(last, rest, seq_len)
        keep = within == 0 if overflow == "truncate" else np.ones(len(pieces), bool)
    if wrapped:
        return np.ones(int(lengths.sum()), np.int64), np.repeat(keep, pieces)
    return pieces, keep
