"""How torch's varlen kernel is called, against stand-ins that have its signatures and compute from the definition."""

import inspect

import pytest
import torch

from attention_twin import gradients, packing, qkv, same_segment, twin
from neatpack import attention
from neatpack.attention import varlen_attention
from neatpack.attention_kernel import INSTALLED_KERNEL, VarlenKernel
from neatpack.errors import MetadataError
from neatpack.packed_seq import packed_seq_params_from_doc_ids


def by_definition(query, key, value, cu_q, cu_k, max_q, max_k, reach, scale, enable_gqa):
    """Segment by segment, keys aligned to the last query, `reach` tokens to the left and right (-1: unlimited)."""
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert cu_q[-1] == len(query)
    assert cu_k[-1] == len(key) == len(value)
    assert enable_gqa or query.shape[1] == key.shape[1]
    pieces = []
    for segment in range(len(cu_q) - 1):
        queries, keys = slice(*cu_q[segment : segment + 2]), slice(*cu_k[segment : segment + 2])
        q, k, v = query[queries], key[keys], value[keys]
        assert len(q) <= max_q
        assert len(k) <= max_k
        back = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))
        left, right = (size if size >= 0 else 10**9 for size in reach)
        pieces.append(twin(q, k, v, (back <= left) & (back >= -right), scale=scale))
    return torch.cat(pieces)


def newer_varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None,
                      window_size=(-1, -1), enable_gqa=False, seqused_k=None, block_table=None, num_splits=None):  # fmt: skip
    return by_definition(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, window_size, scale, enable_gqa)


def older_varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):
    reach = (-1, 0) if is_causal else (-1, -1)
    return by_definition(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, reach, None, enable_gqa=False)


def test_the_newer_stand_in_has_the_installed_signature():
    kernel = INSTALLED_KERNEL
    if kernel is None or "window_size" not in kernel.parameters:
        pytest.skip("this torch has no varlen kernel with windows")
    installed = inspect.signature(kernel.function).parameters.values()
    stand_in = inspect.signature(newer_varlen_attn).parameters.values()
    assert [(each.name, each.kind, each.default) for each in installed] == [
        (each.name, each.kind, each.default) for each in stand_in
    ]


@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("window", [None, 1, 3, 40])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_the_newer_kernel_is_told_everything(kv_heads, causal, window, scale):
    doc_ids = packing(4)
    params = packed_seq_params_from_doc_ids(doc_ids)
    inputs = qkv(doc_ids.numel(), kv_heads=kv_heads)
    kernel = VarlenKernel.of(newer_varlen_attn)
    assert kernel.computes(window=window, scale=scale, causal=causal, grouped=kv_heads != 4)
    ours = kernel.attend(*inputs, params.cu_seqlens, params.max_seqlen, window=window, scale=scale, causal=causal)
    slow = twin(*inputs, same_segment(doc_ids, window=window, causal=causal), scale=scale)
    torch.testing.assert_close(ours, slow)
    for got, expected in zip(gradients(ours, inputs), gradients(slow, inputs), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("causal", [True, False])
def test_the_older_kernel_is_told_causality(causal):
    doc_ids = packing(4)
    params = packed_seq_params_from_doc_ids(doc_ids)
    inputs = qkv(doc_ids.numel(), kv_heads=4)
    kernel = VarlenKernel.of(older_varlen_attn)
    assert kernel.computes(window=None, scale=None, causal=causal, grouped=False)
    ours = kernel.attend(*inputs, params.cu_seqlens, params.max_seqlen, causal=causal)
    torch.testing.assert_close(ours, twin(*inputs, same_segment(doc_ids, causal=causal)))


@pytest.mark.parametrize("asked", [{"window": 3}, {"scale": 0.7}, {"grouped": True}], ids=str)
def test_what_the_older_kernel_has_no_parameter_for_goes_another_way(asked):
    call = {"window": None, "scale": None, "causal": True, "grouped": False, **asked}
    assert not VarlenKernel.of(older_varlen_attn).computes(**call)
    assert VarlenKernel.of(newer_varlen_attn).computes(**call)


def test_a_function_that_does_not_know_causality_is_no_kernel():
    kernel = VarlenKernel.of(lambda query, key, value, cu_q, cu_k, max_q, max_k: query)
    assert not kernel.computes(window=None, scale=None, causal=True, grouped=False)


def test_keys_may_have_segments_of_their_own():
    """Queries that are the tails of their documents, as a context-parallel shard holds them."""
    query, key, value = qkv(12)
    tails = torch.cat([torch.arange(3, 5), torch.arange(6, 12)])
    whole = twin(query, key, value, same_segment(torch.tensor([[1] * 5 + [2] * 7])))
    ours = VarlenKernel.of(newer_varlen_attn).attend(
        query[tails], key, value, torch.tensor([0, 2, 8], dtype=torch.int32), 6,
        cu_seqlens_k=torch.tensor([0, 5, 12], dtype=torch.int32), max_seqlen_k=7,
    )  # fmt: skip
    torch.testing.assert_close(ours, whole[tails])


def test_where_it_applies_the_kernel_does_the_work(monkeypatch):
    calls = []

    def spy(*arguments, scale=None, window_size=(-1, -1), enable_gqa=False):
        calls.append((arguments[-1], window_size, enable_gqa))
        return newer_varlen_attn(*arguments, scale=scale, window_size=window_size, enable_gqa=enable_gqa)

    kernel = VarlenKernel.of(spy)
    monkeypatch.setattr(attention, "_kernel_for", lambda *call: kernel)
    doc_ids = packing(4)
    params = packed_seq_params_from_doc_ids(doc_ids)
    inputs = qkv(doc_ids.numel())
    ours = varlen_attention(*inputs, params.cu_seqlens, params.max_seqlen, window=3)
    torch.testing.assert_close(ours, twin(*inputs, same_segment(doc_ids, window=3)))
    assert calls == [(params.max_seqlen, (2, 0), True)]
    varlen_attention(*inputs, params.cu_seqlens, params.max_seqlen, softcap=2.0)
    assert len(calls) == 1


@torch.library.custom_op(
    "neatpack_tests::varlen",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor cu_q, Tensor cu_k, SymInt max_q, SymInt max_k, "
    "int left, int right) -> Tensor",
)
def opaque_kernel(q, k, v, cu_q, cu_k, max_q, max_k, left, right):
    return newer_varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, window_size=(left, right), enable_gqa=True)


@opaque_kernel.register_fake
def _(q, *rest):
    return torch.empty_like(q)


def test_a_compiled_program_calls_the_kernel_on_checked_offsets(monkeypatch):
    """As torch's own is, the stand-in is an operator: no graph break, and offsets that do not fit never reach it."""

    def standing_in(query, key, value, cu_q, cu_k, max_q, max_k, *, window_size=(-1, -1), enable_gqa=False):
        return torch.ops.neatpack_tests.varlen(query, key, value, cu_q, cu_k, max_q, max_k, *window_size)

    kernel = VarlenKernel.of(standing_in)
    monkeypatch.setattr(attention, "_kernel_for", lambda *call: kernel)
    compiled = torch.compile(varlen_attention, backend="aot_eager", fullgraph=True)
    doc_ids = packing(4)
    params = packed_seq_params_from_doc_ids(doc_ids)
    inputs = [tensor.detach() for tensor in qkv(doc_ids.numel())]
    ours = compiled(*inputs, params.cu_seqlens, params.max_seqlen, window=3)
    torch.testing.assert_close(ours, twin(*inputs, same_segment(doc_ids, window=3)))
    with pytest.raises(MetadataError, match="must run from 0 to the 26 tokens"):
        compiled(*inputs, params.cu_seqlens[:-1], params.max_seqlen, window=3)
    torch._dynamo.reset()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_no_other_device_reaches_the_kernel(device):
    query = torch.empty(4, 2, 8, dtype=torch.bfloat16, device=device)
    assert attention._kernel_for(query, query, query, None, None, True) is None


def narrow(heads, head_dim=8, dtype=torch.bfloat16):
    return torch.empty(4, heads, head_dim, dtype=dtype)


@pytest.mark.parametrize(
    ("applies", "function", "call"),
    [
        (True, newer_varlen_attn, (narrow(4), narrow(4), narrow(4), None, None, True)),
        (True, newer_varlen_attn, (narrow(4), narrow(2), narrow(2), 0.5, 3, False)),
        (True, older_varlen_attn, (narrow(4), narrow(4), narrow(4), None, None, False)),
        (False, older_varlen_attn, (narrow(4), narrow(2), narrow(2), None, None, True)),
        (False, older_varlen_attn, (narrow(4), narrow(4), narrow(4), 0.5, None, True)),
        (False, newer_varlen_attn, (narrow(4), narrow(4), narrow(4, 16), None, None, True)),
        (False, newer_varlen_attn, (narrow(4, 12), narrow(4, 12), narrow(4, 12), None, None, True)),
        (False, newer_varlen_attn, (narrow(4, 512), narrow(4, 512), narrow(4, 512), None, None, True)),
        (False, newer_varlen_attn, (*[narrow(4, dtype=torch.float32)] * 3, None, None, True)),
    ],
)  # fmt: skip
def test_the_kernel_is_chosen_for_what_it_computes(monkeypatch, applies, function, call):
    kernel = VarlenKernel.of(function)
    monkeypatch.setattr(attention, "INSTALLED_KERNEL", kernel)
    monkeypatch.setattr(attention, "runs_on", lambda device: True)
    assert attention._kernel_for(*call) is (kernel if applies else None)


def test_a_compiler_can_trace_the_choice(monkeypatch):
    """As on a device that runs the kernel: no graph break, no warning, whatever this torch has installed."""
    monkeypatch.setattr(attention, "runs_on", torch.compiler.assume_constant_result(lambda device: True))

    def chosen(query):
        return query + (attention._kernel_for(query, query, query, None, 3, True) is not None)

    expected = INSTALLED_KERNEL is not None and "window_size" in INSTALLED_KERNEL.parameters
    compiled = torch.compile(chosen, backend="eager", fullgraph=True)(torch.zeros(4, 2, 8, dtype=torch.bfloat16))
    assert (compiled == float(expected)).all()
    torch._dynamo.reset()


@pytest.mark.skipif(INSTALLED_KERNEL is None, reason="this torch has no varlen kernel")
def test_a_compiler_can_trace_the_installed_kernel(monkeypatch):
    """Up to the kernel itself, which the CPU does not have: the program is one graph that ends in torch's operator."""
    monkeypatch.setattr(attention, "runs_on", torch.compiler.assume_constant_result(lambda device: True))
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return lambda *arguments: [torch.empty(0)]

    inputs = [tensor.detach().bfloat16() for tensor in qkv(12, kv_heads=4)]
    offsets = torch.tensor([0, 5, 12], dtype=torch.int32)
    torch.compile(varlen_attention, backend=keep, fullgraph=True)(*inputs, offsets, 7)
    called = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert "neatpack.checked_offsets" in called
    assert "torch_attn._varlen_attn" in called
    assert "neatpack.varlen_attention" not in called
    torch._dynamo.reset()
