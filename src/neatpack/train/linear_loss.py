"""The output layer and the packed cross-entropy in one: logits exist a chunk at a time, and never all at once.

With `[B, S, D]` states and a `[V, D]` output layer, the logits of a long batch are often its largest tensor. Here a chunk of
tokens is projected, reduced to one loss a token and forgotten; backward projects it again, and adds its gradient to those of
the states and the layer. One more matrix product buys the memory of the logits and of their gradient.

It fits models whose logits are `states @ weight.T (+ bias)` and nothing after that (no soft cap).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from neatpack.errors import MetadataError
from neatpack.packed_seq import PackedSeqParams
from neatpack.train.cross_entropy import (
    check_device,
    check_entries,
    check_floating,
    check_options,
    chunk_gradient_,
    chunk_losses,
    chunk_tokens,
    once,
    pieces,
    wide_dtype,
)
from neatpack.train.labels import IGNORE_INDEX, prediction_targets
from neatpack.train.loss import Reduction, check_reduction, reduce_token_losses

CHUNK_NUMBERS = 2**26
"""Logits worked on at a time when no chunk size is given: larger than for given logits, as each chunk visits the layer."""


def packed_linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    params: PackedSeqParams,
    *,
    bias: torch.Tensor | None = None,
    reduction: Reduction = "token",
    shift: bool = True,
    ignore_index: int = IGNORE_INDEX,
    num_items: float | torch.Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunk_size: int | None = None,
) -> torch.Tensor:
    """Compute `packed_cross_entropy(hidden @ weight.T + bias, ...)` without the logits (form A in).

    Args:
        hidden: `[B, S, D]` states that the output layer reads (`model.model(...).last_hidden_state`).
        weight: `[V, D]` of the output layer (`model.get_output_embeddings().weight`).
        labels: as in `packed_cross_entropy`, and so are the options below.
        params: the batch's metadata.
        bias: `[V]` of the output layer, if it has one.
        reduction: "token", "document", "sqrt_document" or "none".
        shift: whether the labels are aligned.
        ignore_index: the label that does not count.
        num_items: divisor of the whole optimizer step.
        label_smoothing: as in `torch.nn.functional.cross_entropy`.
        z_loss: weight of the squared log-sum-exp.
        chunk_size: tokens projected at a time; None takes as many as make 2**26 logits.

    Returns:
        As `packed_cross_entropy`: float32 (float64 for float64 states), a scalar or `[num_docs]`.

    Raises:
        MetadataError: what `packed_cross_entropy` refuses, or a layer that does not fit the states.
        MetadataTypeError: states or a layer that are not floating, or labels that are no integers.

    Example:
        >>> from neatpack.packed_seq import packed_seq_params_from_doc_ids
        >>> params = packed_seq_params_from_doc_ids(torch.tensor([[1, 1, 2, 2, 2, 0]]))
        >>> packed_linear_cross_entropy(torch.zeros(1, 6, 3), torch.ones(4, 3), torch.zeros(1, 6, dtype=torch.int64), params)
        tensor(1.3863)
    """
    check_reduction(reduction)
    targets = prediction_targets(labels, params, shift=shift, ignore_index=ignore_index)
    losses = linear_token_cross_entropy(
        hidden,
        weight,
        targets,
        bias=bias,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        chunk_size=chunk_size,
    )
    return reduce_token_losses(losses, targets != ignore_index, params, reduction=reduction, num_items=num_items)


def linear_token_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunk_size: int | None = None,
) -> torch.Tensor:
    """Compute `token_cross_entropy(hidden @ weight.T + bias, targets)` without the logits.

    The projection runs in the dtype of the states, or that of autocast where it is on, as the layer itself would.

    Args:
        hidden: `[B, S, D]` states.
        weight: `[V, D]`.
        targets: `[B, S]` integer, what each position must predict.
        bias: `[V]`, if there is one.
        ignore_index: the target that does not count.
        label_smoothing: as in `torch.nn.functional.cross_entropy`.
        z_loss: weight of the squared log-sum-exp.
        chunk_size: tokens projected at a time; None takes as many as make 2**26 logits.

    Returns:
        `[B, S]` losses, float32 (float64 for float64 states), 0 where there is no target. Differentiable once, in states,
        weight and bias.

    Raises:
        MetadataError: shapes or devices that do not fit, a target outside the vocabulary (checked on the CPU in eager mode),
            or options out of range; from backward, if it is asked for second derivatives.
        MetadataTypeError: states, a weight or a bias that are not floating.

    Example:
        >>> linear_token_cross_entropy(torch.zeros(1, 2, 3), torch.ones(4, 3), torch.tensor([[3, -100]]))
        tensor([[1.3863, 0.0000]])
    """
    _check(hidden, weight, targets, bias)
    check_options(label_smoothing, z_loss)
    if targets.device.type == "cpu" and not torch.compiler.is_compiling():
        check_entries(targets, len(weight), ignore_index)
    size = chunk_tokens(len(weight), chunk_size, CHUNK_NUMBERS)
    if torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    options = (ignore_index, label_smoothing, z_loss, size)
    losses: torch.Tensor = _LinearCrossEntropy.apply(hidden, weight, bias, targets.long(), options)  # type: ignore[no-untyped-call]
    return once(losses)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        options: tuple[int, float, float, int],
    ) -> torch.Tensor:
        ignore_index, label_smoothing, z_loss, size = options
        counted = targets != ignore_index
        entries = targets.masked_fill(~counted, 0)
        losses = torch.empty(targets.shape, dtype=wide_dtype(hidden), device=hidden.device)
        lse = torch.empty_like(losses)
        with torch.autocast(hidden.device.type, enabled=False):
            layer = weight.to(hidden.dtype)
            for piece in pieces(targets, size):
                logits = _project(hidden[piece], layer, bias).to(losses.dtype)
                losses[piece], lse[piece] = chunk_losses(logits, entries[piece], label_smoothing, z_loss)
        ctx.save_for_backward(hidden, weight, bias, entries, counted, lse)
        ctx.options = options
        return losses.masked_fill_(~counted, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_losses: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, entries, counted, lse = ctx.saved_tensors
        _, label_smoothing, z_loss, size = ctx.options
        layer = weight.to(hidden.dtype)
        grad_hidden = torch.empty_like(hidden)
        # Added up in float32 over the chunks, whatever the dtype of the layer.
        grad_weight = torch.zeros_like(weight, dtype=lse.dtype) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias, dtype=lse.dtype) if bias is not None and ctx.needs_input_grad[2] else None
        for piece in pieces(entries, size):
            logits = _project(hidden[piece], layer, bias).to(lse.dtype) - lse[piece][..., None]
            chunk_gradient_(logits, lse[piece], entries[piece], grad_losses[piece], label_smoothing, z_loss)
            logits.masked_fill_(~counted[piece][..., None], 0)
            grad = logits.to(hidden.dtype)
            grad_hidden[piece] = grad @ layer
            if grad_weight is not None:
                # States of positions without a target may hold anything; their gradient of zero must not meet it.
                states = hidden[piece].masked_fill(~counted[piece][..., None], 0)
                grad_weight += grad.flatten(0, 1).T @ states.flatten(0, 1)
            if grad_bias is not None:
                grad_bias += logits.sum((0, 1))
        grad_weight = grad_weight if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, grad_bias if grad_bias is None else grad_bias.to(bias.dtype), None, None


def _project(states: torch.Tensor, layer: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.nn.functional.linear(states, layer, bias if bias is None else bias.to(states.dtype))


def _check(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, bias: torch.Tensor | None) -> None:
    for name, tensor in (("hidden", hidden), ("weight", weight), *([] if bias is None else [("bias", bias)])):
        check_floating(name, tensor)
        check_device(name, tensor, targets)
    if hidden.dim() != 3 or hidden.shape[:2] != targets.shape:
        raise MetadataError(
            f"hidden has shape {tuple(hidden.shape)}, targets {tuple(targets.shape)}; expected [B, S, D] and [B, S]."
        )
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[2] or (bias is not None and bias.shape != weight.shape[:1]):
        shape = None if bias is None else tuple(bias.shape)
        raise MetadataError(
            f"an output layer of weight {tuple(weight.shape)} and bias {shape} does not fit states of {hidden.shape[2]} "
            "numbers; expected [V, D] and [V]. Pass model.get_output_embeddings()'s own."
        )
    if not len(weight):
        raise MetadataError(f"an output layer of no entries, weight {tuple(weight.shape)}, predicts nothing.")
