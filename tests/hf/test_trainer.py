"""The callback stops a Trainer before its first step where documents would mix, and lets the others train."""

import datasets
import pytest
import tokenizers
import torch
import transformers
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

import neatpack.hf
from neatpack.audit.zoo_models import small_model
from neatpack.errors import ContractError
from neatpack.hf import collator_for, isolation_callback, require_isolation, use_packed_varlen
from neatpack.hf.trainer import refuse_dispatched_batches
from tiny_models import packed_batch, tiny_model

neatpack.hf.register()


def rows(lengths=((5, 7), (6, 4, 6), (16,), (8, 8))):
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(3, 128, (sum(row),), generator=generator).tolist() for row in lengths]
    return datasets.Dataset.from_dict({"input_ids": ids, "seq_lengths": [list(row) for row in lengths]})


def trainer(model, folder, *, collator=None, callback=None, data=None, **options):
    arguments = {"remove_unused_columns": False, "max_steps": 2, "per_device_train_batch_size": 2, **options}
    args = TrainingArguments(
        output_dir=str(folder), report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True, seed=1, **arguments
    )
    return Trainer(
        model,
        args,
        train_dataset=data or rows(),
        data_collator=collator or collator_for(model),
        callbacks=[callback or isolation_callback()],
    )


def with_a_mask(model):
    """A collator as many are written: it adds the mask that turns packing off."""
    collate = collator_for(model)

    def masked(batch):
        collated = collate(batch)
        return {**collated, "attention_mask": torch.ones_like(collated["input_ids"])}

    return masked


def test_a_run_that_keeps_documents_apart_trains_and_keeps_the_report(tmp_path):
    callback = isolation_callback()
    model = tiny_model("llama")
    result = trainer(model, tmp_path, callback=callback).train()
    assert result.global_step == 2
    assert callback.report.isolated
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("name", ["falcon", "mpt"])
def test_a_family_with_attention_of_its_own_trains_on_layers_that_stand_in(tmp_path, name):
    callback = isolation_callback()
    model = use_packed_varlen(small_model(name, None, 32))
    assert trainer(model, tmp_path, callback=callback).train().global_step == 2
    assert callback.report.isolated


def test_a_collator_that_adds_a_mask_is_stopped_before_the_first_step(tmp_path):
    model = tiny_model("llama", "sdpa")
    before = [parameter.detach().clone() for parameter in model.parameters()]
    run = trainer(model, tmp_path, collator=with_a_mask(model))
    with pytest.raises(ContractError, match=r"leaking: .*\n(.*\n)*.*contract: LlamaForCausalLM on sdpa: positions") as caught:
        run.train()
    assert "collator_for(model)" in str(caught.value)
    assert run.state.global_step == 0
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_the_same_run_without_the_callback_would_have_trained_on_the_leak(tmp_path):
    model = tiny_model("llama", "sdpa")
    run = trainer(model, tmp_path, collator=with_a_mask(model))
    run.callback_handler.callbacks = [each for each in run.callback_handler.callbacks if "Isolation" not in type(each).__name__]
    assert run.train().global_step == 2


def of_the_token_itself(logits, labels, **options):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def test_a_loss_that_asks_for_the_token_itself_is_stopped_before_the_first_step(tmp_path):
    """No source shows it: the function was set on the model."""
    model = tiny_model("llama")
    model.loss_function = of_the_token_itself
    run = trainer(model, tmp_path)
    with pytest.raises(ContractError, match="compares the logits of a token with the label of the same token"):
        run.train()
    assert run.state.global_step == 0
    assert model.training


def test_the_look_at_the_loss_leaves_parts_that_were_put_in_eval_as_they_are():
    model = tiny_model("llama").train()
    model.model.layers[0].eval()
    batch = collator_for(model)([{"input_ids": [5, 6, 7, 8, 9, 10], "seq_lengths": [4, 2]}])
    before = [part.training for part in model.modules()]
    assert require_isolation(model, batch).isolated
    assert [part.training for part in model.modules()] == before


def test_the_callback_changes_nothing_that_is_trained(tmp_path):
    losses = []
    for callback in (isolation_callback(), isolation_callback(probe=False)):
        losses.append(trainer(tiny_model("llama"), tmp_path, callback=callback).train().training_loss)
    assert losses[0] == losses[1]


def test_batches_with_one_document_a_row_prove_nothing_and_the_next_is_taken(tmp_path):
    callback = isolation_callback()
    data = rows([(16,), (12,), (14,), (10,)])  # of different lengths: padding is no document
    trainer(tiny_model("llama"), tmp_path, callback=callback, data=data, max_steps=1).train()
    assert callback.report.verdict == "inconclusive"


def test_columns_dropped_before_the_collator_are_refused(tmp_path):
    run = trainer(tiny_model("llama"), tmp_path, remove_unused_columns=True)
    with pytest.raises(ContractError, match=r"seq_lengths among them.*remove_unused_columns=False"):
        run.train()


def test_dispatched_batches_are_refused():
    from accelerate.data_loader import DataLoaderDispatcher

    loader = DataLoaderDispatcher(rows(), batch_size=2)
    with pytest.raises(ContractError, match=r"dispatches batches.*dispatch_batches': False"):
        refuse_dispatched_batches(loader)
    refuse_dispatched_batches(DataLoader(rows(), batch_size=2))


def test_a_model_without_a_contract_is_refused_when_training_begins(tmp_path):
    from neatpack.train import PackedCollator

    run = trainer(tiny_model("bloom", "eager"), tmp_path, collator=PackedCollator())
    with pytest.raises(ContractError, match="BloomForCausalLM"):
        run.train()


def test_half_precision_is_measured_by_its_own_rounding(tmp_path):
    callback = isolation_callback()
    trainer(tiny_model("llama"), tmp_path, callback=callback, bf16=True, max_steps=1).train()
    assert callback.report.isolated
    assert callback.report.tolerance > 0.04


def test_padding_that_sees_only_itself_is_no_fault():
    """OPT on sdpa gets a mask; its pads see themselves only, and alone they would see each other."""
    model = tiny_model("opt", "sdpa", pad_token_id=1)
    assert require_isolation(model, collator_for(model)(list(rows()))).isolated


def test_the_plain_function_stops_on_a_leak_and_on_a_batch_without_a_map():
    model, batch = tiny_model("llama", "sdpa"), packed_batch()
    assert require_isolation(model, batch).isolated
    with pytest.raises(ContractError, match="leaking"):
        require_isolation(model, {**batch, "attention_mask": torch.ones(3, 16, dtype=torch.long)})
    stock = {name: batch[name] for name in ("input_ids", "position_ids", "use_cache")}
    with pytest.raises(ContractError, match="carries no document map"):
        require_isolation(model, stock)


@pytest.mark.parametrize("attention", ["packed_varlen", "eager"])
def test_padding_behind_documents_in_aligned_slots_is_no_document_either(attention):
    model = tiny_model("opt", attention)  # on eager its collator sends a mask, under which a pad sees only itself
    batch = collator_for(model, align=8)(list(rows(((5, 7), (6, 4, 6)))))
    report = require_isolation(model, batch)
    assert [document.length for document in report.documents] == [5, 7, 6, 4, 6]
    assert report.isolated


def test_trl_asks_its_model_for_no_logits_and_is_checked_all_the_same(tmp_path):
    import trl

    callback = isolation_callback()
    model = tiny_model("llama")
    args = trl.SFTConfig(
        str(tmp_path), dataset_kwargs={"skip_prepare_dataset": True}, max_length=None, packing=False, padding_free=False,
        remove_unused_columns=False, max_steps=1, per_device_train_batch_size=2, report_to=[], save_strategy="no", bf16=False,
        use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    sft = trl.SFTTrainer(
        model,
        args,
        train_dataset=rows(),
        data_collator=collator_for(model),
        processing_class=transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="a", pad_token="a"),
        callbacks=[callback],
    )
    sft.train()
    assert callback.report.isolated
