"""From nothing to a proof: pack real text, train on it, show that no document sees another. `make demo` runs this.

1. Packs the source files of Python's own standard library (thousands of documents with a heavy tail) twice: all of it,
   long files split over rows; and the files shorter than a row, the mix that fine-tuning data has.
2. Builds a small Llama from a config and proves, before training, that packed documents stay apart in it; and shows what
   the usual way of passing boundaries does on stock attention.
3. Trains it for a few dozen steps on the whole library.
4. Times packed steps against padded steps of the same short files, in turn.
"""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, load_from_disk
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

import neatpack
import neatpack.hf

OUT = Path("demo-out")
SEQ_LEN = 1024
VOCABULARY = 258  # the embedded tokenizer: 256 bytes, end of sequence, padding
ROWS_A_BATCH = 2
STEPS = 30
TIMED_STEPS = 8
console = Console()

Batch = dict[str, Any]


def build_model(attention: str) -> LlamaForCausalLM:
    """A Llama of about a million parameters, the same weights for every `attention`."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=SEQ_LEN,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config)


def packed_batches(rows: Dataset) -> Iterator[Batch]:
    """Batches of whole rows, in the packed folder's (shuffled) order, for ever."""
    collate = neatpack.PackedCollator(row_length=SEQ_LEN)
    while True:
        for first in range(0, len(rows) - ROWS_A_BATCH + 1, ROWS_A_BATCH):
            yield collate([rows[i] for i in range(first, first + ROWS_A_BATCH)])


def padded_twin(batch: Batch) -> Batch:
    """The same documents as one padded row each: what packing saves. Boundaries come from the batch's own offsets."""
    offsets = batch["cu_seq_lens_q"].tolist()
    ids, labels = batch["input_ids"].view(-1), batch["labels"].view(-1)
    documents = [(ids[a:b], labels[a:b]) for a, b in itertools.pairwise(offsets) if (labels[a:b] != -100).any()]

    def pad(columns: list[torch.Tensor], fill: int) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(columns, batch_first=True, padding_value=fill)

    return {
        "input_ids": pad([ids for ids, _ in documents], 0),
        "labels": pad([labels for _, labels in documents], -100),
        "attention_mask": pad([torch.ones_like(ids) for ids, _ in documents], 0),
        "use_cache": False,
    }


def prove_isolation(rows: Dataset) -> None:
    """The probe on two batches: ours on packed_varlen, and positions alone on stock attention."""
    batch = next(packed_batches(rows))
    console.print("\n[bold]Is it isolated?[/] One document's tokens change; no other document's logits may move.")
    report = neatpack.check_isolation(build_model("packed_varlen"), batch, max_documents=8)
    console.print(str(report), highlight=False, markup=False)
    report.raise_if_leaking()
    stock = {key: batch[key] for key in ("input_ids", "position_ids", "cu_seq_lens_q")}
    leak = neatpack.check_isolation(build_model("sdpa"), stock, max_documents=8)
    console.print("\nThe same documents through stock attention, with positions that restart and nothing else:")
    console.print(str(leak), highlight=False, markup=False)


def train(model: LlamaForCausalLM, rows: Dataset) -> None:
    """A few dozen steps of plain PyTorch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    batches = packed_batches(rows)
    console.print(f"\n[bold]Training[/] on {ROWS_A_BATCH} rows of {SEQ_LEN} tokens a step")
    losses = []
    for _ in track(range(STEPS), description="training", console=console):
        losses.append(step(model, optimizer, next(batches)))
    for first in range(0, STEPS, 10):
        console.print(f"  steps {first:>2} to {first + 9:>2}: loss {statistics.mean(losses[first : first + 10]):.3f}")


def step(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, batch: Batch) -> float:
    """One optimizer step; returns the loss."""
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def compare_with_padding(model: LlamaForCausalLM, rows: Dataset) -> None:
    """Packed and padded steps of the same documents in turn, so that a drift of the machine hits both alike."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    batches = packed_batches(rows)
    rates: dict[str, list[float]] = {"packed": [], "padded": []}
    for _ in track(range(TIMED_STEPS), description="packed against padded", console=console):
        packed = next(batches)
        for name, batch in (("packed", packed), ("padded", padded_twin(packed))):
            begin = time.perf_counter()
            step(model, optimizer, batch)
            real_tokens = int((packed["labels"] != -100).sum())
            rates[name].append(real_tokens / (time.perf_counter() - begin))
    table = Table(title="Training throughput, the same documents in turn", title_justify="left")
    table.add_column("batch")
    table.add_column("target tokens/s (median)", justify="right")
    for name, values in rates.items():
        table.add_row(name, f"{statistics.median(values):,.0f}")
    ratio = statistics.median(a / b for a, b in zip(rates["packed"], rates["padded"], strict=True))
    console.print(table)
    console.print(f"Packed is [bold]{ratio:.1f}x[/] as fast as padded here.")


def standard_library() -> list[str]:
    """The modules and packages of Python itself, without what was installed beside them."""
    folder = Path(sysconfig.get_path("stdlib"))
    return sorted(str(path) for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists())


def pack_documents(name: str, overflow: str) -> Dataset:
    """What `neatpack pack SRC... --out DIR --seq-len N` does, on a few thousand files."""
    out = str(OUT / name)
    command = [sys.executable, "-m", "neatpack", "pack", *standard_library(), "--include", "*.py"]
    options = ["--out", out, "--seq-len", str(SEQ_LEN), "--overflow", overflow, "--skip-bad", "--overwrite"]
    subprocess.run([*command, *options], check=True)
    return load_from_disk(out)


def main() -> None:
    console.print(f"[bold]Packing[/] all source files of Python {sys.version.split()[0]}'s standard library")
    everything = pack_documents("all", overflow="split")
    console.print(f"\n[bold]Packing[/] those shorter than a row of {SEQ_LEN} tokens")
    short_files = pack_documents("short", overflow="drop")
    neatpack.hf.register()
    prove_isolation(short_files)
    model = build_model("packed_varlen")
    train(model, everything)
    compare_with_padding(model, short_files)


if __name__ == "__main__":
    main()
