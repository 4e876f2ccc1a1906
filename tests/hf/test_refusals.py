"""packed_varlen fails closed: what would drop or override a boundary is one ContractError that names the way out."""

import pytest
import torch
import transformers

import neatpack.hf
from neatpack.errors import ContractError
from neatpack.hf.attention import PackedVarlenAttention
from tiny_models import DOC_IDS, cache_keyword, packed_batch, tiny_model

neatpack.hf.register()


def offsets(*numbers):
    tensor = torch.tensor(numbers, dtype=torch.int32)
    return {"cu_seq_lens_q": tensor, "cu_seq_lens_k": tensor}


BROKEN = {
    "offsets that stop short": (offsets(0, 5, 12, 16), "3 rows x 16 tokens: cu_seqlens must run from 0 to the 48 tokens"),
    "offsets of one row too many": (offsets(0, 16, 32, 48, 64), "got 0 to 64"),
    "offsets that cross a row": (offsets(0, 5, 22, 26, 32, 48), "crosses the start of row 1"),
    "offsets that decrease": (offsets(0, 16, 12, 32, 48), "decreases at segment 1"),
    "offsets of another dtype": ({"cu_seq_lens_q": torch.tensor([0, 16, 32, 48])}, "int32"),
    "queries and keys that differ": ({"cu_seq_lens_k": torch.tensor([0, 16, 32, 48], dtype=torch.int32)}, "differ"),
    "offsets that have lost a boundary": (offsets(0, 12, 16, 32, 48), "restart at row 0, position 5, inside a segment"),
    "a maximum too small": ({"max_length_q": 4}, "max_length is 4, but the longest segment has 16"),
    "a key maximum too small": ({"max_length_k": 4}, "max_length is 4"),
    "lengths without query offsets": ({"cu_seq_lens_q": None}, "came without cu_seq_lens_q"),
    "padding in a 2-D mask": ({"attention_mask": (torch.tensor(DOC_IDS) > 0).long()}, "came along with cu_seq_lens_q"),
    "a 4-D mask": ({"attention_mask": torch.ones(3, 1, 16, 16, dtype=torch.bool)}, "came along with cu_seq_lens_q"),
}


@pytest.mark.parametrize("fault", BROKEN)
@pytest.mark.parametrize("architecture", ["llama", "mistral"])
def test_a_batch_that_contradicts_itself_is_refused(architecture, fault):
    changes, message = BROKEN[fault]
    with pytest.raises(ContractError, match=message):
        tiny_model(architecture)(**{**packed_batch(), **changes})


def test_an_all_ones_mask_beside_the_offsets_says_nothing_and_is_let_through():
    model, batch = tiny_model("llama"), packed_batch()
    ones = {**batch, "attention_mask": torch.ones(3, 16, dtype=torch.long)}
    with torch.no_grad():
        assert torch.equal(model(**ones).logits, model(**batch).logits)


def test_offsets_with_the_default_cache_are_honoured():
    model, batch = tiny_model("llama"), packed_batch()
    with torch.no_grad():
        assert torch.equal(model(**{**batch, "use_cache": True}).logits, model(**batch).logits)


LOST = {
    "the default cache": {},
    "a cache asked for": {"use_cache": True},
    "an all-ones mask": {"attention_mask": torch.ones(3, 16, dtype=torch.long), "use_cache": False},
    "a padding mask": {"attention_mask": (torch.tensor(DOC_IDS) > 0).long(), "use_cache": False},
    "a 4-D mask without boundaries": {"attention_mask": torch.ones(3, 1, 16, 16, dtype=torch.bool).tril(), "use_cache": False},
}


@pytest.mark.parametrize("how", LOST)
@pytest.mark.parametrize("architecture", ["llama", "mistral", "gpt2", "opt", "gemma2"])
def test_positions_that_restart_with_nothing_to_keep_documents_apart_are_refused(architecture, how):
    batch = packed_batch()
    inputs = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"], **LOST[how]}
    with pytest.raises(ContractError, match="from 4 to 0 at row 0, position 5") as caught:
        tiny_model(architecture)(**inputs)
    assert "PackedCollator" in str(caught.value)
    assert "cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k" in str(caught.value)


def test_models_whose_mask_builder_never_sees_positions_are_refused_without_offsets():
    """OPT drops position ids before its mask is built: even without a cache nothing would keep documents apart."""
    batch = packed_batch()
    with pytest.raises(ContractError, match="no offsets came along"):
        tiny_model("opt")(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False)


def test_the_refusal_holds_after_a_good_batch_of_the_same_shape():
    model, batch = tiny_model("llama"), packed_batch()
    with torch.no_grad():
        model(**batch)
    with pytest.raises(ContractError):
        model(input_ids=batch["input_ids"], position_ids=batch["position_ids"])


def test_offsets_refilled_in_place_are_read_again():
    model, batch = tiny_model("llama"), packed_batch()
    with torch.no_grad():
        model(**batch)
        batch["cu_seq_lens_q"].numpy()[1] = 4  # behind torch's back: no version counter moves
        batch["position_ids"][0, :12] = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7])
        refilled = model(**batch).logits
        fresh = packed_batch([[1] * 4 + [2] * 8 + [0] * 4, *DOC_IDS[1:]])
        assert torch.equal(refilled, model(**{**fresh, "input_ids": batch["input_ids"]}).logits)


def caches(model, batch):
    """One of fixed size, empty, and one that grows and holds six tokens of every row."""
    yield transformers.StaticCache(config=model.config, max_cache_len=40)
    filled = transformers.DynamicCache(config=model.config)
    model(input_ids=batch["input_ids"][:, :6], **{cache_keyword(model): filled})
    yield filled


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gpt2"])
def test_positions_that_restart_are_refused_with_any_cache(architecture):
    model, batch = tiny_model(architecture), packed_batch()
    for cache in caches(model, batch):
        with pytest.raises(ContractError, match="position_ids go from"):
            model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], **{cache_keyword(model): cache})


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gpt2"])
def test_positions_that_run_on_are_not_refused_with_a_cache(architecture):
    """Padding on the left, whose positions stand still, included."""
    model, batch = tiny_model(architecture), packed_batch()
    mask = torch.ones(3, 16, dtype=torch.long)
    mask[1, :5] = 0
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
    with torch.no_grad():
        expected = model(input_ids=batch["input_ids"], position_ids=positions, attention_mask=mask).logits[mask > 0]
        for held, cache in zip((0, 6), caches(model, {"input_ids": batch["input_ids"]}), strict=True):
            padded = torch.cat([mask.new_ones(3, held), mask], dim=1)
            inputs = {"input_ids": batch["input_ids"], "position_ids": positions + held, "attention_mask": padded}
            logits = model(**inputs, **{cache_keyword(model): cache}).logits[mask > 0]
            assert held or torch.allclose(logits, expected, atol=1e-5)


@pytest.mark.parametrize("hole", [slice(4, 7), slice(12, None)], ids=["in the middle", "at the end"])
@pytest.mark.parametrize("architecture", ["llama", "mistral", "gpt2", "opt"])
def test_masked_tokens_are_no_boundary_wherever_they_are(architecture, hole):
    """Positions stand still over them, and nobody sees them: what is generated is what sdpa generates."""
    model, plain = tiny_model(architecture), tiny_model(architecture, "sdpa")
    ids, mask = packed_batch()["input_ids"], torch.ones(3, 16, dtype=torch.long)
    mask[1, hole] = 0
    options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    for further in ({}, {"cache_implementation": "static", "disable_compile": True}, {"prefill_chunk_size": 6}):
        assert torch.equal(model.generate(ids, **options, **further), plain.generate(ids, **options, **further))


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "opt", "gemma2"])
def test_a_masked_token_between_documents_keeps_nobody_apart(architecture):
    """The document behind it sees the one before it: positions that restart over it are lost boundaries."""
    model, ids = tiny_model(architecture), packed_batch()["input_ids"][:1]
    mask, positions = torch.ones(1, 16, dtype=torch.long), torch.cat([torch.arange(8), torch.arange(8)])[None]
    mask[0, 7] = 0
    for further in ({"use_cache": False}, {}):
        with pytest.raises(ContractError, match="position_ids go from 6 to 0 at row 0, position 8"):
            model(input_ids=ids, attention_mask=mask, position_ids=positions, **further)
    whole = torch.ones(1, 1, 16, 16, dtype=torch.bool).tril()
    whole[0, 0, 8, 7] = False  # hides the token before from the first one behind, and nothing else
    with pytest.raises(ContractError, match="position_ids go from 7 to 0 at row 0, position 8"):
        model(input_ids=ids, attention_mask=whole, position_ids=positions, use_cache=False)


@pytest.mark.parametrize("behind", [0, 1])
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_a_mask_as_long_as_a_cache_of_fixed_size_is_read_at_the_places_of_the_queries(architecture, behind):
    model, plain, ids = tiny_model(architecture), tiny_model(architecture, "sdpa"), packed_batch()["input_ids"]
    mask = torch.full((3, 40), behind)
    mask[:, :16] = 1
    mask[1, :5] = 0
    positions = (mask[:, :16].cumsum(1) - 1).masked_fill(mask[:, :16] == 0, 1)

    def call(one, positions):
        cache = transformers.StaticCache(config=one.config, max_cache_len=40)
        with torch.no_grad():
            return one(input_ids=ids, attention_mask=mask, position_ids=positions, **{cache_keyword(one): cache}).logits

    kept = mask[:, :16] > 0
    torch.testing.assert_close(call(model, positions)[kept], call(plain, positions)[kept], atol=1e-4, rtol=0)
    with pytest.raises(ContractError, match="position_ids go from"):
        call(model, packed_batch()["position_ids"])


def test_offsets_in_generation_are_refused_at_the_first_cached_step():
    batch = packed_batch()
    lengths = {name: value for name, value in batch.items() if name.startswith(("cu_", "max_"))}
    with pytest.raises(ContractError, match="not a cache"):
        tiny_model("llama").generate(input_ids=batch["input_ids"], max_new_tokens=3, pad_token_id=0, **lengths)


def test_chunks_counted_from_the_row_are_refused():
    batch = packed_batch()
    with pytest.raises(ContractError, match="attends in chunks"):
        tiny_model("llama4")(**{**batch, "use_cache": True})


def test_a_model_that_computes_attention_itself_is_refused_instead_of_running_without_a_mask():
    batch = packed_batch()
    with pytest.raises(ContractError, match="does not go through transformers' AttentionInterface"):
        tiny_model("bloom")(input_ids=batch["input_ids"])


@pytest.mark.parametrize(
    ("name", "what"),
    [("position_bias", "position bias"), ("alibi", "ALiBi"), ("sinks", "sinks"), ("block_indices", "sparse attention")],
)
def test_what_is_not_computed_is_refused_by_name(name, what):
    attention = PackedVarlenAttention()
    heads = torch.randn(1, 2, 4, 8)
    with pytest.raises(ContractError, match=what):
        attention(torch.nn.Identity(), heads, heads, heads, None, **{name: torch.zeros(1)})


def test_a_bidirectional_window_is_refused():
    attention = PackedVarlenAttention()
    heads = torch.randn(1, 2, 4, 8)
    with pytest.raises(ContractError, match="bidirectional sliding window"):
        attention(torch.nn.Identity(), heads, heads, heads, None, is_causal=False, sliding_window=2)
