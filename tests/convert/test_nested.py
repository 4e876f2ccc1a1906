"""Jagged nested tensors: components are the segments, and come back."""

import pytest
import torch
from packings import EMPTY, agrees, merged, offsets_pairs, packings, params_of, worked

from neatpack.convert.nested import from_nested, to_jagged, to_nested
from neatpack.convert.segments import segment_documents, segment_lengths, unpad_params
from neatpack.errors import MetadataError
from neatpack.testing import allowed_pairs


def test_worked_example_form_a():
    assert to_jagged(worked())["offsets"].tolist() == [0, 2, 5, 6, 7, 9, 12]
    nested = to_nested(worked(), torch.arange(24).reshape(2, 6, 2))
    assert [len(part) for part in nested.unbind()] == [2, 3, 1, 1, 2, 3]
    assert (nested._min_seqlen, nested._max_seqlen) == (1, 3)


def test_worked_example_form_c_has_holes():
    arguments = to_jagged(worked(), form="C")
    assert arguments["offsets"].tolist() == [0, 2, 6, 7, 9, 12]
    assert arguments["lengths"].tolist() == [2, 3, 1, 2, 3]
    nested = to_nested(worked(), torch.arange(12).reshape(2, 6), form="C")
    assert [part.tolist() for part in nested.unbind()] == [[0, 1], [2, 3, 4], [6], [7, 8], [9, 10, 11]]
    assert not nested.is_contiguous()


def test_worked_example_form_b():
    indices, real = unpad_params(worked())
    nested = to_nested(real, indices[None])
    assert [part.tolist() for part in nested.unbind()] == [[0, 1], [2, 3, 4], [6], [7, 8], [9, 10, 11]]


def test_components_decode_to_the_oracle_and_a_dropped_boundary_is_noticed():
    noticed = 0
    for doc_ids in packings():
        positions = torch.arange(doc_ids.numel()).reshape(doc_ids.shape)

        def decode(source, positions=positions):
            parts = to_nested(params_of(source), positions).unbind()
            return offsets_pairs([*(int(part[0]) for part in parts), positions.numel()], positions.numel())

        assert agrees(decode(doc_ids), doc_ids)
        if (twin := merged(doc_ids)) is not None:
            assert not agrees(decode(twin), doc_ids)
            noticed += 1
    assert noticed > 3


def test_slots_hold_the_documents_and_nothing_else():
    for doc_ids in packings():
        positions = torch.arange(doc_ids.numel()).reshape(doc_ids.shape)
        params = params_of(doc_ids)
        parts = [part.tolist() for part in to_nested(params, positions, form="C").unbind()]
        assert [position for part in parts for position in part] == unpad_params(params).indices.tolist()
        real = segment_lengths(params)[segment_documents(params) != 0]
        assert [len(part) for part in parts if part] == real.tolist()


def test_a_batch_comes_back_with_its_gradient():
    for doc_ids in packings():
        values = torch.randn(*doc_ids.shape, 3, requires_grad=True)
        back = from_nested(params_of(doc_ids), to_nested(params_of(doc_ids), values) * 2)
        assert torch.equal(back, values * 2)
        back.sum().backward()
        assert (values.grad == 2).all()


def test_attention_by_component_equals_attention_under_the_oracle():
    params = worked()
    q = torch.randn(2, 6, 8)
    parts = [
        torch.nn.functional.scaled_dot_product_attention(part, part, part, is_causal=True)
        for part in to_nested(params, q).unbind()
    ]
    mask = torch.from_numpy(allowed_pairs(params.doc_ids))
    expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    torch.testing.assert_close(torch.cat(parts).reshape(2, 6, 8), expected)


def test_tensors_of_another_batch_are_refused():
    with pytest.raises(MetadataError, match=r"values has shape \(6, 2\), the metadata describes \(2, 6\)"):
        to_nested(worked(), torch.zeros(6, 2))
    nested = to_nested(params_of([[1, 2]]), torch.zeros(1, 2))
    with pytest.raises(MetadataError, match="holds 2 tokens in 2 components, the metadata describes 12 in 6"):
        from_nested(worked(), nested)


@pytest.mark.parametrize("doc_ids", EMPTY, ids=lambda doc_ids: str(tuple(doc_ids.shape)))
def test_an_empty_batch_is_refused(doc_ids):
    with pytest.raises(MetadataError, match="at least one token"):
        to_nested(params_of(doc_ids), doc_ids)
    assert to_jagged(params_of(doc_ids))["offsets"].tolist() == [0]
    assert to_jagged(params_of(doc_ids), form="C")["max_seqlen"] == 0
