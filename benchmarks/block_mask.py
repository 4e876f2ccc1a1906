"""A BlockMask from the offsets against `create_block_mask`, on the CPU: `python benchmarks/block_mask.py`.

Both build the mask of one row of packed documents (lengths lognormal, median 400) in blocks of 128. Each runs in a process of
its own, since peak memory is a number of the process: it is reported above what the process held before the first build.
Both results are compared for equality, index by index, in a third.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from neatpack import packed_seq_params_from_doc_ids
from neatpack.convert.doc_map import doc_ids_from_seq_lengths
from neatpack.convert.flex import to_block_mask, to_mask_mod
from neatpack.packed_seq import PackedSeqParams

LENGTHS = [8192, 32768]
REPEATS = {"offsets": 20, "create_block_mask": 3}


def packed_row(length: int) -> PackedSeqParams:
    rng = np.random.default_rng(0)
    lengths: list[int] = []
    while sum(lengths) < length:
        lengths.append(min(int(rng.lognormal(6, 1)) + 1, length - sum(lengths)))
    return packed_seq_params_from_doc_ids(doc_ids_from_seq_lengths([lengths], length))


def from_offsets(params: PackedSeqParams) -> BlockMask:
    return to_block_mask(params)


def by_evaluation(params: PackedSeqParams) -> BlockMask:
    length = params.doc_ids.shape[1]
    return create_block_mask(to_mask_mod(params), 1, None, length, length, device="cpu")


BUILDERS: dict[str, Callable[[PackedSeqParams], BlockMask]] = {"offsets": from_offsets, "create_block_mask": by_evaluation}


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(name: str, length: int) -> None:
    """Print the median seconds and the peak memory of one builder; the body of a child process."""
    from_offsets(packed_row(128))  # load FlexAttention before looking at memory
    params, before, seconds = packed_row(length), peak_bytes(), []
    for _ in range(REPEATS[name]):
        begin = time.perf_counter()
        BUILDERS[name](params)
        seconds.append(time.perf_counter() - begin)
    print(statistics.median(seconds), peak_bytes() - before)


def check(length: int) -> None:
    """Fail unless both builders give the same blocks."""
    ours, theirs = (build(packed_row(length)) for build in BUILDERS.values())
    for counts, indices in (("kv_num_blocks", "kv_indices"), ("full_kv_num_blocks", "full_kv_indices")):
        numbers = getattr(theirs, counts)
        assert torch.equal(getattr(ours, counts), numbers)
        held = torch.arange(numbers.shape[-1]) < numbers[..., None]
        assert torch.equal(getattr(ours, indices)[held], getattr(theirs, indices)[held])


def in_a_process(*arguments: str) -> str:
    return subprocess.run([sys.executable, __file__, "--run", *arguments], check=True, capture_output=True, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run:
        torch.set_num_threads(1)
        name, length = given.run
        check(int(length)) if name == "check" else measure(name, int(length))
        return
    print(f"torch {torch.__version__}, one thread, blocks of 128\n")
    print("| S | documents | builder | milliseconds | peak MiB |\n|---|---|---|---|---|")
    heads = []
    for length in LENGTHS:
        in_a_process("check", str(length))
        documents = len(packed_row(length).cu_seqlens) - 1
        found = {name: tuple(map(float, in_a_process(name, str(length)).split())) for name in BUILDERS}
        for name, (seconds, peak) in found.items():
            print(f"| {length} | {documents} | {name} | {seconds * 1e3:.2f} | {peak / 2**20:.1f} |", flush=True)
        (ours, our_peak), (theirs, their_peak) = found.values()
        heads.append(
            f"S={length} in 1/{theirs / ours:.0f} of create_block_mask's time, {our_peak / 2**20:.1f} against "
            f"{their_peak / 2**20:.0f} MiB"
        )
    print(f"\nheadline: BlockMask from offsets: {'; '.join(heads)}")


if __name__ == "__main__":
    main()
