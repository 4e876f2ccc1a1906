"""Families whose attention code goes past transformers' interface, on packed_varlen through layers that stand in for it."""

import copy
import pickle

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from neatpack import check_isolation, packed_seq_params_from_doc_ids
from neatpack.audit.zoo_models import small_model
from neatpack.errors import ContractError
from neatpack.hf import collator_for, contract_for, use_packed_varlen
from neatpack.hf.layers.base import PackedLayer, with_alibi
from neatpack.hf.layers.starts import segment_starts
from neatpack.hf.segments import _watch
from tiny_models import packed_batch, tiny_model

SENT = {
    "big_bird": "starts", "bloom": "starts", "falcon": "positions", "gpt_neo": "positions", "gpt_neox_japanese": "positions",
    "megatron-bert": "starts", "mpt": "starts", "openai-gpt": "starts", "rembert": "starts", "xglm": "starts",
}  # fmt: skip
ROWS = [
    {"input_ids": list(range(3, 35)), "seq_lengths": [20, 12]},
    {"input_ids": list(range(33, 5, -1)), "seq_lengths": [7, 1, 1, 9, 10]},
]
FALCON = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
KINDS_OF_FALCON = {
    "one key head": {"alibi": False, "multi_query": True},
    "as many key heads": {"alibi": False, "multi_query": False},
    "grouped key heads": {"alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2},
    "alibi": {"alibi": True, "multi_query": False, "parallel_attn": False},
    "alibi, one key head": {"alibi": True, "multi_query": True},
}


@pytest.fixture(scope="module", params=SENT)
def family(request):
    """A name, the model on transformers' own attention, and the same model on packed_varlen."""
    return request.param, small_model(request.param, None, 32), use_packed_varlen(small_model(request.param, None, 32))


def batch_for(model):
    return dict(collator_for(model, return_doc_ids=True)(ROWS))


def logits_of(model, **inputs):
    with torch.no_grad():
        return model(**inputs).logits


def test_documents_are_what_they_are_alone_and_move_nobody(family):
    name, _, model = family
    contract = contract_for(model)
    assert (contract.payload, contract.attention) == (SENT[name], "packed_varlen")
    report = check_isolation(model, batch_for(model))
    assert report.isolated, str(report)
    assert report.max_influence == 0.0
    assert report.control > 0.1


def test_without_what_the_contract_sends_the_same_rows_leak_or_are_refused(family):
    name, _, model = family
    batch = batch_for(model)
    batch.pop("attention_mask", None)
    if SENT[name] == "positions":
        batch.pop("position_ids")
    report = check_isolation(model, batch)
    assert report.max_influence > 0.1


def test_a_whole_row_a_padded_row_and_what_is_generated_are_those_of_transformers(family):
    _, plain, model = family
    ids = torch.arange(3, 23)[None]
    padding = torch.tensor([[0] * 4 + [1] * 16])
    tolerance = 1e-5 * float(logits_of(plain, input_ids=ids).abs().max())
    assert (logits_of(model, input_ids=ids) - logits_of(plain, input_ids=ids)).abs().max() < tolerance
    padded = [logits_of(each, input_ids=ids, attention_mask=padding)[:, 4:] for each in (model, plain)]
    assert (padded[0] - padded[1]).abs().max() < tolerance
    generated = [each.generate(ids, max_new_tokens=6, do_sample=False) for each in (model, plain)]
    assert torch.equal(*generated)


def test_parameters_keep_their_names_and_a_saved_model_loads_as_it_always_did(family, tmp_path):
    _, plain, model = family
    assert list(model.state_dict()) == list(plain.state_dict())
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert not any(isinstance(part, PackedLayer) for part in loaded.modules())
    ids = torch.arange(3, 23)[None]
    torch.testing.assert_close(logits_of(loaded, input_ids=ids), logits_of(plain, input_ids=ids))


def test_copies_and_pickles_stay_on_packed_varlen(family):
    _, _, model = family
    batch = batch_for(model)
    del batch["labels"], batch["doc_ids"]
    expected = logits_of(model, **batch)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits_of(other, **batch), expected)


def test_no_gradient_of_one_documents_loss_reaches_another_in_training(family):
    """With checkpointing, and a second batch run forward before the first one's backward recomputes its layers."""
    _, _, model = family
    trained = copy.deepcopy(model).train()
    if trained.supports_gradient_checkpointing:
        trained.gradient_checkpointing_enable({"use_reentrant": False})
    batch = batch_for(trained)
    doc_ids = batch.pop("doc_ids")
    del batch["labels"]
    embedded = trained.get_input_embeddings()(batch.pop("input_ids")).detach().requires_grad_()
    logits = trained(inputs_embeds=embedded, **batch).logits
    other = collator_for(trained)([{"input_ids": list(range(3, 35)), "seq_lengths": [5, 27]} for _ in range(2)])
    trained(**other)
    logits[0][doc_ids[0] == 2].square().sum().backward()
    assert embedded.grad[0][doc_ids[0] == 1].abs().max() == 0.0
    assert embedded.grad[1].abs().max() == 0.0
    assert embedded.grad[0][doc_ids[0] == 2].abs().max() > 0.0


@pytest.mark.parametrize("kind", KINDS_OF_FALCON)
def test_every_kind_of_falcon_is_isolated_and_agrees_with_transformers(kind):
    """With sdpa: transformers' eager Falcon adds ALiBi twice, to the scores and in the mask."""
    config = transformers.FalconConfig(**{**FALCON, **KINDS_OF_FALCON[kind]})
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    for parameter in plain.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    model = use_packed_varlen(copy.deepcopy(plain))
    assert check_isolation(model, batch_for(model)).isolated
    ids = torch.arange(3, 23)[None]
    torch.testing.assert_close(logits_of(model, input_ids=ids), logits_of(plain, input_ids=ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize("heads", [4, 6])
def test_mpt_has_its_own_slopes_for_any_number_of_heads(heads):
    config = transformers.MptConfig(vocab_size=128, d_model=16 * heads, n_layers=2, n_heads=heads, max_seq_len=64)
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config).eval()
    for parameter in plain.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    model = use_packed_varlen(copy.deepcopy(plain))
    ids = torch.arange(3, 63)[None]
    torch.testing.assert_close(logits_of(model, input_ids=ids), logits_of(plain, input_ids=ids), atol=1e-4, rtol=0)
    assert check_isolation(model, batch_for(model)).isolated


# --- ALiBi ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_alibi_in_the_dot_product_is_the_bias_added_to_the_scores(dtype):
    """At places far beyond 256, where bfloat16 has no whole numbers any more."""
    torch.manual_seed(0)
    heads, length, width = 6, 700, 16
    query, key, value = (torch.randn(1, heads, length, width).to(dtype) for _ in range(3))
    slopes = torch.tensor([0.84, 0.5, 0.25, 0.11, 0.0625, 0.004])
    places = torch.arange(2000, 2000 + length)[None]
    q, k, v = with_alibi(query, key, value, slopes, places)
    assert {part.shape[-1] for part in (q, k, v)} == {width + 8}
    scores = (q.double() @ k.double().transpose(-1, -2)) - (query.double() @ key.double().transpose(-1, -2))
    bias = scores - scores[..., :1]
    exact = slopes.double()[None, :, None, None] * (places - 2000)[0].double()
    relative = {torch.float64: 1e-7, torch.float32: 1e-7, torch.bfloat16: 2e-5}[dtype]
    assert (bias - exact).abs().max() <= relative * exact.max()
    assert not v[..., width:].any()


def test_alibi_counts_within_documents():
    """Far along a row a document sees the very scores that it sees alone: places restart with it."""
    model = use_packed_varlen(small_model("mpt", None, 32))
    long = {"input_ids": [5 + i % 90 for i in range(900)], "seq_lengths": [870, 30]}
    batch = dict(collator_for(model)([long]))
    del batch["labels"]
    packed = logits_of(model, **batch)[0, 870:]
    alone = logits_of(model, input_ids=torch.tensor([long["input_ids"][870:]]))[0]
    assert (packed - alone).abs().max() < 1e-5 * alone.abs().max()


# --- what is sent -----------------------------------------------------------------------------------------------------


def test_segment_starts_of_the_worked_example():
    doc_ids = torch.tensor([[1, 1, 2, 2, 2, 0], [1, 2, 2, 3, 3, 3]])
    starts = segment_starts(packed_seq_params_from_doc_ids(doc_ids))
    assert starts.shape == (2, 1, 1, 6)
    assert starts[:, 0, 0].int().tolist() == [[1, 0, 1, 0, 0, 1], [1, 1, 0, 1, 0, 0]]


@pytest.mark.parametrize("seed", range(20))
def test_segment_starts_say_who_shares_a_segment(seed):
    import numpy as np

    from neatpack.testing import random_doc_ids

    doc_ids = torch.as_tensor(random_doc_ids(np.random.default_rng(seed), 3, 17))
    segment = segment_starts(packed_seq_params_from_doc_ids(doc_ids))[:, 0, 0].cumsum(1)
    for row in range(3):
        for place in range(1, 17):
            joined = segment[row, place] == segment[row, place - 1]
            assert bool(joined) == bool(doc_ids[row, place] == doc_ids[row, place - 1])


def test_views_of_one_part_of_a_tensor_count_as_the_same_until_it_changes():
    """What spares every layer but the first a look at the map on an accelerator (`meta` stands for one)."""
    mask = torch.zeros(2, 1, 1, 6, dtype=torch.bool, device="meta")
    unchanged = _watch(mask[:, 0, 0])
    assert unchanged(mask[:, 0, 0])
    assert not unchanged(mask[:1, 0, 0])
    assert not unchanged(torch.zeros_like(mask)[:, 0, 0])
    assert not unchanged(None)
    mask[0, 0, 0, 1] = True
    assert not unchanged(mask[:, 0, 0])


# --- selecting it -----------------------------------------------------------------------------------------------------


def test_a_model_that_goes_through_the_interface_is_simply_set():
    model = tiny_model("llama", "sdpa")
    assert use_packed_varlen(model) is model
    batch = packed_batch()
    assert torch.equal(logits_of(model, **batch), logits_of(tiny_model("llama"), **batch))
    assert not any(isinstance(part, PackedLayer) for part in model.modules())


def test_other_models_of_the_family_are_not_touched():
    bystander = small_model("falcon", None, 32)
    use_packed_varlen(small_model("falcon", None, 32))
    assert {type(part).__name__ for part in bystander.modules() if "Attention" in type(part).__name__} == {"FalconAttention"}
    assert contract_for(bystander).attention == "sdpa"


def test_selecting_it_twice_changes_nothing():
    model = use_packed_varlen(small_model("xglm", None, 32))
    kinds = [type(part) for part in model.modules()]
    assert [type(part) for part in use_packed_varlen(model).modules()] == kinds


def test_another_name_reaches_the_layers():
    model = use_packed_varlen(small_model("mpt", None, 32), "varlen_of_layers")
    assert contract_for(model).attention == "varlen_of_layers"
    assert check_isolation(model, batch_for(model)).isolated


def test_a_layer_whose_forward_was_replaced_is_refused():
    model = small_model("gpt_neo", None, 32)
    attention = model.transformer.h[0].attn.attention
    attention.forward = lambda *args, **kwargs: type(attention).forward(attention, *args, **kwargs)
    with pytest.raises(ContractError, match=r"GPTNeoSelfAttention has been replaced.*right after loading"):
        use_packed_varlen(model)


@pytest.mark.parametrize("name", ["xlm", "cpmant"])
def test_a_family_that_nothing_reaches_is_refused(name):
    with pytest.raises(ContractError, match="no layer to put in its place"):
        use_packed_varlen(small_model(name, None, 32))


def test_what_is_no_transformers_model_is_refused():
    with pytest.raises(ContractError, match="Linear is no transformers model"):
        use_packed_varlen(torch.nn.Linear(2, 2))


def test_cross_attention_is_refused():
    model = use_packed_varlen(small_model("xglm", None, 32))
    states = torch.zeros(1, 4, 64)
    with pytest.raises(ContractError, match="cross-attention over encoder_hidden_states"):
        model.model.layers[0].self_attn(states, key_value_states=states)


@pytest.mark.parametrize("name", ["mpt", "bloom", "openai-gpt"])
def test_a_refusal_names_the_way_out(name):
    with pytest.raises(ContractError, match=r"Call neatpack.hf.use_packed_varlen\(model\)"):
        contract_for(plain_with_the_name(name))


def plain_with_the_name(name):
    """A model that was loaded with the name of an attention which its code never calls."""
    model = small_model(name, None, 32)
    model.config._attn_implementation = "packed_varlen"
    return model
