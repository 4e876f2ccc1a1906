"""Varlen attention as one operator: its own backward against autograd's through the slow twin, and what a compiler sees."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_twin import SINKS, assert_equals_twin, gradients, packing, qkv, twin
from neatpack.attention import varlen_attention
from neatpack.attention_op import checked_offsets, varlen_op
from neatpack.errors import MetadataError, MetadataTypeError
from neatpack.packed_seq import packed_seq_params_from_doc_ids


def assert_op_equals_twin(doc_ids, **options):
    def attend(query, key, value, params, **rest):
        return varlen_op(query, key, value, params.cu_seqlens, **rest)

    assert_equals_twin(attend, doc_ids, **options)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    batch=st.integers(1, 3),
    length=st.integers(1, 17),
    kv_heads=st.sampled_from([1, 2, 4]),
    value_dim=st.sampled_from([8, 6]),
    window=st.sampled_from([None, 1, 2, 7, 40]),
    causal=st.booleans(),
    softcap=st.sampled_from([None, None, 0.5]),
    sinks=st.booleans(),
    scale=st.sampled_from([None, 1.5]),
)
def test_forward_and_backward_equal_the_twin(seed, batch, length, **options):
    assert_op_equals_twin(packing(seed, batch, length), **options)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [1, 2, 60, 128, 150])
def test_long_segments_under_a_short_window_equal_the_twin(window, causal, softcap):
    doc_ids = torch.tensor([[1] * 300 + [2] * 257 + [3] * 300])
    assert_op_equals_twin(doc_ids, window=window, causal=causal, softcap=softcap)


def test_dropout_draws_the_same_weights_in_the_backward():
    """The gradient under dropout equals autograd's through the formula with the mask that the forward shows."""
    length, heads = 12, 2
    query, key = (torch.randn(length, heads, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    offsets = torch.tensor([0, 7, length], dtype=torch.int32)
    eye = torch.eye(length, dtype=torch.float64)[:, None, :].expand(length, heads, length)
    value = eye.clone().requires_grad_()  # with one-hot values the output is the weights themselves
    ours = varlen_op(query, key, value, offsets, dropout=0.4)
    whole = twin(query, key, eye, torch.block_diag(torch.ones(7, 7), torch.ones(5, 5)).bool().tril())
    keep = (ours.detach() != 0) / 0.6
    assert 0.4 < (keep > 0).sum() / (whole > 0).sum() < 0.8
    torch.testing.assert_close(ours, whole * keep)
    slow = torch.einsum("qhk,khd->qhd", whole * keep, value)
    for got, expected in zip(gradients(ours, (query, key, value)), gradients(slow, (query, key, value)), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"window": 3}], ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-2), (torch.float16, 5e-3)])
def test_narrow_dtypes_stay_close_to_float64(dtype, tolerance, options):
    doc_ids = packing(3, 2, 40)
    offsets = packed_seq_params_from_doc_ids(doc_ids).cu_seqlens
    exact = qkv(doc_ids.numel())
    rounded = [tensor.detach().to(dtype).requires_grad_() for tensor in exact]
    ours, theirs = varlen_op(*rounded, offsets, **options), varlen_op(*exact, offsets, **options)
    assert ours.dtype == dtype
    assert (ours.double() - theirs).abs().max() < tolerance
    for got, expected in zip(gradients(ours, rounded), gradients(theirs, exact), strict=True):
        assert got.dtype == dtype
        assert (got.double() - expected).abs().max() < tolerance * max(1.0, expected.abs().max().item())


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0, "sinks": True}, {"window": 3}, {"dropout": 0.5}], ids=str)
def test_torch_accepts_the_operator(options):
    """Schema, fake tensors, autograd registration and compilation with dynamic shapes, by torch's own checks."""
    params = packed_seq_params_from_doc_ids(packing(5))
    query, key, value = qkv(params.doc_ids.numel())
    sinks = SINKS.clone().requires_grad_() if options.get("sinks") else None
    dropout = options.get("dropout", 0.0)
    seed = torch.tensor([3]) if dropout else None
    numbers = (0.3, options.get("window"), True, options.get("softcap"), dropout)
    torch.library.opcheck(
        torch.ops.neatpack.varlen_attention.default, (query, key, value, params.cu_seqlens, sinks, seed, *numbers)
    )
    torch.library.opcheck(torch.ops.neatpack.checked_offsets.default, (params.cu_seqlens, 26, 26))


# --- compiled ---------------------------------------------------------------------------------------------------------


class CountingBackend:
    """`aot_eager`, and how many programs were compiled."""

    def __init__(self):
        from torch._dynamo.backends.debugging import aot_eager

        self.graphs, self._compile = 0, aot_eager

    def __call__(self, graph, inputs):
        self.graphs += 1
        return self._compile(graph, inputs)


@pytest.fixture(autouse=True)
def _forget_compiled_code():
    yield
    torch._dynamo.reset()


def offsets_of(*lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


@pytest.mark.parametrize(
    "options",
    [{}, {"window": 3}, {"softcap": 2.0}, {"sinks": SINKS, "window": 5}, {"causal": False}],
    ids=lambda o: "-".join(o),
)
def test_compiled_equals_eager_and_compiles_once_more_at_most(options):
    backend = CountingBackend()
    compiled = torch.compile(varlen_attention, backend=backend, fullgraph=True)
    for lengths in ([5, 7, 4], [16], [1, 2, 3, 4, 6], [8, 8], [2] * 8, [3, 13]):
        inputs = qkv(16)
        arguments = (*inputs, offsets_of(*lengths), max(lengths))
        ours, eager = compiled(*arguments, **options), varlen_attention(*arguments, **options)
        torch.testing.assert_close(ours, eager)
        for got, expected in zip(gradients(ours, inputs), gradients(eager, inputs), strict=True):
            torch.testing.assert_close(got, expected)
    assert backend.graphs <= 2


@pytest.mark.parametrize(
    ("offsets", "maximum", "message"),
    [
        (offsets_of(5), 12, "must run from 0 to the 12 tokens"),
        (torch.tensor([0, 7, 5, 12], dtype=torch.int32), 12, "decreases at segment 1"),
        (offsets_of(5, 7), 6, "max_seqlen is 6, but the longest segment has 7"),
    ],
)
def test_the_check_runs_on_real_offsets_inside_a_compiled_program(offsets, maximum, message):
    compiled = torch.compile(varlen_attention, backend="aot_eager", fullgraph=True)
    inputs = qkv(12)
    torch.testing.assert_close(compiled(*inputs, offsets_of(4, 8), 8), varlen_attention(*inputs, offsets_of(4, 8), 8))
    with pytest.raises(MetadataError, match=message):
        compiled(*inputs, offsets, maximum)


def test_int64_offsets_are_refused_in_a_compiled_program():
    compiled = torch.compile(varlen_attention, backend="aot_eager", fullgraph=True)
    with pytest.raises(MetadataTypeError, match=r"int32 tensor, got torch.int64"):
        compiled(*qkv(12), torch.tensor([0, 12]), 12)
    with pytest.raises(MetadataTypeError, match=r"int32 tensor, got torch.int64"):
        checked_offsets(torch.tensor([0, 12]), 12, 12)


def test_dropout_acts_in_a_compiled_program_and_its_gradient_is_its_own():
    compiled = torch.compile(varlen_attention, backend="aot_eager", fullgraph=True)
    inputs = [tensor.detach().requires_grad_() for tensor in qkv(16)]
    arguments = (*inputs, offsets_of(5, 11), 11)
    first, second = compiled(*arguments, dropout=0.5), compiled(*arguments, dropout=0.5)
    assert not torch.equal(first, second)
    (of_value,) = torch.autograd.grad(first.sum(), inputs[2:])
    # the output is linear in the values: their gradient, applied to them, gives the output's sum back
    torch.testing.assert_close((of_value * inputs[2]).sum(), first.sum())


def test_compiled_under_autocast_equals_eager_under_autocast():
    inputs = [tensor.detach().float() for tensor in qkv(16)]
    inputs[2] = inputs[2].bfloat16()
    compiled = torch.compile(varlen_attention, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        ours = compiled(*inputs, offsets_of(5, 11), 11)
        eager = varlen_attention(*inputs, offsets_of(5, 11), 11)
    assert ours.dtype == eager.dtype == torch.bfloat16
    torch.testing.assert_close(ours, eager)
