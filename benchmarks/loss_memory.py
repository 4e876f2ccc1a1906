"""Peak memory of the loss at a vocabulary of 128k, against torch's own: `python benchmarks/loss_memory.py`.

Each candidate runs in a process of its own on the same bfloat16 logits `[1, T, V]`. What is counted is how far the peak of
resident memory rises above what the process held once the logits existed: everything that the loss, forward and backward,
adds. The gradient of the logits itself is part of it for every candidate; its size is given as the floor.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time

import torch
import torch.nn.functional as F

VOCABULARY = 128 * 1024
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
    from neatpack import packed_seq_params_from_doc_ids
    from neatpack.train import packed_cross_entropy

    doc_ids = torch.arange(labels.shape[1])[None] // DOCUMENT_TOKENS + 1
    return packed_cross_entropy(logits, labels, packed_seq_params_from_doc_ids(doc_ids), reduction=reduction)


CANDIDATES = {
    "F.cross_entropy(logits.float())": torch_upcast,
    "F.cross_entropy(logits)": torch_narrow,
    "packed_cross_entropy, token": packed,
    "packed_cross_entropy, document": lambda logits, labels: packed(logits, labels, "document"),
    "packed_cross_entropy, sqrt_document": lambda logits, labels: packed(logits, labels, "sqrt_document"),
}


def peak_bytes() -> int:
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def measure(name: str, tokens: int, backward: bool) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warm = torch.randn(1, 8, 16, dtype=torch.bfloat16, requires_grad=True)
    CANDIDATES[name](warm, torch.zeros(1, 8, dtype=torch.int64)).backward()  # libraries loaded, before the count starts
    logits = torch.empty(1, tokens, VOCABULARY, dtype=torch.bfloat16).normal_().requires_grad_()
    labels = torch.randint(0, VOCABULARY, (1, tokens))
    held, begin = peak_bytes(), time.perf_counter()
    loss = CANDIDATES[name](logits, labels)
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
    logits = tokens * VOCABULARY * 2
    print(f"logits [1, {tokens}, {VOCABULARY}] bfloat16: {logits / 2**20:.0f} MiB, and as much for their gradient (the floor)")
    print(f"{'':36} {'forward':>12} {'+ backward':>12} {'of logits':>10} {'seconds':>8} {'loss':>9}")
    for name in CANDIDATES:
        forward, _, _ = measured_alone(name, tokens, backward=False)
        both, seconds, loss = measured_alone(name, tokens, backward=True)
        memory = f"{forward / 2**20:>8.0f} MiB {both / 2**20:>8.0f} MiB {both / logits:>9.2f}x"
        print(f"{name:36} {memory} {seconds:>7.1f}s {loss:>9.5f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--candidate", choices=CANDIDATES)
    parser.add_argument("--backward", action="store_true")
    options = parser.parse_args()
    if options.candidate:
        measure(options.candidate, options.tokens, options.backward)
    else:
        main(options.tokens)
