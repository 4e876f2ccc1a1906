"""Segment ids, decoded as splash attention reads them, and where MaxText's loss counts."""

import sys
import types

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from packings import EMPTY, assert_isolated, doc_maps, equal_ids_pairs, params_of, renumbered, worked

from neatpack.convert.foreign import doc_ids_from_indexed_mask
from neatpack.convert.jax import (
    target_segmentation,
    target_segmentation_kind,
    to_grain,
    to_maxtext,
    to_segment_ids,
    to_splash,
    to_te_jax,
)
from neatpack.errors import MetadataError, MissingDependencyError
from neatpack.testing import WORKED_EXAMPLE

POSITIONS = [[0, 1, 0, 1, 2, 0], [0, 0, 1, 0, 1, 2]]
SAFE, SHIFTED = [[1, 0, 2, 2, 0, 0], [0, 2, 0, 3, 3, 0]], [[1, 2, 2, 2, 0, 0], [2, 2, 3, 3, 3, 0]]


def test_worked_example_segment_ids_are_the_map_itself():
    assert to_segment_ids(worked()).tolist() == WORKED_EXAMPLE
    assert to_segment_ids(worked()).dtype == np.int32
    assert to_segment_ids(params_of([[7, 7, 9, 9, 9, 0], [4, 2, 2, 8, 8, 8]])).tolist() == WORKED_EXAMPLE


def test_worked_example_maxtext_keys():
    batch = to_maxtext(worked())
    assert batch["inputs_segmentation"].tolist() == WORKED_EXAMPLE
    assert batch["inputs_position"].tolist() == batch["targets_position"].tolist() == POSITIONS
    assert batch["targets_segmentation"].tolist() == SAFE
    assert {array.dtype for array in batch.values()} == {np.dtype(np.int32)}


def test_worked_example_grain_and_te_keys():
    grain = to_grain(worked(), "tokens")
    assert {key: array.tolist() for key, array in grain.items()} == {
        "tokens_segment_ids": WORKED_EXAMPLE,
        "tokens_positions": POSITIONS,
    }
    arguments = to_te_jax(worked())
    assert arguments.pop("segment_ids").tolist() == WORKED_EXAMPLE
    assert arguments.pop("segment_pos").tolist() == POSITIONS
    assert arguments == {"is_thd": True, "is_segment_ids_reordered": False}


def test_equal_ids_are_one_document():
    assert_isolated(lambda params: equal_ids_pairs(to_segment_ids(params)))


def test_no_query_is_left_without_a_key():
    for doc_ids in ([[0, 0, 1]], [[0, 0, 0]], WORKED_EXAMPLE):
        assert equal_ids_pairs(to_segment_ids(params_of(doc_ids))).any(1).all()


@given(doc_maps())
@settings(max_examples=60, deadline=None)
def test_loss_counts_exactly_where_the_next_token_is_the_same_documents(doc_ids):
    segmentation = to_maxtext(params_of(doc_ids))["targets_segmentation"]
    ids = renumbered(doc_ids)
    for row, position in np.ndindex(ids.shape):
        inside = position + 1 < ids.shape[1] and ids[row, position + 1] == ids[row, position]
        assert segmentation[row, position] == (ids[row, position] if inside else 0)


def test_the_two_shifts_are_told_apart():
    inputs = np.array(WORKED_EXAMPLE)
    assert target_segmentation(inputs).tolist() == SAFE
    assert target_segmentation_kind(inputs, np.array(SAFE)) == "safe"
    assert target_segmentation_kind(inputs, np.array(SHIFTED)) == "shifted"
    with pytest.raises(MetadataError, match=r"targets\[0, 1\] is 1; the boundary-safe shift has 0 there, the plain shift 2"):
        target_segmentation_kind(inputs, inputs)
    with pytest.raises(MetadataError, match="Give both of one batch"):
        target_segmentation_kind(inputs, inputs[:1])


def test_segment_ids_come_back():
    ids = torch.from_numpy(to_segment_ids(worked()))
    assert doc_ids_from_indexed_mask(ids).tolist() == WORKED_EXAMPLE


def test_the_splash_object_is_built_from_the_ids(monkeypatch):
    for name in (
        "jax",
        "jax.experimental",
        "jax.experimental.pallas",
        "jax.experimental.pallas.ops",
        "jax.experimental.pallas.ops.tpu",
    ):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    splash, numpy_like = types.ModuleType("splash_attention"), types.ModuleType("jax.numpy")
    splash.SegmentIds = lambda q, kv: (q, kv)
    numpy_like.asarray = np.asarray
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.ops.tpu.splash_attention", splash)
    monkeypatch.setitem(sys.modules, "jax.numpy", numpy_like)
    q, kv = to_splash(worked())
    assert q is kv
    assert q.tolist() == WORKED_EXAMPLE


def test_a_missing_jax_is_named_with_its_install_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(MissingDependencyError, match="pip install 'jax'"):
        to_splash(worked())


@pytest.mark.parametrize("doc_ids", EMPTY, ids=lambda doc_ids: str(tuple(doc_ids.shape)))
def test_an_empty_batch_has_empty_arrays(doc_ids):
    assert {array.shape for array in to_maxtext(params_of(doc_ids)).values()} == {tuple(doc_ids.shape)}
