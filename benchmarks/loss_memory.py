"""Peak memory of the loss at a vocabulary of 128k, against torch's own: `python benchmarks/loss_memory.py`.

Each candidate runs in a process of its own. What is counted is how far the peak of resident memory rises above what the
process held once its inputs existed: everything that the loss, forward and backward, adds. The first get bfloat16 logits
`[1, T, V]`, whose own gradient is part of the count for every candidate: the floor. The last two start from float32 states
`[1, T, 32]` and an output layer, and so make float32 logits themselves, or never do.

The packed candidates see documents of 100 tokens and count no target across their ends, so their losses differ a little from
torch's, which knows no documents. That of torch on bfloat16 is off by its rounding.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from functools import partial

import torch
import torch.nn.functional as F

from neatpack import PackedSeqParams, packed_seq_params_from_doc_ids
from neatpack.train import packed_cross_entropy, packed_linear_cross_entropy

VOCABULARY = 128 * 1024
WIDTH = 32
DOCUMENT_TOKENS = 100


def torch_upcast(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """What models do that upcast first, as transformers' causal language models do: float32 logits, shift, cross-entropy."""
    targets = F.pad(labels, (0, 1), value=-100)[:, 1:]
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def torch_narrow(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy straight on the bfloat16 logits: less memory, and bfloat16 log-probabilities."""
    targets = F.pad(labels, (0, 1), value=-100)[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def packed(logits: torch.Tensor, labels: torch.Tensor, reduction: str = "token") -> torch.Tensor:
    return packed_cross_entropy(logits, labels, documents(labels), reduction=reduction)


def documents(labels: torch.Tensor) -> PackedSeqParams:
    return packed_seq_params_from_doc_ids(torch.arange(labels.shape[1])[None] // DOCUMENT_TOKENS + 1)


def torch_layer(states: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch_upcast(states @ weight.T, labels)


def packed_layer(states: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return packed_linear_cross_entropy(states, weight, labels, documents(labels), chunk_size=128)


FROM_LOGITS = {
    "F.cross_entropy(logits.float())": torch_upcast,
    "F.cross_entropy(logits)": torch_narrow,
    "packed_cross_entropy, token": packed,
    "packed_cross_entropy, document": partial(packed, reduction="document"),
    "packed_cross_entropy, sqrt_document": partial(packed, reduction="sqrt_document"),
}
FROM_STATES = {
    "layer, F.cross_entropy(logits.float())": torch_layer,
    "packed_linear_cross_entropy": packed_layer,
}


def peak_bytes() -> int:
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def inputs(name: str, tokens: int, vocabulary: int) -> list[torch.Tensor]:
    shapes = [(1, tokens, vocabulary)] if name in FROM_LOGITS else [(1, tokens, WIDTH), (vocabulary, WIDTH)]
    dtype = torch.bfloat16 if name in FROM_LOGITS else torch.float32  # CPUs multiply bfloat16 matrices slowly
    return [torch.empty(shape, dtype=dtype).normal_(std=0.25).requires_grad_() for shape in shapes]


def measure(name: str, tokens: int, backward: bool) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    candidate = {**FROM_LOGITS, **FROM_STATES}[name]
    # Libraries loaded before the count starts.
    candidate(*inputs(name, 8, 16), torch.zeros(1, 8, dtype=torch.int64)).backward()
    leaves, labels = inputs(name, tokens, VOCABULARY), torch.randint(0, VOCABULARY, (1, tokens))
    held, begin = peak_bytes(), time.perf_counter()
    loss = candidate(*leaves, labels)
    if backward:
        loss.backward()
    seconds = time.perf_counter() - begin
    print(peak_bytes() - held, seconds, loss.item())


def measured_alone(name: str, tokens: int, backward: bool) -> tuple[float, float, float]:
    command = [sys.executable, __file__, "--candidate", name, "--tokens", str(tokens), *(["--backward"] if backward else [])]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    added, seconds, loss = run.stdout.split()
    return float(added), float(seconds), float(loss)


def main(tokens: int) -> None:
    size = tokens * VOCABULARY * 2
    print(f"logits [1, {tokens}, {VOCABULARY}] bfloat16: {size / 2**20:.0f} MiB, and as much for their gradient (the floor)\n")
    print("| of the logits | forward MiB | + backward MiB | seconds | loss | loss function |\n|---|---|---|---|---|---|")
    added: dict[str, float] = {}
    for name in (*FROM_LOGITS, *FROM_STATES):
        forward, _, _ = measured_alone(name, tokens, backward=False)
        both, seconds, loss = measured_alone(name, tokens, backward=True)
        added[name] = both
        logits = size if name in FROM_LOGITS else 2 * size
        memory = f"{both / logits:.2f}x | {forward / 2**20:.0f} | {both / 2**20:.0f}"
        print(f"| {memory} | {seconds:.1f} | {loss:.5f} | {name} |", flush=True)
    upcast, _, ours, *_, layer, fused = added.values()
    print(
        f"\nheadline: loss memory at V={VOCABULARY}: packed_cross_entropy adds {ours / upcast:.2f} of what F.cross_entropy on "
        f"float32 logits adds, packed_linear_cross_entropy {fused / layer:.2f}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--candidate", choices=[*FROM_LOGITS, *FROM_STATES])
    parser.add_argument("--backward", action="store_true")
    options = parser.parse_args()
    if options.candidate:
        measure(options.candidate, options.tokens, options.backward)
    else:
        main(options.tokens)
