"""The slow twin of varlen attention: every pair scored, forbidden pairs struck out; and inputs to compare on."""

import numpy as np
import torch

from neatpack.packed_seq import packed_seq_params_from_doc_ids
from neatpack.testing import allowed_pairs, random_doc_ids

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
SINKS = torch.linspace(-1, 2, HEADS, dtype=torch.float64)


def packing(seed, batch=2, length=13):
    return torch.from_numpy(random_doc_ids(np.random.default_rng(seed), batch, length))


def qkv(tokens, *, kv_heads=KV_HEADS, value_dim=HEAD_DIM, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (HEADS, HEAD_DIM), (kv_heads, HEAD_DIM), (kv_heads, value_dim)
    return [torch.randn(tokens, *shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def same_segment(doc_ids, *, window=None, causal=True):
    """`[B*S, B*S]` bool: the oracle's mask over the flattened batch, where a padding run is a segment like any other."""
    length = doc_ids.shape[1]
    ids = torch.where(doc_ids == 0, doc_ids.max() + 1, doc_ids)
    if causal:
        rows = torch.from_numpy(allowed_pairs(ids.numpy(), window=window))
    else:
        rows = ids[:, :, None] == ids[:, None, :]
        if window is not None:
            rows &= (torch.arange(length)[:, None] - torch.arange(length)[None, :]).abs() < window
    return torch.block_diag(*rows).bool()


def twin(query, key, value, allowed, *, scale=None, softcap=None, sinks=None):
    """Attention from the definition: heads repeated, every pair scored, forbidden pairs struck out."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~allowed, float("-inf")).exp()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.exp()[:, None, None]
    return torch.einsum("hqk,khd->qhd", weights / total, value)


def gradients(output, inputs):
    return torch.autograd.grad(
        (output * torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)).sum(), inputs
    )


def assert_equals_twin(
    attend, doc_ids, *, kv_heads=KV_HEADS, value_dim=HEAD_DIM, window=None, causal=True, sinks=False, **options
):
    """`attend(query, key, value, params, ...)` gives what the twin gives, forward and backward."""
    inputs = qkv(doc_ids.numel(), kv_heads=kv_heads, value_dim=value_dim)
    if sinks:
        options["sinks"] = SINKS.clone().requires_grad_()
        inputs.append(options["sinks"])
    params = packed_seq_params_from_doc_ids(doc_ids)
    fast = attend(*inputs[:3], params, window=window, causal=causal, **options)
    slow = twin(*inputs[:3], same_segment(doc_ids, window=window, causal=causal), **options)
    torch.testing.assert_close(fast, slow)
    for ours, theirs in zip(gradients(fast, inputs), gradients(slow, inputs), strict=True):
        torch.testing.assert_close(ours, theirs)
