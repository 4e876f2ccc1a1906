"""How far one document moves another, for every way people pass boundaries: `python benchmarks/leak_table.py`.

A small random Llama in float32, two packed rows with padding; each entry is the probe's largest influence of one
document's tokens on another document's logits. 0 is right. `flash` is transformers' own flash-attention path over a reference
kernel that runs on CPUs; everything up to the kernel's call is what a GPU would run. "wrong" means that no document moves
another, yet one is not what it is alone. Prints the table of the README.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import transformers
from transformers import LlamaConfig

import neatpack
import neatpack.hf
from neatpack.audit import reference_flash
from neatpack.audit.models import build_small
from neatpack.convert import to_dense_mask

ROWS = [
    {"input_ids": [], "seq_lengths": [5, 7]},
    {"input_ids": [], "seq_lengths": [6, 4, 6]},
]
IMPLEMENTATIONS = ("eager", "sdpa", "flash", "packed_varlen")


def packed_batch() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    for row in ROWS:
        row["input_ids"] = torch.randint(3, 120, (sum(row["seq_lengths"]),), generator=generator).tolist()
    return neatpack.PackedCollator(return_doc_ids=True, return_params=True)(ROWS)


def ways(batch: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Batches that say where documents end, each in its own way."""
    ids, positions, doc_ids = batch["input_ids"], batch["position_ids"], batch["doc_ids"]
    flash = neatpack.to_flash_attention_kwargs(batch["packed_seq_params"])
    ones, real = torch.ones_like(ids), (doc_ids != 0).long()
    return {
        "`attention_mask` of 1 and 0": {"input_ids": ids, "attention_mask": real},
        "`attention_mask` of document indices": {"input_ids": ids, "attention_mask": doc_ids},
        "`position_ids` that restart": {"input_ids": ids, "position_ids": positions},
        "... and an `attention_mask` of ones": {"input_ids": ids, "position_ids": positions, "attention_mask": ones},
        "flash kwargs (`cu_seq_lens_q`, ...)": {"input_ids": ids, **flash},
        "flash kwargs, `position_ids`, 1/0 mask": {
            "input_ids": ids, "position_ids": positions, "attention_mask": real, **flash,
        },
        "4-D bool mask": {
            "input_ids": ids, "position_ids": positions, "attention_mask": to_dense_mask(batch["packed_seq_params"]),
        },
        "**`neatpack.PackedCollator`'s batch**": {
            key: value for key, value in batch.items() if key not in ("labels", "doc_ids", "packed_seq_params")
        },
    }  # fmt: skip


def entry(model: torch.nn.Module, batch: dict[str, Any], doc_ids: torch.Tensor) -> str:
    """The probe's number, or that the call was refused."""
    try:
        report = neatpack.check_isolation(model, batch, doc_ids=doc_ids)
    except neatpack.PackError:
        return "refused"
    except Exception as error:
        return f"fails: {type(error).__name__}"
    if report.max_influence > report.tolerance:
        return f"**leaks** {report.max_influence:.1f}"
    return "0" if report.isolated else "**wrong**"


def column(name: str, batch: dict[str, Any]) -> list[str]:
    """One implementation's entries, from top to bottom."""
    config = LlamaConfig(num_key_value_heads=8)
    if name != "flash":
        model = build_small(config, name, row_length=16)
        return [entry(model, given, batch["doc_ids"]) for given in ways(batch).values()]
    with reference_flash.importable() as implementation:
        model = build_small(config, "eager", row_length=16)
        model.config._attn_implementation = implementation  # what from_pretrained sets where the package is installed
        return [entry(model, given, batch["doc_ids"]) for given in ways(batch).values()]


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    transformers.logging.set_verbosity_error()
    neatpack.hf.register()
    batch = packed_batch()
    columns = {name: column(name, batch) for name in IMPLEMENTATIONS}
    print("| what the model is given | " + " | ".join(f"`{name}`" for name in columns) + " |")
    print("|---|" + "---|" * len(columns))
    for way, *entries in zip(ways(batch), *columns.values(), strict=True):
        print(f"| {way} | " + " | ".join(entries) + " |")
    stock = [entries[:-1] for name, entries in columns.items() if name != "packed_varlen"]
    leaking = sum("leaks" in entry for entries in stock for entry in entries)
    ours = [entries[-1] for entries in columns.values()]
    print(
        f"\nheadline: leaks: {leaking} of {sum(map(len, stock))} ways to pass boundaries to stock transformers leak; ", end=""
    )
    print(f"PackedCollator's batch in {sum(entry != '0' for entry in ours)} of {len(ours)}")


if __name__ == "__main__":
    main()
