"""Every reduction against sums written out in plain Python floats: no tensor operation of the library has a part in them."""

import math

import numpy as np
import pytest
import torch

from neatpack import packed_seq_params_from_doc_ids
from neatpack.train import (
    PackedCollator,
    batch_metrics,
    count_items,
    count_targets,
    document_logprobs,
    packed_cross_entropy,
    packed_linear_cross_entropy,
)

VOCABULARY = 7
SCALARS = ("token", "document", "sqrt_document")


def random_batch(rng):
    """A document map with padding anywhere (between documents, before them, rows of nothing else), logits, labels."""
    rows, length = int(rng.integers(1, 5)), int(rng.integers(1, 24))
    doc_ids = np.zeros((rows, length), np.int64)
    for row in doc_ids:
        position, number = 0, 0
        while position < length:
            run = int(rng.integers(1, 7))
            if rng.random() < 0.7:
                number += 1
                row[position : position + run] = number
            position += run
    labels = rng.integers(0, VOCABULARY, (rows, length))
    labels[rng.random((rows, length)) < rng.choice([0.0, 0.4, 0.9])] = -100
    if rng.random() < 0.4:  # a document that is all prompt, or a row of such
        labels[rng.integers(rows), : int(rng.integers(1, length + 1))] = -100
    logits = 3 * rng.standard_normal((rows, length, VOCABULARY))
    return doc_ids, logits, labels


def token_loss(logits, target, smoothing, z_loss):
    """Cross-entropy of one position by its definition."""
    top = max(logits)
    lse = top + math.log(sum(math.exp(x - top) for x in logits))
    plain, spread = lse - logits[target], lse - sum(logits) / len(logits)
    return (1 - smoothing) * plain + smoothing * spread + z_loss * lse * lse


def losses_by_document(doc_ids, logits, labels, smoothing=0.0, z_loss=0.0):
    """For every document, top to bottom and left to right, the losses of its targets: position by position."""
    found = []
    for ids, own_logits, own_labels in zip(doc_ids.tolist(), logits.tolist(), labels.tolist(), strict=True):
        for position, number in enumerate(ids):
            if number == 0:
                continue
            if position == 0 or ids[position - 1] != number:
                found.append([])
            elif own_labels[position] != -100:
                found[-1].append(token_loss(own_logits[position - 1], own_labels[position], smoothing, z_loss))
    return found


def reduced(documents, reduction):
    """The table of `neatpack.train.loss`, and the divisor that goes with it."""
    real = [losses for losses in documents if losses]
    if reduction == "token":
        return sum(map(sum, real)), sum(map(len, real))
    if reduction == "document":
        return sum(sum(losses) / len(losses) for losses in real), len(real)
    return sum(math.sqrt(len(own)) * sum(own) / len(own) for own in real), sum(math.sqrt(len(own)) for own in real)


def tensors(doc_ids, logits, labels):
    params = packed_seq_params_from_doc_ids(torch.from_numpy(doc_ids))
    return torch.from_numpy(logits), torch.from_numpy(labels), params


def test_every_reduction_of_random_packings_is_the_sum_written_out():
    rng = np.random.default_rng(20)
    seen = {"between": 0, "no target": 0, "empty": 0}
    for number in range(300):
        smoothing, z_loss = [(0.0, 0.0), (0.15, 0.0), (0.1, 1e-2)][number % 3]
        options = {"label_smoothing": smoothing, "z_loss": z_loss}
        doc_ids, logits, labels = random_batch(rng)
        documents = losses_by_document(doc_ids, logits, labels, smoothing, z_loss)
        given = tensors(doc_ids, logits, labels)
        for reduction in SCALARS:
            total, divisor = reduced(documents, reduction)
            chunk_size = int(rng.integers(1, 40))
            loss = packed_cross_entropy(*given, reduction=reduction, chunk_size=chunk_size, **options)
            assert loss.item() == pytest.approx(total / divisor if divisor else 0.0, abs=1e-12)
            assert count_items(*given[1:], reduction=reduction).item() == pytest.approx(divisor, abs=1e-12)
            share = packed_cross_entropy(*given, reduction=reduction, num_items=divisor + 3, **options)
            assert share.item() == pytest.approx(total / (divisor + 3), abs=1e-12)
        means = [sum(losses) / len(losses) if losses else 0.0 for losses in documents]
        assert packed_cross_entropy(*given, reduction="none", **options).tolist() == pytest.approx(means, abs=1e-12)
        seen["between"] += any("0" in "".join(map(str, row)).strip("0") for row in (doc_ids != 0).astype(int).tolist())
        seen["no target"] += any(not losses for losses in documents)
        seen["empty"] += not any(documents)
    assert min(seen.values()) > 5, seen  # what the packings are about does occur in them


def test_what_is_read_off_the_documents_is_the_sum_written_out():
    rng = np.random.default_rng(21)
    for _ in range(200):
        doc_ids, logits, labels = random_batch(rng)
        documents = losses_by_document(doc_ids, logits, labels)
        given = tensors(doc_ids, logits, labels)
        logprobs = document_logprobs(*given)
        assert logprobs.sum.tolist() == pytest.approx([-sum(losses) for losses in documents], abs=1e-12)
        assert logprobs.tokens.tolist() == [len(losses) for losses in documents]
        assert count_targets(*given[1:]).tolist() == [len(losses) for losses in documents]
        metrics = batch_metrics(given[2], given[1], document_losses=packed_cross_entropy(*given, reduction="none"))
        assert (metrics.tokens, metrics.target_tokens) == ((doc_ids != 0).sum(), sum(map(len, documents)))
        assert metrics.losses.tolist() == pytest.approx([sum(own) / len(own) for own in documents if own], abs=1e-12)


def test_the_fused_loss_of_random_packings_is_the_sum_written_out():
    rng = np.random.default_rng(22)
    for _ in range(100):
        doc_ids, states, labels = random_batch(rng)
        weight = rng.standard_normal((VOCABULARY, VOCABULARY))
        documents = losses_by_document(doc_ids, states @ weight.T, labels)
        hidden, given_labels, params = tensors(doc_ids, states, labels)
        for reduction in SCALARS:
            total, divisor = reduced(documents, reduction)
            loss = packed_linear_cross_entropy(
                hidden, torch.from_numpy(weight), given_labels, params, reduction=reduction, chunk_size=int(rng.integers(1, 40))
            )
            assert loss.item() == pytest.approx(total / divisor if divisor else 0.0, abs=1e-11)


@pytest.mark.parametrize("align", [2, 4, 8])
def test_slots_of_a_collator_change_no_reduction(align):
    """The same rows, their documents side by side and each in a slot of its own: the padding between them never counts."""
    rng = np.random.default_rng(23)
    rows = []
    for _ in range(6):
        sizes = rng.integers(1, 9, rng.integers(1, 6)).tolist()
        ids = rng.integers(0, VOCABULARY, sum(sizes)).tolist()
        rows.append({"input_ids": ids, "seq_lengths": sizes, "loss_mask": (rng.random(sum(sizes)) < 0.7).astype(int).tolist()})
    found = []
    for collate in (PackedCollator(return_params=True), PackedCollator(return_params=True, align=align)):
        batch = collate(rows)
        params, ids = batch["packed_seq_params"], batch["input_ids"]
        table = torch.randn(VOCABULARY, VOCABULARY, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        logits = table[ids].masked_fill((params.doc_ids == 0)[..., None], float("nan"))
        losses = [packed_cross_entropy(logits, batch["labels"], params, reduction=how) for how in SCALARS]
        found.append([torch.stack(losses), packed_cross_entropy(logits, batch["labels"], params, reduction="none")])
    for plain, aligned in zip(*found, strict=True):
        torch.testing.assert_close(aligned, plain, rtol=0, atol=1e-13)
