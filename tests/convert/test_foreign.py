"""Foreign records in: each comes back to the map it came from, and each refuses what it cannot know."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packings import doc_maps, packings, params_of, renumbered

from neatpack.convert.doc_map import doc_ids_from_seq_lengths, position_ids_from_doc_ids
from neatpack.convert.foreign import (
    doc_ids_from_cu_seqlens,
    doc_ids_from_eos,
    doc_ids_from_indexed_mask,
    doc_ids_from_position_ids,
)
from neatpack.convert.segments import segment_documents, slots
from neatpack.errors import MetadataError, MetadataTypeError
from neatpack.testing import WORKED_EXAMPLE


def lengths_of(doc_ids):
    return [sum(row == number for row in doc_ids[0].tolist()) for number in range(1, int(doc_ids.max()) + 1)]


class TestOffsets:
    def test_worked_example_comes_back_from_each_form(self):
        offsets = [0, 2, 5, 6, 7, 9, 12]
        assert doc_ids_from_cu_seqlens(offsets, 6, padding_segments=[2]).tolist() == WORKED_EXAMPLE
        assert doc_ids_from_cu_seqlens([0, 2, 6, 7, 9, 12], 6, real_lengths=[2, 3, 1, 2, 3]).tolist() == WORKED_EXAMPLE
        assert doc_ids_from_cu_seqlens([0, 2, 5, 6, 8, 11]).tolist() == [[1, 1, 2, 2, 2, 3, 4, 4, 5, 5, 5]]

    @given(doc_maps())
    @settings(max_examples=60, deadline=None)
    def test_forms_a_and_c_round_trip(self, doc_ids):
        params = params_of(doc_ids)
        padding = (segment_documents(params) == 0).nonzero().reshape(-1).tolist()
        back = doc_ids_from_cu_seqlens(params.cu_seqlens, doc_ids.shape[1], padding_segments=padding)
        np.testing.assert_array_equal(back, renumbered(doc_ids))
        form_c = slots(params)
        back = doc_ids_from_cu_seqlens(form_c.cu_seqlens, doc_ids.shape[1], real_lengths=form_c.lengths)
        np.testing.assert_array_equal(back, renumbered(doc_ids))

    def test_the_padding_that_offsets_cannot_name_is_a_document_unless_said(self):
        assert doc_ids_from_cu_seqlens([0, 2, 5, 6]).tolist() == [[1, 1, 2, 2, 2, 3]]
        assert doc_ids_from_cu_seqlens([0, 2, 5], total_tokens=6).tolist() == [[1, 1, 2, 2, 2, 0]]

    def test_absorbed_padding_needs_real_lengths(self):  # F-083, F-088
        assert doc_ids_from_cu_seqlens([0, 3, 8], real_lengths=[3, 2]).tolist() == [[1, 1, 1, 2, 2, 0, 0, 0]]
        assert doc_ids_from_cu_seqlens([0, 4, 8], real_lengths=[4, 2]).tolist() == [[1, 1, 1, 1, 2, 2, 0, 0]]

    def test_repeats_of_the_last_offset_are_no_documents(self):
        assert doc_ids_from_cu_seqlens([0, 2, 5, 5, 5]).tolist() == [[1, 1, 2, 2, 2]]
        assert doc_ids_from_cu_seqlens([0, 0]).shape == (1, 0)

    @pytest.mark.parametrize(
        ("offsets", "options", "message"),
        [
            ([2, 5], {}, "must start at 0, got .2.*for lengths use doc_ids_from_seq_lengths"),
            ([], {}, "must start at 0"),
            ([-1, -1], {}, "must start at 0, got .-1.*for lengths use doc_ids_from_seq_lengths"),
            ([0, 5, 3, 7], {}, r"cu_seqlens\[2\] is 3 after 5"),
            ([0, 5, 3, 5], {}, r"cu_seqlens\[2\] is 3 after 5"),
            ([0, 2, 2, 5], {}, r"cu_seqlens\[2\] is 2 after 2"),
            ([0, 5, 3], {}, r"cu_seqlens\[2\] is 3 after 5"),
            ([0, 8, 12], {"row_length": 6}, "row 1 starts at 6, which is not in cu_seqlens"),
            ([0, 6, 12], {"row_length": 5}, "12 tokens do not fill rows of 5"),
            ([0, 6, 12], {"row_length": 0}, "rows of 0"),
            ([0, 6], {"total_tokens": 4}, "ends at 6, past the 4 tokens"),
            ([0, 6], {"real_lengths": [7]}, r"real_lengths\[0\] is 7, but its slot has 6"),
            ([0, 6], {"real_lengths": [-1]}, r"real_lengths\[0\] is -1"),
            ([0, 6], {"real_lengths": [1, 2]}, "2 entries for 1 slots"),
            ([0, 6], {"padding_segments": [1]}, "padding segment 1 does not exist"),
        ],
    )
    def test_offsets_that_describe_no_batch_are_refused(self, offsets, options, message):
        with pytest.raises(MetadataError, match=message):
            doc_ids_from_cu_seqlens(offsets, **options)

    def test_offsets_must_be_integers(self):
        with pytest.raises(MetadataTypeError, match="cu_seqlens must be a flat list of integers"):
            doc_ids_from_cu_seqlens(torch.tensor([0.0, 2.0]))


class TestPositions:
    @pytest.mark.parametrize(
        ("positions", "offsets"),
        [
            ([[4, 5, 6]], [0, 3]),  # F-062: a ramp from anywhere is one document
            ([[0, 1, 0, 1]], [0, 2, 4]),
            ([[7, 8, 9]], [0, 3]),  # F-063
            ([[1, 2, 3, 1, 2]], [0, 3, 5]),  # F-064
            ([[0, 1, 0, 0, 1]], [0, 2, 3, 5]),  # F-066
            ([[2, 3, 4, 2, 3]], [0, 3, 5]),  # F-059
            ([[0, 1, 2, 900, 901]], [0, 3, 5]),  # a later chunk of a long document
        ],
    )
    def test_documents_restart_at_any_value(self, positions, offsets):
        doc_ids = doc_ids_from_position_ids(torch.tensor(positions))
        assert params_of(doc_ids).cu_seqlens.tolist() == offsets

    def test_rows_of_a_batch_are_kept_apart(self):  # F-062
        doc_ids = doc_ids_from_position_ids(torch.tensor([[0, 1, 0, 1], [0, 1, 2, 0]]))
        assert params_of(doc_ids).cu_seqlens.tolist() == [0, 2, 4, 7, 8]

    def test_one_row_may_come_without_its_batch_axis(self):  # F-068
        assert doc_ids_from_position_ids(torch.tensor([0, 1, 2, 0, 1])).tolist() == [[1, 1, 1, 2, 2]]

    def test_multimodal_positions_are_refused_with_the_way_out(self):  # F-067, F-068
        positions = torch.arange(4).expand(3, 1, 4).clone()
        assert params_of(doc_ids_from_position_ids(positions)).cu_seqlens.tolist() == [0, 4]  # text: the axes agree
        positions[2, 0, 3] = 1
        with pytest.raises(MetadataError, match=r"\(3, 1, 4\).*mRoPE.*doc_ids_from_seq_lengths"):
            doc_ids_from_position_ids(positions)

    @pytest.mark.parametrize(
        ("positions", "message"),
        [
            ([0, 1, 2, 2, 2, 4], r"position_ids\[0\] goes from 2 to 2 at 3, and its documents start at 0.*seq_lengths"),
            ([0, 1, 2, 1, 2, 3], "goes from 2 to 1 at 3"),
            ([0, 1, 9, 10, 5, 6], "goes from 10 to 5 at 4"),
            ([2, 3, 2, 0, 1, 2], "goes from 3 to 2 at 2, and its documents start at 0"),
        ],
    )
    def test_a_break_that_is_no_restart_is_refused(self, positions, message):  # F-040
        with pytest.raises(MetadataError, match=message):
            doc_ids_from_position_ids(torch.tensor([positions]))

    def test_a_later_chunk_may_come_first_or_lie_ahead(self):  # F-075
        positions = torch.tensor([[4, 5, 0, 1, 0], [0, 1, 8, 9, 0], [7, 8, 9, 10, 7]])
        assert doc_ids_from_position_ids(positions).tolist() == [[1, 1, 2, 2, 3], [1, 1, 2, 2, 3], [1, 1, 1, 1, 2]]

    def test_padding_between_documents_hides_no_start(self):
        positions, mask = torch.tensor([[0, 1, 1, 5, 6]]), torch.tensor([[1, 1, 0, 1, 1]])
        assert doc_ids_from_position_ids(positions, mask).tolist() == [[1, 1, 0, 2, 2]]

    def test_negative_positions_are_padding(self):  # F-066
        assert doc_ids_from_position_ids(torch.tensor([[0, 1, 0, 1, -1, -1]])).tolist() == [[1, 1, 2, 2, 0, 0]]

    def test_padding_that_repeats_a_position_needs_the_mask(self):  # F-059, F-080
        positions = torch.tensor([[2, 3, 4, 2, 3, 0, 0, 0]])
        with pytest.raises(MetadataError, match=r"position_ids\[0\] ends in 0, 0.*Pass attention_mask"):
            doc_ids_from_position_ids(positions)
        mask = torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0]])
        assert doc_ids_from_position_ids(positions, mask).tolist() == [[1, 1, 1, 2, 2, 0, 0, 0]]
        assert doc_ids_from_position_ids(torch.zeros(1, 3, dtype=torch.int64), torch.ones(1, 3)).tolist() == [[1, 2, 3]]

    @given(doc_maps(), st.integers(0, 2))
    @settings(max_examples=60, deadline=None)
    def test_positions_and_a_mask_round_trip(self, doc_ids, start):
        positions = position_ids_from_doc_ids(doc_ids, start)
        back = doc_ids_from_position_ids(positions, doc_ids != 0)
        np.testing.assert_array_equal(back, renumbered(doc_ids))

    def test_a_chunk_that_continues_its_neighbours_count_merges_with_it(self):
        """What positions cannot show, and why they are not a source inside the library."""
        assert doc_ids_from_position_ids(torch.tensor([[0, 1, 2, 3, 4]])).tolist() == [[1, 1, 1, 1, 1]]

    def test_nothing_and_non_integers_are_refused(self):  # F-070
        with pytest.raises(MetadataTypeError, match=r"position_ids must be a torch.Tensor of integers, got NoneType"):
            doc_ids_from_position_ids(None)
        with pytest.raises(MetadataTypeError, match="float32"):
            doc_ids_from_position_ids(torch.zeros(1, 3))
        with pytest.raises(MetadataError, match=r"attention_mask has shape \(1, 2\), expected \(1, 3\)"):
            doc_ids_from_position_ids(torch.arange(3)[None], torch.ones(1, 2))


class TestIndexedMask:
    def test_indices_become_document_numbers(self):
        assert doc_ids_from_indexed_mask(torch.tensor(WORKED_EXAMPLE)).tolist() == WORKED_EXAMPLE
        assert doc_ids_from_indexed_mask(torch.tensor([[0, 7, 7, 9, 0]])).tolist() == [[0, 1, 1, 2, 0]]

    def test_a_mask_of_ones_is_refused_until_the_caller_says_what_it_is(self):
        mask = torch.tensor([[1, 1, 1, 0]])
        with pytest.raises(MetadataError, match=r"only 0 and 1.*single_document=True"):
            doc_ids_from_indexed_mask(mask)
        assert doc_ids_from_indexed_mask(mask, single_document=True).tolist() == [[1, 1, 1, 0]]

    def test_all_zeros_are_an_error_and_not_one_document(self):  # F-028
        with pytest.raises(MetadataError, match="no document at all"):
            doc_ids_from_indexed_mask(torch.zeros(2, 4, dtype=torch.int64))

    def test_masks_that_lost_or_garbled_the_indices_are_refused(self):
        with pytest.raises(MetadataTypeError, match=r"torch.bool: boundaries are lost"):
            doc_ids_from_indexed_mask(torch.ones(1, 3, dtype=torch.bool))
        with pytest.raises(MetadataError, match="document 1 comes back"):
            doc_ids_from_indexed_mask(torch.tensor([[1, 1, 2, 1]]))
        with pytest.raises(MetadataError, match="is -1"):
            doc_ids_from_indexed_mask(torch.tensor([[2, 1, -1]]))
        with pytest.raises(MetadataError, match=r"shape \(1, 1, 4, 4\)"):
            doc_ids_from_indexed_mask(torch.ones(1, 1, 4, 4, dtype=torch.int64))


class TestEos:
    def test_eos_belongs_to_the_document_that_it_closes(self):  # F-027
        tokens = torch.tensor([[11, 12, 9, 11, 12, 9, 0, 0]])
        assert doc_ids_from_eos(tokens, 9, pad_token_id=0).tolist() == [[1, 1, 1, 2, 2, 2, 0, 0]]

    def test_the_last_document_may_be_cut_off(self):
        assert doc_ids_from_eos(torch.tensor([5, 2, 7, 8]), 2).tolist() == [[1, 1, 2, 2]]

    def test_several_ids_may_close_a_document(self):
        assert doc_ids_from_eos(torch.tensor([[5, 2, 7, 3, 8]]), [2, 3]).tolist() == [[1, 1, 2, 2, 3]]

    @pytest.mark.parametrize(
        ("tokens", "eos"),
        [
            ([[5, 6, 7, 8, 9]], 2),  # F-025: the EOS lives in the labels only
            ([[5, 6, 2, 7, 2]], 0),  # F-026: an id that was never synced with the tokenizer
        ],
    )
    def test_an_eos_that_never_occurs_is_refused(self, tokens, eos):
        with pytest.raises(MetadataError, match=rf"input_ids\[0\] never holds the EOS token {eos}.*seq_lengths"):
            doc_ids_from_eos(torch.tensor(tokens), eos)

    def test_padding_that_is_eos_needs_the_mask(self):
        tokens = torch.tensor([[5, 6, 2, 7, 2, 2, 2]])
        with pytest.raises(MetadataError, match=r"holds EOS at 4 and 5"):
            doc_ids_from_eos(tokens, 2)
        with pytest.raises(MetadataError, match="pad_token_id 2 is also EOS"):
            doc_ids_from_eos(tokens, 2, pad_token_id=2)
        mask = torch.tensor([[1, 1, 1, 1, 1, 0, 0]])
        assert doc_ids_from_eos(tokens, 2, attention_mask=mask).tolist() == [[1, 1, 1, 2, 2, 0, 0]]
        assert doc_ids_from_eos(tokens, 2, attention_mask=torch.ones(1, 7)).tolist() == [[1, 1, 1, 2, 2, 3, 4]]

    def test_an_all_pad_row_holds_no_document(self):
        tokens = torch.tensor([[5, 9, 0], [0, 0, 0]])
        assert doc_ids_from_eos(tokens, 9, pad_token_id=0).tolist() == [[1, 1, 0], [0, 0, 0]]

    def test_tokens_that_closed_every_document_round_trip(self):
        for doc_ids in packings():
            ids = torch.from_numpy(renumbered(doc_ids))
            ends = torch.ones_like(ids, dtype=torch.bool)
            ends[:, :-1] = ids[:, 1:] != ids[:, :-1]
            tokens = torch.where(ids == 0, 0, torch.where(ends, 9, 5))
            assert torch.equal(doc_ids_from_eos(tokens, 9, attention_mask=ids), ids)


def test_records_without_rows_give_empty_maps():
    empty = torch.zeros(0, 6, dtype=torch.int64)
    assert doc_ids_from_position_ids(empty).shape == (0, 6)
    assert doc_ids_from_indexed_mask(empty).shape == (0, 6)
    assert doc_ids_from_eos(empty, 2).shape == (0, 6)
    assert doc_ids_from_cu_seqlens([0], 6).shape == (0, 6)
    assert doc_ids_from_cu_seqlens([0]).shape == (1, 0)
    assert doc_ids_from_eos(torch.zeros(2, 0, dtype=torch.int64), 2).shape == (2, 0)


def test_all_records_of_one_packing_give_one_map():
    lengths = [[4, 1, 3], [8], [2, 2]]
    doc_ids = doc_ids_from_seq_lengths(lengths, 8)
    assert torch.equal(doc_ids_from_indexed_mask(doc_ids), doc_ids)
    assert torch.equal(doc_ids_from_position_ids(position_ids_from_doc_ids(doc_ids), doc_ids), doc_ids)
    assert torch.equal(doc_ids_from_cu_seqlens(params_of(doc_ids).cu_seqlens, 8, padding_segments=[6]), doc_ids)
