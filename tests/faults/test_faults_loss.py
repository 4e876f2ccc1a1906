"""Loss normalisation: how many items there are, and what a mean is a mean of."""

import pytest
import torch
from fault_cases import joined, params_of, runs

from neatpack.convert import doc_ids_from_seq_lengths
from neatpack.packed_seq import packed_seq_params_from_doc_ids
from neatpack.planning import plan_rows
from neatpack.train import aligned_labels, batch_metrics, count_items, reduce_token_losses, unpack_documents

KIND = "loss normalisation"


def batch_of(rows):
    """Token losses `[B, S]` of documents given as lists of losses, what counts, and the metadata."""
    doc_ids = doc_ids_from_seq_lengths([[len(document) for document in row] for row in rows])
    losses = torch.zeros(doc_ids.shape)
    for place, row in zip(losses, rows, strict=True):
        flat = torch.tensor(joined(row), dtype=torch.float32)
        place[: len(flat)] = flat
    return losses, doc_ids != 0, packed_seq_params_from_doc_ids(doc_ids)


@runs(KIND, "items")
def test_the_count_is_the_same_with_first_labels_masked_or_not(case):
    params = packed_seq_params_from_doc_ids(doc_ids_from_seq_lengths(case.input["rows"]))
    tokens = torch.ones(params.doc_ids.shape, dtype=torch.int64)
    assert int(count_items(tokens, params)) == case.expected["items"]
    assert int(count_items(aligned_labels(tokens, params), params)) == case.expected["items"]


@runs(KIND, "means")
def test_each_mean_is_of_what_it_says(case):
    losses, counted, params = batch_of(case.input["rows"])
    for reduction, value in case.expected.items():
        assert float(reduce_token_losses(losses, counted, params, reduction=reduction)) == pytest.approx(value)
    # Both means are reported, so that one is not taken for the other. A document of n losses has n + 1 tokens.
    lengths = [[len(document) + 1 for document in row] for row in case.input["rows"]]
    whole = packed_seq_params_from_doc_ids(doc_ids_from_seq_lengths(lengths))
    means = torch.tensor([sum(document) / len(document) for row in case.input["rows"] for document in row])
    metrics = batch_metrics(whole, torch.ones(whole.doc_ids.shape, dtype=torch.int64), document_losses=means)
    assert metrics.document_loss == pytest.approx(case.expected["document"])
    assert metrics.token_loss == pytest.approx(case.expected["token"])


@runs(KIND, "accumulated")
def test_micro_batches_of_different_sizes_add_up_to_one_batch(case):
    batches = [batch_of([documents]) for documents in case.input["micro_batches"]]
    items = sum(len(documents) for documents in case.input["micro_batches"])
    parts = [reduce_token_losses(*batch, reduction="document", num_items=items) for batch in batches]
    assert float(sum(parts)) == pytest.approx(case.expected["document"])


@runs(KIND, "experts_per_document")
def test_objectives_of_sequences_get_every_document_by_itself(case):
    experts = torch.tensor([case.input["experts"]])
    parts = unpack_documents(experts, params_of(case.input["lengths"]))
    counts = [torch.bincount(part, minlength=case.input["num_experts"]).tolist() for part in parts]
    assert counts == case.expected["counts"]


@runs(KIND, "useful_tokens")
def test_padding_in_and_behind_slots_is_no_work(case):
    lengths, row_length = case.input["lengths"], case.input["row_length"]
    plan = plan_rows(lengths, row_length, align=case.input["align"])
    assert plan.num_tokens == case.expected["tokens"]
    assert plan.efficiency == case.expected["efficiency"]
    assert [0, *plan.slot_lengths().cumsum().tolist()] == case.expected["cu_seqlens_padded"]
    doc_ids = torch.zeros(1, row_length, dtype=torch.int64)
    for number, (start, length) in enumerate(zip(plan.slot_starts(), plan.length, strict=True), 1):
        doc_ids[0, start : start + length] = number
    metrics = batch_metrics(packed_seq_params_from_doc_ids(doc_ids))
    assert (metrics.tokens, metrics.slots, metrics.fill) == (case.expected["tokens"], row_length, case.expected["efficiency"])
    assert params_of(lengths).cu_seqlens.tolist() == case.expected["cu_seqlens"]
