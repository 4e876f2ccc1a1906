"""transformers' real flash path over a reference kernel, with the very batch that packed_varlen takes."""

import pytest
import torch

import neatpack.hf
from neatpack import check_isolation
from neatpack.audit import reference_flash
from tiny_models import DENSE, DOC_IDS, packed_batch, tiny_model

neatpack.hf.register()
MAP = torch.tensor(DOC_IDS)
# GPT-2 in float32 has no nn.Linear for transformers to read a dtype from; bfloat16 works, and is tested below.
ON_FLASH = [name for name in DENSE if name != "gpt2"]


@pytest.fixture(autouse=True)
def _flash():
    with reference_flash.importable():
        yield


def on_flash(architecture):
    """Without a GPU transformers builds no flash model; one that is built switches as it would there."""
    model = tiny_model(architecture, "eager")
    model.config._attn_implementation = reference_flash.IMPLEMENTATION
    return model


@pytest.mark.parametrize("architecture", ON_FLASH)
def test_flash_attention_isolates_with_the_same_batch(architecture):
    report = check_isolation(on_flash(architecture), packed_batch(), doc_ids=MAP)
    assert report.isolated, str(report)
    assert report.max_influence == 0.0


@pytest.mark.parametrize("architecture", ON_FLASH)
def test_flash_attention_and_packed_varlen_agree(architecture):
    batch = packed_batch()
    with torch.no_grad():
        flash = on_flash(architecture)(**batch)
        ours = tiny_model(architecture)(**batch)
    scale = max(1.0, ours.logits.abs().max().item())
    assert (flash.logits - ours.logits).abs().max() < 1e-5 * scale
    torch.testing.assert_close(flash.loss, ours.loss, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_gradients_agree_with_flash_attention(architecture):
    batch = packed_batch()
    gradients = []
    for model in (on_flash(architecture).train(), tiny_model(architecture).train()):
        model(**batch).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for flash, ours in zip(*gradients, strict=True):
        assert (flash - ours).abs().max() < 1e-5 * max(1.0, flash.abs().max().item())


def test_gpt2_isolates_on_flash_in_bfloat16():
    model = on_flash("gpt2").to(torch.bfloat16)
    assert check_isolation(model, packed_batch(), doc_ids=MAP).isolated


def test_position_ids_alone_leak_on_flash_with_two_rows():
    batch = packed_batch()
    stock = {name: batch[name] for name in ("input_ids", "position_ids", "use_cache")}
    assert check_isolation(on_flash("llama"), stock, doc_ids=MAP).verdict == "leaking"


def test_a_padding_mask_beside_the_offsets_leaks_on_flash():
    batch = {**packed_batch(), "attention_mask": (MAP > 0).long()}
    assert check_isolation(on_flash("llama"), batch, doc_ids=MAP).verdict == "leaking"


def test_offsets_that_stop_short_give_no_pass_on_flash():
    batch = packed_batch()
    batch["cu_seq_lens_q"] = batch["cu_seq_lens_k"] = batch["cu_seq_lens_q"][:-1]
    report = check_isolation(on_flash("llama"), batch, doc_ids=MAP)
    assert not report.isolated
    assert report.max_difference == float("inf")
