"""collator_for(model) builds the collator that the model's contract asks for."""

import pickle

import pytest
import torch

import neatpack.hf
from neatpack import check_isolation
from neatpack.errors import ContractError
from neatpack.hf import collator_for
from neatpack.train import PackedCollator
from tiny_models import DOC_IDS, tiny_model

neatpack.hf.register()
DOC_MAP = torch.tensor(DOC_IDS)


def rows():
    generator = torch.Generator().manual_seed(0)
    lengths = [[5, 7], [6, 4, 6], [16]]
    return [
        {"input_ids": torch.randint(3, 128, (sum(row),), generator=generator).tolist(), "seq_lengths": row} for row in lengths
    ]


def test_models_that_read_offsets_or_positions_get_no_mask():
    for attention in ("packed_varlen", "sdpa"):
        batch = collator_for(tiny_model("llama", attention))(rows())
        assert "attention_mask" not in batch
        assert batch["use_cache"] is False


@pytest.mark.parametrize(("architecture", "attention"), [("opt", "sdpa"), ("opt", "eager"), ("gpt_oss", "eager")])
def test_models_that_read_nothing_else_get_their_masks_and_are_isolated(architecture, attention):
    model = tiny_model(architecture, attention)
    assert check_isolation(model, collator_for(model)(rows()), doc_ids=DOC_MAP).isolated
    assert check_isolation(model, PackedCollator()(rows()), doc_ids=DOC_MAP).verdict == "leaking"


def test_options_reach_the_collator_and_the_padding_id_is_the_models():
    model = tiny_model("llama", pad_token_id=7)
    batch = collator_for(model, row_length=20, return_doc_ids=True)(rows())
    assert batch["input_ids"].shape == (3, 20)
    assert set(batch["input_ids"][batch["doc_ids"] == 0].tolist()) == {7}
    assert collator_for(model, pad_token_id=5).pad_token_id == 5


def test_the_collator_travels_to_workers_and_holds_nothing_of_the_model():
    collator = collator_for(tiny_model("gpt_oss", "eager"))
    data = pickle.dumps(collator)
    assert len(data) < 1000
    assert torch.equal(pickle.loads(data)(rows())["input_ids"], collator(rows())["input_ids"])


def test_the_mask_builder_cannot_be_chosen_and_what_has_no_contract_gets_no_collator():
    with pytest.raises(ContractError, match=r"decides on mask_builder.*PackedCollator"):
        collator_for(tiny_model("llama"), mask_builder=None)
    with pytest.raises(ContractError, match="BloomAttention"):
        collator_for(tiny_model("bloom"))


@pytest.mark.parametrize("architecture", ["gpt2", "opt"])
@pytest.mark.parametrize("attention", ["packed_varlen", "eager"])
def test_padding_longer_than_the_table_of_positions_is_no_index_error(architecture, attention):
    model = tiny_model(architecture, attention, max_position_embeddings=16)
    batch = collator_for(model, row_length=40, return_doc_ids=True)(rows())
    assert int(batch["position_ids"].max()) == 15
    assert check_isolation(model, batch).isolated
    with pytest.raises(IndexError):  # the twin: positions that count on
        model(**PackedCollator(row_length=40)(rows()))
