"""Packed training runs under the Trainer, recorded: `python trainer_loss_run.py OUT ROWS ACCUMULATION REDUCTION...`.

Run alone or as one of several gloo ranks (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT in the environment). Each optimizer
step leaves the rows it saw, its loss and the gradients that the optimizer gets.
"""

import sys
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import neatpack.hf
from neatpack import plan_rows
from neatpack.hf.loss import PackedLoss, PackedLossMixin
from neatpack.train import PackedCollator

ROWS = 12
LEARNING_RATE = 0.1


def tiny_model(attention: str) -> GPT2LMHeadModel:
    """Float64 throughout: its LayerNorm does not go through float32, as an RMSNorm in transformers does."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=37,
        n_embd=16,
        n_inner=24,
        n_layer=2,
        n_head=2,
        n_positions=64,
        initializer_range=0.5,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation=attention,
    )
    return GPT2LMHeadModel(config).double()


def packed_rows(capacity: int = 16) -> list[dict]:
    """Twelve rows of documents of 1 to 12 tokens, some with prompts masked, some without a target."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 13, 60)
    rows = []
    for row, slices in enumerate(list(plan_rows(lengths, capacity, seed=1))[:ROWS]):
        sizes = [piece.length for piece in slices]
        ids = rng.integers(0, 37, sum(sizes))
        mask = (rng.random(sum(sizes)) < 0.8).astype(int)
        mask[: sizes[0]] *= row % 4 != 0  # the first document of every fourth row is all prompt
        rows.append({"input_ids": ids.tolist(), "seq_lengths": sizes, "loss_mask": mask.tolist(), "number": row})
    return rows


class Recorder(TrainerCallback):
    """What every optimizer step was given."""

    def __init__(self):
        self.steps, self.losses, self.seen = [], [], []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        grads = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        self.steps.append({"loss": sum(self.losses), "rows": [*chain(*self.seen)], "grads": grads})
        self.losses, self.seen = [], []


def run(reduction: str, rows_a_batch: int, accumulation: int, attention: str = "packed_varlen", mixed_in: bool = True):
    neatpack.hf.register()
    recorder, rows = Recorder(), packed_rows()
    base = (PackedLossMixin, Trainer) if mixed_in else (Trainer,)

    class Recording(*base):
        def training_step(self, model, inputs, num_items_in_batch=None):
            recorder.seen.append(inputs.pop("number").tolist())
            loss = super().training_step(model, inputs, num_items_in_batch)
            recorder.losses.append(loss.item())
            return loss

    collator = PackedCollator(ignore_columns=["number"])
    loss = PackedLoss(reduction=reduction)
    trainer = Recording(
        tiny_model(attention),
        TrainingArguments(
            per_device_train_batch_size=rows_a_batch,
            gradient_accumulation_steps=accumulation,
            num_train_epochs=1,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            optim="sgd",
            max_grad_norm=0,
            use_cpu=True,
            remove_unused_columns=False,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
            logging_strategy="no",
        ),
        train_dataset=rows,
        data_collator=lambda batch: {**collator(batch), "number": torch.tensor([row["number"] for row in batch])},
        callbacks=[recorder],
        **({"packed_loss": loss} if mixed_in else {"compute_loss_func": loss}),
    )
    trainer.train()
    return recorder.steps


if __name__ == "__main__":
    torch.set_num_threads(1)
    out, rows_a_batch, accumulation, *reductions = sys.argv[1:]
    recorded = {how: run(how, int(rows_a_batch), int(accumulation)) for how in reductions}
    recorded["compute_loss_func"] = run("token", int(rows_a_batch), int(accumulation), mixed_in=False)
    torch.save(recorded, Path(out))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
