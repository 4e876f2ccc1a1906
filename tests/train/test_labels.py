"""Labels: nothing is asked across a document's end, and each convention is told from the other."""

import numpy as np
import pytest
import torch

from neatpack import packed_seq_params_from_doc_ids
from neatpack.convert.doc_map import doc_ids_from_seq_lengths
from neatpack.errors import MetadataError
from neatpack.testing import WORKED_EXAMPLE, random_doc_ids
from neatpack.train import PackedCollator
from neatpack.train.labels import (
    aligned_labels,
    check_labels,
    count_targets,
    mask_from_spans,
    prediction_targets,
    shift_within_documents,
)

TOKENS = torch.tensor([[11, 12, 21, 22, 23, 0], [31, 41, 42, 51, 52, 53]])


def params_of(doc_ids):
    return packed_seq_params_from_doc_ids(torch.as_tensor(doc_ids))


def packed(lengths, row_length=None):
    return packed_seq_params_from_doc_ids(doc_ids_from_seq_lengths([lengths], row_length))


def without_boundaries(params):
    """The twin that must fail: one document a row."""
    return params_of(torch.ones_like(params.doc_ids))


def shifted_token_by_token(x, doc_ids, k, fill):
    out = [[fill] * len(row) for row in doc_ids]
    for row, ids in enumerate(doc_ids):
        for position, document in enumerate(ids):
            source = position + k
            between = ids[min(position, source) : max(position, source) + 1]
            if document and 0 <= source < len(ids) and set(between) == {document}:
                out[row][position] = x[row][source]
    return out


@pytest.mark.parametrize("k", [-2, -1, 0, 1, 2, 3, 50])
@pytest.mark.parametrize("seed", range(8))
def test_the_shift_equals_the_definition_token_by_token(seed, k):
    rng = np.random.default_rng(seed)
    doc_ids = random_doc_ids(rng, 3, 17)
    x = rng.integers(1, 100, doc_ids.shape)
    expected = shifted_token_by_token(x.tolist(), doc_ids.tolist(), k, -7)
    assert shift_within_documents(torch.from_numpy(x), params_of(doc_ids), k, fill=-7).tolist() == expected


@pytest.mark.parametrize("k", [1, 2, 3])
def test_no_shift_takes_a_token_from_another_document_and_without_boundaries_one_does(k):
    doc_ids = torch.from_numpy(random_doc_ids(np.random.default_rng(4), 4, 40))
    params = params_of(doc_ids)
    owner = params.doc_ids + 100 * torch.arange(len(doc_ids))[:, None]  # each token says whose it is
    shifted = shift_within_documents(owner, params, k)
    kept = shifted != -100
    assert kept.any()
    assert torch.equal(shifted[kept], owner[kept])
    leaky = shift_within_documents(owner, without_boundaries(params), k)
    assert (leaky[leaky != -100] != owner[leaky != -100]).any()


def test_a_fill_that_the_type_holds_is_taken():
    params = params_of(WORKED_EXAMPLE)
    for x, fill in ((TOKENS.to(torch.uint8), 255), (TOKENS > 0, False), (TOKENS.float(), 0.5), (TOKENS, 7.0)):
        shifted = shift_within_documents(x, params, fill=fill)
        assert shifted.dtype == x.dtype
        assert shifted[0, 5] == fill


def test_trailing_axes_move_with_their_tokens():
    x = torch.arange(24.0).reshape(2, 6, 2)
    shifted = shift_within_documents(x, params_of(WORKED_EXAMPLE), 1, fill=-1.0)
    assert shifted[..., 0].tolist() == [[2, -1, 6, 8, -1, -1], [-1, 16, -1, 20, 22, -1]]
    assert torch.equal(shifted[..., 1] == -1, shifted[..., 0] == -1)


def test_the_shift_is_differentiable_and_no_gradient_crosses_a_document():
    x = torch.arange(12.0).reshape(2, 6).requires_grad_()
    shift_within_documents(x, params_of(WORKED_EXAMPLE), 1, fill=0).sum().backward()
    assert x.grad.tolist() == [[0, 1, 0, 1, 1, 0], [0, 0, 1, 0, 1, 1]]


@pytest.mark.parametrize("shape", [(0, 6), (2, 0), (0, 0), (1, 1)])
def test_empty_and_one_token_batches_have_no_targets(shape):
    params = params_of(torch.ones(shape, dtype=torch.int64))
    labels = torch.zeros(shape, dtype=torch.int64)
    assert (prediction_targets(labels, params) == -100).all()
    assert int(count_targets(labels, params).sum()) == 0


# The faults that packed training is known for, as data.


def test_f035_a_roll_inside_padded_slots_stops_at_the_last_real_token():
    params = params_of([[1, 1, 1, 1, 1, 0, 0, 0, 2, 2, 2, 0]])
    tokens = torch.tensor([[1, 2, 3, 4, 5, 0, 0, 0, 6, 7, 8, 0]])
    assert shift_within_documents(tokens, params, 1, fill=0).tolist() == [[2, 3, 4, 5, 0, 0, 0, 0, 7, 8, 0, 0]]
    assert torch.roll(tokens, -1).tolist() != [[2, 3, 4, 5, 0, 0, 0, 0, 7, 8, 0, 0]]


def test_f037_a_roll_knows_the_documents():
    tokens = torch.tensor([[10, 11, 12, 20, 21]])
    assert shift_within_documents(tokens, packed([3, 2])).tolist() == [[11, 12, -100, 21, -100]]
    assert shift_within_documents(tokens, packed([5])).tolist() == [[11, 12, 20, 21, -100]]


def test_f041_the_last_token_of_a_document_is_not_asked_for_the_next_ones_first():
    tokens, params = torch.tensor([[11, 12, 13, 21, 22]]), packed([3, 2])
    labels = shift_within_documents(tokens, params)
    assert labels.tolist() == [[12, 13, -100, 22, -100]]
    assert int((labels != -100).sum()) == int(count_targets(tokens, params).sum()) == 3


def test_f043_no_document_learns_to_emit_the_next_ones_start_token():
    tokens = torch.tensor([[1, 7, 2, 1, 8, 2]])
    assert shift_within_documents(tokens, packed([3, 3])).tolist() == [[7, 2, -100, 8, 2, -100]]


@pytest.mark.parametrize("first", [-100, 99])
def test_f044_the_first_label_of_every_document_is_the_one_asked_for_once(first):
    tokens = torch.tensor([[10, 11, 20, 21, 22]])
    assert aligned_labels(tokens, packed([2, 3]), first=first).tolist() == [[first, 11, first, 21, 22]]
    row = {"input_ids": [10, 11, 20, 21, 22], "seq_lengths": [2, 3]}
    assert PackedCollator()([row])["labels"].tolist() == [[-100, 11, -100, 21, 22]]
    assert PackedCollator()([row])["position_ids"].tolist() == [[0, 1, 0, 1, 2]]


def test_f045_a_one_token_document_and_padding_give_no_target():
    tokens, params = torch.tensor([[10, 11, 12, 20, 0, 0]]), packed([3, 1], 6)
    labels = aligned_labels(tokens, params)
    assert labels.tolist() == [[-100, 11, 12, -100, -100, -100]]
    assert count_targets(labels, params).tolist() == [2, 0]
    row = {"input_ids": [10, 11, 12, 20], "seq_lengths": [3, 1]}
    assert PackedCollator(row_length=6)([row])["labels"].tolist() == labels.tolist()


def test_f046_padding_and_the_last_real_token_carry_no_weight():
    params = packed([3], 5)
    targets = prediction_targets(torch.tensor([[7, 8, 9, 0, 0]]), params)
    assert (targets != -100).int().tolist() == [[1, 1, 0, 0, 0]]
    leaky = prediction_targets(torch.tensor([[7, 8, 9, 0, 0]]), without_boundaries(params))
    assert (leaky != -100).int().tolist() == [[1, 1, 1, 1, 0]]


def test_f047_answer_spans_count_from_their_own_document():
    spans = [[(2, 4)], [(1, 3)], [(3, 5)]]
    mask = mask_from_spans(spans, packed([5, 4, 6]))
    assert torch.nonzero(mask[0]).reshape(-1).tolist() == [2, 3, 6, 7, 12, 13]


def test_f048_document_starts_are_taken_out_of_the_count_once():
    tokens, params = torch.arange(1, 10)[None], packed([4, 3, 2])
    for labels in (tokens, aligned_labels(tokens, params)):  # first labels masked already, or not
        assert int(count_targets(labels, params).sum()) == 6


def test_f049_the_count_is_right_for_several_rows_whether_starts_are_masked_or_not():
    params = packed_seq_params_from_doc_ids(doc_ids_from_seq_lengths([[4, 4], [3, 5]]))
    tokens = torch.arange(1, 17).reshape(2, 8)
    assert int(count_targets(tokens, params).sum()) == 12
    assert int(count_targets(aligned_labels(tokens, params), params).sum()) == 12
    assert int(count_targets(tokens, without_boundaries(params)).sum()) == 14


# Conventions and checks.


def test_the_collators_labels_are_those_of_the_tokens():
    rows = [
        {"input_ids": [11, 12, 21, 22, 23], "seq_lengths": [2, 3]},
        {"input_ids": [31, 41, 42, 51, 52, 53], "seq_lengths": [1, 2, 3]},
    ]
    batch = PackedCollator(return_params=True)(rows)
    params = batch["packed_seq_params"]
    assert torch.equal(batch["labels"], aligned_labels(batch["input_ids"], params))
    check_labels(batch["labels"], params, input_ids=batch["input_ids"])


def test_a_loss_mask_takes_prompts_out():
    mask = mask_from_spans([[(1, 2)], [(2, 3)], [], [(0, 2)], [(1, 3)]], params_of(WORKED_EXAMPLE))
    labels = aligned_labels(TOKENS, params_of(WORKED_EXAMPLE), loss_mask=mask)
    assert labels.tolist() == [[-100, 12, -100, -100, 23, -100], [-100, -100, 42, -100, 52, 53]]


def test_shifted_labels_given_as_aligned_are_told_by_name():
    params = params_of(WORKED_EXAMPLE)
    shifted = shift_within_documents(TOKENS, params)
    check_labels(shifted, params, input_ids=TOKENS, convention="shifted")
    middle = shifted.clone()
    middle[:, 0] = middle[0, 2] = middle[1, 1] = middle[1, 3] = -100  # what a shifted label at a document's start gives away
    with pytest.raises(
        MetadataError, match=r"labels\[0, 3\] is 23, but aligned labels have 22 there; all labels fit the shifted"
    ):
        check_labels(middle, params, input_ids=TOKENS)
    aligned = aligned_labels(TOKENS, params)
    aligned[0, 1] = aligned[0, 4] = aligned[1, 2] = aligned[1, 5] = -100
    with pytest.raises(MetadataError, match="fit the aligned convention"):
        check_labels(aligned, params, input_ids=TOKENS, convention="shifted")


@pytest.mark.parametrize(
    ("place", "convention", "message"),
    [
        ((0, 2), "aligned", r"labels\[0, 2\] is 5: the first label of a document"),
        ((0, 5), "aligned", r"labels\[0, 5\] is 5: padding is counted"),
        ((1, 2), "shifted", r"labels\[1, 2\] is 5: the last token of a document has no next"),
    ],
)
def test_labels_that_leak_are_refused_with_their_place(place, convention, message):
    params = params_of(WORKED_EXAMPLE)
    labels = torch.full((2, 6), -100)
    check_labels(labels, params, convention=convention)
    labels[place] = 5
    with pytest.raises(MetadataError, match=message):
        check_labels(labels, params, convention=convention)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: shift_within_documents(TOKENS[:, :5], p), r"x has shape \(2, 5\).*\[B, S\] = \[2, 6\]"),
        (lambda p: mask_from_spans([[(0, 1)]], p), "spans for 1 documents, but the batch holds 5"),
        (lambda p: mask_from_spans([[], [], [], [(1, 3)], []], p), r"span \(1, 3\) of document 1 in row 1 leaves its 2 tokens"),
        (lambda p: check_labels(TOKENS, p, convention="plain"), "unknown labels convention 'plain'"),
        (lambda p: check_labels(TOKENS.float(), p), "labels must be integers, .*got torch.float32"),
        (lambda p: aligned_labels(TOKENS / 2, p), "input_ids must be integers, .*got torch.float32"),
        (lambda p: count_targets(TOKENS > 0, p), "labels must be integers, .*got torch.bool"),
        (
            lambda p: shift_within_documents(TOKENS.to(torch.uint8), p),
            r"torch.uint8 cannot hold fill=-100: .*from 0 to 255, or x",
        ),
        (lambda p: shift_within_documents(TOKENS > 0, p), r"torch.bool cannot hold fill=-100: .*from 0 to 1"),
        (lambda p: shift_within_documents(TOKENS, p, fill=0.5), r"torch.int64 cannot hold fill=0.5"),
        (lambda p: shift_within_documents(TOKENS, p, fill=float("nan")), r"torch.int64 cannot hold fill=nan"),
        (lambda p: shift_within_documents(TOKENS, p, 1.5), r"k is 1.5; it is a whole number"),
    ],
)
def test_what_does_not_fit_is_one_clear_error(call, message):
    with pytest.raises(MetadataError, match=message):
        call(params_of(WORKED_EXAMPLE))
