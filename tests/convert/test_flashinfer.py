"""FlashInfer's ragged offsets, decoded as its kernel runs them."""

import pytest
from packings import EMPTY, assert_isolated, offsets_pairs, params_of, worked

from neatpack.convert.flashinfer import to_flashinfer
from neatpack.errors import MetadataError


def test_worked_example_flashinfer():
    params = worked()
    arguments = to_flashinfer(params)
    assert arguments.pop("qo_indptr") is arguments.pop("kv_indptr") is params.cu_seqlens
    assert arguments == {"causal": True, "window_left": -1}
    assert to_flashinfer(params, window=4)["window_left"] == 3
    with pytest.raises(MetadataError, match="window is 0"):
        to_flashinfer(params, window=0)


@pytest.mark.parametrize("window", [None, 2])
def test_flashinfer_offsets_isolate(window):
    def decode(params):
        arguments = to_flashinfer(params, window=window)
        left = arguments["window_left"]
        return offsets_pairs(arguments["kv_indptr"], params.doc_ids.numel(), window=None if left < 0 else left + 1)

    assert_isolated(decode, window=window)


@pytest.mark.parametrize("doc_ids", EMPTY, ids=lambda doc_ids: str(tuple(doc_ids.shape)))
def test_an_empty_batch_has_one_offset(doc_ids):
    assert to_flashinfer(params_of(doc_ids))["qo_indptr"].tolist() == [0]
