"""Models with stand-in layers, and batches for them."""

import torch

from neatpack.hf import collator_for

FAMILIES = [
    "big_bird", "bloom", "falcon", "gpt_neo", "gpt_neox_japanese", "megatron-bert", "mpt", "openai-gpt", "rembert", "roformer",
    "xglm"
]  # fmt: skip


ROWS = [
    {"input_ids": list(range(3, 35)), "seq_lengths": [20, 12]},
    {"input_ids": list(range(33, 5, -1)), "seq_lengths": [7, 1, 1, 9, 10]},
]


def batch_for(model):
    return dict(collator_for(model, return_doc_ids=True)(ROWS))


def logits_of(model, **inputs):
    with torch.no_grad():
        return model(**inputs).logits


def bare_batch(model):
    """Tokens and positions that restart, and nothing else."""
    batch = batch_for(model)
    return {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"]}
