"""What is logged is what the batch holds, and adds up over batches and ranks."""

import math

import numpy as np
import pytest
import torch
import torch.multiprocessing

from neatpack import packed_seq_params_from_doc_ids
from neatpack.errors import MetadataError
from neatpack.testing import WORKED_EXAMPLE, random_doc_ids
from neatpack.train import BatchMetrics, batch_metrics, count_targets, gather_metrics, packed_cross_entropy

LABELS = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, -100, 1, 1, -100]])  # the second row's first two documents have no target
LOSSES = torch.tensor([4.0, 1.0, 0.0, 0.0, 3.0])


def params_of(doc_ids):
    return packed_seq_params_from_doc_ids(torch.as_tensor(doc_ids))


def worked():
    return batch_metrics(params_of(WORKED_EXAMPLE), LABELS, document_losses=LOSSES)


def test_the_worked_example_is_counted_right():
    metrics = worked()
    assert (metrics.tokens, metrics.slots, metrics.documents, metrics.longest_document) == (11, 12, 5, 3)
    assert (metrics.target_tokens, metrics.documents_with_targets) == (1 + 2 + 1, 3)
    assert metrics.fill == 11 / 12
    assert metrics.losses.tolist() == [4, 1, 3]
    assert metrics.token_loss == pytest.approx((4 + 2 * 1 + 3) / 4)
    assert metrics.document_loss == pytest.approx(8 / 3)
    assert metrics.loss_quantiles((0.0, 0.5, 1.0)) == [1, 3, 4]


def test_names_are_those_of_the_numbers():
    assert list(worked().as_dict("train/")) == [
        "train/tokens",
        "train/target_tokens",
        "train/documents",
        "train/documents_with_targets",
        "train/longest_document",
        "train/fill",
        "train/token_loss",
        "train/document_loss",
        "train/document_loss_p10",
        "train/document_loss_p50",
        "train/document_loss_p90",
    ]
    assert "token_loss" not in batch_metrics(params_of(WORKED_EXAMPLE)).as_dict()


@pytest.mark.parametrize("seed", range(5))
def test_both_means_are_the_reductions_of_the_loss(seed):
    rng = np.random.default_rng(seed)
    params = params_of(random_doc_ids(rng, 3, 20))
    logits, labels = torch.randn(3, 20, 7, dtype=torch.float64), torch.from_numpy(rng.integers(0, 7, (3, 20)))
    labels[:, 5:9] = -100
    losses = packed_cross_entropy(logits, labels, params, reduction="none")
    metrics = batch_metrics(params, labels, document_losses=losses)
    for reduction, value in (("token", metrics.token_loss), ("document", metrics.document_loss)):
        assert value == pytest.approx(packed_cross_entropy(logits, labels, params, reduction=reduction).item(), abs=1e-12)


def test_f055_a_change_of_reduction_is_not_taken_for_a_leak():
    labels = torch.zeros(1, 9, dtype=torch.int64)
    metrics = batch_metrics(params_of([[1] * 7 + [2] * 2]), labels, document_losses=torch.tensor([1.0, 6.0]))
    assert metrics.token_loss == pytest.approx(1.7142857143)
    assert metrics.document_loss == pytest.approx(3.5)


def test_batches_add_up_to_the_metrics_of_all():
    rng = np.random.default_rng(0)
    doc_ids = torch.from_numpy(random_doc_ids(rng, 4, 20))
    labels, losses = torch.zeros(4, 20, dtype=torch.int64), torch.rand(1000)
    parts, first = [], 0
    for row in range(4):
        params = params_of(doc_ids[[row]])
        count = len(count_targets(labels[[row]], params))
        parts.append(batch_metrics(params, labels[[row]], document_losses=losses[first : first + count]))
        first += count
    whole = batch_metrics(params_of(doc_ids), labels, document_losses=losses[:first])
    assert sum(parts, BatchMetrics()).as_dict() == pytest.approx(whole.as_dict())


def test_nothing_is_nothing():
    empty = BatchMetrics()
    assert empty.fill == 1.0
    assert math.isnan(empty.token_loss)
    assert math.isnan(empty.document_loss)
    assert all(math.isnan(value) for value in empty.loss_quantiles())
    only_padding = batch_metrics(params_of([[0, 0]]), torch.zeros(1, 2, dtype=torch.int64))
    assert (only_padding.tokens, only_padding.documents, only_padding.longest_document, only_padding.fill) == (0, 0, 0, 0.0)


def test_without_boundaries_the_numbers_are_others():
    merged = batch_metrics(params_of([[1] * 5 + [0], [1] * 6]), LABELS)
    assert (merged.documents, merged.target_tokens) == (2, 7)


def test_one_rank_alone_keeps_its_own():
    metrics = worked()
    assert gather_metrics(metrics) is metrics


def _gather(rank, rendezvous, folder):
    torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    own = worked() if rank == 0 else BatchMetrics(tokens=5, slots=8, documents=1, longest_document=5)
    torch.save(gather_metrics(own).as_dict(), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def test_ranks_add_up_and_all_get_the_sum(tmp_path):
    torch.multiprocessing.spawn(_gather, args=(tmp_path / "rendezvous", tmp_path), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert first == second
    assert (first["tokens"], first["documents"], first["longest_document"], first["fill"]) == (16, 6, 5, 16 / 20)
    assert first["document_loss"] == pytest.approx(8 / 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: batch_metrics(p, document_losses=LOSSES), "need the labels"),
        (lambda p: batch_metrics(p, LABELS, document_losses=LOSSES[:4]), r"document_losses has shape \(4,\).*5 documents"),
        (lambda p: batch_metrics(p, LABELS[:, :5]), r"labels has shape \(2, 5\)"),
    ],
)
def test_what_does_not_fit_is_one_clear_error(call, message):
    with pytest.raises(MetadataError, match=message):
        call(params_of(WORKED_EXAMPLE))
