"""TRL `SFTTrainer` on a dataset that `neatpack pack` wrote: rows stay as they are packed, and their boundaries arrive.

TRL prepares datasets itself. Its defaults truncate rows and send an `attention_mask` that hides every boundary; so:

    dataset_kwargs={"skip_prepare_dataset": True}   rows are tokenised and packed: nothing to tokenise or truncate
    max_length=None                                 nothing longer than a row exists
    packing=False, padding_free=False               packed already; padding_free would refuse the collator
    data_collator=neatpack.PackedCollator()         sends boundaries and labels; no attention_mask
    remove_unused_columns=False                     keeps `seq_lengths` (and a packed folder's mask columns)

The loss is TRL's own: labels are -100 on the first token of each document, so its shift asks nothing across a boundary.

    python examples/trl_sft.py
"""

from __future__ import annotations

import tempfile
from typing import Any

from datasets import Dataset
from ingredients import byte_tokenizer, packed_library, small_llama
from trl import SFTConfig, SFTTrainer

import neatpack

PACKED_SETTINGS: dict[str, Any] = {
    "dataset_kwargs": {"skip_prepare_dataset": True},
    "max_length": None,
    "packing": False,
    "padding_free": False,
    "remove_unused_columns": False,
}


def make_trainer(rows: Dataset, folder: str, *, data_collator: Any = None, **changes: Any) -> SFTTrainer:
    """An SFTTrainer for rows that `neatpack pack` wrote; `changes` replace its settings."""
    options: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "max_steps": 12,
        "learning_rate": 5e-3,
        "bf16": False,
        "use_cpu": True,
        "save_strategy": "no",
        "logging_steps": 4,
        "report_to": [],
        "disable_tqdm": True,
    }
    return SFTTrainer(
        model=small_llama(),
        args=SFTConfig(folder, **{**options, **PACKED_SETTINGS, **changes}),
        train_dataset=rows,
        processing_class=byte_tokenizer(),
        data_collator=data_collator or neatpack.PackedCollator(row_length=256),
    )


def check(trainer: SFTTrainer) -> neatpack.IsolationReport:
    """Run the probe on the first batch as TRL delivers it, in the model as TRL has prepared it."""
    batch = next(iter(trainer.get_train_dataloader()))
    return neatpack.check_isolation(trainer.model, batch, max_documents=8)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        byte_tokenizer().save_pretrained(f"{folder}/tokenizer")  # yours: the model's own
        trainer = make_trainer(packed_library(folder, tokenizer=f"{folder}/tokenizer"), folder)
        report = check(trainer)
        print(report)
        report.raise_if_leaking()
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {trainer.state.global_step} steps")


if __name__ == "__main__":
    main()
