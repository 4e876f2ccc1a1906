"""The loss of a packed batch is that of its documents alone: values, gradients, every reduction, any split of the batch."""

import itertools
import math

import numpy as np
import pytest
import torch
import torch.multiprocessing
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from neatpack import packed_seq_params_from_doc_ids
from neatpack.convert.doc_map import doc_ids_from_seq_lengths
from neatpack.errors import MetadataError
from neatpack.testing import WORKED_EXAMPLE, random_doc_ids
from neatpack.train.cross_entropy import token_cross_entropy
from neatpack.train.documents import unpack_documents
from neatpack.train.labels import prediction_targets, shift_within_documents
from neatpack.train.loss import (
    count_items,
    document_logprobs,
    packed_cross_entropy,
    reduce_token_losses,
    target_weights,
)

SCALARS = ["token", "document", "sqrt_document"]
VOCABULARY = 13


def params_of(doc_ids):
    return packed_seq_params_from_doc_ids(torch.as_tensor(doc_ids))


def packing(seed, batch=3, length=23, masked=0.3):
    """Logits, labels with some prompts masked, metadata."""
    rng = np.random.default_rng(seed)
    params = params_of(random_doc_ids(rng, batch, length))
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(batch, length, VOCABULARY, dtype=torch.float64, generator=generator)
    labels = torch.from_numpy(rng.integers(0, VOCABULARY, (batch, length)))
    labels[torch.from_numpy(rng.random((batch, length)) < masked)] = -100
    return logits.requires_grad_(), labels, params


def alone(logits, labels, params, *, label_smoothing=0.0, z_loss=0.0):
    """Sum of token losses and number of targets of every document, each cut out and given to torch's own loss."""
    found = []
    for own_logits, own_labels in zip(unpack_documents(logits, params), unpack_documents(labels, params), strict=True):
        own_logits, targets = own_logits[:-1], own_labels[1:]
        total = F.cross_entropy(own_logits, targets, reduction="sum", label_smoothing=label_smoothing)
        total = total + z_loss * own_logits[targets != -100].logsumexp(-1).square().sum()
        found.append((total, int((targets != -100).sum())))
    return found


def reduced_by_definition(found, reduction):
    found = [(total / count, count) for total, count in found if count]
    if reduction == "token":
        return sum(mean * n for mean, n in found) / sum(n for _, n in found)
    if reduction == "document":
        return sum(mean for mean, _ in found) / len(found)
    return sum(math.sqrt(n) * mean for mean, n in found) / sum(math.sqrt(n) for _, n in found)


def gradient(value, leaf):
    (grad,) = torch.autograd.grad(value, leaf)
    return grad


@pytest.mark.parametrize("reduction", SCALARS)
@pytest.mark.parametrize(("label_smoothing", "z_loss"), [(0.0, 0.0), (0.1, 0.0), (0.0, 1e-2), (0.2, 1e-3)])
@pytest.mark.parametrize("seed", range(5))
def test_loss_and_gradient_equal_those_of_documents_alone(seed, label_smoothing, z_loss, reduction):
    logits, labels, params = packing(seed)
    options = {"label_smoothing": label_smoothing, "z_loss": z_loss}
    loss = packed_cross_entropy(logits, labels, params, reduction=reduction, chunk_size=7, **options)
    expected = reduced_by_definition(alone(logits, labels, params, **options), reduction)
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(gradient(loss, logits), gradient(expected, logits), rtol=0, atol=1e-14)


@pytest.mark.parametrize("reduction", SCALARS)
def test_without_boundaries_the_loss_is_another(reduction):
    logits, labels, params = packing(0, masked=0.0)
    merged = params_of(torch.ones_like(params.doc_ids))
    leaky = packed_cross_entropy(logits, labels, merged, reduction=reduction)
    assert abs(leaky - packed_cross_entropy(logits, labels, params, reduction=reduction)) > 1e-3


@pytest.mark.parametrize("seed", range(5))
def test_no_reduction_gives_every_document_its_own_mean(seed):
    logits, labels, params = packing(seed)
    found = alone(logits, labels, params)
    losses = packed_cross_entropy(logits, labels, params, reduction="none")
    expected = torch.stack([total / max(count, 1) for total, count in found])
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-12)
    weights = torch.randn(len(found), dtype=torch.float64)
    torch.testing.assert_close(gradient(losses @ weights, logits), gradient(expected @ weights, logits), rtol=0, atol=1e-14)


@pytest.mark.parametrize("chunk_size", [1, 2, 6, 7, 23, 46, 1000, None])
def test_the_chunk_size_changes_nothing(chunk_size):
    logits, labels, params = packing(1)
    loss = packed_cross_entropy(logits, labels, params, chunk_size=chunk_size, label_smoothing=0.1, z_loss=1e-3)
    whole = packed_cross_entropy(logits, labels, params, chunk_size=10**9, label_smoothing=0.1, z_loss=1e-3)
    assert loss == whole
    assert torch.equal(gradient(loss, logits), gradient(whole, logits))


def test_shifted_labels_without_a_shift_give_the_same_loss():
    logits, labels, params = packing(2)
    shifted = shift_within_documents(labels, params)
    for reduction in (*SCALARS, "none"):
        aligned = packed_cross_entropy(logits, labels, params, reduction=reduction)
        assert torch.equal(packed_cross_entropy(logits, shifted, params, reduction=reduction, shift=False), aligned)
    assert count_items(shifted, params, shift=False) == count_items(labels, params)
    twice = packed_cross_entropy(logits, shifted, params)  # the fault: shifted labels to a loss that shifts
    assert abs(twice - packed_cross_entropy(logits, labels, params)) > 1e-3


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_multi_token_prediction_asks_each_depth_within_the_document(depth):
    logits, labels, params = packing(3, masked=0.0)
    loss = packed_cross_entropy(logits, shift_within_documents(labels, params, depth), params, shift=False)
    total, count = 0.0, 0
    for own_logits, own_labels in zip(unpack_documents(logits, params), unpack_documents(labels, params), strict=True):
        if len(own_labels) > depth:
            total = total + F.cross_entropy(own_logits[:-depth], own_labels[depth:], reduction="sum")
            count += len(own_labels) - depth
    torch.testing.assert_close(loss, total / count, rtol=0, atol=1e-12)


@pytest.mark.parametrize("reduction", SCALARS)
def test_padding_and_prompts_never_count_whatever_their_logits_hold(reduction):
    params = params_of(WORKED_EXAMPLE)
    logits = torch.randn(2, 6, VOCABULARY, dtype=torch.float64)
    labels = torch.randint(0, VOCABULARY, (2, 6))
    labels[1, 1:3] = -100  # a document that is all prompt
    clean = packed_cross_entropy(logits, labels, params, reduction=reduction)
    uncounted = prediction_targets(labels, params) == -100
    assert uncounted.sum() == 7
    logits[uncounted] = float("nan")
    labels[0, 5] = 3  # a label on a pad
    logits.requires_grad_()
    loss = packed_cross_entropy(logits, labels, params, reduction=reduction)
    assert loss == clean
    grad = gradient(loss, logits)
    assert (grad[uncounted] == 0).all()
    assert torch.isfinite(grad).all()


@pytest.mark.parametrize("reduction", [*SCALARS, "none"])
@pytest.mark.parametrize("num_items", [None, 0, 5])
def test_a_batch_without_targets_gives_zero_and_gradients_of_zero(reduction, num_items):
    if reduction == "none" and num_items is not None:
        return
    logits = torch.randn(2, 6, VOCABULARY, requires_grad=True)
    labels = torch.full((2, 6), -100)
    loss = packed_cross_entropy(logits, labels, params_of(WORKED_EXAMPLE), reduction=reduction, num_items=num_items)
    assert (loss == 0).all()
    assert (gradient(loss.sum(), logits) == 0).all()
    assert torch.isnan(F.cross_entropy(logits.flatten(0, 1), labels.flatten()))  # what torch's own mean gives


def test_a_document_without_targets_has_no_weight():
    logits, labels, params = packing(4, masked=0.0)
    found = alone(logits, labels, params)
    labels[0] = -100
    fewer = alone(logits, labels, params)
    assert sum(count > 0 for _, count in fewer) < sum(count > 0 for _, count in found)
    for reduction in SCALARS:
        expected = reduced_by_definition(fewer, reduction)
        torch.testing.assert_close(packed_cross_entropy(logits, labels, params, reduction=reduction), expected)


@pytest.mark.parametrize("reduction", SCALARS)
@pytest.mark.parametrize("rows_a_batch", [1, 2, 3])
def test_any_split_of_the_batch_adds_up_to_the_same_loss_and_gradient(reduction, rows_a_batch):
    logits, labels, params = packing(5, batch=6)
    whole = packed_cross_entropy(logits, labels, params, reduction=reduction)
    splits = [slice(first, first + rows_a_batch) for first in range(0, 6, rows_a_batch)]
    micro = [(logits[rows], labels[rows], params_of(params.doc_ids[rows])) for rows in splits]
    num_items = sum(count_items(own_labels, own, reduction=reduction) for _, own_labels, own in micro)
    total = sum(packed_cross_entropy(*batch, reduction=reduction, num_items=num_items) for batch in micro)
    torch.testing.assert_close(total, whole, rtol=0, atol=1e-13)
    torch.testing.assert_close(gradient(total, logits), gradient(whole, logits), rtol=0, atol=1e-14)


@pytest.mark.parametrize("reduction", SCALARS)
def test_a_mean_of_the_batches_means_is_not_the_mean(reduction):
    logits, labels, params = packing(5, batch=6)
    means = [
        packed_cross_entropy(logits[[r]], labels[[r]], params_of(params.doc_ids[[r]]), reduction=reduction) for r in range(6)
    ]
    assert abs(sum(means) / 6 - packed_cross_entropy(logits, labels, params, reduction=reduction)) > 1e-3


@pytest.mark.parametrize("reduction", SCALARS)
def test_weights_made_before_sharding_make_the_tokens_of_a_document_countable_on_any_rank(reduction):
    logits, labels, params = packing(6)
    weights = target_weights(labels, params, reduction=reduction, dtype=torch.float64)
    targets = prediction_targets(labels, params)
    shards = [slice(0, 8), slice(8, 16), slice(16, 23)]  # documents straddle them
    total = sum((token_cross_entropy(logits[:, s], targets[:, s]) * weights[:, s]).sum() for s in shards)
    whole = packed_cross_entropy(logits, labels, params, reduction=reduction)
    torch.testing.assert_close(total / count_items(labels, params, reduction=reduction), whole, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_logits_lose_nothing_but_their_own_rounding(dtype):
    logits, labels, params = packing(7)
    narrow = logits.detach().to(dtype).requires_grad_()
    loss = packed_cross_entropy(narrow, labels, params, reduction="document")
    assert loss.dtype == torch.float32
    same = narrow.detach().double().requires_grad_()
    expected = packed_cross_entropy(same, labels, params, reduction="document")
    torch.testing.assert_close(loss.double(), expected, rtol=0, atol=1e-6)
    grad = gradient(loss, narrow)
    assert grad.dtype == dtype
    torch.testing.assert_close(grad.double(), gradient(expected, same), rtol=torch.finfo(dtype).eps, atol=1e-7)


def test_gradients_agree_with_finite_differences():
    logits, labels, params = packing(8, batch=1, length=9)
    for reduction in (*SCALARS, "none"):
        assert torch.autograd.gradcheck(
            lambda x, how=reduction: packed_cross_entropy(x, labels, params, reduction=how, label_smoothing=0.1, z_loss=1e-2),
            (logits,),
        )


def test_a_penalty_on_the_gradient_is_refused_not_lost():
    logits, labels, params = packing(8)
    loss = packed_cross_entropy(logits, labels, params)
    with pytest.raises(MetadataError, match=r"differentiable once.*create_graph=True.*prediction_targets"):
        torch.autograd.grad(loss, logits, create_graph=True)
    targets = prediction_targets(labels, params)
    twice = F.cross_entropy(logits.flatten(0, 1), targets.flatten())  # the way out that the error names
    (grad,) = torch.autograd.grad(twice, logits, create_graph=True)
    assert gradient(grad.square().sum(), logits).abs().max() > 0
    torch.testing.assert_close(grad, gradient(packed_cross_entropy(logits, labels, params), logits), rtol=0, atol=1e-14)


def test_strided_logits_are_read_where_they_lie():
    logits, labels, params = packing(9)
    loss = packed_cross_entropy(logits, labels, params, chunk_size=5)
    expected = gradient(loss, logits)
    wide = torch.zeros(3, 30, VOCABULARY + 4, dtype=torch.float64)
    wide[:, :23, :VOCABULARY] = logits.detach()
    for view in (wide[:, :23, :VOCABULARY], logits.detach().transpose(0, 1).contiguous().transpose(0, 1)):
        assert not view.is_contiguous()
        view.requires_grad_()
        strided = packed_cross_entropy(view, labels, params, chunk_size=5)
        assert strided == loss
        assert torch.equal(gradient(strided, view), expected)


@pytest.mark.parametrize("shape", [(0, 6), (2, 0), (1, 1)])
def test_empty_batches_lose_nothing(shape):
    logits = torch.randn(*shape, VOCABULARY, requires_grad=True)
    params = params_of(torch.ones(shape, dtype=torch.int64))
    labels = torch.zeros(shape, dtype=torch.int64)
    loss = packed_cross_entropy(logits, labels, params, reduction="document")
    assert loss == 0
    assert gradient(loss, logits).shape == logits.shape


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # the tracer's own doing
@pytest.mark.parametrize("num_items", [None, 7, torch.tensor(7.5)])
def test_the_loss_compiles_to_one_graph(num_items):
    logits, labels, params = packing(10)
    compiled = torch.compile(packed_cross_entropy, backend="aot_eager", fullgraph=True)
    options = {"reduction": "sqrt_document", "num_items": num_items}
    loss = compiled(logits, labels, params, **options)
    expected = packed_cross_entropy(logits, labels, params, **options)
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(gradient(loss, logits), gradient(expected, logits), rtol=0, atol=1e-14)


def test_logprobs_of_documents_equal_those_of_documents_alone():
    logits, labels, params = packing(11)
    found = alone(logits, labels, params)
    logprobs = document_logprobs(logits, labels, params, chunk_size=5)
    expected = -torch.stack([total for total, _ in found])
    assert logprobs.tokens.tolist() == [count for _, count in found]
    torch.testing.assert_close(logprobs.sum, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(logprobs.mean, expected / logprobs.tokens.clamp(min=1), rtol=0, atol=1e-12)
    torch.testing.assert_close(gradient(logprobs.sum.sum(), logits), gradient(expected.sum(), logits), rtol=0, atol=1e-13)


def test_a_document_moves_its_own_logprob_only_and_without_boundaries_another():
    logits, labels, params = packing(12, batch=1, masked=0.0)
    first_end = int(params.cu_seqlens[1])
    moved = logits.detach().clone()
    moved[0, :first_end] = torch.randn(first_end, VOCABULARY, dtype=torch.float64)
    before, after = (document_logprobs(x, labels, params).sum for x in (logits, moved))
    assert (before[1:] == after[1:]).all()
    labels_moved = labels.clone()
    labels_moved[0, first_end] = (labels[0, first_end] + 1) % VOCABULARY  # the first token of document 1
    assert (document_logprobs(logits, labels_moved, params).sum == before).all()
    merged = params_of(torch.ones_like(params.doc_ids))
    assert (document_logprobs(logits, labels_moved, merged).sum != document_logprobs(logits, labels, merged).sum).all()


class LargestFloat32(TorchDispatchMode):
    """The most float32 numbers that any tensor made meanwhile holds."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32:
                self.numbers = max(self.numbers, tensor.numel())
        return result


@pytest.mark.parametrize("reduction", [*SCALARS, "none"])
def test_no_float32_tensor_is_ever_larger_than_a_chunk(reduction):
    params = params_of(random_doc_ids(np.random.default_rng(0), 4, 64))
    logits = torch.randn(4, 64, 500, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, 500, (4, 64))
    with LargestFloat32() as made:
        loss = packed_cross_entropy(
            logits, labels, params, reduction=reduction, label_smoothing=0.1, z_loss=1e-4, chunk_size=16
        )
        loss.sum().backward()
    assert made.numbers == 16 * 500
    with LargestFloat32() as made:
        F.cross_entropy(logits.float().flatten(0, 1), labels.flatten()).backward()
    assert made.numbers == 4 * 64 * 500  # the whole, as a plain loss makes it


class Bigram(torch.nn.Module):
    """Logits from each token alone, so that no attention has a part in the comparison."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(VOCABULARY, 8, dtype=torch.float64)
        self.head = torch.nn.Linear(8, VOCABULARY, dtype=torch.float64)

    def forward(self, ids):
        return self.head(self.embed(ids))


def _train_on_rank(rank, rendezvous, folder):
    torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    model = torch.nn.parallel.DistributedDataParallel(Bigram())
    own_batches = _batches_of_rank(rank)
    found = {}
    for reduction, silent in itertools.product(SCALARS, [False, True]):
        own = [(labels.masked_fill(torch.tensor(silent and rank == 1), -100), params) for labels, params in own_batches]
        model.zero_grad()
        num_items = sum(count_items(*batch, reduction=reduction) for batch in own)
        torch.distributed.all_reduce(num_items)
        total = 0.0
        for number, (own_labels, own_params) in enumerate(own):
            model.require_backward_grad_sync = number == len(own) - 1
            logits = model(own_labels.clamp(min=0))
            loss = packed_cross_entropy(logits, own_labels, own_params, reduction=reduction, num_items=num_items)
            (2 * loss).backward()
            total += loss.item()
        found[reduction, silent] = (total, [parameter.grad.clone() for parameter in model.parameters()])
    torch.save(found, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def _batches_of_rank(rank):
    _, labels, params = packing(5, batch=6)
    return [
        (labels[rows], params_of(params.doc_ids[rows]))
        for rows in ([slice(0, 1), slice(1, 2)], [slice(2, 5), slice(5, 6)])[rank]
    ]


def test_two_ranks_with_accumulation_take_the_step_of_all_their_documents(tmp_path):
    torch.multiprocessing.spawn(_train_on_rank, args=(tmp_path / "rendezvous", tmp_path), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    for reduction, silent in itertools.product(SCALARS, [False, True]):
        _, labels, params = packing(5, batch=6)
        labels[2:] = -100 if silent else labels[2:]  # the second rank has no target at all
        model = Bigram()
        loss = reduced_by_definition(alone(model(labels.clamp(min=0)), labels, params), reduction)
        loss.backward()
        assert first[reduction, silent][0] + second[reduction, silent][0] == pytest.approx(loss.item(), abs=1e-12)
        for parameter, grad in zip(model.parameters(), first[reduction, silent][1], strict=True):
            torch.testing.assert_close(grad, parameter.grad, rtol=0, atol=1e-13)


# The faults that packed training is known for, as data: token losses made to order.


def logits_with_losses(documents):
    """Two-entry logits whose cross-entropy against label 0 is each number given; a first token goes before each document."""
    rows = [[x for losses in row for x in [0.0, *losses]] for row in documents]
    width = max(map(len, rows))
    losses = torch.tensor([row + [0.0] * (width - len(row)) for row in rows], dtype=torch.float64)
    params = packed_seq_params_from_doc_ids(doc_ids_from_seq_lengths([[len(d) + 1 for d in row] for row in documents], width))
    ahead = torch.roll(losses, -1, 1)  # position t predicts token t + 1
    logits = torch.stack([torch.zeros_like(ahead), torch.log(torch.expm1(ahead.clamp(min=1e-9)))], -1)
    return logits, torch.zeros(losses.shape, dtype=torch.int64), params


def reduced(documents, reduction):
    return packed_cross_entropy(*logits_with_losses(documents), reduction=reduction).item()


def test_f052_a_mean_over_documents_counts_documents_not_rows():
    documents = [[[1, 1, 1, 1], [3]], [[2, 2]]]
    assert reduced(documents, "document") == pytest.approx(2.0)
    assert reduced(documents, "token") == pytest.approx(1.5714285714)
    rows = [packed_cross_entropy(*logits_with_losses([row])).item() for row in documents]
    assert sum(rows) / 2 == pytest.approx(1.7)  # the fault: a mean over rows
    assert reduced([*documents, []], "document") == pytest.approx(2.0)  # an empty row does not count


def test_f053_documents_weigh_the_same_whichever_batch_they_fall_in():
    micro = [logits_with_losses([[[4]]]), logits_with_losses([[[1], [1], [1]]])]
    num_items = sum(count_items(labels, params, reduction="document") for _, labels, params in micro)
    total = sum(packed_cross_entropy(*batch, reduction="document", num_items=num_items) for batch in micro)
    assert total.item() == pytest.approx(1.75)
    wrong = sum(packed_cross_entropy(*batch, reduction="document") for batch in micro) / 2
    assert wrong.item() == pytest.approx(2.5)


def test_f054_a_mean_over_documents_is_not_a_mean_over_tokens():
    documents = [[[1, 1, 1], [5]]]
    assert reduced(documents, "document") == pytest.approx(3.0)
    assert reduced(documents, "token") == pytest.approx(2.0)


def test_f055_both_means_are_to_be_had_so_that_a_change_of_reduction_is_not_taken_for_a_leak():
    documents = [[[1] * 6, [6]]]
    assert reduced(documents, "token") == pytest.approx(1.7142857143)
    assert reduced(documents, "document") == pytest.approx(3.5)
    root = math.sqrt(6)
    assert reduced(documents, "sqrt_document") == pytest.approx((root * 1 + 1 * 6) / (root + 1))


@pytest.mark.parametrize("num_items", [5, 5.0, np.int64(5), torch.tensor(5), torch.tensor([5.0]), torch.tensor([[5]])])
def test_every_form_of_one_number_divides_alike_and_gives_a_scalar(num_items):
    logits, labels, params = packing(13)
    loss = packed_cross_entropy(logits, labels, params, num_items=num_items)
    assert loss.shape == ()
    assert loss == packed_cross_entropy(logits, labels, params, num_items=5)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
@pytest.mark.parametrize("reduction", SCALARS)
def test_labels_of_any_integer_type_count_the_same(dtype, reduction):
    logits, labels, params = packing(14, masked=0.0)
    assert count_items(labels.to(dtype), params, reduction=reduction) == count_items(labels, params, reduction=reduction)
    narrow = packed_cross_entropy(logits, labels.to(dtype), params, reduction=reduction)
    assert narrow == packed_cross_entropy(logits, labels, params, reduction=reduction)


def test_any_objective_a_token_is_reduced_as_documents_count():
    params, counted = params_of(WORKED_EXAMPLE), torch.tensor([[1, 0, 1, 1, 0, 0], [0, 1, 0, 1, 1, 0]]).bool()
    values = torch.arange(12.0).reshape(2, 6)
    values[~counted] = float("inf")
    assert reduce_token_losses(values, counted, params, reduction="none").tolist() == [0, 2.5, 0, 7, 9.5]
    assert reduce_token_losses(values, counted, params, reduction="document").item() == pytest.approx(19 / 4)
