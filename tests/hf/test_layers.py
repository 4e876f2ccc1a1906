"""Families whose attention code goes past transformers' interface, on packed_varlen through layers that stand in for it."""

import copy
import pickle

import peft
import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from hf.stand_ins import ROWS, batch_for, logits_of
from neatpack import PackedCollator, check_isolation
from neatpack.audit.zoo_models import small_model
from neatpack.hf import collator_for, contract_for, use_packed_varlen
from neatpack.hf.layers.base import PackedLayer, with_alibi

FALCON = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}


KINDS_OF_FALCON = {
    "one key head": {"alibi": False, "multi_query": True},
    "as many key heads": {"alibi": False, "multi_query": False},
    "grouped key heads": {"alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2},
    "alibi": {"alibi": True, "multi_query": False, "parallel_attn": False},
    "alibi, one key head": {"alibi": True, "multi_query": True},
}


def test_documents_are_what_they_are_alone_and_move_nobody(family):
    _, _, model = family
    contract = contract_for(model)
    assert (contract.payload, contract.attention) == ("offsets", "packed_varlen")
    report = check_isolation(model, batch_for(model))
    assert report.isolated, str(report)
    assert report.max_influence == 0.0
    assert report.control > 0.1


def test_without_boundaries_the_same_rows_leak(family):
    _, _, model = family
    batch = batch_for(model)
    rows = {"input_ids": batch["input_ids"], "doc_ids": batch["doc_ids"]}
    assert check_isolation(model, rows).max_influence > 0.1


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
    padding = torch.tensor([[0] * 4 + [1] * 16])
    padded = [logits_of(each, input_ids=ids, attention_mask=padding)[:, 4:] for each in (model, plain)]
    torch.testing.assert_close(*padded, atol=1e-4, rtol=0)
    holes = torch.ones(1, 20, dtype=torch.long)
    holes[0, 6:9] = 0
    holed = [logits_of(each, input_ids=ids, attention_mask=holes)[:, holes[0] > 0] for each in (model, plain)]
    torch.testing.assert_close(*holed, atol=1e-4, rtol=0)
    with torch.no_grad():
        caches = [each(input_ids=ids[:, :8], use_cache=True).cache for each in (model, plain)]
        steps = [each(input_ids=ids[:, 8:], cache=cache).logits for each, cache in zip((model, plain), caches, strict=True)]
    torch.testing.assert_close(*steps, atol=1e-4, rtol=0)


@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("head", [transformers.FalconForTokenClassification, transformers.FalconForQuestionAnswering])
def test_heads_of_falcon_keep_the_documents_of_offsets_apart(head, alibi):
    """Whether they hand positions on or not; what a contract says of such heads is another matter."""
    torch.manual_seed(0)
    model = use_packed_varlen(head(transformers.FalconConfig(**FALCON, alibi=alibi)).eval())
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    batch = dict(PackedCollator()(ROWS))
    del batch["labels"]
    name = "logits" if head is transformers.FalconForTokenClassification else "start_logits"

    def scores(ids):
        with torch.no_grad():
            return getattr(model(**{**batch, "input_ids": ids}), name)[0]

    changed = batch["input_ids"].clone()
    changed[0, 3] = 99
    before, after = scores(batch["input_ids"]), scores(changed)
    assert torch.equal(before[20:], after[20:])
    assert not torch.equal(before[:20], after[:20])


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


def test_roformers_values_may_be_rotated_too():
    """Then a document is what it is alone only where its places are counted from its own start."""
    sizes = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(transformers.RoFormerConfig(**sizes, is_decoder=True, rotary_value=True)).eval()
    for parameter in plain.parameters():
        if parameter.dim() > 1 and parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.2)
    model, ids = use_packed_varlen(copy.deepcopy(plain)), torch.arange(3, 35)[None]
    torch.testing.assert_close(logits_of(model, input_ids=ids), logits_of(plain, input_ids=ids), atol=1e-4, rtol=0)
    assert check_isolation(model, batch_for(model)).isolated
    batch = dict(collator_for(model)(ROWS[:1]))
    alone = logits_of(plain, input_ids=ids[:, 20:])
    torch.testing.assert_close(logits_of(model, **batch)[:, 20:], alone, atol=1e-4, rtol=0)
    assert (logits_of(plain, input_ids=ids)[:, 20:] - alone).abs().max() > 0.1


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


def test_blooms_slices_are_summed_as_transformers_sums_them():
    config = transformers.BloomConfig(
        vocab_size=128, hidden_size=64, n_layer=2, n_head=4, pretraining_tp=2, slow_but_exact=True
    )
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config).eval()
    for parameter in plain.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model = use_packed_varlen(copy.deepcopy(plain))
    ids = torch.arange(3, 23)[None]
    torch.testing.assert_close(logits_of(model, input_ids=ids), logits_of(plain, input_ids=ids), atol=1e-4, rtol=0)


def test_an_adapted_model_keeps_documents_apart(family):
    name, _, model = family
    linear = next(name for name, part in model.named_modules() if "att" in name and isinstance(part, (nn.Linear, Conv1D)))
    lora = peft.LoraConfig(
        target_modules=[linear.rpartition(".")[2]],
        init_lora_weights=False,
        task_type="CAUSAL_LM",
        fan_in_fan_out=name == "openai-gpt",
    )
    adapted = peft.get_peft_model(copy.deepcopy(model), lora).eval()
    report = check_isolation(adapted, batch_for(adapted))
    assert report.isolated
    assert report.control > 0.1
