"""Cross-entropy token by token, in chunks: the memory of the logits and their gradient, and one chunk on top.

A plain loss on logits `[B, S, V]` makes a float32 copy, its log-softmax and their gradients: at V = 128k that is many times
the model's activations. Here the float32 work happens on some tokens at a time, in forward and again in backward; what is
kept in between is one number a token (the log-sum-exp). The gradient is written once, in the logits' own dtype.

Arithmetic is float32 (float64 for float64 logits) whatever the dtype of the logits, so bfloat16 logits lose nothing more.
The gradient of position t with target y, smoothing e and z-loss z over V entries is

    (1 + 2 z lse) softmax(x) - (1 - e) onehot(y) - e / V

Positions without a target are filled with zeros, not multiplied by them: whatever their logits hold, NaN included, no loss
and no gradient sees it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from neatpack.errors import MetadataError, MetadataTypeError

CHUNK_NUMBERS = 2**24
"""Logits worked on at a time when no chunk size is given: 64 MiB in float32."""


def token_cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunk_size: int | None = None,
) -> torch.Tensor:
    """Compute the cross-entropy of every position, in chunks.

    Args:
        logits: `[B, S, V]`, any floating dtype and strides.
        targets: `[B, S]` integer, what each position must predict (`prediction_targets` makes it from labels).
        ignore_index: the target that does not count.
        label_smoothing: share of the target's probability that is spread evenly over all V entries, as in
            `torch.nn.functional.cross_entropy`.
        z_loss: weight of the squared log-sum-exp, which keeps logits from drifting; 0 leaves it out.
        chunk_size: tokens worked on at a time; None takes as many as make 2**24 logits.

    Returns:
        `[B, S]` losses, float32 (float64 for float64 logits), 0 where there is no target. Differentiable once.

    Raises:
        MetadataError: shapes or devices that do not fit, a target that is no entry of the vocabulary (checked on the CPU in
            eager mode), or options out of range; from backward, if it is asked for second derivatives.
        MetadataTypeError: logits that are not floating.

    Example:
        >>> token_cross_entropy(torch.zeros(1, 2, 4), torch.tensor([[3, -100]]))
        tensor([[1.3863, 0.0000]])

    Source: the z-loss follows Chowdhery et al., PaLM, section 5.
    """
    _check(logits, targets, ignore_index, label_smoothing, z_loss)
    size = chunk_tokens(logits.shape[-1], chunk_size)
    apply = _TokenCrossEntropy.apply
    losses: torch.Tensor = apply(logits, targets.long(), ignore_index, label_smoothing, z_loss, size)  # type: ignore[no-untyped-call]
    return once(losses)


class _TokenCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        ignore_index: int,
        label_smoothing: float,
        z_loss: float,
        size: int,
    ) -> torch.Tensor:
        counted = targets != ignore_index
        entries = targets.masked_fill(~counted, 0)
        losses = torch.empty(targets.shape, dtype=wide_dtype(logits), device=logits.device)
        lse = torch.empty_like(losses)
        for piece in pieces(targets, size):
            losses[piece], lse[piece] = chunk_losses(logits[piece].to(losses.dtype), entries[piece], label_smoothing, z_loss)
        ctx.save_for_backward(logits, entries, counted, lse)
        ctx.options = (label_smoothing, z_loss, size)
        return losses.masked_fill_(~counted, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_losses: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, entries, counted, lse = ctx.saved_tensors
        label_smoothing, z_loss, size = ctx.options
        grad = torch.empty_like(logits)
        for piece in pieces(entries, size):
            chunk = logits[piece].to(lse.dtype) - lse[piece][..., None]
            chunk_gradient_(chunk, lse[piece], entries[piece], grad_losses[piece], label_smoothing, z_loss)
            grad[piece] = chunk.masked_fill_(~counted[piece][..., None], 0)
        return grad, None, None, None, None, None


def chunk_losses(
    chunk: torch.Tensor, entries: torch.Tensor, label_smoothing: float, z_loss: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses and log-sum-exps `[b, s]` of some positions' logits `[b, s, V]` in the wide dtype."""
    lse = torch.logsumexp(chunk, -1)
    losses = lse - (1 - label_smoothing) * chunk.gather(-1, entries[..., None])[..., 0]
    if label_smoothing:
        losses -= label_smoothing * chunk.mean(-1)
    if z_loss:
        losses += z_loss * lse.square()
    return losses, lse


def chunk_gradient_(
    chunk: torch.Tensor,
    lse: torch.Tensor,
    entries: torch.Tensor,
    grad_losses: torch.Tensor,
    label_smoothing: float,
    z_loss: float,
) -> torch.Tensor:
    """Turn log-probabilities `[b, s, V]` into the gradient of the logits, in place."""
    chunk.exp_()
    if z_loss:
        chunk *= (1 + 2 * z_loss * lse)[..., None]
    chunk.scatter_add_(-1, entries[..., None], torch.full_like(lse, label_smoothing - 1)[..., None])
    if label_smoothing:
        chunk -= label_smoothing / chunk.shape[-1]
    chunk *= grad_losses[..., None]
    return chunk


def once(losses: torch.Tensor) -> torch.Tensor:
    """Refuse a graph of the gradient of `losses`, which torch's `once_differentiable` alone leaves out without a word.

    That one looks at the gradient that comes in; where this one is a constant (a loss times a weight), what goes out counts as
    a constant too, though it depends on the logits: a penalty on the gradient would train nothing.
    """
    if losses.requires_grad and not torch.compiler.is_compiling():
        losses.register_hook(_refuse_graph)  # type: ignore[no-untyped-call]
    return losses


def _refuse_graph(grad_losses: torch.Tensor) -> None:
    if torch.is_grad_enabled():
        raise MetadataError(
            "the packed loss is differentiable once, and backward(create_graph=True) asks for more. For second derivatives "
            "give torch.nn.functional.cross_entropy the targets of prediction_targets(labels, params)."
        )


def wide_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The dtype to add losses up in: float64 for float64, else float32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def chunk_tokens(vocabulary: int, chunk_size: int | None, numbers: int = CHUNK_NUMBERS) -> int:
    """Tokens worked on at a time: as asked, or as many as make `numbers` logits."""
    if chunk_size is not None and (not isinstance(chunk_size, int) or chunk_size < 1):
        raise MetadataError(f"chunk_size is {chunk_size}; work on at least one token at a time, a whole number, or give None.")
    return chunk_size or max(1, numbers // max(vocabulary, 1))


def pieces(tokens: torch.Tensor, size: int) -> Iterator[tuple[slice, slice]]:
    """Cut `[B, S]` into blocks of about `size` tokens that index as views, whatever the strides."""
    batch, length = tokens.shape
    rows, columns = max(1, size // max(length, 1)), max(1, min(length, size))
    for row in range(0, batch, rows):
        for column in range(0, length, columns):
            yield slice(row, row + rows), slice(column, column + columns)


def _check(logits: torch.Tensor, targets: torch.Tensor, ignore_index: int, label_smoothing: float, z_loss: float) -> None:
    check_floating("logits", logits)
    if logits.dim() != 3 or logits.shape[:2] != targets.shape:
        raise MetadataError(
            f"logits have shape {tuple(logits.shape)}, targets {tuple(targets.shape)}; expected [B, S, V] and [B, S]. "
            "Logits of every position are needed: leave logits_to_keep at its default."
        )
    if not logits.shape[-1]:
        raise MetadataError(
            f"logits of shape {tuple(logits.shape)} have no entry to predict: their last axis is the vocabulary."
        )
    check_device("logits", logits, targets)
    check_options(label_smoothing, z_loss)
    # Elsewhere the look would cost a sync, and under torch.compile break the graph.
    if targets.device.type == "cpu" and not torch.compiler.is_compiling():
        check_entries(targets, logits.shape[-1], ignore_index)


def check_floating(name: str, tensor: torch.Tensor) -> None:
    """Refuse what is no tensor of floating numbers."""
    if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
        got = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise MetadataTypeError(f"{name} must be floating, got {got}. Pass the model's outputs, not token ids.")


def check_device(name: str, tensor: torch.Tensor, targets: torch.Tensor) -> None:
    """Refuse a tensor that lies elsewhere than the targets."""
    if tensor.device != targets.device:
        raise MetadataError(
            f"{name} is on {tensor.device}, the labels on {targets.device}. Move the batch to the model: labels.to(device) and "
            "params.to(device)."
        )


def check_options(label_smoothing: float, z_loss: float) -> None:
    """Refuse a smoothing or z-loss weight out of range."""
    if not 0 <= label_smoothing <= 1:
        raise MetadataError(f"label_smoothing is {label_smoothing}; it is a share of probability, from 0 to 1.")
    if not 0 <= z_loss < float("inf"):
        raise MetadataError(f"z_loss is {z_loss}; it is a weight of 0 or more (1e-4 is usual).")


def check_entries(targets: torch.Tensor, vocabulary: int, ignore_index: int) -> None:
    """Refuse targets that are no entry of the vocabulary; names row and position."""
    wrong = (targets != ignore_index) & ((targets < 0) | (targets >= vocabulary))
    if bool(wrong.any()):
        row, position = torch.nonzero(wrong)[0].tolist()
        raise MetadataError(
            f"the target of row {row}, position {position} is {int(targets[row, position])}, no entry of a vocabulary of "
            f"{vocabulary}; only {ignore_index} (ignore_index) marks positions that do not count."
        )
