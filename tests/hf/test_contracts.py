"""A contract names what a built model honours, and refuses what nothing would keep apart; both are held to measurement."""

import pickle

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.modeling_outputs import CausalLMOutput

import neatpack.hf
from neatpack import check_isolation
from neatpack.audit.zoo_models import small_model
from neatpack.errors import ContractError
from neatpack.hf import contract_for
from neatpack.hf.model_facts import _mask_calls, model_facts
from neatpack.packed_seq import packed_seq_params_from_doc_ids
from tiny_models import COMMON, DOC_IDS, GROUPED, packed_batch, tiny_model

neatpack.hf.register()
MAP = torch.tensor(DOC_IDS)

PAYLOADS = {
    ("llama", "packed_varlen"): "offsets",
    ("llama", "sdpa"): "positions",
    ("llama", "eager"): "positions",
    ("llama", "flex_attention"): "positions",
    ("mistral", "sdpa"): "positions",  # its builder is chosen in a variable, window or not
    ("gemma3", "sdpa"): "positions",  # its builders take a dictionary of arguments
    ("gpt2", "eager"): "positions",
    ("opt", "packed_varlen"): "offsets",
    ("opt", "sdpa"): "mask",
    ("opt", "eager"): "mask",
    ("gpt_oss", "packed_varlen"): "offsets",
    ("gpt_oss", "eager"): "mask_dict",
}


def sent(model):
    """The batch with what the model's contract adds."""
    contract, batch = contract_for(model), packed_batch()
    if contract.mask_builder is not None:
        batch["attention_mask"] = contract.mask_builder(packed_seq_params_from_doc_ids(MAP))
    return contract, batch


@pytest.mark.parametrize(("architecture", "attention"), PAYLOADS)
def test_the_contract_names_the_payload_that_isolates(architecture, attention):
    model = tiny_model(architecture, attention)
    contract, batch = sent(model)
    assert contract.payload == PAYLOADS[architecture, attention]
    assert contract.attention == attention
    if attention != "flex_attention":  # compiled on the CPU, so measured elsewhere
        report = check_isolation(model, batch, doc_ids=MAP)
        assert report.isolated, f"{contract}\n{report}"


@pytest.mark.parametrize(("architecture", "attention"), [("opt", "sdpa"), ("opt", "eager"), ("gpt_oss", "eager")])
def test_without_what_the_contract_asks_for_the_same_model_leaks(architecture, attention):
    assert check_isolation(tiny_model(architecture, attention), packed_batch(), doc_ids=MAP).verdict == "leaking"


def test_one_mask_for_all_layers_would_switch_the_windows_off():
    """Why gpt_oss gets masks by layer type: with one full mask nothing leaks, and every document is wrong."""
    model = tiny_model("gpt_oss", "eager")
    _, batch = sent(model)
    full = {**batch, "attention_mask": batch["attention_mask"]["full_attention"]}
    assert check_isolation(model, full, doc_ids=MAP).verdict == "differing"


def test_masks_are_additive_in_the_models_dtype_for_eager_and_bool_for_sdpa():
    assert contract_for(tiny_model("opt", "eager").bfloat16()).dtype == torch.bfloat16
    assert contract_for(tiny_model("opt", "sdpa")).dtype is None


def test_a_contract_says_what_to_send_in_words_and_its_mask_builder_travels_to_workers():
    contract = contract_for(tiny_model("gpt_oss", "eager"))
    assert "masks by layer type" in str(contract)
    assert "never told position_ids" in str(contract)
    masks = pickle.loads(pickle.dumps(contract.mask_builder))(packed_seq_params_from_doc_ids(MAP))
    assert set(masks) == {"full_attention", "sliding_attention"}


def small(config, attention="eager"):
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


RECURRENT = {
    "Mamba2Mixer": lambda: transformers.Mamba2Config(
        num_hidden_layers=1, hidden_size=64, vocab_size=128, num_heads=8, head_dim=16, state_size=16, n_groups=1
    ),
    "BambaMixer": lambda: transformers.BambaConfig(
        **GROUPED, attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=16, mamba_d_state=16, mamba_n_groups=1
    ),
    "JambaMambaMixer": lambda: transformers.JambaConfig(
        **GROUPED, num_experts=2, use_mamba_kernels=False, attn_layer_period=2, attn_layer_offset=1
    ),
    "Qwen3NextGatedDeltaNet": lambda: transformers.Qwen3NextConfig(
        **{**GROUPED, "head_dim": 16}, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        shared_expert_intermediate_size=32, layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
    ),
}  # fmt: skip


@pytest.mark.parametrize("layer", RECURRENT)
def test_recurrent_layers_are_refused_by_name(layer):
    with pytest.raises(ContractError, match=f"carries a state from token to token in .*{layer}"):
        contract_for(small(RECURRENT[layer]()))


def test_attention_outside_the_interface_is_refused_where_offsets_are_all_that_is_read():
    with pytest.raises(ContractError, match="BloomAttention computes attention in its own code"):
        contract_for(tiny_model("bloom"))


def test_a_mask_that_is_read_as_padding_is_not_sent_as_four_dimensional():
    with pytest.raises(ContractError, match="distance bias is computed from a 2-D attention_mask"):
        contract_for(tiny_model("bloom", "eager"))


def test_flex_attention_is_refused_where_the_mask_builder_never_sees_positions():
    with pytest.raises(ContractError, match=r"never told position_ids.*packed_varlen"):
        contract_for(tiny_model("opt", "flex_attention"))


def test_an_encoder_is_refused_and_the_same_class_as_a_decoder_is_not():
    options = {**COMMON, "type_vocab_size": 1}
    with pytest.raises(ContractError, match=r"configured as an encoder.*is_decoder=True"):
        contract_for(small(transformers.BertConfig(**options)))
    decoder = small(transformers.BertConfig(**options, is_decoder=True), "packed_varlen")
    assert contract_for(decoder).payload == "offsets"


def test_attention_in_blocks_of_the_row_is_refused_and_the_same_model_in_full_is_not():
    """BigBird falls back to attention in full on short rows only; what holds there would not hold in training."""
    options = {**COMMON, "is_decoder": True, "type_vocab_size": 1}
    with pytest.raises(ContractError, match=r"attention in blocks of the row.*attention_type='original_full'"):
        contract_for(small(transformers.BigBirdConfig(**options)))
    assert contract_for(small(transformers.BigBirdConfig(**options, attention_type="original_full"))).payload == "mask"


def test_an_implementation_nobody_knows_is_refused():
    model = tiny_model("llama", "sdpa")
    model.config._attn_implementation_internal = "someones_attention"
    with pytest.raises(ContractError, match=r"attn_implementation='someones_attention'.*neatpack.hf.register"):
        contract_for(model)


class ShiftsInItsParent(transformers.LlamaForCausalLM):
    """A user's own class: its loss is that of the class it extends."""

    def forward(self, input_ids=None, position_ids=None, labels=None, **options):
        return super().forward(input_ids, position_ids=position_ids, labels=labels, **options)


def causal_loss(logits, labels):
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class ShiftsInAFunction(transformers.LlamaForCausalLM):
    """As remote code is often written."""

    def forward(self, input_ids=None, position_ids=None, labels=None, **options):
        logits = self.lm_head(self.model(input_ids, position_ids=position_ids, **options)[0])
        return CausalLMOutput(loss=causal_loss(logits, labels), logits=logits)


class DoesNotShift(transformers.LlamaForCausalLM):
    """As a decoder of an encoder-decoder family has it."""

    def forward(self, input_ids=None, position_ids=None, labels=None, **options):
        logits = self.lm_head(self.model(input_ids, position_ids=position_ids, **options)[0])
        return CausalLMOutput(loss=torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits=logits)


def loss_and_that_of_next_tokens(model):
    ids = torch.arange(3, 23)[None]
    with torch.no_grad():
        result = model(input_ids=ids, labels=ids, use_cache=False)
    return float(result.loss), float(torch.nn.functional.cross_entropy(result.logits[0, :-1], ids[0, 1:]))


def test_a_model_whose_own_loss_asks_for_the_token_itself_is_refused():
    """Decoders of encoder-decoder families want labels that were shifted before; aligned ones would teach them to repeat."""
    model = small_model("whisper", "sdpa", 32)
    loss, of_next = loss_and_that_of_next_tokens(model)
    assert abs(loss - of_next) > 0.01
    with pytest.raises(ContractError, match="shows no sign of shifting labels"):
        contract_for(model)


def test_a_model_whose_loss_asks_for_the_next_token_is_not():
    for kind in (ShiftsInItsParent, ShiftsInAFunction):
        model = kind(tiny_model("llama", "sdpa").config).eval()
        loss, of_next = loss_and_that_of_next_tokens(model)
        assert loss == pytest.approx(of_next, rel=1e-5)
        assert contract_for(model).payload == "positions"


def test_a_loss_that_replaces_the_one_that_shifts_is_refused():
    """What the class it extends would have done does not count: that forward does not run."""
    model = DoesNotShift(tiny_model("llama", "sdpa").config).eval()
    loss, of_next = loss_and_that_of_next_tokens(model)
    assert abs(loss - of_next) > 0.001
    with pytest.raises(ContractError, match="shows no sign of shifting labels"):
        contract_for(model)
    model = tiny_model("llama", "sdpa")
    model.loss_type = "ForMaskedLM"
    with pytest.raises(ContractError, match="shows no sign of shifting labels"):
        contract_for(model)


@pytest.mark.parametrize("attention", ["packed_varlen", "sdpa", "eager"])
def test_a_window_of_nothing_is_refused_with_the_way_out(attention):
    with pytest.raises(ContractError, match=r"sliding_window=0: no token would see anything.*sliding_window=None"):
        contract_for(tiny_model("mistral", attention, sliding_window=0))


def test_what_is_no_transformers_model_is_refused_with_the_way_out():
    with pytest.raises(ContractError, match=r"Linear is no transformers model.*check_isolation"):
        contract_for(torch.nn.Linear(2, 2))


def test_adapters_are_looked_through_and_learned_prompts_are_refused():
    import peft

    lora = peft.get_peft_model(tiny_model("llama"), peft.LoraConfig(target_modules=["q_proj"], r=2))
    assert contract_for(lora).payload == "offsets"
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(ContractError, match=r"adapter 'default' is PROMPT_TUNING: it puts learned tokens in front"):
        contract_for(peft.get_peft_model(tiny_model("llama"), prompts))
    prefix = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(ContractError, match="PREFIX_TUNING"):
        contract_for(peft.get_peft_model(tiny_model("llama"), prefix))


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
def test_wrappers_are_looked_through_and_nothing_is_run():
    assert contract_for(torch.nn.DataParallel(tiny_model("llama"))).payload == "offsets"
    assert contract_for(torch.compile(tiny_model("llama"))).payload == "offsets"
    with torch.device("meta"):
        assert contract_for(small(transformers.LlamaConfig(), "packed_varlen")).payload == "offsets"


CALLS = {
    "a keyword": ("m = create_causal_mask(config=c, attention_mask=a, position_ids=position_ids)", [True]),
    "no keyword": ("m = create_causal_mask(config=c, attention_mask=a)", [False]),
    "None": ("m = create_causal_mask(config=c, position_ids=None)", [False]),
    "a dictionary": ("k = {'position_ids': text_position_ids}\n    m = create_causal_mask(**k)", [True]),
    "a dictionary without": ("k = {'config': c}\n    m = create_causal_mask(**k)", [False]),
    "a copy": ("k = {'position_ids': p}\n    j = k.copy()\n    m = create_sliding_window_causal_mask(**j)", [True]),
    "a chosen builder": (
        "f = create_causal_mask if w is None else create_sliding_window_causal_mask\n    m = f(config=c, attention_mask=a)",
        [False],
    ),
    "one of two": (
        "m = create_causal_mask(position_ids=p)\n    n = create_chunked_causal_mask(attention_mask=a)",
        [True, False],
    ),
    "an encoder's": ("m = create_bidirectional_mask(config=c, attention_mask=a)", []),
    "none at all": ("m = self.make(a)", []),
}


@pytest.mark.parametrize("how", CALLS)
def test_whether_a_mask_builder_sees_positions_is_read_off_the_source(how):
    body, expected = CALLS[how]
    assert list(_mask_calls(f"class Model:\n  def forward(self):\n    {body}\n")) == expected


class NoKwargs(torch.nn.Module):
    """Stands around an attention layer and takes none of its keyword arguments."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None):
        return self.attention(hidden_states, position_embeddings, attention_mask, past_key_values)


class KeepsKwargs(NoKwargs):
    """Takes keyword arguments and passes none of them on."""

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
        return self.attention(hidden_states, position_embeddings, attention_mask)


def wrapped(wrapper):
    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.self_attn = wrapper(layer.self_attn)
    return model


@pytest.mark.parametrize("wrapper", [NoKwargs, KeepsKwargs])
def test_where_offsets_do_not_reach_the_attention_flash_is_refused(wrapper):
    model = wrapped(wrapper)
    assert model_facts(model).loses_kwargs == (wrapper.__name__,)
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ContractError, match=f"because {wrapper.__name__} takes no keyword arguments or does not pass them on"):
        contract_for(model)


def test_where_offsets_do_not_reach_the_attention_packed_varlen_reads_positions():
    model = wrapped(KeepsKwargs)
    contract, batch = sent(model)
    assert contract.payload == "positions"
    assert check_isolation(model, batch, doc_ids=MAP).isolated


def test_every_layer_of_a_stock_model_passes_offsets_on():
    for architecture in ("llama", "gpt2", "gpt_neox", "opt", "mixtral"):
        assert model_facts(tiny_model(architecture)).loses_kwargs == ()


def test_flash_in_float32_without_a_linear_layer_is_refused_with_the_way_out():
    model = tiny_model("gpt2")
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ContractError, match="Load the model in bfloat16"):
        contract_for(model)
    assert contract_for(model.bfloat16()).payload == "offsets"


@pytest.mark.parametrize("attention", ["packed_varlen", "sdpa"])
def test_chunked_attention_is_refused_where_transformers_counts_chunks_along_the_row(attention, monkeypatch):
    """transformers 5.20 and before: logits differ by 3.8 from the document alone, and none moves another."""
    from transformers import masking_utils

    model = tiny_model("llama4", attention)
    assert contract_for(model).payload in ("offsets", "positions")
    monkeypatch.delattr(masking_utils, "remap_positions_for_packed_sequence")
    with pytest.raises(ContractError, match=r"Llama4.* attends in chunks.*Upgrade transformers"):
        contract_for(model)
