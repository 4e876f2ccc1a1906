"""Families whose attention code goes past transformers' interface, on packed_varlen through layers that stand in for it."""

import copy
import functools
import json
import pickle
import subprocess
import sys

import peft
import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from neatpack import PackedCollator, check_isolation
from neatpack.audit.zoo_models import small_model
from neatpack.errors import ContractError
from neatpack.hf import collator_for, contract_for, use_packed_varlen
from neatpack.hf.layers.base import PackedLayer, with_alibi
from neatpack.hf.layers.models import ReadsBoundaries
from neatpack.hf.segments import _watch
from tiny_models import cache_keyword, packed_batch, tiny_model

FAMILIES = [
    "big_bird", "bloom", "falcon", "gpt_neo", "gpt_neox_japanese", "megatron-bert", "mpt", "openai-gpt", "rembert", "roformer",
    "xglm"
]  # fmt: skip
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


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    """A name, the model on transformers' own attention, and the same model on packed_varlen."""
    return request.param, small_model(request.param, None, 32), use_packed_varlen(small_model(request.param, None, 32))


def batch_for(model):
    return dict(collator_for(model, return_doc_ids=True)(ROWS))


def logits_of(model, **inputs):
    with torch.no_grad():
        return model(**inputs).logits


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


# --- what a model is called with --------------------------------------------------------------------------------------

DOC_MAP = torch.tensor([[1] * 20 + [2] * 12, [1] * 7 + [2] + [3] + [4] * 9 + [5] * 10 + [0] * 4])


def bare_batch(model):
    """Tokens and positions that restart, and nothing else."""
    batch = batch_for(model)
    return {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"]}


def test_positions_that_restart_are_read_with_a_cache_and_without(family):
    _, _, model = family
    batch = batch_for(model)
    expected = logits_of(model, **{key: batch[key] for key in batch if key not in ("labels", "doc_ids")})
    for further in ({}, {"use_cache": False}):
        assert torch.equal(logits_of(model, **bare_batch(model), **further), expected)


@pytest.mark.parametrize(
    "mask", [DOC_MAP.sign(), torch.ones_like(DOC_MAP), DOC_MAP], ids=["of padding", "of ones", "of documents"]
)
def test_a_two_dimensional_mask_that_would_lose_boundaries_is_refused(family, mask):
    _, _, model = family
    with pytest.raises(ContractError, match="position_ids go from 19 to 0 at row 0, position 20"):
        model(**bare_batch(model), attention_mask=mask)


@pytest.mark.parametrize("shape", [(2, 1, 1, 32), (1, 1, 1, 32), (2, 1, 32, 32)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_mask_of_four_dimensions_is_refused_whatever_it_means(family, shape, dtype):
    _, _, model = family
    with pytest.raises(ContractError, match="a mask that is not"):
        model(input_ids=bare_batch(model)["input_ids"], attention_mask=torch.ones(shape, dtype=dtype))


def test_offsets_that_do_not_fit_or_come_with_a_mask_are_refused(family):
    _, _, model = family
    batch = batch_for(model)
    del batch["labels"], batch["doc_ids"]
    wrong = {
        "does not describe this batch": {"cu_seq_lens_q": batch["cu_seq_lens_q"][:-1]},
        "came along with cu_seq_lens_q": {"attention_mask": torch.ones(2, 32)},
        "came without cu_seq_lens_q": {"cu_seq_lens_q": None},
        "but the longest segment has 20": {"max_length_q": 3},
        "restart at row 0, position 20": {
            "cu_seq_lens_q": torch.tensor([0, 32, 64], dtype=torch.int32),
            "cu_seq_lens_k": None,
            "max_length_q": 32,
            "max_length_k": 32,
        },
    }
    for words, change in wrong.items():
        with pytest.raises(ContractError, match=words):
            model(**{**batch, **change})


def test_attention_weights_are_refused(family):
    _, _, model = family
    with pytest.raises(ContractError, match="computes no attention weights"):
        model(input_ids=torch.arange(3, 9)[None], output_attentions=True)


def test_the_model_within_takes_offsets_too(family):
    """And returns what it returns when the outer model has read the boundaries for it."""
    _, _, model = family
    batch = batch_for(model)
    del batch["labels"], batch["doc_ids"]
    with torch.no_grad():
        inner = model.base_model(**batch).last_hidden_state
        lone = model.base_model(**{"input_ids": batch["input_ids"][:1, :20], "use_cache": False}).last_hidden_state
    assert (inner[0, :20] - lone[0]).abs().max() < 1e-5 * lone.abs().max()


def test_an_empty_cache_changes_nothing_and_a_filled_one_is_refused(family):
    name, _, model = family
    if name == "openai-gpt":
        pytest.skip("it has no cache")
    batch = batch_for(model)
    del batch["labels"], batch["doc_ids"]
    expected = logits_of(model, **batch)
    keyword = cache_keyword(model)
    cache = transformers.DynamicCache()
    assert torch.equal(logits_of(model, **{**batch, keyword: cache, "use_cache": True}), expected)
    with pytest.raises(ContractError, match="not a cache or a prefix"):
        model(**{**batch, keyword: cache, "use_cache": True})


def test_positions_of_three_dimensions_are_refused(family):
    _, _, model = family
    bare = bare_batch(model)
    with pytest.raises(ContractError, match="or positions"):
        model(input_ids=bare["input_ids"], position_ids=bare["position_ids"].expand(3, -1, -1))


def test_a_padding_mask_of_four_dimensions_is_no_map_for_the_model_within(family):
    _, _, model = family
    padding = torch.ones(2, 1, 1, 32, dtype=torch.bool)
    with pytest.raises(ContractError, match="a mask that is not"):
        model.base_model(input_ids=bare_batch(model)["input_ids"], attention_mask=padding)


def test_a_mask_with_a_hole_gives_what_transformers_gives(family):
    _, plain, model = family
    ids, mask = torch.arange(3, 23)[None], torch.ones(1, 20, dtype=torch.long)
    mask[0, 6:9] = 0
    ours, theirs = (logits_of(each, input_ids=ids, attention_mask=mask)[:, mask[0] > 0] for each in (model, plain))
    assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max()


def test_tokens_may_be_given_by_place(family):
    _, _, model = family
    batch = batch_for(model)
    del batch["labels"], batch["doc_ids"]
    expected = logits_of(model, **batch)
    ids = batch.pop("input_ids")
    with torch.no_grad():
        assert torch.equal(model(ids, **batch).logits, expected)


@pytest.mark.parametrize("name", ["mpt", "falcon"])
def test_a_compiled_model_reads_positions_with_a_cache_too(name):
    model = use_packed_varlen(small_model(name, None, 32))
    expected = logits_of(model, **bare_batch(model), use_cache=False)
    compiled = torch.compile(model, backend="eager")
    assert torch.equal(logits_of(compiled, **bare_batch(model), cache=transformers.DynamicCache(), use_cache=True), expected)


def test_what_is_given_twice_or_too_much_is_the_models_own_error():
    model, ids = use_packed_varlen(small_model("mpt", None, 32)), torch.arange(3, 9)[None]
    with pytest.raises(TypeError, match="multiple values for argument 'input_ids'"):
        model(ids, input_ids=ids)
    with pytest.raises(TypeError, match="positional arguments"):
        model(ids, *[None] * 40)


def test_offsets_may_end_in_empty_segments():
    model = use_packed_varlen(small_model("mpt", None, 32))
    batch = batch_for(model)
    del batch["labels"], batch["doc_ids"]
    expected = logits_of(model, **batch)
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        batch[name] = torch.cat([batch[name], batch[name][-1:].repeat(3)])
    assert torch.equal(logits_of(model, **batch), expected)


def test_a_compiled_model_has_one_program_for_any_documents():
    """Compiled once more when the number of documents first changes."""
    model = use_packed_varlen(small_model("mpt", None, 32))
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=count, fullgraph=True, dynamic=None)
    for lengths in ([20, 12], [7, 1, 1, 9, 14], [3] * 10 + [2]):
        batch = dict(collator_for(model)([{"input_ids": list(range(3, 35)), "seq_lengths": lengths}] * 2))
        del batch["labels"]
        assert torch.equal(logits_of(compiled, **batch), logits_of(model, **batch))
    assert len(graphs) == 2


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
    assert kinds[0].__mro__.count(ReadsBoundaries) == 1
    assert check_isolation(use_packed_varlen(model, "by_another_name"), batch_for(model)).isolated
    assert contract_for(model).attention == "by_another_name"


def test_a_model_around_one_that_was_selected_before_reads_for_both():
    model = small_model("rembert", None, 32)
    use_packed_varlen(model.rembert)
    assert check_isolation(use_packed_varlen(model), batch_for(model)).isolated


def test_a_model_that_does_not_read_boundaries_for_its_layers_has_no_contract():
    model = use_packed_varlen(small_model("mpt", None, 32))
    model.__class__ = transformers.MptForCausalLM
    with pytest.raises(ContractError):
        contract_for(model)


def test_layers_work_in_a_process_that_registered_nothing(tmp_path):
    model = use_packed_varlen(small_model("mpt", None, 32))
    torch.save((model, batch_for(model)), tmp_path / "model.pt")
    script = (
        "import sys, torch; m, b = torch.load(sys.argv[1], weights_only=False); b.pop('doc_ids'); print(m(**b).loss.item())"
    )
    run = subprocess.run([sys.executable, "-c", script, str(tmp_path / "model.pt")], capture_output=True, text=True, check=True)
    batch = batch_for(model)
    del batch["doc_ids"]
    assert float(run.stdout) == pytest.approx(model(**batch).loss.item(), rel=1e-5)


def test_a_saved_part_names_the_class_that_everyone_knows(tmp_path):
    model = use_packed_varlen(small_model("bloom", None, 32))
    model.transformer.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["BloomModel"]


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


@pytest.mark.parametrize("static", [False, True])
def test_forward_called_by_itself_reads_boundaries_too(family, static):
    """That is how PEFT and TRL call the model inside them; hooks do not run there."""
    _, _, model = family
    batch = batch_for(model)
    del batch["labels"], batch["doc_ids"]
    expected = logits_of(model, **batch)
    call = functools.partial(type(model).forward, model) if static else model.forward
    with torch.no_grad():
        assert torch.equal(call(**batch).logits, expected)
        assert torch.equal(call(**bare_batch(model)).logits, expected)
    with pytest.raises(ContractError, match="does not describe this batch"):
        call(**{**batch, "cu_seq_lens_q": batch["cu_seq_lens_q"][:-1]})


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


def test_another_model_of_its_class_is_on_packed_varlen_too(family, tmp_path):
    """A class that reads boundaries for layers of transformers would hand those a map they cannot read."""
    _, _, model = family
    model.save_pretrained(tmp_path)
    batch = batch_for(model)
    for other in (type(model)(copy.deepcopy(model.config)).eval(), type(model).from_pretrained(tmp_path).eval()):
        assert contract_for(other).attention == "packed_varlen"
        assert check_isolation(other, batch).max_influence == 0.0
    assert torch.equal(logits_of(other, input_ids=batch["input_ids"]), logits_of(model, input_ids=batch["input_ids"]))


def test_offsets_alone_restart_positions(family):
    _, _, model = family
    batch = batch_for(model)
    del batch["labels"], batch["doc_ids"]
    expected = logits_of(model, **batch)
    del batch["position_ids"]
    assert torch.equal(logits_of(model, **batch), expected)


def test_what_is_generated_with_a_cache_of_fixed_size_is_that_of_transformers(family):
    name, plain, model = family
    if name in ("gpt_neo", "openai-gpt"):
        pytest.skip("one has windows, the other no cache")
    ids, mask = torch.arange(3, 23).repeat(2, 1), torch.ones(2, 20, dtype=torch.long)
    mask[1, :5] = 0
    further = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = plain.generate(ids, **further)
    assert torch.equal(model.generate(ids, **further, cache_implementation="static"), expected)


def test_a_packed_row_in_a_cache_of_fixed_size_is_refused(family):
    name, _, model = family
    if name in ("gpt_neo", "openai-gpt"):
        pytest.skip("one has windows, the other no cache")
    keyword = cache_keyword(model)
    bare = bare_batch(model)
    seen = torch.ones(32, 40, dtype=torch.bool).tril()[None, None].expand(2, -1, -1, -1)
    for further in ({}, {"attention_mask": seen}, {"attention_mask": torch.ones(2, 32)}):
        cache = transformers.StaticCache(config=model.config, max_cache_len=40)
        with pytest.raises(ContractError):
            model(**bare, **further, **{keyword: cache}, use_cache=True)


@pytest.mark.parametrize("head", ["BigBird", "MegatronBert", "RemBert", "RoFormer"])
def test_choices_are_rows_of_one_document(head):
    config = getattr(transformers, f"{head}Config")(
        vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, attention_type="original_full",
        is_decoder=True, input_embedding_size=64, intermediate_size=64,
    )  # fmt: skip
    torch.manual_seed(0)
    plain = getattr(transformers, f"{head}ForMultipleChoice")(config).eval()
    model, ids = use_packed_varlen(copy.deepcopy(plain)), torch.arange(3, 63).view(1, 3, 20)
    for further in ({}, {"attention_mask": torch.ones_like(ids)}):
        torch.testing.assert_close(logits_of(model, input_ids=ids, **further), logits_of(plain, input_ids=ids, **further))
    refuses_documents_in_choices(model, ids)


def test_the_first_gpts_two_heads_take_choices_of_one_document():
    config = transformers.OpenAIGPTConfig(vocab_size=128, n_embd=64, n_layer=2, n_head=4, n_positions=64)
    torch.manual_seed(0)
    plain = transformers.OpenAIGPTDoubleHeadsModel(config).eval()
    model, ids = use_packed_varlen(copy.deepcopy(plain)), torch.arange(3, 63).view(1, 3, 20)
    torch.testing.assert_close(logits_of(model, input_ids=ids), logits_of(plain, input_ids=ids))
    refuses_documents_in_choices(model, ids)


def refuses_documents_in_choices(model, ids):
    restarting = torch.cat([torch.arange(12), torch.arange(8)]).expand(1, 3, -1)
    offsets = torch.tensor([0, 12, 20, 40, 60], dtype=torch.int32)
    for further in ({"position_ids": restarting}, {"cu_seq_lens_q": offsets}, {"attention_mask": ids[:, :, None, None]}):
        with pytest.raises(ContractError, match="several choices a row"):
            model(input_ids=ids, **further)


def test_a_window_over_a_cache_of_fixed_size_is_refused():
    model = use_packed_varlen(small_model("gpt_neo", None, 32))
    with pytest.raises(ContractError, match="cache of fixed size"):
        model.generate(torch.arange(3, 23)[None], max_new_tokens=3, do_sample=False, cache_implementation="static")
