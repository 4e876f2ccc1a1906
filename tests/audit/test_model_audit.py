"""The audit builds what a config describes, probes it, and says what it found."""

import json

import pytest
import torch
import transformers

from neatpack.audit import audit_model
from neatpack.audit.model_audit import packed_batch
from neatpack.audit.models import build_small, load_config, shrink
from neatpack.errors import SourceError
from neatpack.packed_seq import packed_seq_params_from_doc_ids
from tiny_models import tiny_model

FULL_SIZE = {
    "llama": transformers.LlamaConfig(num_key_value_heads=8),
    "qwen2": transformers.Qwen2Config(use_sliding_window=True, max_window_layers=2, sliding_window=4096),
    "mistral": transformers.MistralConfig(sliding_window=4096),
    "gemma": transformers.GemmaConfig(num_key_value_heads=1),
    "gemma2": transformers.Gemma2Config(),
    "gemma3": transformers.Gemma3TextConfig(),
    "gpt2": transformers.GPT2Config(),
    "mixtral": transformers.MixtralConfig(),
}


def folder_of(config, folder):
    config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", FULL_SIZE)
def test_a_config_of_full_size_is_audited_on_a_small_model_of_its_kind(name, tmp_path):
    result = audit_model(folder_of(FULL_SIZE[name], tmp_path), attention=["packed_varlen"])
    (only,) = result.results
    assert only.verdict == "isolated", only.reason or str(only.report)
    assert only.report.control > 0.5
    assert result.passed
    assert result.weights == "random"


def test_shrinking_keeps_the_traits():
    config = transformers.Gemma3TextConfig(num_hidden_layers=12, num_attention_heads=8, num_key_value_heads=4)
    shrink(config, 64)
    assert config.layer_types == ["sliding_attention", "full_attention"]
    assert config.num_hidden_layers == 2
    assert config.num_attention_heads == 2 * config.num_key_value_heads
    assert config.sliding_window == 8
    model = build_small(config, "sdpa", row_length=64)
    assert sum(parameter.numel() for parameter in model.parameters()) < 200_000


def test_one_key_head_for_all_queries_stays_one():
    config = transformers.GemmaConfig(num_attention_heads=16, num_key_value_heads=1)
    shrink(config, 64)
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 1)


def test_long_rope_factors_shrink_with_the_head():
    factors = [1.0 + index / 48 for index in range(48)]
    rope = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "rope_theta": 1e4}
    rope["original_max_position_embeddings"] = 4096
    config = transformers.Phi3Config(rope_parameters=rope, max_position_embeddings=131072, pad_token_id=0)
    assert build_small(config, "sdpa", row_length=64)(torch.ones(1, 8, dtype=torch.long)).logits.shape == (1, 8, 128)


def test_a_checkpoint_is_audited_with_its_own_weights(tmp_path):
    tiny_model("llama", "sdpa").save_pretrained(tmp_path)
    result = audit_model(tmp_path)
    assert result.weights == "checkpoint"
    assert [(each.attention, each.verdict) for each in result.results] == [
        ("packed_varlen", "isolated"),
        ("sdpa", "isolated"),
        ("eager", "isolated"),
    ]
    assert result.passed


def test_a_model_that_leaks_without_its_mask_is_measured_with_and_without_it(tmp_path):
    result = audit_model(folder_of(transformers.OPTConfig(), tmp_path))
    assert {each.attention: (each.verdict, each.payload) for each in result.results} == {
        "packed_varlen": ("isolated", "offsets"),
        "sdpa": ("isolated", "mask"),
        "eager": ("isolated", "mask"),
    }
    assert result.passed
    assert [each.bare and each.bare.verdict for each in result.results] == [None, "leaking", "leaking"]
    assert json.loads(json.dumps(result.to_dict(), allow_nan=False))["results"]["sdpa"]["bare"]["max_influence"] > 1


def test_a_recurrent_model_is_refused_and_the_leak_is_measured(tmp_path):
    result = audit_model(folder_of(transformers.Mamba2Config(), tmp_path), attention=["eager"])
    (only,) = result.results
    assert only.verdict == "refused"
    assert "from token to token" in only.refusal
    assert only.report.verdict == "leaking"
    assert not result.passed


def test_an_implementation_that_a_model_lacks_fails_only_if_it_was_asked_for(tmp_path):
    folder = folder_of(transformers.Gemma2Config(), tmp_path)
    by_default = audit_model(folder)
    assert by_default.passed
    assert "does not support" in {each.attention: each.reason for each in by_default.results}["sdpa"]
    assert not audit_model(folder, attention=["sdpa", "packed_varlen"]).passed


def test_a_model_that_refuses_everything_has_not_passed(tmp_path):
    result = audit_model(folder_of(transformers.BloomConfig(), tmp_path), attention=["eager"])
    assert result.results[0].verdict == "refused"
    assert "use_packed_varlen" in result.results[0].refusal
    assert not result.passed


def test_a_family_with_attention_of_its_own_is_audited_on_layers_that_stand_in(tmp_path):
    result = audit_model(folder_of(transformers.BloomConfig(), tmp_path), attention=["packed_varlen"])
    assert (result.results[0].verdict, result.results[0].payload) == ("isolated", "offsets")
    assert result.passed


def test_two_audits_measure_the_same(tmp_path):
    folder = folder_of(FULL_SIZE["llama"], tmp_path)
    first, second = (audit_model(folder, attention=["packed_varlen"], seed=3).to_dict() for _ in range(2))
    assert first == second


@pytest.mark.parametrize("row_length", [8, 9, 64, 100])
def test_the_audits_batch_has_documents_side_by_side_and_padding(row_length):
    batch, doc_ids = packed_batch(50, 3, row_length, seed=1)
    assert batch["cu_seq_lens_q"].tolist() == packed_seq_params_from_doc_ids(doc_ids).cu_seqlens.tolist()
    assert (doc_ids.max(1).values >= 2).all()
    assert (doc_ids[-1] == 0).any()
    starts = batch["cu_seq_lens_q"][:-1].long()
    flat = batch["position_ids"].flatten()
    assert (flat[starts] == 0).all()
    assert ((flat[1:] - flat[:-1] == 1) | (flat[1:] == 0)).all()
    assert int((flat == 0).sum()) == len(starts)
    assert "attention_mask" not in batch


def test_what_cannot_be_read_is_one_clear_error(tmp_path):
    with pytest.raises(SourceError, match=r"config.json, or a folder that holds one"):
        audit_model(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text('{"model_type": "never_heard_of_it"}')
    with pytest.raises(SourceError, match="transformers cannot read this config"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("not json")
    with pytest.raises(SourceError, match="transformers cannot read this config"):
        load_config(tmp_path / "config.json")
    with pytest.raises(SourceError, match="at least 8 tokens"):
        audit_model(tmp_path, row_length=4)
