"""The metadata builder against the reference's formula, side by side: `python benchmarks/metadata.py`.

The formula is written out from the reference's page: start flags by comparing neighbours, row starts by modulo, nonzero,
cat, diff. Both run in this process, interleaved, on the same maps; the floor is a copy of the map (memory bandwidth).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from neatpack import packed_seq_params_from_doc_ids

SHAPES = [(8, 32768), (1, 4096), (4, 8192), (32, 2048), (1, 131072), (64, 512)]
DOCUMENT_TOKENS = 200


def reference_formula(doc_ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    batch, length = doc_ids.shape
    flat = doc_ids.reshape(-1)
    starts = torch.ones_like(flat, dtype=torch.bool)
    starts[1:] = flat[1:] != flat[:-1]
    starts |= torch.arange(batch * length, device=flat.device) % length == 0
    positions = starts.nonzero().flatten()
    end = torch.tensor([batch * length], device=flat.device)
    cu_seqlens = torch.cat([positions, end]).to(torch.int32)
    return cu_seqlens, int(cu_seqlens.diff().max())


def interleaved_medians(candidates: list[Callable[[], object]], repeats: int = 60) -> list[float]:
    """Median seconds of each candidate, run in turn so that a drift of the machine hits all alike."""
    for candidate in candidates:
        candidate()
    times: list[list[float]] = [[] for _ in candidates]
    for _ in range(repeats):
        for candidate, seconds in zip(candidates, times, strict=True):
            begin = time.perf_counter()
            candidate()
            seconds.append(time.perf_counter() - begin)
    return [statistics.median(seconds) for seconds in times]


def main() -> None:
    print(f"{'shape':>12} {'dtype':>6} {'reference':>11} {'neatpack':>10} {'ratio':>6} {'copy floor':>11}")
    for dtype in (torch.int64, torch.int32):
        for batch, length in SHAPES:
            doc_ids = (torch.arange(length) // DOCUMENT_TOKENS + 1).repeat(batch, 1).to(dtype)
            expected, longest = reference_formula(doc_ids)
            params = packed_seq_params_from_doc_ids(doc_ids)
            assert torch.equal(params.cu_seqlens, expected)
            assert params.max_seqlen == longest
            reference, ours, copy = interleaved_medians(
                [
                    lambda ids=doc_ids: reference_formula(ids),
                    lambda ids=doc_ids: packed_seq_params_from_doc_ids(ids),
                    lambda ids=doc_ids: ids.clone(),
                ]
            )
            name = f"{batch} x {length}"
            print(
                f"{name:>12} {str(dtype)[6:]:>6} {reference * 1e6:>8.0f} us {ours * 1e6:>7.0f} us "
                f"{reference / ours:>5.1f}x {copy * 1e6:>8.0f} us"
            )


if __name__ == "__main__":
    main()
