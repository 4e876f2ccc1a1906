"""xFormers lengths, decoded as the block-diagonal causal mask they describe."""

import itertools
import sys
import types

import pytest
from packings import EMPTY, assert_isolated, offsets_pairs, params_of, worked

from neatpack.convert.segments import unpad_params
from neatpack.convert.xformers import to_xformers, to_xformers_lengths
from neatpack.errors import MissingDependencyError


def test_worked_example_xformers_lengths():
    assert to_xformers_lengths(worked()) == [2, 3, 1, 1, 2, 3]
    assert to_xformers_lengths(unpad_params(worked()).params) == [2, 3, 1, 2, 3]
    assert all(type(length) is int for length in to_xformers_lengths(worked()))


def test_xformers_lengths_isolate():
    def decode(params):
        return offsets_pairs([0, *itertools.accumulate(to_xformers_lengths(params))], params.doc_ids.numel())

    assert_isolated(decode)


def test_the_xformers_object_is_built_from_a_list_on_the_params_device(monkeypatch):
    calls = []
    package = types.ModuleType("xformers.ops.fmha.attn_bias")
    package.BlockDiagonalCausalMask = types.SimpleNamespace(from_seqlens=lambda **options: calls.append(options) or "mask")
    for name in ("xformers", "xformers.ops", "xformers.ops.fmha"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "xformers.ops.fmha.attn_bias", package)
    assert to_xformers(worked()) == "mask"
    assert calls == [{"q_seqlen": [2, 3, 1, 1, 2, 3], "device": worked().cu_seqlens.device}]


def test_a_missing_xformers_is_named_with_its_install_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "xformers", None)
    with pytest.raises(MissingDependencyError, match="pip install 'xformers'"):
        to_xformers(worked())


@pytest.mark.parametrize("doc_ids", EMPTY, ids=lambda doc_ids: str(tuple(doc_ids.shape)))
def test_an_empty_batch_has_no_lengths(doc_ids):
    assert to_xformers_lengths(params_of(doc_ids)) == []
