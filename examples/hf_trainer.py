"""Hugging Face `Trainer` on packed rows: four settings, and the probe on the very batch that the Trainer makes.

    attn_implementation=neatpack.hf.register()     attention that takes the boundaries
    data_collator=neatpack.hf.collator_for(model)  the `PackedCollator` that sends them as this model reads them
    remove_unused_columns=False                    or the Trainer drops `seq_lengths`, which holds the boundaries
    callbacks=[neatpack.hf.isolation_callback()]   stops training before its first step, should one of these be forgotten

The loss is the mean over the target tokens of the whole optimizer step, whatever the batch size and accumulation.

    python examples/hf_trainer.py
"""

from __future__ import annotations

import tempfile
from typing import Any

from datasets import Dataset
from ingredients import packed_library, small_llama
from transformers import Trainer, TrainingArguments

import neatpack
import neatpack.hf
from neatpack.hf.loss import PackedLoss


def make_trainer(rows: Dataset, folder: str, attention: str | None = None, **changes: Any) -> Trainer:
    """A Trainer for rows that `neatpack pack` wrote; `changes` replace its training arguments."""
    options: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 12,
        "learning_rate": 5e-3,
        "remove_unused_columns": False,
        "use_cpu": True,
        "save_strategy": "no",
        "logging_steps": 4,
        "report_to": [],
        "disable_tqdm": True,
    }
    model = small_llama(attention)
    return Trainer(
        model=model,
        args=TrainingArguments(folder, **{**options, **changes}),
        train_dataset=rows,
        data_collator=neatpack.hf.collator_for(model, row_length=256),
        compute_loss_func=PackedLoss(),
        callbacks=[neatpack.hf.isolation_callback()],
    )


def check(trainer: Trainer) -> neatpack.IsolationReport:
    """Run the probe on the first batch as the Trainer delivers it, after all that it does to columns and batches."""
    batch = next(iter(trainer.get_train_dataloader()))
    return neatpack.check_isolation(trainer.model, batch, max_documents=8)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(packed_library(folder), folder)
        report = check(trainer)
        print(report)
        report.raise_if_leaking()
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {trainer.state.global_step} steps")


if __name__ == "__main__":
    main()
