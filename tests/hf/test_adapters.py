"""Adapters: those that change a token by itself are looked through, those that look at the row are refused by name."""

import peft
import pytest
import torch

import neatpack.hf
from neatpack import check_isolation
from neatpack.errors import ContractError
from neatpack.hf import collator_for, contract_for
from tiny_models import DOC_IDS, packed_batch, tiny_model

neatpack.hf.register()
MAP = torch.tensor(DOC_IDS)
TARGETS = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
TOKENWISE = {
    "lora": peft.LoraConfig(r=2, **TARGETS),
    "dora": peft.LoraConfig(r=2, use_dora=True, **TARGETS),
    "ia3": peft.IA3Config(feedforward_modules=[], **TARGETS),
    "oft": peft.OFTConfig(oft_block_size=4, **TARGETS),
    "vera": peft.VeraConfig(r=2, **TARGETS),
}


def adapted(config):
    torch.manual_seed(0)
    model = peft.get_peft_model(tiny_model("llama"), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.dim() > 1:
                parameter.normal_(std=0.3)
    return model.eval()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("what", TOKENWISE)
def test_adapters_of_single_tokens_are_packed_and_isolated(what):
    model = adapted(TOKENWISE[what])
    assert contract_for(model).payload == "offsets"
    assert check_isolation(model, packed_batch(), doc_ids=MAP).isolated


def test_activated_lora_switches_on_along_the_row_and_is_refused():
    model = adapted(peft.LoraConfig(r=2, alora_invocation_tokens=[int(packed_batch()["input_ids"][0, 8])], **TARGETS))
    with pytest.raises(ContractError, match=r"adapter 'default'.*alora_invocation_tokens.*Use LoRA"):
        contract_for(model)
    assert check_isolation(model, packed_batch(), doc_ids=MAP).verdict == "leaking"


@pytest.mark.skipif(not hasattr(peft, "LilyConfig"), reason="this peft has no Lily")
def test_adapters_that_average_over_a_batch_are_refused_by_name():
    model = adapted(peft.LilyConfig(**TARGETS))
    with pytest.raises(ContractError, match=r"adapter 'default' is LILY.*not known to treat every token by itself.*Use LoRA"):
        collator_for(model)
    assert check_isolation(model, packed_batch(), doc_ids=MAP).verdict == "leaking"
