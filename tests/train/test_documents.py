"""Per-document values: order kept, padding skipped, and nothing of one document in another's."""

import numpy as np
import pytest
import torch

from neatpack import packed_seq_params_from_doc_ids
from neatpack.errors import MetadataError
from neatpack.testing import WORKED_EXAMPLE, random_doc_ids
from neatpack.train.documents import (
    document_spans,
    pad_documents,
    pool_documents,
    repack_documents,
    segment_sums,
    unpack_documents,
)

LENGTHS = [2, 3, 1, 2, 3]  # of the worked example's documents

EDGES = {
    "worked example": WORKED_EXAMPLE,
    "an all-pad row": [[0, 0, 0], [1, 1, 2]],
    "left padding": [[0, 0, 1, 1], [0, 1, 2, 2]],
    "padding between documents": [[1, 0, 2, 2, 0]],
    "ids that reappear": [[1, 1, 2, 1]],
    "only padding": [[0, 0]],
    "no rows": np.zeros((0, 4), np.int64),
    "no columns": np.zeros((2, 0), np.int64),
}


def params_of(doc_ids):
    return packed_seq_params_from_doc_ids(torch.as_tensor(doc_ids))


def documents_by_hand(doc_ids):
    """(row, index, start, length) of every run of a real id, token by token."""
    found = []
    for row, ids in enumerate(np.asarray(doc_ids).tolist()):
        index, previous = -1, 0
        for position, document in enumerate(ids):
            if document and (document != previous or position == 0):
                index += 1
                found.append([row, index, position, 0])
            if document:
                found[-1][3] += 1
            previous = document
    return found


def packings():
    rng = np.random.default_rng(0)
    return [*EDGES.values(), *(random_doc_ids(rng, int(rng.integers(1, 4)), int(rng.integers(1, 24))) for _ in range(10))]


@pytest.mark.parametrize("doc_ids", packings())
def test_spans_equal_the_documents_found_token_by_token(doc_ids):
    spans = document_spans(params_of(doc_ids))
    assert torch.stack([spans.row, spans.index, spans.start, spans.length], 1).tolist() == documents_by_hand(doc_ids)


@pytest.mark.parametrize("doc_ids", packings())
def test_unpacked_documents_go_back_to_their_places(doc_ids):
    params = params_of(doc_ids)
    x = torch.randn(*params.doc_ids.shape, 2)
    documents = unpack_documents(x, params)
    assert [len(document) for document in documents] == [length for *_, length in documents_by_hand(doc_ids)]
    if documents:
        back = repack_documents(documents, params, fill=7.0)
        assert torch.equal(back, x.masked_fill((params.doc_ids == 0)[..., None], 7.0))


@pytest.mark.parametrize("doc_ids", packings())
def test_padded_documents_hold_each_document_alone(doc_ids):
    params = params_of(doc_ids)
    x = torch.arange(params.doc_ids.numel()).reshape(params.doc_ids.shape)
    padded, documents = pad_documents(x, params, fill=-1), unpack_documents(x, params)
    assert len(padded) == len(documents)
    for row, document in zip(padded, documents, strict=True):
        assert row[: len(document)].tolist() == document.tolist()
        assert (row[len(document) :] == -1).all()


@pytest.mark.parametrize("doc_ids", packings())
@pytest.mark.parametrize("how", ["last", "mean"])
def test_pooling_equals_each_document_alone(doc_ids, how):
    params = params_of(doc_ids)
    hidden = torch.randn(*params.doc_ids.shape, 3, dtype=torch.float64)
    alone = [part[-1] if how == "last" else part.mean(0) for part in unpack_documents(hidden, params)]
    pooled = pool_documents(hidden, params, how)
    assert pooled.shape == (len(alone), 3)
    if alone:
        torch.testing.assert_close(pooled, torch.stack(alone), rtol=0, atol=1e-14)


@pytest.mark.parametrize("how", ["last", "mean"])
@pytest.mark.parametrize("trailing", [(), (1,), (2, 3)])
def test_pooling_keeps_whatever_axes_follow_the_tokens(how, trailing):
    params = params_of(WORKED_EXAMPLE)
    hidden, mask = torch.randn(2, 6, *trailing, dtype=torch.float64), torch.rand(2, 6) < 0.5
    flat = pool_documents(hidden.reshape(2, 6, -1), params, how, mask=mask)
    assert torch.equal(pool_documents(hidden, params, how, mask=mask), flat.reshape(5, *trailing))


def test_pooling_over_a_mask_takes_the_tokens_it_names():
    hidden = torch.arange(12.0).reshape(2, 6, 1)
    mask = torch.tensor([[1, 0, 1, 1, 0, 1], [0, 1, 1, 1, 0, 0]])
    params = params_of(WORKED_EXAMPLE)
    assert pool_documents(hidden, params, "last", mask=mask)[:, 0].tolist() == [0, 3, 0, 8, 9]
    assert pool_documents(hidden, params, "mean", mask=mask)[:, 0].tolist() == [0, 2.5, 0, 7.5, 9]


@pytest.mark.parametrize("how", ["last", "mean"])
def test_what_lies_in_padding_never_reaches_a_document_or_its_gradient(how):
    params = params_of(WORKED_EXAMPLE)
    hidden = torch.randn(2, 6, 3)
    hidden[0, 5] = float("nan")
    hidden.requires_grad_()
    pooled = pool_documents(hidden, params, how)
    pooled.sum().backward()
    assert torch.isfinite(pooled).all()
    assert torch.isfinite(hidden.grad).all()
    assert (hidden.grad[0, 5] == 0).all()


def documents_that_move(doc_ids, how, before, after):
    pooled = [pool_documents(hidden, params_of(doc_ids), how) for hidden in (before, after)]
    return (pooled[0] != pooled[1]).any(1).tolist()


@pytest.mark.parametrize("how", ["last", "mean"])
def test_a_document_moves_its_own_vector_only_and_without_boundaries_it_moves_another(how):
    hidden = torch.randn(2, 6, 3)
    changed = hidden.clone()
    changed[0, 2:5] += 1.0  # document 1 of row 0
    assert documents_that_move(WORKED_EXAMPLE, how, hidden, changed) == [False, True, False, False, False]
    merged = [[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]]
    assert documents_that_move(merged, how, hidden, changed) == [True, False]  # documents 0 and 1 share a vector now


def test_the_mean_of_a_bfloat16_document_is_summed_in_float32():
    hidden = torch.full((1, 4096, 1), 1.0, dtype=torch.bfloat16)
    pooled = pool_documents(hidden, params_of(torch.ones(1, 4096, dtype=torch.int64)), "mean")
    assert pooled.dtype == torch.bfloat16
    assert pooled.item() == 1.0


def test_segment_sums_keep_padding_runs_apart():
    sums = segment_sums(torch.arange(12).reshape(2, 6), params_of(WORKED_EXAMPLE))
    assert sums.tolist() == [1, 9, 5, 6, 15, 30]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: pool_documents(torch.zeros(2, 6, 3), p, "max"), "unknown pooling 'max'"),
        (lambda p: pool_documents(torch.zeros(12, 3), p), r"hidden has shape \(12, 3\)"),
        (lambda p: unpack_documents(torch.zeros(1, 12), p), r"tensor has shape \(1, 12\).*flatten_params"),
        (lambda p: unpack_documents([[1]], p), "tensor must be a torch.Tensor, got list"),
        (lambda p: repack_documents([torch.zeros(2)], p), "1 documents given for a batch that holds 5"),
        (lambda p: repack_documents([torch.zeros(2)] * 5, p), r"document 1 \(row 0, index 1\) has 2 entries.*3 tokens"),
        (lambda p: pool_documents(torch.zeros(2, 6, 3, device="meta"), p), r"hidden is on meta, the metadata on cpu"),
        (lambda p: pool_documents(torch.ones(2, 6, 3).long(), p, "mean"), "a mean needs floating hidden, got torch.int64"),
        (lambda p: unpack_documents(torch.zeros(2, 6), None), r"params must be the PackedSeqParams.*got NoneType"),
        (
            lambda p: repack_documents([torch.zeros(n, dtype=torch.int64) if n < 3 else torch.ones(n) / 2 for n in LENGTHS], p),
            r"document 1 is \[3\] of torch.float32, document 0 \[2\] of torch.int64",
        ),
        (lambda p: repack_documents([torch.zeros(n, n) for n in LENGTHS], p), r"document 1 is \[3, 3\].*document 0 \[2, 2\]"),
    ],
)
def test_what_does_not_fit_is_one_clear_error(call, message):
    with pytest.raises(MetadataError, match=message):
        call(params_of(WORKED_EXAMPLE))
