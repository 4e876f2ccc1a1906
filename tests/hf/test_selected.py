"""Layers that select keys: packed_varlen sees the selected ones within a document, and knows when that was not ensured."""

import pytest
import torch

import neatpack.hf
from neatpack import check_isolation
from neatpack.audit.zoo_models import small_model
from neatpack.errors import ContractError
from neatpack.hf import collator_for, contract_for
from neatpack.hf.mask import PackedMask, packed_mask
from neatpack.hf.selected import selected_keys
from tiny_models import DOC_IDS, packed_batch

neatpack.hf.register()
MAP = torch.tensor(DOC_IDS)
STARTS = torch.tensor([[True, False, False, True, False]])
ROWS = [
    {"input_ids": list(range(3, 15)), "seq_lengths": [5, 7]},
    {"input_ids": list(range(20, 36)), "seq_lengths": [6, 4, 6]},
    {"input_ids": list(range(40, 56)), "seq_lengths": [16]},
]


@pytest.fixture(scope="module")
def models():
    """The same weights on packed_varlen and sdpa; 8 keys are selected, documents are longer."""
    ours = small_model("deepseek_v32", "packed_varlen", 16)
    stock = small_model("deepseek_v32", "sdpa", 16)
    stock.load_state_dict(ours.state_dict())
    return ours, stock


def test_a_model_that_selects_keys_is_isolated_and_says_what_sdpa_says(models):
    ours, stock = models
    assert ours.config.index_topk < max(length for row in ROWS for length in row["seq_lengths"])
    assert (contract_for(ours).payload, contract_for(stock).payload) == ("offsets", "positions")
    batch = collator_for(ours)(ROWS)
    assert check_isolation(ours, batch, doc_ids=MAP).isolated
    gradients = []
    for model in models:
        model.zero_grad()
        model(**batch).loss.backward()
        gradients.append([part.grad for part in model.parameters() if part.grad is not None])
    for mine, theirs in zip(*gradients, strict=True):
        assert (mine - theirs).abs().max() < 1e-5 * max(1.0, float(theirs.abs().max()))


def test_what_was_selected_across_boundaries_is_refused(models):
    """Non-vacuity: with a cache transformers' masks forget the documents, and sdpa mixes them without a word."""
    ours, stock = models
    batch = {**collator_for(ours)(ROWS), "use_cache": True}
    del batch["labels"]
    with pytest.raises(ContractError, match=r"starts at row 0, position 5, but this layer selected its keys without knowing"):
        ours(**batch)
    assert check_isolation(stock, batch, doc_ids=MAP).verdict == "leaking"


@pytest.mark.parametrize("padded", [False, True])
def test_calls_without_packing_say_what_sdpa_says(models, padded):
    call = {"input_ids": packed_batch()["input_ids"]}
    real = MAP > 0
    if padded:
        call["attention_mask"] = real.long()
    with torch.no_grad():
        mine, theirs = (model(**call).logits for model in models)
    assert (mine - theirs)[real].abs().max() < 1e-5 * float(theirs.abs().max())


def test_generation_with_a_cache_says_what_sdpa_says(models):
    call = {"input_ids": torch.arange(3, 15)[None], "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    mine, theirs = (model.generate(**call) for model in models)
    assert mine.tolist() == theirs.tolist()


def test_keys_beyond_the_mask_are_dropped_whatever_was_selected():
    everything = torch.arange(5).expand(1, 5, 5)
    kept = selected_keys(everything, PackedMask(STARTS), None, 5, None, torch.float32)[0, 0]
    assert kept.int().tolist() == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]]
    windowed = selected_keys(everything, PackedMask(STARTS), None, 5, 2, torch.float32)[0, 0]
    assert windowed.int().tolist()[2] == [0, 1, 1, 0, 0]
    additive = torch.zeros(1, 1, 5, 5).masked_fill(~kept, -1e9)
    first = torch.zeros(1, 5, 1, dtype=torch.long)
    seen = selected_keys(first, additive, None, 5, None, torch.float32)[0, 0]
    assert (seen > -1e9).nonzero().tolist() == [[0, 0], [1, 0], [2, 0]]


def test_offsets_that_the_mask_does_not_know_are_refused_and_finer_masks_are_not():
    chosen = torch.zeros(1, 5, 1, dtype=torch.long)
    with pytest.raises(ContractError, match="starts at row 0, position 2"):
        selected_keys(chosen, PackedMask(STARTS), torch.tensor([0, 2, 3, 5], dtype=torch.int32), 5, None, torch.float32)
    for offsets in ([0, 3, 5], [0, 5], [0, 3, 5, 5]):
        selected_keys(chosen, PackedMask(STARTS), torch.tensor(offsets, dtype=torch.int32), 5, None, torch.float32)


def test_only_the_mask_of_one_head_is_given_away():
    mask = PackedMask(STARTS)
    assert torch.equal(mask[:, 0], mask.dense())
    assert torch.equal(mask[:, 0, :, :], mask.dense())
    assert PackedMask(STARTS, causal=False).dense()[0, 0].tolist() == [True, True, True, False, False]
    for ask in (lambda: mask[0], lambda: mask[:, :, :, :4], lambda: mask[:, 0, :3], lambda: mask[:, None]):
        with pytest.raises(ContractError, match="does not go through transformers' AttentionInterface"):
            ask()
    with pytest.raises(ContractError, match="asks for the shape of its attention mask"):
        PackedMask()[:, 0]


def test_selected_keys_without_the_mask_are_refused():
    with pytest.raises(ContractError, match="came without the mask that they were selected by"):
        selected_keys(torch.zeros(1, 5, 1, dtype=torch.long), None, None, 5, None, torch.float32)


@pytest.mark.parametrize("length", [1, 4])
def test_a_mask_asked_for_in_full_knows_its_shape_and_claims_no_boundaries(length):
    def causal(batch, head, query, key):
        return key <= query

    mask = packed_mask(2, length, length, mask_function=causal, allow_is_causal_skip=False)
    assert mask.dense().shape == (2, length, length)
    assert torch.equal(mask.dense()[0], torch.ones(length, length, dtype=torch.bool).tril())
    assert not mask.from_positions
