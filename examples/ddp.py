"""Plain PyTorch with `DistributedDataParallel`: the ranks' step is the step of one process that holds all their rows.

DDP averages gradients over ranks, and ranks hold different numbers of target tokens and documents. So the divisor of the
loss is counted over all ranks, and each rank's share is multiplied by the number of ranks:

    num_items = count_items(labels, params, reduction=...)      this rank's; then all_reduce
    loss = packed_cross_entropy(..., num_items=num_items)       this rank's share of the step's loss
    (loss * world_size).backward()                              DDP divides by world_size

The first step is compared with one process, and with what averaging the ranks' own means would give.

    torchrun --standalone --nproc-per-node 2 examples/ddp.py
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.distributed as dist
from ingredients import packed_library, small_llama
from torch.nn.parallel import DistributedDataParallel

import neatpack
from neatpack.train import count_items, packed_cross_entropy

ROWS_A_RANK = 2
STEPS = 9
REDUCTION = "document"  # every document counts the same; "token" and "sqrt_document" are the others

COLLATE = neatpack.PackedCollator(row_length=256, return_params=True)
Batch = dict[str, Any]


def share_of_loss(model: torch.nn.Module, batch: Batch, *, over_ranks: bool = True) -> torch.Tensor:
    """This rank's share of the step's loss; with `over_ranks=False`, the mean of its own documents."""
    inputs = dict(batch)
    labels, params = inputs.pop("labels"), inputs.pop("packed_seq_params")
    num_items = count_items(labels, params, reduction=REDUCTION)
    if over_ranks:
        dist.all_reduce(num_items)
    return packed_cross_entropy(model(**inputs).logits, labels, params, reduction=REDUCTION, num_items=num_items)


def gradients_of(model: torch.nn.Module, loss: torch.Tensor) -> torch.Tensor:
    """All gradients in one flat tensor, cleared afterwards."""
    loss.backward()
    flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    model.zero_grad()
    return flat


def compare(model: DistributedDataParallel, batch: Batch, whole: Batch) -> None:
    """Print how far the ranks' step is from that of one process with all rows."""
    ranks = dist.get_world_size()
    expected_loss = share_of_loss(model.module, whole, over_ranks=False)
    expected = gradients_of(model.module, expected_loss)
    share = share_of_loss(model, batch)
    together = gradients_of(model, share * ranks)
    loss = share.detach().clone()
    dist.all_reduce(loss)
    naive = gradients_of(model, share_of_loss(model, batch, over_ranks=False))
    if dist.get_rank() == 0:
        print(f"{ranks} ranks against one process: loss differs by {(loss - expected_loss).abs().item():.1e}, ", end="")
        print(f"gradients by {(together - expected).abs().max().item():.1e} of {expected.abs().max().item():.1e}")
        print(f"the mean of the ranks' means would be off by {(naive - expected).abs().max().item():.1e}")


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with tempfile.TemporaryDirectory() as folder:
        rows = list(packed_library(folder))  # packing is deterministic: the same rows on every rank
    model = DistributedDataParallel(small_llama())  # the same weights on every rank
    report = neatpack.check_isolation(model.module, COLLATE(rows[rank * ROWS_A_RANK :][:ROWS_A_RANK]))
    report.raise_if_leaking()  # every rank checks its own batch
    if rank == 0:
        print(report)

    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses = []
    for step in range(STEPS):
        first = step % (len(rows) // (ranks * ROWS_A_RANK)) * ranks * ROWS_A_RANK
        of_step = rows[first : first + ranks * ROWS_A_RANK]
        batch = COLLATE(of_step[rank * ROWS_A_RANK :][:ROWS_A_RANK])
        if step == 0:
            compare(model, batch, COLLATE(of_step))
        loss = share_of_loss(model, batch)
        (loss * ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        dist.all_reduce(loss)
        losses.append(loss.item())
    if rank == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {STEPS} steps")
    dist.barrier()  # nobody closes its connections while another one still uses them
    del model, optimizer  # they hold the process group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
