"""Rows with padding between their documents, from an aligned plan to the ranks: equal to every document run alone."""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig

import neatpack.hf
from gloo_ranks import run_on_ranks
from neatpack import plan_rows
from neatpack.convert.segments import slots
from neatpack.errors import MetadataError
from neatpack.train import PackedCollator, count_items, target_weights, token_cross_entropy, unpack_documents
from neatpack.train.context_parallel import shard_batch, shard_tensor
from neatpack.train.context_parallel.index_maps import aligned_slots

LENGTHS = [13, 5, 9, 1, 14, 3, 7, 2, 11, 8, 24]
CAPACITY = 32
SCHEMES = ["contiguous", "zigzag", "per_document_zigzag"]
KINDS = ["llama", "window"]
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}


def planned_rows(align):
    """What an aligned plan makes of the documents: plain rows, whose padding the collator puts in."""
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(1, 64, (length,), generator=generator) for length in LENGTHS]
    plan = plan_rows(LENGTHS, CAPACITY, align=align)
    rows = [list(plan)[number] for number in (1, 0, 2)]  # the longest document in the middle, where shards are cut
    return [
        {
            "input_ids": torch.cat([documents[piece.doc] for piece in row]),
            "seq_lengths": [piece.length for piece in row],
            "loss_mask": torch.cat([torch.arange(piece.length) % 5 != 3 for piece in row]),
        }
        for row in rows
    ]


def batch_of(align, **options):
    return PackedCollator(row_length=CAPACITY, align=align, **options)(planned_rows(align))


def model_of(kind, attention):
    torch.manual_seed(0)
    config = MistralConfig(**SIZES, sliding_window=4) if kind == "window" else LlamaConfig(**SIZES)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).train()


def alone(kind, batch, params, reduction):
    """Logits of every document run alone on stock attention, the reduced loss written out, and its gradients."""
    model = model_of(kind, "eager")
    logits, means, counts = [], [], []
    for ids, labels in zip(
        unpack_documents(batch["input_ids"], params), unpack_documents(batch["labels"], params), strict=True
    ):
        own = model(input_ids=ids[None], use_cache=False).logits[0]
        logits.append(own.detach())
        if (labels != -100).any():
            means.append(F.cross_entropy(own[:-1], labels[1:]))
            counts.append(int((labels != -100).sum()))
    weights = counts if reduction == "token" else [1] * len(counts)
    loss = sum(weight * mean for weight, mean in zip(weights, means, strict=True)) / sum(weights)
    loss.backward()
    return logits, loss.detach(), [parameter.grad for parameter in model.parameters()]


def over_ranks(kind, scheme, batch, params, reduction):
    model = model_of(kind, neatpack.hf.register())
    with neatpack.hf.context_parallel(model, dist.group.WORLD, scheme=scheme) as parallel:
        local = parallel.shard(batch)
        output = model(**local)
        loss = output.loss
        if reduction == "document":
            weights = shard_tensor(target_weights(batch["labels"], params, reduction=reduction), local["context_shard"])
            losses = token_cross_entropy(output.logits, local["shift_labels"])
            loss = (losses * weights).sum() / count_items(batch["labels"], params, reduction=reduction)
        loss.backward()
        parallel.sum_gradients()
        logits = parallel.gather(output.logits.detach(), local["context_shard"])
    whole = loss.detach().clone()
    dist.all_reduce(whole)
    plans = local["context_shard"].plans.values()
    return logits, whole, [parameter.grad for parameter in model.parameters()], any(plan.exchange.remote for plan in plans)


def differences(kind, scheme, batch, params, reduction):
    logits, loss, gradients, remote = over_ranks(kind, scheme, batch, params, reduction)
    if dist.get_rank():
        return None
    expected, expected_loss, expected_gradients = alone(kind, batch, params, reduction)
    return {
        "logits": max((a - b).abs().max().item() for a, b in zip(unpack_documents(logits, params), expected, strict=True)),
        "loss": (loss - expected_loss).abs().item(),
        "gradients": max((a - b).abs().max().item() for a, b in zip(gradients, expected_gradients, strict=True)),
        "largest": max(gradient.abs().max().item() for gradient in expected_gradients),
        "remote": remote,
    }


def cases(rank, world_size):
    align = 2 * world_size
    params = batch_of(align, return_params=True)["packed_seq_params"]
    results = {}
    for kind, scheme in itertools.product(KINDS, SCHEMES):
        results[kind, scheme] = differences(kind, scheme, batch_of(align), params, "token")
    results["map", "per_document_zigzag"] = differences(
        "llama", "per_document_zigzag", batch_of(align, return_doc_ids=True), params, "token"
    )
    for scheme in SCHEMES:
        results["document", scheme] = differences("llama", scheme, batch_of(align), params, "document")
    return results


@pytest.fixture(scope="module", params=[2, 4])
def measured(request, tmp_path_factory):
    return run_on_ranks(cases, request.param, tmp_path_factory.mktemp(f"ranks{request.param}"))


CASES = [*itertools.product(KINDS, SCHEMES), ("map", "per_document_zigzag"), *(("document", scheme) for scheme in SCHEMES)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_equal_every_document_alone(measured, case):
    found = measured[case]
    assert max(found["logits"], found["loss"], found["gradients"]) < 1e-5
    assert found["largest"] > 0.1
    assert found["remote"]


@pytest.mark.parametrize("cp_size", [1, 2, 4, 8])
def test_slots_are_found_from_offsets_alone(cp_size):
    align = 2 * cp_size
    batch = batch_of(align, return_params=True)
    params = batch["packed_seq_params"]
    found = aligned_slots(batch["cu_seq_lens_q"], CAPACITY, align)
    assert (found.diff() % align == 0).all()
    starts = params.cu_seqlens[:-1].long()
    documents = starts[params.doc_ids.flatten()[starts] != 0]
    assert set(documents.tolist()) <= set(found.tolist())  # every document opens a slot, whole
    assert set(slots(params).cu_seqlens.tolist()) <= set(found.tolist())  # the rest is padding at the end of a row


def test_offsets_of_documents_side_by_side_are_refused_with_the_collators_option(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/init", rank=0, world_size=1)
    try:
        batch = PackedCollator(row_length=CAPACITY)(planned_rows(1))
        with pytest.raises(MetadataError, match=r"slot \d+ .*plan_rows\(..., align=2\) and PackedCollator\(align=2\)"):
            shard_batch(batch, dist.group.WORLD, scheme="per_document_zigzag")
        uneven = PackedCollator(row_length=CAPACITY + 1, align=2)(planned_rows(2))
        with pytest.raises(MetadataError, match=r"a row_length that is a multiple of 2 too"):
            shard_batch(uneven, dist.group.WORLD, scheme="per_document_zigzag")
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("offsets", [[0, 3, 8], [0, 3, 5, 8], [0, 2, 3, 8]])
def test_a_document_that_no_alignment_would_leave_there_is_no_padding(offsets):
    found = aligned_slots(torch.tensor(offsets), 16, 4)
    assert (found.diff() % 4 != 0).any()
