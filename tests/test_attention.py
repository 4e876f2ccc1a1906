"""Varlen attention against its slow twin: the formula under the oracle's mask, forward and backward."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_twin import HEAD_DIM, HEADS, KV_HEADS, assert_equals_twin, gradients, packing, qkv, same_segment, twin
from neatpack import attention
from neatpack.attention import dense_attention, plan_segments, varlen_attention
from neatpack.attention_plan import spans_of
from neatpack.errors import MetadataError, MetadataTypeError
from neatpack.packed_seq import packed_seq_params_from_doc_ids
from neatpack.testing import WORKED_EXAMPLE


def assert_equal_to_twin(doc_ids, **options):
    def attend(query, key, value, params, **rest):
        return varlen_attention(query, key, value, params.cu_seqlens, params.max_seqlen, **rest)

    assert_equals_twin(attend, doc_ids, **options)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    batch=st.integers(1, 3),
    length=st.integers(1, 17),
    kv_heads=st.sampled_from([1, 2, 4]),
    window=st.sampled_from([None, 1, 2, 3, 7, 40]),
    causal=st.booleans(),
)
def test_any_packing_equals_the_twin_forward_and_backward(seed, batch, length, kv_heads, window, causal):
    assert_equal_to_twin(packing(seed, batch, length), kv_heads=kv_heads, window=window, causal=causal)


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    kv_heads=st.sampled_from([1, 2, 4]),
    window=st.sampled_from([None, 2, 5]),
    causal=st.booleans(),
    softcap=st.sampled_from([None, 0.5, 3.0]),
    sinks=st.booleans(),
    scale=st.sampled_from([None, 1.5]),
)
def test_softcap_sinks_and_scale_equal_the_twin_forward_and_backward(seed, kv_heads, window, causal, softcap, sinks, scale):
    doc_ids = packing(seed)
    assert_equal_to_twin(doc_ids, kv_heads=kv_heads, window=window, causal=causal, softcap=softcap, sinks=sinks, scale=scale)


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0, "sinks": True}], ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [1, 2, 100, 128, 129, 150])
def test_long_segments_under_a_short_window_equal_the_twin(window, causal, options):
    """Long enough for blocks of queries; the lengths leave a full and a partial last block, and one segment is short."""
    doc_ids = torch.tensor([[1] * 384 + [2] * 301 + [3] * 384 + [4] * 20])
    assert_equal_to_twin(doc_ids, window=window, causal=causal, **options)


@settings(deadline=None)
@given(length=st.integers(1, 1500), window=st.integers(1, 400), causal=st.booleans())
def test_every_pair_in_reach_is_in_exactly_one_block(length, window, causal):
    covered = torch.zeros(length, length, dtype=torch.int32)
    for span in spans_of(length, window, causal):
        mask = span.mask(window, causal, covered.device)
        if mask is None:
            mask = torch.ones(span.queries, span.keys, dtype=torch.bool)
            mask = mask.tril() if causal else mask
        for block in range(span.count):
            first, first_key = span.first + block * span.queries, span.first_key + block * span.queries
            covered[first : first + span.queries, first_key : first_key + span.keys] += mask
    back = torch.arange(length)[:, None] - torch.arange(length)
    assert torch.equal(covered, ((back < window) & (back >= 0 if causal else back > -window)).int())


def test_a_long_segment_under_a_short_window_builds_no_mask_of_its_length_squared():
    assert max(span.queries * span.keys for span in spans_of(8192, 512)) <= 1024**2
    assert sum(span.count * span.queries * span.keys for span in spans_of(8192, 512)) < 8192**2 / 7


def test_softcap_and_sinks_are_not_decoration():
    params = packed_seq_params_from_doc_ids(torch.tensor(WORKED_EXAMPLE))
    inputs = qkv(12)
    plain = varlen_attention(*inputs, params.cu_seqlens, 3)
    assert (varlen_attention(*inputs, params.cu_seqlens, 3, softcap=0.5) - plain).abs().max() > 0.1
    assert (varlen_attention(*inputs, params.cu_seqlens, 3, sinks=torch.ones(HEADS)) - plain).abs().max() > 0.1


def test_values_may_have_a_head_size_of_their_own():
    assert_equal_to_twin(torch.tensor(WORKED_EXAMPLE), value_dim=6)


def test_the_twin_differs_when_a_boundary_is_removed():
    doc_ids = torch.tensor([[1, 1, 1, 2, 2, 2]])
    inputs = qkv(6)
    leaking = twin(*inputs, same_segment(torch.ones(1, 6, dtype=torch.long)))
    ours = varlen_attention(*inputs, torch.tensor([0, 3, 6], dtype=torch.int32), 3)
    torch.testing.assert_close(ours, twin(*inputs, same_segment(doc_ids)))
    assert (ours - leaking)[:3].abs().max() < 1e-9
    assert (ours - leaking)[3:].abs().max() > 0.1


def test_another_document_moves_nothing_not_even_the_last_bit():
    offsets = torch.tensor([0, 5, 12, 16], dtype=torch.int32)
    query, key, value = (tensor.detach() for tensor in qkv(16, dtype=torch.float32))
    before = varlen_attention(query, key, value, offsets, 7)
    for tensor in (query, key, value):
        tensor[5:12] = torch.randn_like(tensor[5:12]) * 100
    after = varlen_attention(query, key, value, offsets, 7)
    assert torch.equal(before[:5], after[:5])
    assert torch.equal(before[12:], after[12:])
    assert not torch.equal(before[5:12], after[5:12])


def test_segments_of_length_zero_change_nothing():
    inputs = qkv(6)
    plain = varlen_attention(*inputs, torch.tensor([0, 2, 6], dtype=torch.int32), 4)
    repeated = varlen_attention(*inputs, torch.tensor([0, 0, 2, 2, 2, 6, 6], dtype=torch.int32), 4)
    assert torch.equal(plain, repeated)


def test_an_empty_batch_stays_empty():
    inputs = qkv(0)
    assert varlen_attention(*inputs, torch.tensor([0], dtype=torch.int32), 0).shape == (0, HEADS, HEAD_DIM)
    assert varlen_attention(*inputs, torch.tensor([0, 0], dtype=torch.int32), 0).shape == (0, HEADS, HEAD_DIM)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
def test_narrow_dtypes_stay_close_to_the_twin_in_float64(dtype, tolerance):
    doc_ids = packing(3, 2, 40)
    params = packed_seq_params_from_doc_ids(doc_ids)
    exact = qkv(doc_ids.numel())
    rounded = [tensor.detach().to(dtype) for tensor in exact]
    ours = varlen_attention(*rounded, params.cu_seqlens, params.max_seqlen)
    assert ours.dtype == dtype
    assert (ours.double() - twin(*exact, same_segment(doc_ids))).abs().max() < tolerance
    capped = varlen_attention(*rounded, params.cu_seqlens, params.max_seqlen, softcap=2.0)
    assert capped.dtype == dtype
    assert (capped.double() - twin(*exact, same_segment(doc_ids), softcap=2.0)).abs().max() < tolerance


@pytest.mark.parametrize("sinks", [None, torch.zeros(HEADS, dtype=torch.float64)])
def test_dropout_drops_single_weights_and_scales_the_rest(sinks):
    """With one-hot values the output is the weights themselves: each is dropped or divided by 1 - p, and half are dropped."""
    length = 64
    query, key = (torch.randn(length, HEADS, 8, dtype=torch.float64) for _ in range(2))
    value = torch.eye(length, dtype=torch.float64)[:, None, :].expand(length, HEADS, length)
    offsets = torch.tensor([0, 30, length], dtype=torch.int32)
    whole = varlen_attention(query, key, value, offsets, 34, sinks=sinks)
    dropped = varlen_attention(query, key, value, offsets, 34, sinks=sinks, dropout=0.5)
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], 2 * whole[kept])
    share = (kept & (whole > 0)).sum() / (whole > 0).sum()
    assert 0.4 < share < 0.6
    assert not (dropped[30:, :, :30]).any()


def test_a_plan_spares_the_check_and_changes_nothing():
    params = packed_seq_params_from_doc_ids(packing(5))
    inputs = qkv(len(params.doc_ids.flatten()))
    plan = plan_segments(params.cu_seqlens, params.doc_ids.numel())
    with_plan = varlen_attention(*inputs, params.cu_seqlens, params.max_seqlen, plan=plan)
    assert torch.equal(with_plan, varlen_attention(*inputs, params.cu_seqlens, params.max_seqlen))
    with pytest.raises(MetadataError, match="the plan describes 26 tokens, the query has 12"):
        varlen_attention(*qkv(12), params.cu_seqlens, params.max_seqlen, plan=plan)


def test_segments_of_one_length_share_one_call(monkeypatch):
    calls = []
    monkeypatch.setattr(
        attention, "dense_attention", lambda *args, **options: calls.append(1) or dense_attention(*args, **options)
    )
    offsets = torch.tensor([0, 4, 7, 11, 14, 18], dtype=torch.int32)
    varlen_attention(*qkv(18), offsets, 4)
    assert len(calls) == 2


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_gives_the_same_gradients(reentrant):
    from torch.utils.checkpoint import checkpoint

    params = packed_seq_params_from_doc_ids(packing(8))
    inputs = qkv(params.doc_ids.numel())

    def attend(*tensors):
        return varlen_attention(*tensors, params.cu_seqlens, params.max_seqlen, window=3, softcap=2.0)

    plain = gradients(attend(*inputs), inputs)
    output = checkpoint(attend, *inputs, use_reentrant=reentrant)
    output.backward(torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output))
    recomputed = [tensor.grad for tensor in inputs]
    for ours, theirs in zip(recomputed, plain, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_dense_mask_that_hides_everything_gives_no_nan():
    query, key, value = (torch.randn(1, HEADS, 3, 8) for _ in range(3))
    mask = torch.tensor([[False, False, False], [False, True, False], [False, True, True]])[None, None]
    capped = dense_attention(query, key, value, mask, softcap=5.0)
    assert not capped.isnan().any()
    torch.testing.assert_close(capped[0, :, 1], value[0, :, 1])


@pytest.mark.parametrize("heads", [1, HEADS])
def test_additive_and_bool_masks_mean_the_same(heads):
    query, key, value = torch.randn(2, HEADS, 5, 8), torch.randn(2, KV_HEADS, 5, 8), torch.randn(2, KV_HEADS, 5, 8)
    allowed = torch.rand(2, heads, 5, 5) > 0.5
    allowed |= torch.eye(5, dtype=torch.bool)
    additive = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    for softcap in (None, 4.0):
        torch.testing.assert_close(
            dense_attention(query, key, value, allowed, softcap=softcap),
            dense_attention(query, key, value, additive, softcap=softcap),
        )


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([0, 5], "must run from 0 to the 12 tokens of the flattened batch, got 0 to 5"),
        ([1, 12], "got 1 to 12"),
        ([0, 13], "got 0 to 13"),
        ([0, 7, 5, 12], "decreases at segment 1: from 7 to 5"),
        ([], r"must be \[num_segments \+ 1\], got shape \(0,\)"),
        ([[0, 12]], r"got shape \(1, 2\)"),
    ],
)
def test_offsets_that_do_not_describe_the_input_are_refused(offsets, message):
    with pytest.raises(MetadataError, match=message):
        varlen_attention(*qkv(12), torch.tensor(offsets, dtype=torch.int32), 12)


def test_offsets_must_be_int32_and_cover_the_longest_segment():
    with pytest.raises(MetadataTypeError, match=r"int32 tensor, got torch.int64"):
        varlen_attention(*qkv(12), torch.tensor([0, 12]), 12)
    with pytest.raises(MetadataTypeError, match="got list"):
        varlen_attention(*qkv(12), [0, 12], 12)
    with pytest.raises(MetadataError, match="max_seqlen is 3, but the longest segment has 12 tokens"):
        varlen_attention(*qkv(12), torch.tensor([0, 12], dtype=torch.int32), 3)


def test_tensors_that_are_no_flattened_batch_are_refused():
    offsets = torch.tensor([0, 12], dtype=torch.int32)
    query, key, value = qkv(12)
    with pytest.raises(MetadataError, match=r"must be \[T, heads, head_dim\]"):
        varlen_attention(query[None], key, value, offsets, 12)
    with pytest.raises(MetadataError, match="same tokens, got 12, 11 and 12"):
        varlen_attention(query, key[1:], value, offsets, 12)
    with pytest.raises(MetadataError, match="4 query heads cannot share 3"):
        varlen_attention(query, torch.randn(12, 3, 8), torch.randn(12, 3, 8), offsets, 12)
    with pytest.raises(MetadataError, match="window must be at least 1"):
        varlen_attention(query, key, value, offsets, 12, window=0)
