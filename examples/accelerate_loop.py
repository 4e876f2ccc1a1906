"""An Accelerate loop over a stream of packed rows: one setting, `dispatch_batches=False`.

For an `IterableDataset` Accelerate turns `dispatch_batches` on by itself: the first rank collates for all, joins the batches
and cuts the result by rows. A packed batch cannot be cut so: its lengths are plain integers, at which Accelerate stops on
several ranks (`TypeError: Can only concatenate tensors`), and its offsets are no rows: on one rank they arrive cut short, and
`packed_varlen` refuses them. With

    Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False))

every rank reads the stream, takes its own rows and collates them. A dataset with an index has that by default.

    torchrun --standalone --nproc-per-node 2 examples/accelerate_loop.py        (or accelerate launch)
"""

from __future__ import annotations

import tempfile

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from datasets import Dataset
from ingredients import packed_library, small_llama
from torch.utils.data import DataLoader

import neatpack
from neatpack.train import BatchMetrics, batch_metrics, count_items, gather_metrics, packed_cross_entropy

EPOCHS = 3


def make_loader(rows: Dataset) -> DataLoader:
    """Batches of two rows from a stream; `drop_last`, so that every rank takes the same number of steps."""
    collate = neatpack.PackedCollator(row_length=256, return_params=True)
    return DataLoader(rows.to_iterable_dataset(), batch_size=2, collate_fn=collate, drop_last=True)


def make_accelerator(dispatch_batches: bool | None = False) -> Accelerator:
    return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch_batches))


def main() -> None:
    torch.set_num_threads(1)
    accelerator = make_accelerator()
    with tempfile.TemporaryDirectory() as folder:
        rows = packed_library(folder)
        model = small_llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        model, optimizer, loader = accelerator.prepare(model, optimizer, make_loader(rows))

        # every rank probes a batch as it comes out of the prepared loader
        report = neatpack.check_isolation(accelerator.unwrap_model(model), next(iter(loader)), max_documents=8)
        report.raise_if_leaking()
        accelerator.print(report)

        losses = []
        for _ in range(EPOCHS):
            seen = BatchMetrics()
            for batch in loader:
                labels, params = batch.pop("labels"), batch.pop("packed_seq_params")
                # the divisor of the whole step; DDP averages over the ranks, so each gives its share times their number
                num_items = accelerator.reduce(count_items(labels, params))
                loss = packed_cross_entropy(model(**batch).logits, labels, params, num_items=num_items)
                accelerator.backward(loss * accelerator.num_processes)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(accelerator.reduce(loss.detach()).item())
                seen += batch_metrics(params, labels)
            total = gather_metrics(seen)
        accelerator.print(
            f"an epoch on {accelerator.num_processes} ranks: {total.tokens} of {sum(map(len, rows['input_ids']))} ", end=""
        )
        accelerator.print(f"tokens, {total.documents} documents, fill {total.fill:.3f}")
        accelerator.print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps")
    accelerator.end_training()


if __name__ == "__main__":
    main()
