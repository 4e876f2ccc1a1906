"""Context parallelism: ranks share each batch, and documents that straddle the cut are attended to whole.

    with neatpack.hf.context_parallel(model, group) as parallel:
        local = parallel.shard(batch)                    this rank's tokens, positions, targets and boundaries
        model(**local).loss.backward()                   this rank's share of the batch's loss
        parallel.sum_gradients()                         the batch's gradients, on every rank

Each rank runs the model on its own share of the tokens; attention fetches the keys that its documents have elsewhere. The
group may be a process group or one dimension of a `DeviceMesh`. The probe runs over the ranks as well: it sees the whole
batch's logits, gathered. The first step is compared with one process.

    torchrun --standalone --nproc-per-node 2 examples/context_parallel.py
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.distributed as dist
from ingredients import packed_library, small_llama

import neatpack
import neatpack.hf
from neatpack.train.context_parallel import pad_batch

ROWS = 2
STEPS = 9

COLLATE = neatpack.PackedCollator(row_length=256)
Batch = dict[str, Any]


class WholeBatch(torch.nn.Module):
    """What the probe calls: a batch in, the gathered logits `[B, S, V]` out, on every rank."""

    def __init__(self, parallel: neatpack.hf.ContextParallel) -> None:
        super().__init__()
        self.model, self.parallel = parallel.model, parallel

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        cu_seq_lens_q: torch.Tensor,
        **others: Any,
    ) -> torch.Tensor:
        """Pad to what the ranks can share evenly, run the shards, gather, and cut the padding off."""
        batch = {"input_ids": input_ids, "position_ids": position_ids, "cu_seq_lens_q": cu_seq_lens_q, "use_cache": False}
        local = self.parallel.shard(pad_batch(batch, 2 * dist.get_world_size()))
        logits = self.parallel.gather(self.model(**local).logits, local["context_shard"])
        return logits[:, : input_ids.shape[1]]


def step(parallel: neatpack.hf.ContextParallel, batch: Batch) -> torch.Tensor:
    """Leave the batch's gradients on the model; its loss."""
    loss = parallel.model(**parallel.shard(batch)).loss
    loss.backward()
    parallel.sum_gradients()
    loss = loss.detach()
    dist.all_reduce(loss)
    return loss


def gradients(model: torch.nn.Module) -> torch.Tensor:
    """All gradients in one flat tensor, cleared afterwards."""
    flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    model.zero_grad()
    return flat


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with tempfile.TemporaryDirectory() as folder:
        rows = list(packed_library(folder))  # the same rows on every rank of the group
    model = small_llama()
    batch = COLLATE(rows[:ROWS])
    expected_loss = model(**batch).loss
    expected_loss.backward()
    expected = gradients(model)

    with neatpack.hf.context_parallel(model, dist.group.WORLD, scheme="zigzag") as parallel:
        report = neatpack.check_isolation(WholeBatch(parallel), batch, max_documents=4)
        report.raise_if_leaking()
        loss, found = step(parallel, batch), gradients(model)
        if rank == 0:
            print(report)
            tokens = parallel.shard(batch, check_equal=False)["input_ids"].numel()
            print(f"{ranks} ranks with {tokens} of {batch['input_ids'].numel()} tokens each, against one process: ", end="")
            print(f"loss differs by {(loss - expected_loss).abs().item():.1e}, ", end="")
            print(f"gradients by {(found - expected).abs().max().item():.1e} of {expected.abs().max().item():.1e}")

        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)  # the same step on every rank
        losses = []
        for number in range(STEPS):
            first = number % (len(rows) // ROWS) * ROWS
            losses.append(step(parallel, COLLATE(rows[first : first + ROWS])).item())
            optimizer.step()
            optimizer.zero_grad()
    if rank == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {STEPS} steps")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
