"""Selecting packed_varlen on a built model: which classes it gets, and which models are refused."""

import copy
import importlib
import json
import pickle
import subprocess
import sys

import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from hf.stand_ins import ROWS, batch_for, logits_of
from neatpack import PackedCollator, check_isolation
from neatpack.audit.zoo_models import small_model
from neatpack.errors import ContractError
from neatpack.hf import contract_for, register, use_packed_varlen
from neatpack.hf.layers.base import PackedLayer
from neatpack.hf.layers.models import ReadsBoundaries
from tiny_models import cache_keyword, packed_batch, tiny_model


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


@pytest.mark.parametrize("name", ["deepseek_v4", "doge"])
def test_a_family_that_computes_on_its_mask_is_refused(name):
    """Theirs are numbers to add, and ours would be read as such."""
    with pytest.raises(ContractError, match="Attention computes a mask of its own from the one it is given"):
        use_packed_varlen(small_model(name, "eager", 32))


def test_what_is_no_transformers_model_is_refused():
    with pytest.raises(ContractError, match="Linear is no transformers model"):
        use_packed_varlen(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("name", ["mpt", "bloom", "openai-gpt"])
def test_a_refusal_names_the_way_out(name):
    with pytest.raises(ContractError, match=r"Call neatpack.hf.use_packed_varlen\(model\)"):
        contract_for(plain_with_the_name(name))


def plain_with_the_name(name):
    """A model that was loaded with the name of an attention which its code never calls."""
    model = small_model(name, None, 32)
    model.config._attn_implementation = "packed_varlen"
    return model


def test_another_model_of_its_class_is_on_packed_varlen_too(family, tmp_path):
    """A class that reads boundaries for layers of transformers would hand those a map they cannot read."""
    _, _, model = family
    model.save_pretrained(tmp_path)
    batch = batch_for(model)
    for other in (type(model)(copy.deepcopy(model.config)).eval(), type(model).from_pretrained(tmp_path).eval()):
        assert contract_for(other).attention == "packed_varlen"
        assert check_isolation(other, batch).max_influence == 0.0
    assert torch.equal(logits_of(other, input_ids=batch["input_ids"]), logits_of(model, input_ids=batch["input_ids"]))


@pytest.mark.parametrize("name", ["mpt", "xglm"])
def test_a_model_whose_own_forward_was_replaced_is_refused(name):
    """As accelerate's prepare and `model.forward = torch.compile(model.forward)` do: no class of ours would be called."""
    model = small_model(name, None, 32)
    model.forward = model.forward
    with pytest.raises(ContractError, match=rf"{type(model).__name__} has been replaced"):
        use_packed_varlen(model)
    assert type(model) is getattr(transformers, type(model).__name__)


@pytest.fixture
def a_new_process_state():
    """Accelerate keeps its settings for the process: other tests have theirs."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("a_new_process_state")
def test_a_model_that_is_prepared_afterwards_still_reads_boundaries():
    model = use_packed_varlen(small_model("mpt", None, 32))
    batch = batch_for(model)
    prepared = Accelerator(mixed_precision="bf16", cpu=True).prepare(model)
    assert "forward" in vars(prepared)
    assert check_isolation(prepared, batch).max_influence == 0.0


@pytest.mark.parametrize("selected", ["eager", "sdpa"])
def test_another_attention_cannot_be_selected_afterwards(selected):
    model = use_packed_varlen(small_model("xglm", None, 32))
    batch = batch_for(model)
    model.config._attn_implementation = selected
    for ask in (lambda: contract_for(model), lambda: model(input_ids=batch["input_ids"])):
        with pytest.raises(ContractError, match=rf"'{selected}' was selected on XGLMForCausalLM.*Load the model again"):
            ask()


class AnyArguments(transformers.BloomForCausalLM):
    """A user's class that hands on whatever it is given."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


def test_a_class_that_takes_any_arguments_is_read_by_name_and_refused_by_place():
    model = use_packed_varlen(AnyArguments(small_model("bloom", None, 32).config).eval())
    batch = {key: value for key, value in dict(PackedCollator()(ROWS)).items() if key != "labels"}
    assert check_isolation(model, batch).max_influence == 0.0
    ids = batch.pop("input_ids")
    with pytest.raises(ContractError, match="takes \\*arguments"):
        model(ids, **batch)


def test_a_users_own_class_is_saved_with_its_own_code(tmp_path, monkeypatch):
    (tmp_path / "my_bloom.py").write_text(
        "from transformers import BloomForCausalLM\n\n\nclass MyBloom(BloomForCausalLM):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    kind = importlib.import_module("my_bloom").MyBloom
    kind.register_for_auto_class("AutoModelForCausalLM")
    model = use_packed_varlen(kind(small_model("bloom", None, 32).config).eval())
    model.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert saved["auto_map"] == {"AutoModelForCausalLM": "my_bloom.MyBloom"}
    assert (tmp_path / "saved" / "my_bloom.py").read_text() == (tmp_path / "my_bloom.py").read_text()


def test_a_compiled_model_is_pickled_as_any_other():
    model = use_packed_varlen(small_model("mpt", None, 32))
    model.compile(backend="eager")
    batch = batch_for(model)
    del batch["labels"], batch["doc_ids"]
    assert torch.equal(logits_of(pickle.loads(pickle.dumps(model)), **batch), logits_of(model, **batch))


@pytest.mark.parametrize("name", ["bloom", "gpt_neo", "openai-gpt", "roformer", "big_bird"])
def test_dropout_may_be_taken_out(name):
    model = use_packed_varlen(small_model(name, None, 32)).train()
    for parent in list(model.modules()):
        for child, part in parent.named_children():
            if isinstance(part, torch.nn.Dropout):
                setattr(parent, child, torch.nn.Identity())
    ids = torch.arange(3, 23)[None]
    assert torch.equal(logits_of(model, input_ids=ids), logits_of(model.eval(), input_ids=ids))


@pytest.mark.parametrize("name", ["xglm", "rembert"])
def test_a_stock_model_that_inherits_the_name_is_refused_when_called(name):
    """`AutoModelForCausalLM.from_config(model.config)` builds one: its own attention cannot read what stands for a mask."""
    model = use_packed_varlen(small_model(name, None, 32))
    other = transformers.AutoModelForCausalLM.from_config(model.config)
    with pytest.raises(ContractError, match="own code asks for"):
        other(input_ids=torch.arange(3, 23)[None])


# Families that do not tell their attention the positions; what they are given with positions that restart.
UNTOLD = ["llama4_text", "deepseek_v32", "persimmon", "gpt_bigcode", "ctrl", "cohere_compass_text", "fuyu", "moshi"]
LOST = {
    "a mask of ones": {"attention_mask": torch.ones(2, 32), "use_cache": False},
    "a causal mask": {"attention_mask": torch.ones(2, 1, 32, 32, dtype=torch.bool).tril(), "use_cache": False},
    "a cache": {"use_cache": True},
}


@pytest.mark.parametrize("name", UNTOLD)
def test_a_model_that_tells_its_attention_no_positions_refuses_lost_boundaries_itself(name):
    model = use_packed_varlen(small_model(name, None, 32))
    batch = PackedCollator(return_doc_ids=True, row_length=32)(ROWS)
    bare = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"]}
    for further in LOST.values():
        with pytest.raises(ContractError, match="position_ids go from 19 to 0 at row 0, position 20"):
            model(**bare, **further)
    assert check_isolation(model, batch).max_influence == 0.0
    assert type(model).__name__ == type(small_model(name, None, 32)).__name__


@pytest.mark.parametrize("name", ["llama4_text", "cohere_compass_text", "falcon", "xglm"])
def test_masks_by_layer_type_and_of_a_whole_cache_of_fixed_size_are_looked_through(name):
    model = use_packed_varlen(small_model(name, None, 32))
    batch = PackedCollator(row_length=32)(ROWS)
    bare = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"]}
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[:, 32:] = 0
    cache = transformers.StaticCache(config=model.config, max_cache_len=40)
    with pytest.raises(ContractError, match="position_ids go from 19 to 0 at row 0, position 20"):
        model(**bare, attention_mask=mask, **{cache_keyword(model): cache})
    if name in UNTOLD:
        kinds = set(model.config.layer_types)
        for each in (None, torch.ones(1, 1, 32, 32, dtype=torch.bool).tril()):
            with pytest.raises(ContractError, match="position_ids go from 19 to 0 at row 0, position 20"):
                model(**bare, attention_mask=dict.fromkeys(kinds, each), use_cache=False)


def test_a_mask_by_layer_type_may_be_shorter_than_what_a_cache_has_seen():
    """Caches of windows forget; positions that stand still on padding are looked at under such a mask too."""
    model = use_packed_varlen(small_model("llama4_text", None, 32))
    ids, cache = torch.arange(3, 43)[None], transformers.DynamicCache(config=model.config)
    keyword = cache_keyword(model)
    with torch.no_grad():
        model(input_ids=ids[:, :30], **{keyword: cache})
        cut = torch.ones(1, 1, 10, 40, dtype=torch.bool).tril(30)
        masks = {kind: cut if kind == "full_attention" else cut[..., -17:] for kind in set(model.config.layer_types)}
        positions = torch.arange(30, 40)[None]
        positions[0, 4] = 0
        with pytest.raises(ContractError, match="position_ids go from 33 to 0 at row 0, position 4"):
            model(input_ids=ids[:, 30:], position_ids=positions, attention_mask=masks, **{keyword: cache})


def test_a_model_works_in_a_process_that_registered_nothing(tmp_path):
    model = use_packed_varlen(small_model("persimmon", None, 32))
    torch.save(model, tmp_path / "model.pt")
    script = "import sys, torch; model = torch.load(sys.argv[1], weights_only=False); "
    script += "print(model(input_ids=torch.arange(3, 9)[None]).logits.sum().item())"
    run = subprocess.run([sys.executable, "-c", script, str(tmp_path / "model.pt")], capture_output=True, text=True, check=True)
    expected = logits_of(model, input_ids=torch.arange(3, 9)[None]).sum().item()
    assert float(run.stdout) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("name", UNTOLD)
def test_what_a_model_makes_a_cache_by_itself_is_looked_for_in_its_text_config(name):
    model = use_packed_varlen(small_model(name, None, 32))
    batch = PackedCollator(row_length=32)(ROWS)
    model.config.get_text_config().use_cache = True
    with pytest.raises(ContractError, match="position_ids go from 19 to 0 at row 0, position 20"):
        model(input_ids=batch["input_ids"], position_ids=batch["position_ids"])


@pytest.mark.parametrize("name", UNTOLD)
def test_without_that_look_a_mask_of_ones_would_let_documents_through(name):
    model = small_model(name, None, 32)
    model.set_attn_implementation(register())
    batch = PackedCollator(return_doc_ids=True, row_length=32)(ROWS)
    bare = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"], **LOST["a mask of ones"]}
    assert check_isolation(model, bare, doc_ids=batch["doc_ids"]).max_influence > 0.1


def test_padding_and_generation_pass_that_look():
    plain, model = small_model("persimmon", "sdpa", 32), use_packed_varlen(small_model("persimmon", None, 32))
    ids, mask = torch.arange(3, 23).repeat(2, 1), torch.ones(2, 20, dtype=torch.long)
    mask[1, :5] = 0
    options = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **options), plain.generate(ids, **options))
    assert torch.equal(logits_of(copy.deepcopy(model), input_ids=ids), logits_of(model, input_ids=ids))
