"""packed_varlen against what packing is trained with elsewhere: `python benchmarks/attention.py`.

One small Llama (8 layers, hidden size 256, float32) and the same documents in every candidate:

* `packed_varlen`: PackedCollator's batch, neatpack's registered attention;
* `mask`: a 4-D block-diagonal bool mask under sdpa;
* `positions`: position ids alone under sdpa, from which transformers builds that mask itself;
* `padded`: one document a row, padded to the longest, sdpa with its causal flag;
* `flex` (forward only, `--flex`): a `BlockMask` from the offsets under compiled FlexAttention, which has no backward on CPUs.

Candidates take turns within one process, one thread; the numbers are medians of process CPU seconds (and of wall seconds, which
suffer from neighbours on a shared machine). All losses must agree before anything is timed. Ratios are to `mask`; below 1 is
faster. The last line of each table is a floor: the same step in which every token attends to itself only, so the model
without its attention.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
import transformers

import neatpack.hf
from neatpack import packed_seq_params_from_doc_ids
from neatpack.convert.dense import to_dense_mask
from neatpack.convert.flex import to_block_mask
from neatpack.train import PackedCollator

MIXES = ["mixed", "short", "equal", "long"]
VOCABULARY = 1024
ROWS = """
`packed_varlen` is PackedCollator's batch on neatpack's attention; `mask` a 4-D block-diagonal mask under sdpa; `positions` the
position ids alone under sdpa, from which transformers builds that mask; `padded` one document a row, padded to the longest;
`flex` a BlockMask under compiled FlexAttention, forward only; and `floor` the model without its attention: every token attends
to itself only."""


def lengths_of(mix: str, total: int) -> list[int]:
    """Document lengths that fill one row of `total` tokens."""
    rng = np.random.default_rng(0)
    draw: dict[str, Callable[[], int]] = {
        "mixed": lambda: int(np.clip(rng.lognormal(5, 1), 8, total // 2)),
        "short": lambda: int(rng.integers(32, 200)),
        "equal": lambda: 256,
        "long": lambda: total // 2,
    }
    lengths: list[int] = []
    while sum(lengths) < total:
        lengths.append(min(draw[mix](), total - sum(lengths)))
    return lengths


@dataclass
class Candidate:
    """A model's attention and the batch that it is called with, and what was measured."""

    attention: str
    batch: dict[str, object]
    cpu: dict[str, list[float]] = field(default_factory=lambda: {"forward": [], "forward + backward": []})
    wall: dict[str, list[float]] = field(default_factory=lambda: {"forward": [], "forward + backward": []})


def candidates_of(lengths: list[int], *, flex: bool) -> dict[str, Candidate]:
    total = sum(lengths)
    tokens = torch.randint(0, VOCABULARY, (total,), generator=torch.Generator().manual_seed(0))
    packed = PackedCollator(pad_token_id=0)([{"input_ids": tokens.tolist(), "seq_lengths": lengths}])
    doc_ids = torch.repeat_interleave(torch.arange(1, len(lengths) + 1), torch.tensor(lengths))[None]
    params = packed_seq_params_from_doc_ids(doc_ids)
    bare = {key: packed[key] for key in ("input_ids", "labels", "position_ids", "use_cache")}
    found = {
        "packed_varlen": Candidate(neatpack.hf.register(), packed),
        "mask": Candidate("sdpa", {**bare, "attention_mask": to_dense_mask(params)}),
        "positions": Candidate("sdpa", bare),
        "padded": Candidate("sdpa", padded(tokens, lengths)),
    }
    if flex:
        found["flex"] = Candidate("flex_attention", {**bare, "attention_mask": to_block_mask(params)})
    alone = PackedCollator(pad_token_id=0)([{"input_ids": tokens.tolist(), "seq_lengths": [1] * total}])
    return {**found, "floor": Candidate(neatpack.hf.register(), {**alone, "labels": packed["labels"]})}


def padded(tokens: torch.Tensor, lengths: list[int]) -> dict[str, object]:
    """One document a row; no mask is needed to the right of a causal document, and padding has no label."""
    documents = tokens.split(lengths)
    ids = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True)
    labels = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True, padding_value=-100)
    labels[:, 0] = -100
    return {"input_ids": ids, "labels": labels, "use_cache": False}


def small_llama(kv_heads: int) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=kv_heads,
        max_position_embeddings=16384,
    )
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


def forward(model: transformers.PreTrainedModel, batch: dict[str, object]) -> torch.Tensor:
    with torch.no_grad():
        return model(**batch).loss


def forward_and_backward(model: transformers.PreTrainedModel, batch: dict[str, object]) -> torch.Tensor:
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return loss.detach()


STEPS = {"forward": forward, "forward + backward": forward_and_backward}


def check(model: transformers.PreTrainedModel, candidates: dict[str, Candidate]) -> None:
    """Fail unless every candidate has the same loss; this also warms up."""
    losses = {}
    for name, candidate in candidates.items():
        model.set_attn_implementation(candidate.attention)
        losses[name] = forward(model, candidate.batch).item()
    for name, loss in losses.items():
        if name != "floor":
            assert abs(loss - losses["packed_varlen"]) < 1e-4, losses


def measure(model: transformers.PreTrainedModel, candidates: dict[str, Candidate], repeats: int) -> None:
    for _ in range(repeats):
        for name, candidate in candidates.items():
            model.set_attn_implementation(candidate.attention)
            for step, run in STEPS.items():
                if name == "flex" and run is forward_and_backward:
                    continue
                cpu, wall = time.process_time(), time.perf_counter()
                run(model, candidate.batch)
                candidate.cpu[step].append(time.process_time() - cpu)
                candidate.wall[step].append(time.perf_counter() - wall)


def report(candidates: dict[str, Candidate]) -> None:
    print("| attention | forward: of the mask's time | CPU s | wall s | forward + backward: of the mask's | CPU s | wall s |")
    print("|---|---|---|---|---|---|---|")
    for name, candidate in candidates.items():
        cells = []
        for step in STEPS:
            if not candidate.cpu[step]:
                cells += ["-", "-", "-"]
                continue
            cpu, wall = statistics.median(candidate.cpu[step]), statistics.median(candidate.wall[step])
            cells += [f"{ratio(candidates, name, step):.2f}x", f"{cpu:.2f}", f"{wall:.2f}"]
        print(f"| {'[floor] ' if name == 'floor' else ''}{name} | {' | '.join(cells)} |", flush=True)


def ratio(candidates: dict[str, Candidate], name: str, step: str, base: str = "mask") -> float:
    """CPU time of a step over that of another candidate."""
    return statistics.median(candidates[name].cpu[step]) / statistics.median(candidates[base].cpu[step])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096], help="tokens a row (try 8192)")
    parser.add_argument("--mixes", nargs="+", choices=MIXES, default=MIXES)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--flex", action="store_true", help="add FlexAttention, forward only (compiles for some seconds)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, one thread, medians of {options.repeats}")
    print(ROWS)
    model = small_llama(options.kv_heads)
    heads: dict[int, list[str]] = {}
    for total in options.lengths:
        for mix in options.mixes:
            lengths = lengths_of(mix, total)
            padding = len(lengths) * max(lengths) / total
            print(f"\nS={total} {mix}: {len(lengths)} documents, longest {max(lengths)}, padded {padding:.2f}x the tokens\n")
            candidates = candidates_of(lengths, flex=options.flex)
            check(model, candidates)
            measure(model, candidates, options.repeats)
            report(candidates)
            step = "forward + backward"
            of_mask, of_padded = (ratio(candidates, "packed_varlen", step, base) for base in ("mask", "padded"))
            heads.setdefault(total, []).append(f"{mix} {of_mask:.2f}x and {of_padded:.2f}x")
    for total, parts in heads.items():
        print(
            f"\nheadline: training step at S={total}: packed_varlen takes of the 4-D mask's and the padded batch's time: ",
            end="",
        )
        print("; ".join(parts))


if __name__ == "__main__":
    main()
