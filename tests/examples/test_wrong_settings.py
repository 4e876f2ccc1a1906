"""Where a trainer fights the boundaries: the settings that the examples warn of are refused, or shown to leak."""

import pytest
import torch
from datasets import Dataset

import neatpack
from neatpack.errors import ContractError, MetadataError

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # TRL's and transformers' own renamings

COLLATE = neatpack.PackedCollator(row_length=64, return_doc_ids=True)


@pytest.fixture
def rows():
    ids = torch.randint(0, 256, (8, 48), generator=torch.Generator().manual_seed(0))
    return Dataset.from_list([{"input_ids": row.tolist(), "seq_lengths": [20, 11, 17]} for row in ids])


def with_mask(rows):
    batch = COLLATE(rows)
    return {**batch, "attention_mask": (batch["doc_ids"] != 0).long()}


def without(*names):
    def collate(rows):
        return {name: value for name, value in COLLATE(rows).items() if name not in names}

    return collate


def probed(trainer, rows):
    """The probe on the trainer's first batch, with the true document map."""
    batch = next(iter(trainer.get_train_dataloader()))
    batch.pop("doc_ids", None)
    shape = batch["input_ids"].shape
    doc_ids = neatpack.PackedCollator(row_length=shape[1], return_doc_ids=True)([rows[i] for i in range(shape[0])])["doc_ids"]
    return neatpack.check_isolation(trainer.model, batch, doc_ids=doc_ids)


def hf_trainer(rows, folder, **changes):
    import hf_trainer

    trainer = hf_trainer.make_trainer(rows, str(folder), **changes)
    return trainer, hf_trainer.check


def test_a_trainer_that_removes_unused_columns_is_refused(rows, tmp_path):
    trainer, check = hf_trainer(rows, tmp_path, remove_unused_columns=True)
    with pytest.raises(MetadataError, match=r"no seq_lengths.*remove_unused_columns=False"):
        check(trainer)
    with pytest.raises(ContractError, match=r"drops.*seq_lengths.*remove_unused_columns=False"):
        trainer.train()


def test_a_mask_beside_the_boundaries_is_refused(rows, tmp_path):
    trainer, check = hf_trainer(rows, tmp_path)
    trainer.data_collator = with_mask
    with pytest.raises(ContractError, match="came along with cu_seq_lens_q"):
        check(trainer)


def test_stock_attention_without_positions_leaks(rows, tmp_path):
    trainer, check = hf_trainer(rows, tmp_path, attention="sdpa")
    assert check(trainer).isolated
    trainer.data_collator = without("position_ids", "doc_ids")
    report = check(trainer)
    assert report.verdict == "leaking"
    with pytest.raises(ContractError, match="leaking"):
        trainer.train()
    assert trainer.state.global_step == 0


def sft_trainer(rows, folder, **changes):
    import trl_sft

    return trl_sft.make_trainer(rows, str(folder), **changes)


def test_trl_keeps_rows_and_boundaries_as_they_were_packed(rows, tmp_path):
    trainer = sft_trainer(rows, tmp_path)
    assert trainer.train_dataset.column_names == ["input_ids", "seq_lengths"]
    assert trainer.train_dataset[:] == rows[:]
    batch = next(iter(trainer.get_train_dataloader()))
    assert sorted(batch) == sorted(neatpack.PackedCollator()([rows[0]]))
    assert batch["cu_seq_lens_q"].tolist() == [0, 20, 31, 48, 256, 276, 287, 304, 512]


def test_trls_own_collator_leaks(rows, tmp_path):
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    trainer = sft_trainer(rows, tmp_path, data_collator=DataCollatorForLanguageModeling(pad_token_id=0), shuffle_dataset=False)
    batch = next(iter(trainer.get_train_dataloader()))
    assert set(batch) == {"input_ids", "labels", "attention_mask"}
    assert probed(trainer, rows).verdict == "leaking"


def test_trls_preparation_cuts_rows_and_is_refused(rows, tmp_path):
    trainer = sft_trainer(rows, tmp_path, dataset_kwargs=None, max_length=40)
    with pytest.raises(MetadataError, match=r"seq_lengths add up to 48, but input_ids has 40 tokens.*truncated after packing"):
        next(iter(trainer.get_train_dataloader()))


@pytest.mark.parametrize(
    "settings", [{"padding_free": True}, {"packing": True, "max_length": 64}], ids=["padding_free", "packing"]
)
def test_trl_refuses_the_collator_with_its_own_packing(settings, rows, tmp_path):
    with pytest.raises(ValueError, match="custom data collator is not supported when using padding-free"):
        sft_trainer(rows, tmp_path, **settings)


def dispatched(rows):
    """A batch of the example's stream with Accelerate's default."""
    import accelerate_loop

    accelerator = accelerate_loop.make_accelerator(dispatch_batches=None)
    return next(iter(accelerator.prepare(accelerate_loop.make_loader(rows))))


def test_dispatched_batches_are_cut_by_rows_and_refused(rows):
    import ingredients

    batch = dispatched(rows)
    assert batch["cu_seq_lens_q"].tolist() == [0, 20]  # of the two rows' nine offsets
    del batch["packed_seq_params"]
    with pytest.raises(ContractError, match="cu_seq_lens_q does not describe this batch of 2 rows x 256 tokens"):
        ingredients.small_llama()(**batch)


def test_batches_of_several_ranks_cannot_be_joined(rows):
    from accelerate.utils import concatenate  # what the first rank does with the batches it dispatches

    batch = COLLATE([rows[0]])
    with pytest.raises(TypeError, match="Can only concatenate tensors"):
        concatenate([batch, batch])


def test_a_stock_classification_head_gives_one_reward_a_row():
    import trl_reward
    from transformers import LlamaForSequenceClassification

    pairs = [{"chosen_ids": [1, 2, 3], "rejected_ids": [4, 5]}, {"chosen_ids": [6, 7], "rejected_ids": [8, 9, 10]}]
    batch = trl_reward.collate_pairs(pairs)
    assert batch["input_ids"].shape[0] == 1
    assert trl_reward.make_model()(**batch).logits.shape == (4, 1)
    mask = batch.pop("attention_mask")
    assert mask.sum() == 10
    assert trl_reward.make_model(LlamaForSequenceClassification)(**batch).logits.shape == (1, 1)


def test_the_packed_dpo_loss_is_trls(tmp_path):
    import copy

    import dpo
    from ingredients import byte_tokenizer, library_pairs, small_llama
    from trl import DPOConfig, DPOTrainer

    pairs = library_pairs()[:4]
    model = small_llama()
    reference = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    options = {"per_device_train_batch_size": 4, "beta": dpo.BETA, "max_length": None, "bf16": False}
    trainer = DPOTrainer(
        model=model,
        ref_model=reference,
        args=DPOConfig(str(tmp_path), use_cpu=True, report_to=[], gradient_checkpointing=False, **options),
        train_dataset=Dataset.from_list(pairs),
        processing_class=byte_tokenizer(),
    )
    batch = next(iter(trainer.get_train_dataloader()))
    documents = [
        (dpo.answer(pair["prompt_ids"], pair["chosen_ids"]), dpo.answer(pair["prompt_ids"], pair["rejected_ids"]))
        for pair in trainer.train_dataset
    ]
    expected = trainer.compute_loss(trainer.model, batch)
    assert abs(expected.item() - 0.6931) > 1e-3
    torch.testing.assert_close(dpo.dpo_loss(model, reference, dpo.collate(documents)), expected, rtol=0, atol=1e-5)
