"""Direct preference optimisation on packed pairs, in plain PyTorch: the loss and gradients of answers run alone.

DPO compares the log-probability of two answers to one prompt, under the model and under a frozen reference. Packed:

    pack_groups            a pair in one row, side by side, chosen first; prompts masked out by `loss_mask`
    PackedCollator         boundaries, labels, and the number of each document's pair
    document_logprobs      one sum a document, not a row
    split_pairs            chosen, rejected

TRL's `DPOTrainer` adds up log-probabilities over rows inside a private method, so it cannot be given packed rows without
patching it; `trl_reward.py` shows the trainer that can.

    python examples/dpo.py
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from ingredients import library_pairs, small_llama
from torch.nn.functional import logsigmoid

import neatpack
from neatpack.data.groups import pack_groups
from neatpack.train import document_logprobs, split_pairs

BETA = 0.1
PAIRS = 16
END = 256  # end of sequence

Document = dict[str, list[int]]
Batch = dict[str, Any]


def answer(prompt: Sequence[int], reply: Sequence[int]) -> Document:
    """One document of a pair; only the reply counts."""
    return {"input_ids": [*prompt, *reply], "loss_mask": [0] * len(prompt) + [1] * len(reply)}


def byte_pair(texts: dict[str, str]) -> tuple[Document, Document]:
    """The chosen and the rejected answer, a token a byte."""
    prompt, chosen, rejected = (texts[name].encode() for name in ("prompt", "chosen", "rejected"))
    return answer(prompt, [*chosen, END]), answer(prompt, [*rejected, END])


def collate(pairs: list[tuple[Document, Document]]) -> Batch:
    """The pairs in as few rows of 1024 tokens as they fit in."""
    rows = pack_groups(pairs, capacity=1024)
    return neatpack.PackedCollator(document_columns=["group_ids"], return_params=True)(rows)


def dpo_loss(model: torch.nn.Module, reference: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Mean over the pairs of a batch."""
    inputs = dict(batch)
    labels, group_ids, params = (inputs.pop(name) for name in ("labels", "group_ids", "packed_seq_params"))
    now = document_logprobs(model(**inputs).logits, labels, params).sum
    with torch.no_grad():
        before = document_logprobs(reference(**inputs).logits, labels, params).sum
    chosen, rejected = split_pairs(now - before, group_ids, params)
    return -logsigmoid(BETA * (chosen - rejected)).mean()


def logprob_alone(model: torch.nn.Module, document: Document) -> torch.Tensor:
    """The sum of an answer's log-probabilities with nothing packed, written out."""
    ids = torch.tensor([document["input_ids"]])
    logprobs = model(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(-1, ids[0, 1:, None])[-sum(document["loss_mask"]) :].sum()


def unpacked_loss(model: torch.nn.Module, reference: torch.nn.Module, pairs: list[tuple[Document, Document]]) -> torch.Tensor:
    """`dpo_loss`, every answer run alone."""
    margins = []
    for pair in pairs:
        chosen, rejected = (logprob_alone(model, one) - logprob_alone(reference, one).detach() for one in pair)
        margins.append(chosen - rejected)
    return -logsigmoid(BETA * torch.stack(margins)).mean()


def compare(model: torch.nn.Module, reference: torch.nn.Module, pairs: list[tuple[Document, Document]]) -> None:
    """Print how far loss and gradients of the packed batch are from those of answers run alone."""
    losses = [dpo_loss(model, reference, collate(pairs)), unpacked_loss(model, reference, pairs)]
    packed, alone = (torch.autograd.grad(loss, list(model.parameters())) for loss in losses)
    off = max((a - b).abs().max().item() for a, b in zip(packed, alone, strict=True))
    largest = max(gradient.abs().max().item() for gradient in alone)
    print(f"packed against alone: loss differs by {(losses[0] - losses[1]).abs().item():.1e}, ", end="")
    print(f"gradients by {off:.1e} of {largest:.1e}")


def main() -> None:
    torch.set_num_threads(1)
    pairs = [byte_pair(texts) for texts in library_pairs()[:PAIRS]]
    batch = collate(pairs)
    model = small_llama()
    inputs = {name: value for name, value in batch.items() if name not in ("group_ids", "packed_seq_params")}
    report = neatpack.check_isolation(model, inputs, doc_ids=batch["packed_seq_params"].doc_ids)
    print(report)
    report.raise_if_leaking()

    reference = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for step in range(12):
        if step == 1:  # at the first step model and reference agree, and every pair's loss is log 2
            compare(model, reference, pairs)
        loss = dpo_loss(model, reference, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"{len(pairs)} pairs in {len(batch['input_ids'])} rows: loss {losses[0]:.3f} -> {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
