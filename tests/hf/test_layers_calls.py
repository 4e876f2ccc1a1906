"""What a model with stand-in layers may be called with: every way that carries boundaries, and none that loses them."""

import copy
import functools

import pytest
import torch
import transformers

from hf.stand_ins import bare_batch, batch_for, logits_of
from neatpack.audit.zoo_models import small_model
from neatpack.errors import ContractError
from neatpack.hf import collator_for, use_packed_varlen
from neatpack.hf.segments import _watch
from tiny_models import cache_keyword

DOC_MAP = torch.tensor([[1] * 20 + [2] * 12, [1] * 7 + [2] + [3] + [4] * 9 + [5] * 10 + [0] * 4])


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
    """Compiled once more, at most, when the number of documents first changes."""
    torch._dynamo.reset()  # what other tests compiled would be taken into account
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
    assert 1 <= len(graphs) <= 2


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


def test_cross_attention_is_refused():
    model = use_packed_varlen(small_model("xglm", None, 32))
    states = torch.zeros(1, 4, 64)
    with pytest.raises(ContractError, match="cross-attention over encoder_hidden_states"):
        model.model.layers[0].self_attn(states, key_value_states=states)


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


@pytest.mark.parametrize("further", [{}, {"cache_implementation": "static"}, {"num_beams": 2}], ids=str)
def test_what_is_generated_with_a_cache_that_is_asked_for_is_that_of_transformers(family, further):
    """MPT makes one only then; its code works on the mask that it is given."""
    name, plain, model = family
    if name == "openai-gpt" or (name == "gpt_neo" and "cache_implementation" in further):
        pytest.skip("one has no cache, the other windows, which a cache of fixed size does not go with")
    ids = torch.arange(3, 23)[None]
    options = {"max_new_tokens": 6, "do_sample": False, "use_cache": True, "pad_token_id": 0, **further}
    assert torch.equal(model.generate(ids, **options), plain.generate(ids, **options))


def test_hidden_states_are_given_where_they_are_asked_for(family):
    _, plain, model = family
    ids = torch.arange(3, 23)[None]
    with torch.no_grad():
        ours, theirs = (each(input_ids=ids, output_hidden_states=True).hidden_states for each in (model, plain))
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
