"""Models that count from their padding id on (the RoBERTa family) are packed with positions that start there."""

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

import neatpack.hf
from neatpack import check_isolation
from neatpack.audit import audit_model
from neatpack.audit.models import scale_weights
from neatpack.errors import ContractError
from neatpack.hf import collator_for, contract_for, require_isolation
from neatpack.train import PackedCollator
from tiny_models import COMMON, DOC_IDS

neatpack.hf.register()
MAP = torch.tensor(DOC_IDS)
OPTIONS = {**COMMON, "bos_token_id": 0, "pad_token_id": 1, "type_vocab_size": 1, "is_decoder": True}
FAMILY = {
    "Roberta": {},
    "XLMRoberta": {},
    "Camembert": {},
    "Data2VecText": {},
    "RobertaPreLayerNorm": {},
    "XLMRobertaXL": {},
    "Xmod": {"default_language": "en_XX"},
}
ROWS = [
    {"input_ids": list(range(3, 15)), "seq_lengths": [5, 7]},
    {"input_ids": list(range(20, 36)), "seq_lengths": [6, 4, 6]},
    {"input_ids": list(range(40, 56)), "seq_lengths": [16]},
]


def model_of(family, attention="packed_varlen", **changes):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**OPTIONS, **FAMILY[family], **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    scale_weights(model)
    return model


@pytest.mark.parametrize("attention", ["packed_varlen", "sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILY)
def test_positions_from_the_padding_id_on_isolate_the_roberta_family(family, attention):
    model = model_of(family, attention)
    contract, batch = contract_for(model), collator_for(model)(ROWS)
    assert contract.position_start == 2
    assert "position_ids from 2 on" in str(contract) or "position_ids that restart from 2 on" in str(contract)
    report = check_isolation(model, batch, doc_ids=MAP, position_start=contract.position_start)
    assert report.isolated, str(report)
    with torch.no_grad():  # and as the call without positions gives it, which the model numbers by itself
        alone = model(input_ids=batch["input_ids"][:1, 5:12], use_cache=False).logits[0]
        packed = model(**{name: value for name, value in batch.items() if name != "labels"}).logits[0, 5:12]
    assert (alone - packed).abs().max() < 1e-5 * max(1.0, float(alone.abs().max()))


@pytest.mark.parametrize("family", ["Roberta", "XLMRobertaXL"])
def test_positions_from_zero_are_not_what_such_a_model_counts(family):
    """Non-vacuity: nothing leaks, and every document is wrong; a probe that starts at 0 is wrong the other way."""
    model = model_of(family)
    from_zero = check_isolation(model, PackedCollator(pad_token_id=1)(ROWS), doc_ids=MAP, position_start=2)
    assert (from_zero.verdict, from_zero.max_influence) == ("differing", 0.0)
    assert check_isolation(model, collator_for(model)(ROWS), doc_ids=MAP).verdict == "differing"


def test_the_start_follows_the_models_padding_id_and_is_not_for_the_user_to_choose():
    model = model_of("Roberta", pad_token_id=4)
    assert contract_for(model).position_start == 5
    assert collator_for(model)(ROWS)["position_ids"][0].tolist()[:12] == [5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 10, 11]
    with pytest.raises(ContractError, match=r"decides on position_start.*PackedCollator"):
        collator_for(model, position_start=0)


def test_a_model_that_counts_from_an_unknown_place_is_refused():
    model = model_of("Roberta")
    model.roberta.embeddings.padding_idx = None
    with pytest.raises(ContractError, match="where a document's positions would have to start is not known"):
        contract_for(model)


def test_the_trainers_gate_and_the_audit_start_where_the_contract_says(tmp_path):
    model = model_of("Roberta")
    assert require_isolation(model, collator_for(model)(ROWS)).isolated
    transformers.RobertaConfig(is_decoder=True).save_pretrained(tmp_path)
    assert {each.attention: each.verdict for each in audit_model(tmp_path).results} == {
        "packed_varlen": "isolated",
        "sdpa": "isolated",
        "eager": "isolated",
    }


def test_rows_as_long_as_the_position_table_leave_room_for_the_control():
    """One sequence over the whole row would run past the table: the control takes a part that fits."""
    model = model_of("Roberta", max_position_embeddings=16)
    report = check_isolation(model, collator_for(model)(ROWS[:2]), doc_ids=MAP[:2], position_start=2)
    assert report.isolated, str(report)
