"""`torch.compile` on packed batches: one graph for the model, however many documents a batch holds.

While torch compiles, packed attention is one operator that reads the offsets when it runs: the number of documents and
their lengths are no part of the program. So the model compiles as a whole (`fullgraph=True`): once, and once more when the
first batch with another number of documents comes; from then on any batch runs that program. Rows padded to one length
(`row_length`) keep every other shape the same.

Printed: the probe on the compiled model; how many graphs were compiled for how many batches, and how far the compiled
loss and gradients are from the plain ones.

    python examples/torch_compile.py              compiled by Inductor (needs a C++ compiler on a CPU)
    python examples/torch_compile.py aot_eager    traced only: quick to compile, no faster to run
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch
from ingredients import packed_library, small_llama
from torch._dynamo.utils import counters

import neatpack

ROWS = 2
STEPS = 9
COLLATE = neatpack.PackedCollator(row_length=256)


def loss_and_gradients(model: torch.nn.Module, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss, and all gradients in one flat tensor; cleared afterwards."""
    loss = model(**batch).loss
    loss.backward()
    flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    model.zero_grad()
    return loss.detach(), flat


def main() -> None:
    torch.set_num_threads(1)
    backend = sys.argv[1] if len(sys.argv) > 1 else "inductor"
    with tempfile.TemporaryDirectory() as folder:
        rows = list(packed_library(folder))
    batches = [COLLATE(rows[first : first + ROWS]) for first in range(0, len(rows) - ROWS + 1, ROWS)]
    model = small_llama()
    compiled = torch.compile(model, backend=backend, fullgraph=True)

    compiled.eval()
    with torch.no_grad():
        compiled(**batches[0])
    with torch.compiler.set_stance("eager_on_recompile"):  # documents run alone have shapes of their own: those run plain
        report = neatpack.check_isolation(compiled, batches[0], max_documents=4)
    compiled.train()
    print(report)
    report.raise_if_leaking()

    counters.clear()
    worst_loss = worst_gradient = 0.0
    for batch in batches:
        (loss, found), (expected_loss, expected) = (loss_and_gradients(one, batch) for one in (compiled, model))
        worst_loss = max(worst_loss, (loss - expected_loss).abs().item())
        worst_gradient = max(worst_gradient, ((found - expected).abs().max() / expected.abs().max()).item())
    documents = sorted({len(batch["cu_seq_lens_q"]) - 1 for batch in batches})
    graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    print(f"{len(batches)} batches of {documents[0]} to {documents[-1]} segments: {graphs} graphs compiled, {breaks} breaks")
    print(f"compiled against plain: loss differs by {worst_loss:.1e}, gradients by {worst_gradient:.1e} of the largest")

    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses = []
    for number in range(STEPS):
        loss = compiled(**batches[number % len(batches)]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {STEPS} steps")


if __name__ == "__main__":
    main()
