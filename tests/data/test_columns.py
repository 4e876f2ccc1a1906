"""Arrow columns become flat arrays: every list and text type, slices with offsets, chunks, and labels."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from data.corpora import TEXTS
from neatpack.data.columns import checked_ids, checked_text, text_parts
from neatpack.data.records import Chunk, Layout, Places, Problems

IDS = [[9, 9], [1, 2, 3], [], [4], [5, 6], [7]]


def chunk(columns: dict[str, pa.Array], text: str | None = None) -> Chunk:
    size = len(next(iter(columns.values())))
    return Chunk(Layout(text, () if text else tuple(columns)), columns, Places(("a",), np.arange(size), "row"))


@pytest.mark.parametrize(
    "kind",
    [pa.list_(pa.int64()), pa.large_list(pa.int64()), pa.list_(pa.uint8()), pa.list_(pa.uint16()), pa.large_list(pa.int32())],
)
@pytest.mark.parametrize("window", [slice(0, 6), slice(1, 5), slice(2, 3), slice(3, 6), slice(0, 0)])
def test_a_slice_of_a_list_column_is_read_from_its_offset(kind, window):
    array = pa.array(IDS, kind)[window]
    documents = checked_ids(chunk({"input_ids": array}), None, Problems())
    assert documents.lengths.tolist() == [len(ids) for ids in IDS[window]]
    assert documents.ids.tolist() == [token for ids in IDS[window] for token in ids]
    assert documents.labels is None


def test_reading_without_the_offset_would_be_noticed():
    array = pa.array(IDS, pa.list_(pa.int64()))[1:5]
    assert array.values.to_numpy().tolist() != [token for ids in IDS[1:5] for token in ids]


def test_fixed_size_lists_are_read():
    array = pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int64(), 2))[1:]
    documents = checked_ids(chunk({"input_ids": array}), None, Problems())
    assert (documents.ids.tolist(), documents.lengths.tolist()) == ([3, 4, 5, 6], [2, 2])


def test_lists_that_hide_values_under_a_null_are_skipped_with_their_values():
    lists = pa.ListArray.from_arrays(pa.array([0, 2, 4, 5]), pa.array([1, 2, 8, 8, 3]), mask=pa.array([False, True, False]))
    documents = checked_ids(chunk({"input_ids": lists}), None, Problems(skip=True))
    assert (documents.ids.tolist(), documents.lengths.tolist()) == ([1, 2, 3], [2, 1])


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()])
@pytest.mark.parametrize("window", [slice(0, 9), slice(2, 6), slice(1, 2), slice(0, 0)])
def test_a_slice_of_a_text_column_is_read_from_its_offset(kind, window):
    values = [text.encode() for text in TEXTS] if "binary" in str(kind) else TEXTS
    array = pa.array(values, kind)[window]
    texts, _ = checked_text(chunk({"text": array}, "text"), Problems())
    data, offsets = text_parts(texts)
    assert bytes(data) == "".join(TEXTS[window]).encode()
    assert np.diff(offsets).tolist() == [len(text.encode()) for text in TEXTS[window]]


def test_dictionary_text_is_read():
    texts, _ = checked_text(chunk({"text": pa.array(["a", "b", "a"]).dictionary_encode()}, "text"), Problems())
    assert texts.to_pylist() == ["a", "b", "a"]


def test_masks_and_labels_combine_and_stay_aligned():
    columns = {
        "input_ids": pa.array([[0, 0], [1, 2, 3], [4]])[1:],
        "labels": pa.array([[0, 0], [1, -100, 3], [4]])[1:],
        "loss_mask": pa.array([[True, True], [True, True, False], [True]])[1:],
        "assistant_masks": pa.array([[0, 0], [1, 1, 1], [1]], pa.list_(pa.int8()))[1:],
    }
    documents = checked_ids(chunk(columns), None, Problems())
    assert documents.ids.tolist() == [1, 2, 3, 4]
    assert documents.labels is not None
    assert documents.labels.tolist() == [1, -100, -100, 4]


def test_several_reasons_in_one_chunk_are_each_counted():
    columns = {"input_ids": pa.array([[1], None, [-1], [2, None], [3]], pa.list_(pa.int64()))}
    problems = Problems(skip=True)
    documents = checked_ids(chunk(columns), None, problems)
    assert documents.ids.tolist() == [1, 3]
    assert problems.counts == {"null list": 1, "not an integer": 1, "id out of range": 1}
    assert [documents.places.name(index) for index in range(2)] == ["a row 0", "a row 4"]
