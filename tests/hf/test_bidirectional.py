"""Decoders that a config turns into encoders: their tokens see later ones, and boundaries get lost on the way."""

import pytest
import torch

import neatpack.hf
from neatpack import check_isolation
from neatpack.errors import ContractError
from neatpack.hf import collator_for
from tiny_models import DOC_IDS, packed_batch, tiny_model

neatpack.hf.register()
MAP = torch.tensor(DOC_IDS)


@pytest.mark.parametrize("attention", ["packed_varlen", "sdpa", "eager"])
@pytest.mark.parametrize(
    ("architecture", "option"),
    [("llama", {"is_causal": False}), ("gemma", {"use_bidirectional_attention": True}),
     ("gemma3", {"use_bidirectional_attention": True})],
)  # fmt: skip
def test_a_decoder_that_sees_later_tokens_is_refused_with_the_option_that_makes_it(architecture, option, attention):
    model = tiny_model(architecture, attention, **option)
    with pytest.raises(ContractError, match=rf"its tokens see later ones.*{next(iter(option))}"):
        collator_for(model)


def test_on_stock_attention_such_a_decoder_would_leak():
    model = tiny_model("llama", "sdpa", is_causal=False)
    assert check_isolation(model, packed_batch(), doc_ids=MAP).verdict == "leaking"
