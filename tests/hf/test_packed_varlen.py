"""packed_varlen under transformers: each packed document is what it is alone, on every architecture."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import neatpack.hf
from neatpack import check_isolation
from neatpack.errors import ContractError
from neatpack.hf.mask import PackedMask
from tiny_models import DENSE, DOC_IDS, MIXTURES, documents_of, packed_batch, tiny_model

NAME = neatpack.hf.register()
TOLERANCE = 1e-5


def alone(model, input_ids, document):
    row, start, end = document
    return model(input_ids=input_ids[row : row + 1, start:end], use_cache=False).logits[0]


@torch.no_grad()
def differences(model, batch, doc_ids=DOC_IDS, reference="eager"):
    """Per document: largest difference between its packed logits and those of the document alone under `reference`."""
    packed = model(**batch).logits
    model.set_attn_implementation(reference)
    return [
        (packed[row, start:end] - alone(model, batch["input_ids"], (row, start, end))).abs().max().item()
        for row, start, end in documents_of(doc_ids)
    ]


@torch.no_grad()
def influences(model, batch, doc_ids=DOC_IDS):
    """Per document: how far its logits move when every other token of the batch changes."""
    before = model(**batch).logits
    moved = []
    for row, start, end in documents_of(doc_ids):
        changed = (batch["input_ids"] - 3 + 61) % 125 + 3
        changed[row, start:end] = batch["input_ids"][row, start:end]
        after = model(**{**batch, "input_ids": changed}).logits
        moved.append((after - before)[row, start:end].abs().max().item())
    return moved


def scaled(model, batch):
    with torch.no_grad():
        return TOLERANCE * max(1.0, model(**batch).logits.abs().max().item())


@pytest.mark.parametrize("architecture", [*DENSE, *MIXTURES])
def test_each_packed_document_equals_itself_alone(architecture):
    model, batch = tiny_model(architecture), packed_batch()
    tolerance = scaled(model, batch)
    assert max(differences(model, batch)) < tolerance


@pytest.mark.parametrize("architecture", DENSE)
def test_no_document_moves_another_in_the_last_bit(architecture):
    assert influences(tiny_model(architecture), packed_batch()) == [0.0] * 6


@pytest.mark.parametrize("architecture", MIXTURES)
def test_mixtures_of_experts_move_others_by_rounding_only(architecture):
    assert max(influences(tiny_model(architecture), packed_batch())) < 1e-4


@pytest.mark.parametrize("architecture", [*DENSE, *MIXTURES])
def test_without_boundaries_the_same_rows_leak(architecture):
    batch = packed_batch()
    rows = {"input_ids": batch["input_ids"], "use_cache": False}
    moved = influences(tiny_model(architecture), rows)
    assert min(moved[index] for index in (1, 3, 4)) > 0.1  # every document but the first of its row
    assert max(moved[index] for index in (0, 2)) < 1e-4  # causality keeps the first ones clean


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma3", "gpt2"])
def test_positions_alone_are_enough_while_no_cache_and_no_mask_turn_them_off(architecture):
    model, batch = tiny_model(architecture), packed_batch()
    bare = {key: batch[key] for key in ("input_ids", "position_ids", "use_cache")}
    with torch.no_grad():
        torch.testing.assert_close(model(**bare).logits, model(**batch).logits, atol=0, rtol=0)


def test_chunked_attention_counts_chunks_within_documents():
    model, batch = tiny_model("llama4"), packed_batch()
    tolerance = scaled(model, batch)
    assert max(influences(model, batch)) < 1e-4
    assert max(differences(model, batch)) < tolerance


def test_a_window_that_only_the_mask_knows_is_kept():
    """qwen2_moe does not pass its window to the attention function; the mask function does."""
    wide = tiny_model("qwen2_moe", sliding_window=64)
    narrow = tiny_model("qwen2_moe", sliding_window=2)
    batch = packed_batch()
    with torch.no_grad():
        assert (wide(**batch).logits - narrow(**batch).logits).abs().max() > 0.1


@pytest.mark.parametrize(("architecture", "verdict"), [("llama", "isolated"), ("gpt2", "differing"), ("opt", "differing")])
def test_offsets_without_positions_leak_nowhere_and_differ_where_places_have_vectors(architecture, verdict):
    batch = packed_batch()
    del batch["position_ids"]
    report = check_isolation(tiny_model(architecture), batch, doc_ids=torch.tensor(DOC_IDS))
    assert report.max_influence == 0.0
    assert report.verdict == verdict


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_generated_packings_equal_the_documents_alone(architecture, seed):
    import numpy as np

    from neatpack.testing import random_doc_ids

    doc_ids = random_doc_ids(np.random.default_rng(seed), 3, 24)
    model, batch = tiny_model(architecture), packed_batch(doc_ids, seed)
    tolerance = scaled(model, batch)
    assert max(differences(model, batch, doc_ids), default=0.0) < tolerance


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_do_not_leak(dtype):
    assert influences(tiny_model("llama").to(dtype), packed_batch()) == [0.0] * 6


# --- selecting it -----------------------------------------------------------------------------------------------------


def test_every_way_to_select_it_gives_the_same_logits(tmp_path):
    model, batch = tiny_model("llama", "sdpa"), packed_batch()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=NAME).eval()
    config = AutoConfig.from_pretrained(tmp_path)
    config._attn_implementation = NAME
    configured = AutoModelForCausalLM.from_config(config).eval()
    configured.load_state_dict(model.state_dict())
    model.set_attn_implementation(NAME)
    with torch.no_grad():
        logits = [each(**batch).logits for each in (loaded, configured, model)]
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


def test_registering_twice_changes_nothing():
    model, batch = tiny_model("llama"), packed_batch()
    with torch.no_grad():
        before = model(**batch).logits
        assert neatpack.hf.register() == NAME
        assert torch.equal(before, model(**batch).logits)


@pytest.mark.parametrize("name", ["packed_sdpa", "my_flash", "org/kernel", "flex_attention_packed", ""])
def test_names_that_transformers_routes_elsewhere_are_refused(name):
    with pytest.raises(ContractError, match="routes elsewhere"):
        neatpack.hf.register(name)


def test_another_name_works_the_same():
    neatpack.hf.register("varlen_by_another_name")
    with torch.no_grad():
        other = tiny_model("llama", "varlen_by_another_name")(**packed_batch()).logits
        assert torch.equal(other, tiny_model("llama")(**packed_batch()).logits)


# --- training ---------------------------------------------------------------------------------------------------------


def gradients_of(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def loss_alone(model, batch):
    """The sum over documents run alone, divided by the number of predicted tokens: what the packed loss must be."""
    total, count = 0.0, 0
    for row, start, end in documents_of():
        ids = batch["input_ids"][row : row + 1, start:end]
        logits = model(input_ids=ids, use_cache=False).logits[0]
        total = total + torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:], reduction="sum")
        count += end - start - 1
    return total / count


@pytest.mark.parametrize("checkpointing", [None, False, True])
@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma2"])
def test_loss_and_gradients_equal_the_sum_over_documents(architecture, checkpointing):
    model, batch = tiny_model(architecture).train(), packed_batch()
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        model.enable_input_require_grads()
    loss = model(**batch).loss
    packed = gradients_of(model, loss)
    model.gradient_checkpointing_disable()
    model.set_attn_implementation("eager")
    expected = loss_alone(model, batch)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    reference = gradients_of(model, expected)
    scale = max(gradient.abs().max().item() for gradient in reference.values())
    for name, gradient in reference.items():
        assert (packed[name] - gradient).abs().max() < 1e-5 * max(scale, 1.0), name


def test_a_document_sends_no_gradient_to_another():
    model, batch = tiny_model("llama"), packed_batch()
    embedded = model.get_input_embeddings()(batch["input_ids"]).detach().requires_grad_()
    inputs = {key: value for key, value in batch.items() if key not in ("input_ids", "labels")}
    logits = model(inputs_embeds=embedded, **inputs).logits
    logits[0, 5:12].sum().backward()
    outside = torch.ones_like(embedded, dtype=torch.bool)
    outside[0, 5:12] = False
    assert not embedded.grad[outside].any()
    assert embedded.grad[~outside].abs().max() > 0.01


def test_attention_dropout_acts_in_training_only():
    model, batch = tiny_model("llama", attention_dropout=0.5), packed_batch()
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, model(**batch).logits)
        model.train()
        assert not torch.equal(model(**batch).logits, model(**batch).logits)
    assert influences(model.eval(), batch) == [0.0] * 6


# --- generation and padding -------------------------------------------------------------------------------------------


def generated(model, attention, **inputs):
    model.set_attn_implementation(attention)
    return model.generate(**inputs, max_new_tokens=8, do_sample=False, pad_token_id=0)


@pytest.mark.parametrize("architecture", [*DENSE, *MIXTURES])
def test_greedy_generation_with_a_cache_equals_stock(architecture):
    model = tiny_model(architecture)
    ids = packed_batch()["input_ids"][:2, :7]
    stock = "eager" if architecture in ("gemma2", "gpt_oss") else "sdpa"
    ones = torch.ones_like(ids)
    ours = generated(model, NAME, input_ids=ids, attention_mask=ones)
    assert torch.equal(ours, generated(model, stock, input_ids=ids, attention_mask=ones))


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma2", "gemma3", "gpt2", "opt", "gpt_oss"])
def test_left_padded_generation_equals_each_prompt_alone(architecture):
    model = tiny_model(architecture)
    ids = packed_batch()["input_ids"][:2, :7]
    padded = ids.clone()
    padded[1, :3] = 0
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    ours = generated(model, NAME, input_ids=padded, attention_mask=mask)
    for row, start in ((0, 0), (1, 3)):
        prompt = ids[row : row + 1, start:]
        alone = generated(model, NAME, input_ids=prompt, attention_mask=torch.ones_like(prompt))
        assert torch.equal(ours[row, 7:], alone[0, prompt.shape[1] :])


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize(("architecture", "stock"), [("llama", "sdpa"), ("mistral", "sdpa"), ("gemma2", "eager")])
def test_generation_with_a_cache_of_fixed_size_equals_stock(architecture, stock, masked):
    """Also with a prompt that fills a window's cache, where transformers hands in the mask that it asked for before."""
    model = tiny_model(architecture)
    for length in (7, 16):
        inputs = {"input_ids": packed_batch()["input_ids"][:2, :length]}
        if masked:
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        options = {"cache_implementation": "static", "disable_compile": True}
        assert torch.equal(generated(model, NAME, **inputs, **options), generated(model, stock, **inputs, **options))


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gemma3", "gpt2"])
def test_a_padded_batch_equals_stock(architecture):
    model, ids = tiny_model(architecture), packed_batch()["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, 10:] = 0
    with torch.no_grad():
        ours = model(input_ids=ids, attention_mask=mask).logits
        model.set_attn_implementation("eager")
        stock = model(input_ids=ids, attention_mask=mask).logits
    torch.testing.assert_close(ours[mask == 1], stock[mask == 1], atol=2e-5, rtol=1e-5)


def test_a_four_dimensional_mask_is_honoured():
    from neatpack.testing import allowed_pairs

    model, batch = tiny_model("llama"), packed_batch()
    mask = torch.from_numpy(allowed_pairs(DOC_IDS))[:, None]
    rows = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"], "attention_mask": mask}
    real = torch.tensor(DOC_IDS) > 0
    with torch.no_grad():
        masked = model(**rows).logits[real]
        additive = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
        torch.testing.assert_close(model(**{**rows, "attention_mask": additive}).logits[real], masked, atol=1e-5, rtol=0)
        torch.testing.assert_close(masked, model(**batch).logits[real], atol=1e-5, rtol=0)


def test_no_mask_of_sequence_squared_is_ever_built(monkeypatch):
    seen = []
    original = neatpack.hf.attention.PackedVarlenAttention.__call__

    def spy(self, module, query, key, value, attention_mask, **options):
        seen.append(attention_mask)
        return original(self, module, query, key, value, attention_mask, **options)

    monkeypatch.setattr(neatpack.hf.attention.PackedVarlenAttention, "__call__", spy)
    for architecture in ("llama", "mistral", "gemma3"):
        with torch.no_grad():
            tiny_model(architecture)(**packed_batch())
    assert len(seen) == 6
    assert all(isinstance(mask, PackedMask) for mask in seen)
    assert all(mask.starts is None or mask.starts.shape == (3, 16) for mask in seen)
