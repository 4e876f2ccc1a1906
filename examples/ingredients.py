"""What the examples start from: packed rows of real text, and a small model that trains in seconds.

The text is Python's own standard library: each top-level block of a few of its modules (a function, a class, a group of
imports) is one document. Replace both with your own: `neatpack pack` writes the same kind of folder from any text.
"""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path

import torch
from datasets import Dataset, load_from_disk
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import neatpack.data
import neatpack.hf

MODULES = ("argparse", "bisect", "calendar", "copy", "heapq", "pprint", "shlex", "shutil", "stat", "string", "textwrap")
VOCABULARY = 258  # the embedded tokenizer: 256 bytes, end of sequence, padding


def library_documents() -> list[str]:
    """Top-level blocks of a few modules: two blank lines stand between them."""
    sources = [inspect.getsource(importlib.import_module(name)) for name in MODULES]
    return [block.strip() + "\n" for source in sources for block in source.split("\n\n\n") if block.strip()]


def library_pairs(longest: int = 120) -> list[dict[str, str]]:
    """Preference pairs: after the first line of a block, its own next lines are better than those of the next block."""
    halves = [block.partition("\n")[::2] for block in library_documents()]
    halves = [(head + "\n", tail.partition("\n\n")[0][:longest]) for head, tail in halves if tail and len(head) < longest]
    turned = zip(halves, halves[1:] + halves[:1], strict=True)
    return [{"prompt": head, "chosen": tail, "rejected": other} for (head, tail), (_, other) in turned]


def packed_library(folder: str | Path, seq_len: int = 256, tokenizer: str = "bytes") -> Dataset:
    """Rows of at most `seq_len` tokens, with the columns `input_ids` and `seq_lengths`; longer documents are left out.

    From the shell: `neatpack pack blocks.jsonl --out packed --seq-len 256 --tokenizer bytes --overflow drop`
    """
    source, packed = Path(folder) / "blocks.jsonl", Path(folder) / "packed"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in library_documents()))
    neatpack.data.pack(source, packed, seq_len, tokenizer=tokenizer, overflow="drop", workers=1)
    return load_from_disk(str(packed))


def small_llama_config(**changes: object) -> LlamaConfig:
    """A Llama of about 30 thousand parameters; weights wide enough for its attention to matter before training."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    options = {"vocab_size": VOCABULARY, "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.2}
    return LlamaConfig(**{**sizes, **options, **changes})


def small_llama(attention: str | None = None, **changes: object) -> LlamaForCausalLM:
    """The same weights for every `attention`; by default `packed_varlen`, which neatpack registers with transformers."""
    torch.manual_seed(0)
    config = small_llama_config(attn_implementation=attention or neatpack.hf.register(), **changes)
    return LlamaForCausalLM(config)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, for trainers that insist on a tokenizer: ids below 256, then end of sequence and padding."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*alphabet, "<eos>", "<pad>"])}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
