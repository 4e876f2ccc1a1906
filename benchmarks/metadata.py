"""The metadata builder against everyone else's, side by side: `python benchmarks/metadata.py`.

All run in this process and on one thread, on the same batches, taking turns. Times are medians of CPU time, which neighbours on
a shared machine disturb least; ratios are to `neatpack`. From a document map:

* `reference`: NeMo AutoModel's own `packed_seq` module, where it is installed, else the formula of its page written out;
* `mask counting`: documents counted in an indexed mask, id by id, as LLaMA-Factory and its kin do. It takes an unpadded
  or end-padded map only, and its offsets leave the padding out.

Not from a map: `positions` is transformers' `prepare_fa_kwargs_from_position_ids`, which finds offsets where positions are 0
(so it is given positions, untimed), and `seq_lengths` is TRL's collator, which makes positions from the stored lengths.
The last column is the floor: a copy of the map.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from peers import nemo_module
from transformers.modeling_flash_attention_utils import prepare_fa_kwargs_from_position_ids

from neatpack import packed_seq_params_from_doc_ids
from neatpack.convert import position_ids_from_doc_ids

SHAPES = [(8, 32768), (1, 4096), (4, 8192), (32, 2048), (1, 131072), (64, 512)]
DOCUMENT_TOKENS = 200


def reference_formula(doc_ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The reference's page: start flags by comparing neighbours, row starts by modulo, nonzero, cat, diff."""
    batch, length = doc_ids.shape
    flat = doc_ids.reshape(-1)
    starts = torch.ones_like(flat, dtype=torch.bool)
    starts[1:] = flat[1:] != flat[:-1]
    starts |= torch.arange(batch * length, device=flat.device) % length == 0
    positions = starts.nonzero().flatten()
    end = torch.tensor([batch * length], device=flat.device)
    cu_seqlens = torch.cat([positions, end]).to(torch.int32)
    return cu_seqlens, int(cu_seqlens.diff().max())


def reference_module() -> tuple[str, Callable[[torch.Tensor], tuple[torch.Tensor, int]]]:
    """The reference's own builder, or its formula where its package is not installed."""
    try:
        build = nemo_module("components/datasets/packed_seq").packed_seq_params_from_doc_ids
    except ImportError:
        return "reference's formula", reference_formula

    def run(doc_ids: torch.Tensor) -> tuple[torch.Tensor, int]:
        params = build(doc_ids)
        return params.cu_seqlens, params.max_seqlen

    return "reference", run


def mask_counting(mask: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Lengths by counting each id of each row, one comparison of the whole mask an id."""
    counts = torch.stack([(mask == index).sum(-1) for index in range(1, int(mask.max()) + 1)], dim=1).flatten()
    lengths = counts[counts != 0]
    offsets = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return offsets, int(lengths.max())


def trl_positions() -> Callable[[list[list[int]]], list[torch.Tensor]] | None:
    """TRL's positions from stored lengths, where TRL is installed."""
    try:
        from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
    except ImportError:
        return None
    return DataCollatorForLanguageModeling.get_position_ids_from_packed_seq_lengths


def interleaved_medians(candidates: dict[str, Callable[[], Any]], repeats: int = 60) -> dict[str, float]:
    """Median CPU seconds of each candidate, run in turn so that a drift of the machine hits all alike; slow ones run thrice."""
    times: dict[str, list[float]] = {name: [_seconds(candidate)] for name, candidate in candidates.items()}
    for turn in range(repeats):
        for name, candidate in candidates.items():
            if turn < 3 or times[name][0] < 0.1:
                times[name].append(_seconds(candidate))
    return {name: statistics.median(seconds[1:]) for name, seconds in times.items()}


def _seconds(candidate: Callable[[], Any]) -> float:
    begin = time.process_time()
    candidate()
    return time.process_time() - begin


def measure(batch: int, length: int, dtype: torch.dtype) -> dict[str, float]:
    """Median CPU seconds of everyone on one shape, after checking that those who read a map agree."""
    doc_ids = (torch.arange(length) // DOCUMENT_TOKENS + 1).repeat(batch, 1).to(dtype)
    positions = position_ids_from_doc_ids(doc_ids)
    rows = [[DOCUMENT_TOKENS] * (length // DOCUMENT_TOKENS) + [length % DOCUMENT_TOKENS] for _ in range(batch)]
    name, reference = reference_module()
    params = packed_seq_params_from_doc_ids(doc_ids)
    for build in (reference, mask_counting):
        offsets, longest = build(doc_ids)
        assert torch.equal(params.cu_seqlens, offsets)
        assert params.max_seqlen == longest
    candidates: dict[str, Callable[[], Any]] = {
        "neatpack": lambda: packed_seq_params_from_doc_ids(doc_ids),
        name: lambda: reference(doc_ids),
        "mask counting": lambda: mask_counting(doc_ids),
        "positions": lambda: prepare_fa_kwargs_from_position_ids(positions),
    }
    trl = trl_positions()
    if trl is not None:
        candidates["seq_lengths"] = lambda: trl(rows)
    candidates["copy"] = doc_ids.clone
    return interleaved_medians(candidates, repeats=60 if batch * length < 2**18 else 30)


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread, documents of {DOCUMENT_TOKENS} tokens\n")
    ratios = []
    for dtype in (torch.int64, torch.int32):
        for batch, length in SHAPES:
            taken = measure(batch, length, dtype)
            ours = taken.pop("neatpack")
            if not ratios:
                print("| shape | dtype | neatpack | " + " | ".join(taken) + " |")
                print("|---|---|---|" + "---|" * len(taken))
            cells = [f"{seconds / ours:.1f}x ({seconds * 1e6:.0f} us)" for seconds in taken.values()]
            print(f"| {batch} x {length} | {str(dtype)[6:]} | {ours * 1e6:.0f} us | {' | '.join(cells)} |", flush=True)
            ratios.append(next(iter(taken.values())) / ours)
    name, _ = reference_module()
    print(f"\nheadline: metadata: the {name} takes {min(ratios):.1f} to {max(ratios):.1f} times as long")


if __name__ == "__main__":
    main()
