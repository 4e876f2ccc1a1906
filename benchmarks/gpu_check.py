"""What only a GPU can show, in one run of under five minutes: `python benchmarks/gpu_check.py`.

Needs torch, transformers and neatpack; no flash-attn. Each line is a claim with its numbers, and whether it held:

1. `varlen_attention` equals every document alone, forward and backward, and no other document moves a bit of it; in bfloat16
   over torch's own varlen kernel where there is one (the line says which path ran), also compiled;
2. syncs: how often the metadata builder, the move of a batch to the device and a training step wait for the device;
3. the time of a training step on a small Llama: `packed_varlen` against a 4-D mask and a padded batch, equal losses;
4. a `BlockMask` from the offsets against `create_block_mask`: equal, and how long each takes.

Without a GPU it runs the same checks on the CPU, in float32 and smaller; what needs a GPU then says so. The exit code is 1 if a
claim did not hold. Times are reported, not judged.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers
from attention import Candidate, candidates_of, forward_and_backward, lengths_of, small_llama
from torch.nn.attention.flex_attention import create_block_mask

import neatpack.hf
from neatpack import packed_seq_params_from_doc_ids
from neatpack.attention import plan_segments, varlen_attention
from neatpack.attention_kernel import INSTALLED_KERNEL
from neatpack.convert.flex import to_block_mask, to_mask_mod
from neatpack.packed_seq import PackedSeqParams

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPE = torch.bfloat16 if CUDA else torch.float32
TOLERANCE = 2e-2 if CUDA else 1e-5
"""Between bfloat16 results: a few units in the last place of values around 1."""

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped heads": {"kv_heads": 2},
    "window": {"window": 64},
    "grouped heads, window, scale": {"kv_heads": 2, "window": 64, "scale": 0.2},
    "soft cap (the formula)": {"softcap": 5.0},
}

COMPILED = ["plain", "grouped heads, window, scale", "soft cap (the formula)"]


class Report:
    """Claims as they are checked."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        self.held = 0

    def line(self, held: bool | None, claim: str, numbers: str) -> None:
        """One claim: True or False for whether it held, None for what is only reported."""
        self.held += held is True
        if held is False:
            self.failed.append(claim)
        print(f"{ {True: 'ok', False: 'FAILED', None: '-'}[held]:>6}  {claim}: {numbers}", flush=True)


def documents(total: int) -> PackedSeqParams:
    lengths = torch.tensor(lengths_of("mixed", total))
    return packed_seq_params_from_doc_ids(torch.repeat_interleave(torch.arange(1, len(lengths) + 1), lengths)[None])


# --- 1. isolation -----------------------------------------------------------------------------------------------------


def check_isolation(report: Report, total: int) -> None:
    kernel = INSTALLED_KERNEL
    takes = "no varlen kernel" if kernel is None else f"varlen_attn({', '.join(sorted(kernel.parameters))})"
    report.line(None, "torch has", takes if CUDA else f"{takes}, which the CPU cannot run")
    params = documents(total)
    for name, case in CASES.items():
        options = dict(case)
        inputs = random_inputs(total, options.pop("kv_heads", 4))
        report_isolation(report, f"{name}, eager", varlen_attention, inputs, params, options)
        if name in COMPILED:
            report_isolation(report, f"{name}, compiled", compiled_attention(), inputs, params, options)


def compiled_attention() -> Callable[..., torch.Tensor]:
    torch._dynamo.reset()
    return torch.compile(varlen_attention, backend="aot_eager", fullgraph=True)


def random_inputs(total: int, kv_heads: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(total, heads, 64) for heads in (4, kv_heads, kv_heads)]
    return [torch.randn(shape, generator=generator).to(DEVICE, DTYPE).requires_grad_() for shape in shapes]


def report_isolation(
    report: Report,
    name: str,
    attend: Callable[..., torch.Tensor],
    inputs: list[torch.Tensor],
    params: PackedSeqParams,
    options: dict[str, Any],
) -> None:
    """Largest difference from documents alone, of outputs and of gradients; and what changing one document does to others."""
    offsets = params.cu_seqlens.to(DEVICE)
    packed = attend(*inputs, offsets, params.max_seqlen, **options)
    grads = torch.autograd.grad(packed.float().square().sum(), inputs)
    apart, grad_apart = 0.0, 0.0
    bounds = params.cu_seqlens.tolist()
    for start, end in itertools.pairwise(bounds):
        document = [tensor[start:end].detach().requires_grad_() for tensor in inputs]
        alone = varlen_attention(*document, torch.tensor([0, end - start], dtype=torch.int32), end - start, **options)
        apart = max(apart, largest(packed[start:end] - alone))
        expected = torch.autograd.grad(alone.float().square().sum(), document)
        for grad, lone in zip(grads, expected, strict=True):
            grad_apart = max(grad_apart, largest(grad[start:end] - lone) / max(1.0, largest(lone)))
    start, end = bounds[1], bounds[2]
    changed = [tensor.detach().clone() for tensor in inputs]
    for tensor in changed:
        tensor[start:end] = torch.randn_like(tensor[start:end]) * 10
    moved = attend(*changed, offsets, params.max_seqlen, **options) - packed
    outside = max(largest(moved[:start]), largest(moved[end:]))
    held = apart < TOLERANCE and grad_apart < TOLERANCE and outside == 0.0 and largest(moved[start:end]) > 0.1
    numbers = (
        f"output {apart:.1e}, gradients {grad_apart:.1e} from documents alone; a changed document moves others by {outside}"
    )
    report.line(held, f"isolated, {str(DTYPE).removeprefix('torch.')}, {name}", numbers)


def largest(tensor: torch.Tensor) -> float:
    return tensor.detach().abs().max().item() if tensor.numel() else 0.0


# --- 2. syncs ---------------------------------------------------------------------------------------------------------


def check_syncs(report: Report, total: int) -> None:
    if not CUDA:
        report.line(None, "syncs", "need a GPU")
        return
    params = documents(total)
    on_device, pinned = params.doc_ids.to(DEVICE), params.cu_seqlens.pin_memory()
    inputs, offsets, plan = (
        random_inputs(total, 4),
        params.cu_seqlens.to(DEVICE),
        plan_segments(params.cu_seqlens, total, device=DEVICE),
    )
    counted: dict[str, tuple[Callable[[], Any], int | None]] = {
        "the builder on a map on the host": (lambda: packed_seq_params_from_doc_ids(params.doc_ids), 0),
        "the builder on a map on the GPU": (lambda: packed_seq_params_from_doc_ids(on_device), 1),
        "moving pinned offsets": (lambda: pinned.to(DEVICE, non_blocking=True), 0),
        "varlen_attention with a plan": (lambda: varlen_attention(*inputs, offsets, params.max_seqlen, plan=plan), 0),
        "varlen_attention without one": (lambda: varlen_attention(*inputs, offsets, params.max_seqlen), 1),
    }
    for name, (run, most) in counted.items():
        run()
        syncs = count_syncs(run)
        report.line(most is None or syncs <= most, f"syncs in {name}", f"{syncs}, at most {most} expected")
    model = small_llama(kv_heads=4).to(DEVICE, DTYPE)
    for name, candidate in on_the_device(total).items():
        model.set_attn_implementation(candidate.attention)
        forward_and_backward(model, candidate.batch)
        syncs = count_syncs(lambda batch=candidate.batch: forward_and_backward(model, batch))
        report.line(None, f"syncs in a training step of 8 layers, {name}", str(syncs))


def count_syncs(run: Callable[[], Any]) -> int:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


# --- 3. a training step -----------------------------------------------------------------------------------------------


def on_the_device(total: int) -> dict[str, Candidate]:
    candidates = candidates_of(lengths_of("mixed", total), flex=False)
    for candidate in candidates.values():
        candidate.batch = {
            key: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for key, value in candidate.batch.items()
        }
    return {name: candidates[name] for name in ("packed_varlen", "mask", "padded")}


def check_steps(report: Report, total: int, repeats: int) -> None:
    model = small_llama(kv_heads=4).to(DEVICE, DTYPE)
    candidates, seconds, losses = on_the_device(total), {}, {}
    for name, candidate in candidates.items():
        model.set_attn_implementation(candidate.attention)
        losses[name] = forward_and_backward(model, candidate.batch).item()
        runs = [timed(lambda batch=candidate.batch: forward_and_backward(model, batch)) for _ in range(repeats)]
        seconds[name] = statistics.median(runs)
    spread = max(losses.values()) - min(losses.values())
    report.line(spread < TOLERANCE, "equal losses", ", ".join(f"{name} {loss:.5f}" for name, loss in losses.items()))
    for name, median in seconds.items():
        numbers = f"{median / seconds['mask']:.2f}x the 4-D mask's time, {median * 1e3:.1f} ms"
        report.line(None, f"training step, S={total}, {name}", numbers)


def timed(run: Callable[[], Any]) -> float:
    if CUDA:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter() - begin


# --- 4. block masks ---------------------------------------------------------------------------------------------------


def check_block_mask(report: Report, total: int, repeats: int) -> None:
    params = documents(total)
    there = packed_seq_params_from_doc_ids(params.doc_ids.to(DEVICE))
    builders: dict[str, Callable[[], Any]] = {
        "from offsets": lambda: to_block_mask(params).to(DEVICE),
        "create_block_mask": lambda: create_block_mask(to_mask_mod(there), 1, None, total, total, device=DEVICE),
    }
    ours, theirs = (build() for build in builders.values())
    equal = all(
        torch.equal(getattr(ours, name), getattr(theirs, name)) for name in ("kv_num_blocks", "full_kv_num_blocks")
    ) and torch.equal(ours.to_dense(), theirs.to_dense())
    report.line(equal, f"equal BlockMask, S={total}", f"sparsity {ours.sparsity():.1f} %")
    for name, build in builders.items():
        median = statistics.median(timed(build) for _ in range(repeats))
        report.line(None, f"BlockMask {name}, S={total}", f"{median * 1e3:.2f} ms")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192 if CUDA else 1024, help="tokens in the packed row")
    parser.add_argument("--repeats", type=int, default=10 if CUDA else 3)
    options = parser.parse_args()
    name = torch.cuda.get_device_name() if CUDA else "CPU"
    print(f"{name}, torch {torch.__version__}, transformers {transformers.__version__}, {options.tokens} tokens")
    report = Report()
    check_isolation(report, options.tokens)
    check_syncs(report, options.tokens)
    check_steps(report, options.tokens, options.repeats)
    check_block_mask(report, options.tokens, options.repeats)
    for claim in report.failed:
        print(f"failed: {claim}")
    print(f"\nheadline: gpu_check on {name}: {report.held} claims hold, {len(report.failed)} failed")
    return 1 if report.failed else 0


if __name__ == "__main__":
    neatpack.hf.register()
    sys.exit(main())
