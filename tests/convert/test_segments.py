"""The shared pieces: every canonical quantity of the worked example, and the three forms on any packing."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from packings import (
    EMPTY,
    agrees,
    assert_isolated,
    doc_maps,
    flat_pairs,
    offsets_pairs,
    packings,
    params_of,
    real,
    renumbered,
    worked,
)

from neatpack.convert import segments
from neatpack.convert.segments import (
    check_params,
    document_numbers,
    first_keys,
    flatten_params,
    position_ids,
    segment_documents,
    segment_index,
    segment_lengths,
    slots,
    unpad_params,
)
from neatpack.errors import MetadataError


def test_worked_example_segments():
    params = worked()
    assert segment_lengths(params).tolist() == [2, 3, 1, 1, 2, 3]
    assert segment_documents(params).tolist() == [1, 2, 0, 1, 2, 3]
    assert position_ids(params).tolist() == [[0, 1, 0, 1, 2, 0], [0, 0, 1, 0, 1, 2]]
    assert document_numbers(params).tolist() == params.doc_ids.tolist()


def test_worked_example_segment_numbers_per_row_and_over_the_batch():
    params = worked()
    assert segment_index(params).tolist() == [[0, 0, 1, 1, 1, 2], [0, 1, 1, 2, 2, 2]]
    assert segment_index(params, pad=-1).tolist() == [[0, 0, 1, 1, 1, -1], [0, 1, 1, 2, 2, 2]]
    assert segment_index(params, flat=True).tolist() == [[0, 0, 1, 1, 1, 2, 3, 4, 4, 5, 5, 5]]
    assert segment_index(params, flat=True, pad=-1).tolist() == [[0, 0, 1, 1, 1, -1, 3, 4, 4, 5, 5, 5]]
    assert segment_index(params).dtype == torch.int32


def test_worked_example_form_b():
    indices, params = unpad_params(worked())
    assert indices.tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11]
    assert params.cu_seqlens.tolist() == [0, 2, 5, 6, 8, 11]
    assert params.max_seqlen == 3
    assert params.doc_ids.tolist() == [[1, 1, 2, 2, 2, 3, 4, 4, 5, 5, 5]]


def test_worked_example_form_c():
    form_c = slots(worked())
    assert form_c.cu_seqlens.tolist() == [0, 2, 6, 7, 9, 12]
    assert form_c.lengths.tolist() == [2, 3, 1, 2, 3]
    assert (form_c.max_slot, form_c.max_length) == (4, 3)
    assert segments.cumulative(form_c.lengths).tolist() == [0, 2, 5, 6, 8, 11]


def test_padding_without_a_document_before_it_is_a_slot_of_its_own():
    form_c = slots(params_of([[0, 0, 1, 0], [0, 0, 0, 0]]))
    assert form_c.cu_seqlens.tolist() == [0, 2, 4, 8]
    assert form_c.lengths.tolist() == [0, 1, 0]


def test_flattening_renumbers_and_keeps_the_offsets_object():
    flat = flatten_params(worked())
    assert flat.doc_ids.tolist() == [[1, 1, 2, 2, 2, 0, 3, 4, 4, 5, 5, 5]]
    params = worked()
    assert flatten_params(params).cu_seqlens is params.cu_seqlens


def test_the_flattened_map_gives_the_same_metadata_when_rebuilt():
    """Only where padding does not cross a row boundary, which one row cannot show: `cu_seqlens` is the truth there."""
    for doc_ids in packings():
        flat = flatten_params(params_of(doc_ids))
        rebuilt = params_of(flat.doc_ids)
        if not any(doc_ids[row, -1] == 0 == doc_ids[row + 1, 0] for row in range(len(doc_ids) - 1)):
            assert torch.equal(rebuilt.cu_seqlens, flat.cu_seqlens)


@given(doc_maps())
@settings(max_examples=80, deadline=None)
def test_documents_are_renumbered_by_run(doc_ids):
    np.testing.assert_array_equal(document_numbers(params_of(doc_ids)), renumbered(doc_ids))


@given(doc_maps())
@settings(max_examples=80, deadline=None)
def test_the_three_forms_say_the_same_on_real_tokens(doc_ids):
    params = params_of(doc_ids)
    total, rows = doc_ids.numel(), real(doc_ids)
    assert agrees(offsets_pairs(params.cu_seqlens, total), doc_ids)
    indices, packed = unpad_params(params)
    np.testing.assert_array_equal(indices, np.flatnonzero(rows))
    compact = offsets_pairs(packed.cu_seqlens, len(indices))
    np.testing.assert_array_equal(compact, flat_pairs(doc_ids)[np.ix_(rows, rows)])
    form_c = slots(params)
    assert agrees(offsets_pairs(form_c.cu_seqlens, total, lengths=form_c.lengths), doc_ids)
    assert agrees(offsets_pairs(form_c.cu_seqlens, total), doc_ids)
    for each in (params, packed):
        check_params(each)


def test_a_dropped_boundary_is_noticed_in_each_form():
    assert_isolated(lambda params: offsets_pairs(params.cu_seqlens, params.doc_ids.numel()))
    assert_isolated(lambda params: offsets_pairs(slots(params).cu_seqlens, params.doc_ids.numel()))


@pytest.mark.parametrize("window", [None, 1, 2, 5, 1000])
@pytest.mark.parametrize("pad_self", [False, True])
def test_first_keys_and_causality_are_the_whole_mask(window, pad_self):
    for doc_ids in packings():
        first = np.asarray(first_keys(params_of(doc_ids), window=window, pad_self=pad_self))
        batch, length = first.shape
        keys = np.arange(length)
        pairs = (first[:, :, None] <= keys) & (keys <= keys[:, None])
        expected = flat_pairs(doc_ids, window=window, pad_self=pad_self)
        for row in range(batch):
            block = slice(row * length, (row + 1) * length)
            np.testing.assert_array_equal(pairs[row], expected[block, block])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.uint16, torch.int32, torch.uint32, torch.uint64], ids=str)
def test_every_integer_dtype_gives_the_same_pieces(dtype):
    params, plain = params_of(worked().doc_ids.to(dtype)), worked()
    for piece in (segment_documents, segment_index, document_numbers, position_ids, first_keys):
        assert torch.equal(piece(params), piece(plain))
    assert torch.equal(slots(params).lengths, slots(plain).lengths)
    assert torch.equal(unpad_params(params).indices, unpad_params(plain).indices)


def test_a_large_view_of_one_row_is_not_copied_out():
    params = params_of(torch.ones(1, 1, dtype=torch.int64).expand(30_000, 60_000))
    assert segment_documents(params).tolist() == [1] * 30_000
    assert slots(params).max_slot == 60_000


@pytest.mark.parametrize("doc_ids", EMPTY, ids=lambda doc_ids: str(tuple(doc_ids.shape)))
def test_an_empty_batch_has_empty_pieces(doc_ids):
    params = params_of(doc_ids)
    check_params(params)
    for piece in (segment_index, document_numbers, position_ids, first_keys):
        assert piece(params).shape == doc_ids.shape
    assert segment_index(params, flat=True).shape == (1, 0)
    assert unpad_params(params).params.cu_seqlens.tolist() == [0]
    assert slots(params).cu_seqlens.tolist() == [0]
    assert flatten_params(params).doc_ids.shape == (1, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_seqlen": 2}, "max_seqlen is 2, but the longest segment has 3"),
        ({"max_seqlen": 4}, "max_seqlen is 4"),
        (
            {"cu_seqlens": torch.tensor([0, 2, 5, 7, 9, 12], dtype=torch.int32)},
            r"doc_ids\[1, 0\] starts a segment, but cu_seqlens has no offset there \(flattened position 6\)",
        ),
        (
            {"cu_seqlens": torch.tensor([0, 2, 5, 6, 9, 12], dtype=torch.int32)},
            r"doc_ids\[1, 1\] starts a segment, but cu_seqlens has no offset there \(flattened position 7\)",
        ),
        (
            {"cu_seqlens": torch.tensor([0, 2, 4, 5, 6, 7, 9, 12], dtype=torch.int32)},
            r"doc_ids\[0, 4\] is within a document, but cu_seqlens cuts it there \(flattened position 4\)",
        ),
        (
            {"cu_seqlens": torch.tensor([0, 2, 6, 7, 9, 12], dtype=torch.int32)},
            r"doc_ids\[0, 5\] starts a segment, but cu_seqlens has no offset there \(flattened position 5\)",
        ),
        ({"cu_seqlens": torch.tensor([0, 2, 5, 6, 7, 9, 11], dtype=torch.int32)}, r"from 0 to B\*S = 12"),
        ({"cu_seqlens": torch.tensor([0, 5, 2, 6, 7, 9, 12], dtype=torch.int32)}, "must increase"),
        ({"cu_seqlens": torch.tensor([0, 2, 5, 6, 7, 9, 12])}, "int64"),
        ({"cu_seqlens": torch.tensor([[0, 12]], dtype=torch.int32)}, r"shape \(1, 2\)"),
        ({"cu_seqlens": torch.arange(13, dtype=torch.int32)[1:]}, r"got \[1, 2, 3"),
    ],
)
def test_metadata_that_a_kernel_would_trust_wrongly_is_refused(change, message):
    with pytest.raises(MetadataError, match=message):
        check_params(dataclasses.replace(worked(), **change))


def test_activations_of_another_batch_are_refused():
    check_params(worked(), total_tokens=12)
    with pytest.raises(MetadataError, match="activations hold 11 tokens, but the metadata describes 12"):
        check_params(worked(), total_tokens=11)
