"""collator_for(model) builds the collator that the model's contract asks for."""

import pickle

import pytest
import torch
from transformers import LlamaForCausalLM

import neatpack.hf
from neatpack import check_isolation
from neatpack.errors import ContractError, MetadataError
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


def test_ids_past_the_models_vocabulary_are_refused_by_row_and_place():
    model = tiny_model("llama")
    row = {"input_ids": [5, 128, 6], "seq_lengths": [3]}
    with pytest.raises(MetadataError, match=r"row 0 of the batch: input_ids\[1\] is 128, expected 0 to 127"):
        collator_for(model)([row])
    with pytest.raises(IndexError):  # the twin: nobody looks
        model(**collator_for(model, vocab_size=None)([row]))
    model.resize_token_embeddings(129)
    assert model(**collator_for(model)([row])).loss.isfinite()


def test_a_padding_id_that_the_model_has_no_embedding_for_is_not_taken():
    model = tiny_model("llama", pad_token_id=7)
    model.config.pad_token_id = 128
    batch = collator_for(model, row_length=20)(rows())
    assert model(**batch).loss.isfinite()
    with pytest.raises(MetadataError, match="pad_token_id=128 is outside of the vocabulary"):
        collator_for(model, pad_token_id=128)


def test_a_model_that_does_not_tell_its_embeddings_gets_a_collator_that_does_not_look(monkeypatch):
    model = tiny_model("llama")
    monkeypatch.setattr(type(model), "get_input_embeddings", lambda self: (_ for _ in ()).throw(NotImplementedError))
    assert collator_for(model).vocab_size is None


def test_a_number_a_document_cannot_have_the_name_of_an_input_of_the_model(monkeypatch):
    model, forward = tiny_model("llama"), LlamaForCausalLM.forward

    def with_languages(self, input_ids=None, langs=None, **others):
        return forward(self, input_ids, **others)

    assert collator_for(model, document_columns=["langs"]).document_columns == ["langs"]
    monkeypatch.setattr(LlamaForCausalLM, "forward", with_languages)
    with pytest.raises(ContractError, match=r"names langs, which LlamaForCausalLM.forward takes.*Rename"):
        collator_for(model, document_columns=["langs"])


@pytest.mark.parametrize("architecture", ["gpt2", "opt"])
@pytest.mark.parametrize("attention", ["packed_varlen", "eager"])
def test_padding_longer_than_the_table_of_positions_is_no_index_error(architecture, attention):
    model = tiny_model(architecture, attention, max_position_embeddings=16)
    batch = collator_for(model, row_length=40, return_doc_ids=True)(rows())
    assert int(batch["position_ids"].max()) == 15
    assert check_isolation(model, batch).isolated
    with pytest.raises(IndexError):  # the twin: positions that count on
        model(**PackedCollator(row_length=40)(rows()))
