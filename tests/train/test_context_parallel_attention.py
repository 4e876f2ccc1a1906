"""Attention over ranks equals attention in one process, forward and backward, and only the keys that are needed travel."""

import itertools

import numpy as np
import pytest
import torch
import torch.distributed as dist

import neatpack.train.context_parallel.attention as attention_module
from gloo_ranks import run_on_ranks
from neatpack.attention import dense_attention
from neatpack.convert.doc_map import doc_ids_from_seq_lengths
from neatpack.errors import ContractError, MetadataError
from neatpack.packed_seq import packed_seq_params_from_doc_ids
from neatpack.train.context_parallel import context_parallel_attention, gather_tensor, shard_params, shard_tensor
from neatpack.train.context_parallel.exchange import plan_exchange

# Documents straddle 2, 4 and 8 ranks under every scheme: contiguous shards of two rows would end at the row on 2 ranks.
ROWS = {
    "contiguous": ([[29, 5, 30, 20]], 96),
    "zigzag": ([[29, 5, 9], [3, 20, 25]], 48),
    "per_document_zigzag": ([[16, 8, 24], [40, 8]], 48),
}
HEADS, KV_HEADS, DIM = 4, 2, 8

SETTINGS = {
    "causal": {},
    "window": {"window": 5},
    "wide_window": {"window": 26},
    "bidirectional": {"causal": False},
    "bidirectional_window": {"causal": False, "window": 4},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.linspace(-1, 1, HEADS, dtype=torch.float64)},
    "scale": {"scale": 0.3, "window": 7},
}


def params_for(scheme):
    return packed_seq_params_from_doc_ids(doc_ids_from_seq_lengths(*ROWS[scheme]))


def inputs(shape=(2, 48)):
    generator = torch.Generator().manual_seed(3)
    heads = [(HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, DIM), (HEADS, DIM)]
    return [torch.randn(*shape, *each, generator=generator, dtype=torch.float64) for each in heads]


def oracle(query, key, value, doc_ids, window=None, causal=True, **scores):
    """Dense attention under a mask written out from the definition; a pad sees the pads of its row."""
    tokens = torch.arange(doc_ids.shape[1])
    near = tokens[:, None] - tokens
    allowed = doc_ids[:, :, None] == doc_ids[:, None, :]
    if causal:
        allowed = allowed & (near >= 0)
    if window is not None:
        allowed = allowed & (near.abs() < window)
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return dense_attention(query, key, value, allowed[:, None], causal=False, **scores).transpose(1, 2)


def compare(rank, world_size, scheme, settings, params=None):
    """Largest difference from the oracle: of the outputs, and of the gradients of query, key and value."""
    truth = params_for(scheme)
    shard = shard_params(params or truth, world_size, rank, scheme=scheme)
    query, key, value, weight = inputs(truth.doc_ids.shape)
    whole = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    expected = oracle(*whole, truth.doc_ids, **settings)
    (expected * weight).sum().backward()
    local = [shard_tensor(tensor, shard)[0].requires_grad_() for tensor in (query, key, value)]
    out = context_parallel_attention(*local, shard, dist.group.WORLD, **settings)
    (out * shard_tensor(weight, shard)[0]).sum().backward()
    forward = (out - shard_tensor(expected, shard)[0]).abs().max()
    backward = max((mine.grad - shard_tensor(all_.grad, shard)[0]).abs().max() for mine, all_ in zip(local, whole, strict=True))
    worst = torch.stack([forward.detach(), backward])
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.tolist()


def cases(rank, world_size):
    results = {}
    for scheme, (name, settings) in itertools.product(ROWS, SETTINGS.items()):
        results[scheme, name] = compare(rank, world_size, scheme, settings)
        attention_module.QUERY_BLOCK = 3
        results[scheme, name + "_in_blocks"] = compare(rank, world_size, scheme, settings)
        attention_module.QUERY_BLOCK = 1024
    merged = packed_seq_params_from_doc_ids(torch.ones(2, 48, dtype=torch.int64))
    results["merged"] = compare(rank, world_size, "zigzag", {}, merged)
    results["gather"] = gathered(rank, world_size)
    results["half"] = half_precision(rank, world_size)
    results["refusals"] = refusals(rank, world_size)
    return results


def gathered(rank, world_size):
    """What comes back, and its gradient when only rank 0 computes a loss."""
    shard = shard_params(params_for("zigzag"), world_size, rank, scheme="zigzag")
    batch, weight = torch.randn(2, 48, 3), torch.randn(2, 48, 3)  # seeded alike on all ranks
    local = shard_tensor(batch, shard).requires_grad_()
    back = gather_tensor(local, shard, dist.group.WORLD)
    (back * weight * (rank == 0)).sum().backward()
    flags = gather_tensor(shard_tensor(batch > 0, shard), shard, dist.group.WORLD)
    same = torch.equal(back, batch) and torch.equal(local.grad, shard_tensor(weight, shard)) and torch.equal(flags, batch > 0)
    agreed = torch.tensor(float(same))
    dist.all_reduce(agreed, dist.ReduceOp.MIN)
    return bool(agreed)


def half_precision(rank, world_size):
    shard = shard_params(params_for("zigzag"), world_size, rank, scheme="zigzag")
    query, key, value, _ = (shard_tensor(tensor, shard)[0].bfloat16().requires_grad_() for tensor in inputs())
    out = context_parallel_attention(query, key, value, shard, dist.group.WORLD)
    out.float().sum().backward()
    exact = context_parallel_attention(*(tensor.detach().double() for tensor in (query, key, value)), shard, dist.group.WORLD)
    return out.dtype, bool(key.grad.isfinite().all()), (out.detach() - exact).abs().max().item()


def refusals(rank, world_size):
    """Messages of what is refused before any collective."""
    query, key, value, _ = inputs()
    shard = shard_params(params_for("zigzag"), world_size, rank, scheme="zigzag")
    other = shard_params(params_for("zigzag"), 2 * world_size, rank, scheme="contiguous")
    calls = {
        "tokens": lambda: context_parallel_attention(query[0, :7], key[0, :7], value[0, :7], shard, dist.group.WORLD),
        "group": lambda: context_parallel_attention(query[0, :6], key[0, :6], value[0, :6], other, dist.group.WORLD),
        "no group": lambda: context_parallel_attention(query[0], key[0], value[0], shard, None),
    }
    messages = {}
    for name, call in calls.items():
        try:
            call()
        except (ContractError, MetadataError) as error:
            messages[name] = str(error)
    return messages


@pytest.fixture(scope="module", params=[2, 4])
def measured(request, tmp_path_factory):
    return run_on_ranks(cases, request.param, tmp_path_factory.mktemp(f"ranks{request.param}"))


def test_every_scheme_and_setting_equals_one_process(measured):
    compared = {name: worst for name, worst in measured.items() if isinstance(name, tuple)}
    assert len(compared) == 2 * len(ROWS) * len(SETTINGS)
    wrong = {name: worst for name, worst in compared.items() if max(worst) > 1e-12}
    assert wrong == {}


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("scheme", ROWS)
def test_documents_of_these_cases_straddle_ranks(scheme, world_size):
    assert plan_exchange(shard_params(params_for(scheme), world_size, 0, scheme=scheme), 2, True).remote


def test_without_the_boundaries_the_ranks_would_differ(measured):
    assert min(measured["merged"]) > 0.1


def test_gathered_shards_are_the_batch_and_gradients_flow_back(measured):
    assert measured["gather"]


def test_half_precision_stays_half_precision(measured):
    dtype, finite, difference = measured["half"]
    assert dtype == torch.bfloat16
    assert finite
    assert difference < 0.05


def test_a_shard_of_another_group_or_length_is_refused(measured):
    refused = measured["refusals"]
    assert "the shard is rank 0 of" in refused["group"]
    assert "query, key and value hold 7, 7 and 7 tokens, the shard" in refused["tokens"]
    assert "process group or a DeviceMesh dimension, got NoneType" in refused["no group"]


def test_only_the_keys_that_are_needed_travel():
    params = packed_seq_params_from_doc_ids(doc_ids_from_seq_lengths([[6, 10, 8]]))
    middle = plan_exchange(shard_params(params, 3, 1, scheme="contiguous"), None, True)
    assert middle.receive_counts == (2, 8, 0)  # tokens 6 and 7 of the document that began on rank 0
    assert middle.send_counts == (0, 8, 0)
    assert plan_exchange(shard_params(params, 3, 2, scheme="contiguous"), None, True).receive_counts == (0, 0, 8)
    windowed = plan_exchange(shard_params(params, 3, 1, scheme="contiguous"), 2, True)
    assert windowed.receive_counts == (1, 8, 0)


def test_documents_that_end_at_the_cut_need_no_collective():
    params = packed_seq_params_from_doc_ids(doc_ids_from_seq_lengths([[3, 5, 8, 2, 6]]))
    shards = [shard_params(params, 3, rank, scheme="contiguous") for rank in range(3)]
    assert [plan_exchange(shard, None, True).remote for shard in shards] == [False] * 3
    assert plan_exchange(shard_params(params, 2, 0, scheme="contiguous"), None, True).remote


def test_every_rank_expects_what_the_others_send():
    rng = np.random.default_rng(5)
    for _ in range(20):
        lengths = rng.integers(1, 20, 6)
        total = int(lengths.sum()) + -int(lengths.sum()) % 8
        params = packed_seq_params_from_doc_ids(doc_ids_from_seq_lengths([lengths], total))
        for scheme, window in itertools.product(["contiguous", "zigzag"], [None, 3]):
            plans = [plan_exchange(shard_params(params, 4, rank, scheme=scheme), window, True) for rank in range(4)]
            sent = np.array([plan.send_counts for plan in plans])
            assert np.array_equal(sent.T, [plan.receive_counts for plan in plans])
            assert len({plan.remote for plan in plans}) == 1
