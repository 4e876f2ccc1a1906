"""Slices are copied as they lie, few or many, short or long, apart or side by side; none from outside of its chunk."""

import mmap

import numpy as np
import pytest

from neatpack.data.slices import FEW_SLICES, SliceCopier


def copied(chunks, which, begins, sizes) -> bytes:
    return bytes(SliceCopier(chunks).copy(None if which is None else np.array(which), np.array(begins), np.array(sizes)))


def joined(chunks, which, begins, sizes) -> bytes:
    slices = zip(which, begins, sizes, strict=True)
    return b"".join(chunks[chunk].tobytes()[begin : begin + size] for chunk, begin, size in slices)


@pytest.mark.parametrize("count", [1, 7, FEW_SLICES, FEW_SLICES + 1, 3 * FEW_SLICES])
@pytest.mark.parametrize("num_chunks", [1, 5])
@pytest.mark.parametrize("longest", [3, 12, 13, 200])
def test_slices_come_one_after_the_other(count, num_chunks, longest):
    rng = np.random.default_rng([count, num_chunks, longest])
    chunks = [rng.integers(0, 256, 1000 + 100 * number, np.uint8) for number in range(num_chunks)]
    which, sizes = rng.integers(0, num_chunks, count), rng.integers(0, longest + 1, count)
    begins = np.array([rng.integers(0, len(chunks[chunk]) - size + 1) for chunk, size in zip(which, sizes, strict=True)])
    assert copied(chunks, which, begins, sizes) == joined(chunks, which, begins, sizes)
    if num_chunks == 1:
        assert copied(chunks, None, begins, sizes) == joined(chunks, which, begins, sizes)


@pytest.mark.parametrize("count", [2, 2 * FEW_SLICES])
@pytest.mark.parametrize("first", [0, 1])
def test_positions_count_values_of_the_first_chunk_where_no_chunk_is_named(count, first):
    memory = np.arange(2000, dtype=np.int32)
    chunks = [memory[1000 * first :][:1000], memory[1000 * (1 - first) :][:1000]]
    begins, lengths = np.arange(count, dtype=np.int32) * 7 % 900, np.arange(count, dtype=np.int32) % 50
    expected = [value for begin, length in zip(begins, lengths, strict=True) for value in chunks[0][begin : begin + length]]
    assert np.frombuffer(copied(chunks, None, begins, lengths), np.int32).tolist() == expected


@pytest.mark.parametrize("repeats", [2, 3 * FEW_SLICES])
def test_neighbours_are_joined_only_within_a_chunk(repeats):
    memory = np.arange(200, dtype=np.uint8)
    chunks = [memory[:100], memory[100:]]  # the second chunk begins where the first ends
    which, begins, sizes = [0, 0, 1, 0], [80, 90, 0, 5], [10, 10, 20, 1]
    expected = [*range(80, 120), 5] * repeats
    assert list(copied(chunks, which * repeats, begins * repeats, sizes * repeats)) == expected


def test_rows_that_lie_as_they_are_stored_are_one_copy():
    memory = np.arange(10_000, dtype=np.uint16)
    lengths = np.full(1000, 10)
    assert copied([memory], None, np.cumsum(lengths) - lengths, lengths) == memory.tobytes()


def test_chunks_may_lie_gigabytes_apart():
    far = np.frombuffer(mmap.mmap(-1, 3 << 30), np.uint8)  # takes no memory before it is written
    writable = far.view()
    marks = [0, 5, (1 << 30) - 7, (1 << 31) + 3, (3 << 30) - 20]
    for number, mark in enumerate(marks):
        writable[mark : mark + 20] = number + 1
    heap = np.full(50, 99, np.uint8)
    which, begins = ([0] * len(marks) + [1]) * FEW_SLICES, ([*marks, 4]) * FEW_SLICES
    sizes = [2, 20, 20, 20, 20, 20] * FEW_SLICES
    expected = bytes([1] * 2 + [2] * 20 + [3] * 20 + [4] * 20 + [5] * 20 + [99] * 20)
    assert copied([far, heap], which, begins, sizes) == expected * FEW_SLICES


def test_what_is_copied_can_be_written_and_outlives_its_source():
    for count in (3, 2 * FEW_SLICES):
        source = np.arange(40 * count, dtype=np.uint8)
        copy = np.frombuffer(SliceCopier([source]).copy(None, np.arange(count) * 40, np.full(count, 30)), np.uint8)
        expected = np.concatenate([source[40 * at : 40 * at + 30] for at in range(count)])
        source[:] = 0
        assert np.array_equal(copy, expected)
        copy[0] = 1


@pytest.mark.parametrize(("begin", "size"), [(-1, 5), (90, 11), (101, 0), (5, -1), (1 << 40, 5)])
@pytest.mark.parametrize("which", [None, 0])
def test_a_slice_outside_of_its_chunk_is_refused(begin, size, which):
    count = 2 * FEW_SLICES
    begins, sizes = np.arange(count) % 50 * 2, np.full(count, 1)
    begins[7], sizes[7] = begin, size
    with pytest.raises(IndexError, match="outside of the memory"):
        SliceCopier([np.zeros(100, np.uint8)]).copy(None if which is None else np.zeros(count, np.int64), begins, sizes)
