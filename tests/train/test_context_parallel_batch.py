"""Batches cut and put together: targets across the cut, the right fill, and refusals that name the column."""

import pytest
import torch
import torch.distributed as dist

from neatpack.convert.doc_map import position_ids_from_doc_ids
from neatpack.errors import MetadataError
from neatpack.packed_seq import packed_seq_params_from_doc_ids
from neatpack.train import PackedCollator, shift_within_documents
from neatpack.train.context_parallel import pad_batch, process_group, shard_batch, shard_params, shard_tensor

ROWS = [
    {"input_ids": [11, 12, 21, 22, 23], "seq_lengths": [2, 3]},
    {"input_ids": [31, 41, 42, 51, 52, 53], "seq_lengths": [1, 2, 3]},
]


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/init", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_document_cut_between_ranks_keeps_its_target_at_the_cut():
    batch = PackedCollator(return_params=True)([{"input_ids": [1, 2, 3, 4, 5, 6], "seq_lengths": [6]}])
    params = batch["packed_seq_params"]
    first = shard_params(params, 2, 0, scheme="contiguous")
    assert shard_tensor(shift_within_documents(batch["labels"], params), first).tolist() == [[2, 3, 4]]
    cut_first = shard_tensor(batch["labels"], first)
    assert torch.nn.functional.pad(cut_first, (0, 1), value=-100)[:, 1:].tolist() == [[2, 3, -100]]  # the target is lost


def test_shards_hold_targets_positions_and_the_count_of_the_whole_batch(alone):
    local = shard_batch(PackedCollator()(ROWS), alone, scheme="contiguous")
    assert local["input_ids"].tolist() == [[11, 12, 21, 22, 23, 0, 31, 41, 42, 51, 52, 53]]
    assert local["position_ids"].tolist() == [[0, 1, 0, 1, 2, 0, 0, 0, 1, 0, 1, 2]]
    assert local["shift_labels"].tolist() == [[12, -100, 22, 23, -100, -100, -100, 42, -100, 52, 53, -100]]
    assert local["labels"].tolist() == [[-100, 12, -100, 22, 23, -100, -100, -100, 42, -100, 52, 53]]
    assert local["num_items_in_batch"] == 6
    assert local["use_cache"] is False
    assert local["context_group"] is alone
    assert not set(local) & {"cu_seq_lens_q", "max_length_q", "doc_ids", "packed_seq_params", "attention_mask"}


def test_any_source_of_boundaries_gives_the_same_shard(alone):
    plain = PackedCollator()(ROWS)
    full = PackedCollator(return_doc_ids=True, return_params=True)(ROWS)
    mapped = {"input_ids": full["input_ids"], "doc_ids": full["doc_ids"]}
    for batch in (plain, full, mapped):
        local = shard_batch(batch, alone, scheme="contiguous")
        assert local["context_shard"].cu_seqlens.tolist() == [0, 2, 5, 6, 7, 9, 12]
        assert local["position_ids"].tolist() == [[0, 1, 0, 1, 2, 0, 0, 0, 1, 0, 1, 2]]


def test_zigzag_maps_cut_any_per_token_tensor():
    batch = PackedCollator(return_params=True)(ROWS)
    shard = shard_params(batch["packed_seq_params"], 3, 2, scheme="zigzag")
    assert shard_tensor(batch["input_ids"], shard).tolist() == [[21, 22, 42, 51]]
    hidden = torch.randn(2, 6, 4, 5)
    assert torch.equal(shard_tensor(hidden, shard)[0], hidden.flatten(0, 1)[[2, 3, 8, 9]])
    with pytest.raises(MetadataError, match=r"shape \(2, 5\) is not of the batch \[2, 6\]"):
        shard_tensor(hidden[:, :5, 0, 0], shard)


def test_extra_columns_are_cut_and_scalars_pass(alone):
    batch = {**PackedCollator()(ROWS), "weights": torch.rand(2, 6), "temperature": 0.5, "step": torch.tensor(3)}
    local = shard_batch(batch, alone, scheme="contiguous")
    assert torch.equal(local["weights"], batch["weights"].view(1, 12))
    assert (local["temperature"], local["step"].item()) == (0.5, 3)


def test_a_batch_without_targets_divides_by_one(alone):
    batch = PackedCollator()([{"input_ids": [1, 2], "seq_lengths": [1, 1]}])
    assert shard_batch(batch, alone)["num_items_in_batch"] == 1


def test_what_cannot_be_cut_is_refused_by_name(alone):
    batch = PackedCollator()(ROWS)
    with pytest.raises(MetadataError, match=r"column 'image_grid' has shape \(3, 2, 6\)"):
        shard_batch({**batch, "image_grid": torch.zeros(3, 2, 6, dtype=torch.int64)}, alone)
    mask = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]])
    with pytest.raises(MetadataError, match="attention_mask that masks something"):
        shard_batch({**batch, "attention_mask": mask}, alone)
    assert "attention_mask" not in shard_batch({**batch, "attention_mask": torch.ones(2, 6)}, alone)
    with pytest.raises(MetadataError, match=r"no boundaries, only \['input_ids'\]"):
        shard_batch({"input_ids": batch["input_ids"]}, alone)
    with pytest.raises(MetadataError, match=r"needs input_ids \[B, S\], got NoneType"):
        shard_batch({"labels": batch["labels"]}, alone)
    with pytest.raises(MetadataError, match=r"boundaries are of a batch \[1, 6\], input_ids are \[2, 6\]"):
        shard_batch({**batch, "doc_ids": torch.ones(1, 6, dtype=torch.int64)}, alone)


def test_offsets_in_which_a_document_straddles_rows_are_refused(alone):
    batch = {**PackedCollator()(ROWS), "cu_seq_lens_q": torch.tensor([0, 2, 7, 9, 12], dtype=torch.int32)}
    with pytest.raises(MetadataError, match="row 1 starts at 6, which is not in cu_seqlens"):
        shard_batch(batch, alone)


@pytest.mark.parametrize("described", [{}, {"return_doc_ids": True}, {"return_params": True}])
def test_padding_fills_every_column_with_what_it_must_hold(alone, described):
    batch = pad_batch(PackedCollator(**described)(ROWS), 4, pad_token_id=7)
    assert batch["input_ids"].tolist() == [[11, 12, 21, 22, 23, 0, 7, 7], [31, 41, 42, 51, 52, 53, 7, 7]]
    assert batch["labels"][:, 6:].tolist() == [[-100, -100], [-100, -100]]
    first = [0, 2, 5, 8] if described else [0, 2, 5, 6, 8]  # offsets alone do not say that the row's end is padding
    assert batch["cu_seq_lens_q"].tolist() == [*first, 9, 11, 14, 16]
    assert batch["cu_seq_lens_q"].dtype == torch.int32
    assert batch["max_length_q"] == batch["max_length_k"] == 3
    restored = batch.get("doc_ids", getattr(batch.get("packed_seq_params"), "doc_ids", None))
    if restored is not None:
        assert restored.tolist() == [[1, 1, 2, 2, 2, 0, 0, 0], [1, 2, 2, 3, 3, 3, 0, 0]]
        assert torch.equal(batch["position_ids"], position_ids_from_doc_ids(restored))
    local = shard_batch(batch, alone, scheme="zigzag")
    assert local["num_items_in_batch"] == 6


def test_padding_agrees_with_a_collator_that_padded_to_the_multiple():
    padded = pad_batch(PackedCollator(return_params=True)(ROWS), 4)
    collated = PackedCollator(pad_to_multiple_of=4, return_params=True)(ROWS)
    for name in ("input_ids", "labels", "position_ids", "cu_seq_lens_q"):
        assert torch.equal(padded[name], collated[name])
    assert padded["max_length_q"] == collated["max_length_q"]


def test_padding_leaves_a_batch_that_divides_alone():
    batch = PackedCollator()(ROWS)
    assert all(pad_batch(batch, 3)[name] is value for name, value in batch.items())


def test_padding_asks_for_a_fill_that_it_does_not_know():
    batch = {**PackedCollator()(ROWS), "weights": torch.rand(2, 6)}
    with pytest.raises(MetadataError, match=r"column 'weights' is per token; .*fills=\{'weights': ...\}"):
        pad_batch(batch, 4)
    assert pad_batch(batch, 4, fills={"weights": 0.0})["weights"][:, 6:].tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_a_mesh_dimension_is_its_group(alone):
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
    assert process_group(mesh).size() == 1
    assert process_group(mesh["cp"]).size() == 1
    assert shard_batch(PackedCollator()(ROWS), mesh["cp"])["input_ids"].shape == (1, 12)


def test_a_shard_moves_and_pickles_without_its_group():
    import pickle

    params = packed_seq_params_from_doc_ids(torch.tensor([[1, 1, 2, 2]]))
    shard = pickle.loads(pickle.dumps(shard_params(params, 2, 1)))
    assert shard.indices.tolist() == [1, 2]
