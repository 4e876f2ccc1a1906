"""Index maps: equal to the partitions that kernels make, and every token in exactly one shard."""

import numpy as np
import pytest
import torch

from neatpack.errors import MetadataError
from neatpack.train.context_parallel import (
    contiguous_indices,
    inverse_indices,
    padding_to,
    per_document_zigzag_indices,
    zigzag_indices,
)


def maps_of(scheme, cp_size, batch=2, row_length=48):
    slots = [0, 16, 48, 64, 96]
    return [
        {
            "contiguous": lambda rank=rank: contiguous_indices(batch * row_length, cp_size, rank),
            "zigzag": lambda rank=rank: zigzag_indices(batch, row_length, cp_size, rank),
            "per_document_zigzag": lambda rank=rank: per_document_zigzag_indices(slots, cp_size, rank),
        }[scheme]()
        for rank in range(cp_size)
    ]


def test_per_document_zigzag_equals_the_thd_partition():
    offsets = torch.tensor([0, 8, 16], dtype=torch.int32)
    assert per_document_zigzag_indices(offsets, 2, 0).tolist() == [0, 1, 6, 7, 8, 9, 14, 15]
    assert per_document_zigzag_indices(offsets, 2, 1).tolist() == [2, 3, 4, 5, 10, 11, 12, 13]


def test_per_document_zigzag_of_the_worked_example_in_slots_of_four():
    assert per_document_zigzag_indices([0, 4, 8, 12, 16, 20], 2, 0).tolist() == [0, 3, 4, 7, 8, 11, 12, 15, 16, 19]
    assert per_document_zigzag_indices([0, 4, 8, 12, 16, 20], 2, 1).tolist() == [1, 2, 5, 6, 9, 10, 13, 14, 17, 18]


def test_zigzag_takes_a_chunk_and_its_mirror_image_of_every_row():
    assert zigzag_indices(1, 8, 2, 0).tolist() == [0, 1, 6, 7]
    assert zigzag_indices(1, 8, 2, 1).tolist() == [2, 3, 4, 5]
    assert zigzag_indices(2, 8, 2, 1).tolist() == [2, 3, 4, 5, 10, 11, 12, 13]


def test_contiguous_takes_one_stretch_of_the_flattened_batch():
    assert contiguous_indices(12, 2, 1).tolist() == [6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize("cp_size", [1, 2, 4, 8])
@pytest.mark.parametrize("scheme", ["contiguous", "zigzag", "per_document_zigzag"])
def test_every_token_is_in_exactly_one_shard_and_comes_back(scheme, cp_size):
    maps = maps_of(scheme, cp_size)
    assert {len(indices) for indices in maps} == {96 // cp_size}
    batch = torch.randn(96)
    shards = [batch[indices] for indices in maps]
    assert torch.equal(torch.cat(shards)[inverse_indices(maps)], batch)


def test_generated_slots_come_back():
    rng = np.random.default_rng(0)
    for _ in range(50):
        cp_size = int(rng.integers(1, 5))
        slots = np.cumsum([0, *(2 * cp_size * rng.integers(0, 4, rng.integers(1, 8)))])
        maps = [per_document_zigzag_indices(torch.from_numpy(slots), cp_size, rank) for rank in range(cp_size)]
        assert sorted(torch.cat(maps).tolist()) == list(range(slots[-1]))
        assert torch.equal(torch.cat(maps)[inverse_indices(maps)], torch.arange(slots[-1]))


def test_maps_of_different_schemes_have_no_inverse():
    with pytest.raises(MetadataError, match="token 2 is held 0 times"):
        inverse_indices([zigzag_indices(1, 8, 2, 0), contiguous_indices(8, 2, 1)])


def test_what_does_not_divide_is_refused_with_the_alignment_that_would():
    with pytest.raises(
        MetadataError, match=r"10 tokens .* over 8 ranks. Pad 10 to 16 tokens: .*multiple of 8.*pad_to_multiple_of=8"
    ):
        contiguous_indices(10, 8, 0)
    with pytest.raises(MetadataError, match=r"rows of 6 tokens .* 2 \* 2 zigzag chunks. Pad 6 to 8 .*pad_to_multiple_of=4"):
        zigzag_indices(2, 6, 2, 0)
    with pytest.raises(MetadataError, match=r"slot 0 \(flat positions 0 to 7\) has 7 tokens.*Pad it to 8.*align=4"):
        per_document_zigzag_indices([0, 7, 12], 2, 0)  # F-144: half offsets of this read past the shard


def test_padding_is_what_is_lacking_not_what_is_left_over():  # F-141, F-142
    assert padding_to(10, 8) == 6
    assert padding_to(16, 8) == 0
    assert 9 + padding_to(9, 2) == 10


def test_the_alignment_that_the_refusal_names_is_one_the_planner_gives():
    from neatpack import plan_rows

    plan = plan_rows([5, 4, 7, 1], capacity=16, align=4)
    for row in range(plan.num_rows):
        slots = plan.slot_lengths()[plan.row_offsets[row] : plan.row_offsets[row + 1]]
        per_document_zigzag_indices(np.cumsum([0, *slots]), 2, 0)


def test_a_rank_outside_the_group_is_refused():
    with pytest.raises(MetadataError, match="rank 2 of 2"):
        contiguous_indices(12, 2, 2)
