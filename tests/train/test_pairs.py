"""Preference pairs in one row, and their objective equal to each pair's alone."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from neatpack import packed_seq_params_from_doc_ids
from neatpack.data.groups import pack_groups, pack_pairs
from neatpack.errors import MetadataError, SourceError
from neatpack.testing import WORKED_EXAMPLE
from neatpack.train import PackedCollator, document_logprobs, group_documents, pool_documents, split_pairs

GROUPS = torch.tensor([7, 7, 3, 4, 4])


def worked():
    return packed_seq_params_from_doc_ids(torch.tensor(WORKED_EXAMPLE))


def preference_data(pairs=9, vocabulary=37):
    """Chosen and rejected documents with a shared prompt, which the loss leaves out."""
    rng = np.random.default_rng(0)
    chosen, rejected = [], []
    for _ in range(pairs):
        prompt = rng.integers(0, vocabulary, rng.integers(1, 5)).tolist()
        for documents in (chosen, rejected):
            answer = rng.integers(0, vocabulary, rng.integers(1, 7)).tolist()
            mask = [0] * len(prompt) + [1] * len(answer)
            documents.append({"input_ids": prompt + answer, "loss_mask": mask})
    return chosen, rejected


def batch_of(rows):
    batch = PackedCollator(return_params=True, document_columns=["group_ids"])(rows)
    return batch.pop("group_ids"), batch.pop("labels"), batch.pop("packed_seq_params"), batch


def tiny_model(seed):
    torch.manual_seed(seed)
    size = {"vocab_size": 37, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 256, "initializer_range": 0.5}
    return GPT2LMHeadModel(
        GPT2Config(**size, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, bos_token_id=0, eos_token_id=0)
    ).double()


def preference_loss(margins, reference_margins):
    return -F.logsigmoid(0.5 * (margins - reference_margins))


def packed_margins(model, rows):
    group_ids, labels, params, inputs = batch_of(rows)
    logprobs = document_logprobs(model(**inputs).logits, labels, params).sum
    chosen, rejected = split_pairs(logprobs, group_ids, params)
    order = group_ids[group_documents(group_ids, params)[:, 0]]
    return (chosen - rejected)[torch.argsort(order)]


def margin_alone(model, chosen, rejected):
    def logprob(document):
        ids, start = torch.tensor(document["input_ids"]), document["loss_mask"].index(1)
        logprobs = model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
        return sum(logprobs[t - 1, ids[t]] for t in range(start, len(ids)))

    return logprob(chosen) - logprob(rejected)


@pytest.mark.parametrize("capacity", [24, 48, 200])
def test_a_preference_objective_on_packed_pairs_equals_that_of_pairs_alone(capacity):
    model, reference = tiny_model(0), tiny_model(1)
    chosen, rejected = preference_data()
    rows = pack_pairs(chosen, rejected, capacity)
    with torch.no_grad():
        baseline = packed_margins(reference, rows)
        expected_baseline = torch.stack([margin_alone(reference, *pair) for pair in zip(chosen, rejected, strict=True)])
    packed = preference_loss(packed_margins(model, rows), baseline).mean()
    packed.backward()
    grads = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    margins = torch.stack([margin_alone(model, *pair) for pair in zip(chosen, rejected, strict=True)])
    expected = preference_loss(margins, expected_baseline).mean()
    expected.backward()
    torch.testing.assert_close(packed, expected, rtol=0, atol=1e-12)
    for grad, parameter in zip(grads, model.parameters(), strict=True):
        torch.testing.assert_close(grad, parameter.grad, rtol=0, atol=1e-12)


def test_without_boundaries_the_objective_is_another():
    chosen, rejected = preference_data()
    (row,) = pack_pairs(chosen, rejected, 200)
    model = tiny_model(0)
    group_ids, labels, params, inputs = batch_of([row])
    with torch.no_grad():
        right = split_pairs(document_logprobs(model(**inputs).logits, labels, params).sum, group_ids, params)
        merged = {"input_ids": row["input_ids"], "seq_lengths": [len(row["input_ids"])]}  # one document
        wrong = split_pairs(
            document_logprobs(model(**PackedCollator()([merged])).logits, labels, params).sum, group_ids, params
        )
    assert min((right[0] - wrong[0])[1:].abs().min(), (right[1] - wrong[1]).abs().min()) > 1e-3


def test_pairs_lie_side_by_side_with_the_chosen_first():
    rows = pack_pairs([[1, 1, 1], [3, 3], [5]], [[2, 2], [4, 4, 4], [6]], capacity=7)
    documents = {}
    for row in rows:
        pieces = np.split(row["input_ids"], np.cumsum(row["seq_lengths"])[:-1])
        for group, piece in zip(row["group_ids"].tolist(), pieces, strict=True):
            documents.setdefault(group, []).append(piece.tolist())
    assert documents == {0: [[1, 1, 1], [2, 2]], 1: [[3, 3], [4, 4, 4]], 2: [[5], [6]]}


def test_groups_of_any_size_keep_their_columns():
    groups = [[{"input_ids": [1, 2], "labels": [-100, 2]}] * 3, [{"input_ids": [3], "labels": [3]}]]
    (row,) = pack_groups(groups, 16)
    assert row["labels"].tolist() == [-100, 2, -100, 2, -100, 2, 3]
    assert row["group_ids"].tolist() == [0, 0, 0, 1]


def test_rewards_of_a_pair_are_told_apart_by_the_last_state():
    rows = pack_pairs([[1, 2], [5, 6, 7]], [[3], [8]], capacity=16, strategy="in_order")
    group_ids, _, params, inputs = batch_of(rows)
    hidden = inputs["input_ids"][..., None].double()
    chosen, rejected = split_pairs(pool_documents(hidden, params, "last")[:, 0], group_ids, params)
    assert (chosen.tolist(), rejected.tolist()) == ([2, 7], [3, 8])


def test_f053_pairs_weigh_the_same_whichever_batch_they_fall_in():
    micro = [pack_pairs([[4]], [[0]], 16), pack_pairs([[1], [2], [3]], [[0], [1], [2]], 16)]
    losses = []
    for rows in micro:
        group_ids, _, params, inputs = batch_of(rows)
        rewards = pool_documents(inputs["input_ids"][..., None].double(), params)[:, 0]
        chosen, rejected = split_pairs(rewards, group_ids, params)
        losses.append(chosen - rejected)  # 4, and three times 1
    num_pairs = sum(len(own) for own in losses)
    assert sum(own.sum() / num_pairs for own in losses) == 1.75
    assert sum(own.mean() for own in losses) / 2 == 2.5  # the fault: each batch averaged by itself


def test_a_row_drawn_twice_holds_its_groups_twice():
    params = packed_seq_params_from_doc_ids(torch.tensor([[1, 2], [1, 2]]))
    assert group_documents(torch.tensor([5, 5, 5, 5]), params).tolist() == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("group_ids", "size", "message"),
    [
        ([7, 7, 3, 4], 2, "the batch holds 5 documents"),
        ([7, 7, 3, 4, 4], 2, "group 3 in row 1 has 1 documents, expected 2"),
        ([7, 3, 3, 4, 4], None, "group 4 in row 1 has 2 documents, expected 1"),
        ([7, 3, 3, 4, 4], 2, "group 7 in row 0 has 1 documents, expected 2"),
        ([7, 3, 3, 3, 3], 2, "group 7 in row 0 has 1"),
        ([7, 7, 4, 3, 4], 2, r"group 4 in row 1 has other documents between its own \(numbers \[2, 4\]\)"),
    ],
)
def test_groups_that_are_not_whole_are_refused_by_name(group_ids, size, message):
    with pytest.raises(MetadataError, match=message):
        group_documents(torch.tensor(group_ids), worked(), size=size)


@pytest.mark.parametrize(
    ("group_ids", "size", "message"),
    [
        ([7, 7, 3, 4, 4], 2, "group_ids must be a tensor of integers, one a document, got list"),
        (torch.tensor([7.0, 7.0, 3.0, 4.0, 4.0]), 2, "got torch.float32"),
        (torch.tensor([7, 7, 3, 4, 4]), 0, "size is 0; a group has at least one document"),
    ],
)
def test_what_are_no_group_ids_is_one_clear_error(group_ids, size, message):
    with pytest.raises(MetadataError, match=message):
        group_documents(group_ids, worked(), size=size)


def test_a_pair_parted_over_rows_names_the_other_row():
    params = packed_seq_params_from_doc_ids(torch.tensor([[1], [1]]))
    with pytest.raises(MetadataError, match="group 5 in row 0 has 1 documents, expected 2; row 1 has more of it"):
        group_documents(torch.tensor([5, 5]), params, size=2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pack_pairs([[1]], [[1], [2]], 8), "1 chosen but 2 rejected"),
        (lambda: pack_pairs([[1]], [[]], 8), "document 1 of group 0 has no tokens"),
        (lambda: pack_pairs([[1]], [{"ids": [1]}], 8), "document 1 of group 0 has no input_ids, only ids"),
        (
            lambda: pack_pairs([[1]], [{"input_ids": [1], "labels": [1]}], 8),
            "has columns input_ids, labels; the first has input_ids",
        ),
        (lambda: pack_pairs([{"input_ids": [1, 2], "labels": [1]}], [[1]], 8), "labels must be a flat list of 2 integers"),
        (lambda: pack_pairs([[1.5]], [[1]], 8), "input_ids must be a flat list of 1 integers"),
    ],
)
def test_documents_that_do_not_fit_are_refused_by_name(call, message):
    with pytest.raises(SourceError, match=message):
        call()
