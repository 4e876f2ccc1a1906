"""The output layer fused with the loss gives what the two give apart, and makes no logits."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from neatpack import packed_seq_params_from_doc_ids
from neatpack.errors import MetadataError
from neatpack.testing import random_doc_ids
from neatpack.train import packed_cross_entropy, packed_linear_cross_entropy

REDUCTIONS = ["token", "document", "sqrt_document", "none"]
VOCABULARY, WIDTH = 29, 5


def packing(seed, dtype=torch.float64, with_bias=True):
    rng = np.random.default_rng(seed)
    params = packed_seq_params_from_doc_ids(torch.from_numpy(random_doc_ids(rng, 3, 21)))
    torch.manual_seed(seed)
    hidden = torch.randn(3, 21, WIDTH, dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDTH, dtype=dtype, requires_grad=True)
    bias = torch.randn(VOCABULARY, dtype=dtype, requires_grad=True) if with_bias else None
    labels = torch.from_numpy(rng.integers(0, VOCABULARY, (3, 21)))
    labels[torch.from_numpy(rng.random((3, 21)) < 0.3)] = -100
    return hidden, weight, bias, labels, params


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 1e-3}])
def test_fused_loss_and_gradients_equal_those_of_the_logits(reduction, with_bias, options):
    hidden, weight, bias, labels, params = packing(0, with_bias=with_bias)
    leaves = [hidden, weight, *([bias] if with_bias else [])]
    fused = packed_linear_cross_entropy(hidden, weight, labels, params, bias=bias, reduction=reduction, chunk_size=8, **options)
    apart = packed_cross_entropy(F.linear(hidden, weight, bias), labels, params, reduction=reduction, **options)
    torch.testing.assert_close(fused, apart, rtol=0, atol=1e-12)
    direction = torch.randn_like(apart)
    for one, other in zip(
        torch.autograd.grad((fused * direction).sum(), leaves),
        torch.autograd.grad((apart * direction).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_without_boundaries_the_fused_loss_is_another():
    hidden, weight, bias, labels, params = packing(1)
    merged = packed_seq_params_from_doc_ids(torch.ones_like(params.doc_ids))
    losses = [packed_linear_cross_entropy(hidden, weight, labels, own, bias=bias) for own in (params, merged)]
    assert abs(losses[0] - losses[1]) > 1e-3


class LargestTensor(TorchDispatchMode):
    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple) else (result,):
            self.numbers = max(self.numbers, tensor.numel() if isinstance(tensor, torch.Tensor) else 0)
        return result


def test_no_tensor_is_ever_larger_than_a_chunk_of_logits():
    hidden, weight, bias, labels, params = packing(2)
    with LargestTensor() as made:
        packed_linear_cross_entropy(hidden, weight, labels, params, bias=bias, chunk_size=21).backward()
    assert made.numbers == 21 * VOCABULARY
    with LargestTensor() as made:
        packed_cross_entropy(F.linear(hidden, weight, bias), labels, params, chunk_size=21).backward()
    assert made.numbers == 3 * 21 * VOCABULARY


def test_a_frozen_layer_gets_no_gradient():
    hidden, weight, bias, labels, params = packing(3)
    weight.requires_grad_(False)
    bias.requires_grad_(False)
    packed_linear_cross_entropy(hidden, weight, labels, params, bias=bias).backward()
    assert weight.grad is None
    assert hidden.grad.abs().sum() > 0


def test_a_penalty_on_the_gradient_is_refused_not_lost():
    hidden, weight, bias, labels, params = packing(3)
    loss = packed_linear_cross_entropy(hidden, weight, labels, params, bias=bias)
    with pytest.raises(MetadataError, match="differentiable once"):
        loss.backward(create_graph=True)


def test_states_without_a_target_may_hold_anything():
    hidden, weight, bias, labels, params = packing(4)
    clean = packed_linear_cross_entropy(hidden, weight, labels, params, bias=bias)
    (expected,) = torch.autograd.grad(clean, weight)
    spoiled = hidden.detach().clone()
    spoiled[params.doc_ids == 0] = float("nan")
    assert (params.doc_ids == 0).any()
    spoiled.requires_grad_()
    loss = packed_linear_cross_entropy(spoiled, weight, labels, params, bias=bias)
    loss.backward()
    assert loss == clean
    assert torch.equal(weight.grad, expected)
    assert torch.isfinite(spoiled.grad).all()


@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_gives_what_the_layer_would(autocast):
    hidden, weight, bias, labels, params = packing(5, torch.float32 if autocast else torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        fused = packed_linear_cross_entropy(hidden, weight, labels, params, bias=bias, chunk_size=10)
        apart = packed_cross_entropy(F.linear(hidden, weight, bias), labels, params)
    assert fused.dtype == torch.float32
    torch.testing.assert_close(fused, apart, rtol=0, atol=1e-5)
    leaves = [hidden, weight, bias]
    for one, other in zip(torch.autograd.grad(fused, leaves), torch.autograd.grad(apart, leaves), strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(7, 4)}, r"weight \(7, 4\) and bias None does not fit states of 5"),
        ({"bias": torch.zeros(3)}, r"bias \(3,\) does not fit"),
        ({"hidden": torch.zeros(3, 20, 5)}, r"hidden has shape \(3, 20, 5\)"),
        ({"weight": torch.zeros(7, 5)}, "no entry of a vocabulary of 7"),
        ({"reduction": "mean"}, "unknown reduction"),
        ({"hidden": torch.zeros(3, 21, 5, dtype=torch.int64)}, "hidden must be floating, got torch.int64"),
        ({"weight": torch.zeros(7, 5, device="meta")}, "weight is on meta, the labels on cpu"),
        ({"weight": torch.zeros(0, 5), "labels": torch.full((3, 21), -100)}, "an output layer of no entries"),
        ({"num_items": 0}, "num_items is 0, but this batch alone adds"),
    ],
)
def test_what_does_not_fit_is_one_clear_error(change, message):
    hidden, weight, _, labels, params = packing(0, torch.float32)
    given = {"hidden": hidden, "weight": weight, "labels": labels, "params": params, "bias": None}
    with pytest.raises(MetadataError, match=message):
        packed_linear_cross_entropy(**{**given, **change})
