"""Offsets and sequence numbers of recurrences, decoded as the kernels read them: which tokens can influence which."""

import numpy as np
import pytest
import torch
from packings import (
    EMPTY,
    agrees,
    assert_isolated,
    equal_ids_pairs,
    flat_pairs,
    offsets_pairs,
    packings,
    params_of,
    real,
    worked,
)

from neatpack.convert.recurrent import to_fla, to_mamba2, to_seq_idx
from neatpack.convert.segments import unpad_params
from neatpack.errors import MetadataError


def test_worked_example_fla_hands_over_the_very_tensor():
    params = worked()
    assert to_fla(params) == {"cu_seqlens": params.cu_seqlens}
    assert to_fla(params)["cu_seqlens"] is params.cu_seqlens
    assert params.cu_seqlens.tolist() == [0, 2, 5, 6, 7, 9, 12]
    assert to_fla(params, include_cpu=True)["cu_seqlens_cpu"].tolist() == [0, 2, 5, 6, 7, 9, 12]
    assert to_fla(unpad_params(params).params)["cu_seqlens"].tolist() == [0, 2, 5, 6, 8, 11]


def test_worked_example_seq_idx():
    params = worked()
    assert to_seq_idx(params).tolist() == [[0, 0, 1, 1, 1, 2], [0, 1, 1, 2, 2, 2]]
    assert to_seq_idx(params, pad=-1).tolist() == [[0, 0, 1, 1, 1, -1], [0, 1, 1, 2, 2, 2]]
    assert to_seq_idx(params, flat=True).tolist() == [[0, 0, 1, 1, 1, 2, 3, 4, 4, 5, 5, 5]]
    assert to_seq_idx(params, flat=True, pad=-1).tolist() == [[0, 0, 1, 1, 1, -1, 3, 4, 4, 5, 5, 5]]
    for flat in (False, True):
        assert to_seq_idx(params, flat=flat).dtype == torch.int32
        assert to_seq_idx(params, flat=flat).is_contiguous()


def test_offsets_isolate():
    assert_isolated(lambda params: offsets_pairs(to_fla(params)["cu_seqlens"], params.doc_ids.numel()))


@pytest.mark.parametrize("pad", ["keep", -1])
@pytest.mark.parametrize("flat", [False, True])
def test_equal_numbers_are_one_document_and_nothing_else(pad, flat):
    assert_isolated(lambda params: equal_ids_pairs(to_seq_idx(params, pad=pad, flat=flat)))


def test_flattening_numbers_by_row_would_join_documents_of_different_rows():
    """Why flat numbers are their own: on the worked example token 6 would join 0, 1 and 7, 8 would join 2, 3, 4."""
    by_row = to_seq_idx(worked()).reshape(1, -1)
    leaking = equal_ids_pairs(by_row) & ~flat_pairs(worked().doc_ids)
    assert not agrees(equal_ids_pairs(by_row), worked().doc_ids)
    assert leaking[6].nonzero()[0].tolist() == [0, 1]
    assert leaking[7].nonzero()[0].tolist() == leaking[8].nonzero()[0].tolist() == [2, 3, 4]


def short_convolution(values, seq_idx, width=4):
    """A causal convolution as the kernel runs it: taps from tokens of the same number only, 0 on negative numbers."""
    out = np.zeros_like(values)
    for row, position in np.ndindex(values.shape):
        for tap in range(max(0, position - width + 1), position + 1):
            if seq_idx[row, position] >= 0 and seq_idx[row, tap] == seq_idx[row, position]:
                out[row, position] += values[row, tap]
    return out


def test_a_convolution_never_mixes_documents():
    rng = np.random.default_rng(0)
    for doc_ids in packings():
        values = rng.random(doc_ids.shape)
        allowed = flat_pairs(doc_ids, window=4).astype(float)
        expected = (allowed @ values.reshape(-1)).reshape(doc_ids.shape)
        out = short_convolution(values, to_seq_idx(params_of(doc_ids), pad=-1).numpy())
        np.testing.assert_allclose(out, expected)
        flat = short_convolution(values.reshape(1, -1), to_seq_idx(params_of(doc_ids), flat=True).numpy())
        np.testing.assert_allclose(flat.reshape(-1)[real(doc_ids)], expected.reshape(-1)[real(doc_ids)])


def test_a_number_that_could_be_a_documents_is_no_padding():
    with pytest.raises(MetadataError, match="pad is 0"):
        to_seq_idx(worked(), pad=0)


def test_rows_that_have_corrupted_mamba2_are_warned_of():  # F-158
    params = params_of(torch.ones(2, 61_000, dtype=torch.int64))
    assert to_mamba2(params)["seq_idx"].shape == (2, 61_000)
    with pytest.warns(UserWarning, match="rows of 122000 tokens.*do not flatten") as warned:
        to_mamba2(params, flat=True)
    assert warned[0].filename == __file__  # where the user called it


@pytest.mark.parametrize("doc_ids", EMPTY, ids=lambda doc_ids: str(tuple(doc_ids.shape)))
def test_an_empty_batch_has_no_numbers(doc_ids):
    assert to_seq_idx(params_of(doc_ids)).shape == doc_ids.shape
    assert to_fla(params_of(doc_ids))["cu_seqlens"].tolist() == [0]
