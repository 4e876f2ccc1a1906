"""Rows in, batch out: every key follows from seq_lengths, and nothing asks one document to predict the next."""

import dataclasses

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from neatpack import PackedCollator, packed_seq_params_from_doc_ids
from neatpack.convert.dense import to_dense_mask
from neatpack.errors import MetadataError, PackError
from neatpack.testing import WORKED_EXAMPLE, random_lengths

ROWS = [
    {"input_ids": [11, 12, 21, 22, 23], "seq_lengths": [2, 3]},
    {"input_ids": [31, 41, 42, 51, 52, 53], "seq_lengths": [1, 2, 3]},
]


def random_rows(seed: int, count: int = 3, length: int = 30) -> list[dict]:
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        lengths = random_lengths(rng, length)
        rows.append({"input_ids": rng.integers(1, 1000, sum(lengths)).tolist(), "seq_lengths": lengths})
    return rows


def test_the_worked_example_gives_every_key_of_a_batch():
    batch = PackedCollator(return_doc_ids=True, return_params=True)(ROWS)
    assert batch["input_ids"].tolist() == [[11, 12, 21, 22, 23, 0], [31, 41, 42, 51, 52, 53]]
    assert batch["labels"].tolist() == [[-100, 12, -100, 22, 23, -100], [-100, -100, 42, -100, 52, 53]]
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1, 2, 0], [0, 0, 1, 0, 1, 2]]
    assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == [0, 2, 5, 6, 7, 9, 12]
    assert batch["max_length_q"] == batch["max_length_k"] == 3
    assert batch["use_cache"] is False
    assert batch["doc_ids"].tolist() == WORKED_EXAMPLE
    assert batch["packed_seq_params"].doc_ids is batch["doc_ids"]


def test_a_batch_has_no_attention_mask_and_starts_with_input_ids():
    batch = PackedCollator()(ROWS)
    assert list(batch) == [
        "input_ids",
        "labels",
        "position_ids",
        "cu_seq_lens_q",
        "cu_seq_lens_k",
        "max_length_q",
        "max_length_k",
        "use_cache",
    ]
    assert [batch[key].dtype for key in ("input_ids", "labels", "position_ids")] == [torch.int64] * 3
    assert batch["cu_seq_lens_q"].dtype == torch.int32


def test_the_mask_builders_mask_of_this_batch_is_its_attention_mask():
    batch = PackedCollator(mask_builder=to_dense_mask, return_params=True)(ROWS)
    assert torch.equal(batch["attention_mask"], to_dense_mask(batch["packed_seq_params"]))
    assert batch["attention_mask"].shape == (2, 1, 6, 6)
    assert "attention_mask" not in PackedCollator()(ROWS)


@pytest.mark.parametrize("seed", range(20))
def test_the_models_shift_never_asks_a_document_for_the_next_ones_first_token(seed):
    batch = PackedCollator(return_doc_ids=True)(random_rows(seed))
    doc_ids, targets = batch["doc_ids"], batch["labels"][:, 1:] != -100
    assert not (targets & (doc_ids[:, 1:] != doc_ids[:, :-1])).any()
    assert not (targets & (doc_ids[:, 1:] == 0)).any()
    documents = sum(len(row["seq_lengths"]) for row in random_rows(seed))
    tokens = sum(len(row["input_ids"]) for row in random_rows(seed))
    assert int(targets.sum()) == tokens - documents
    # The twin: labels that simply repeat the ids do ask across boundaries, so the check can fail.
    if documents > len(batch["labels"]):
        assert ((doc_ids[:, 1:] != doc_ids[:, :-1]) & (doc_ids[:, 1:] != 0)).any()


@pytest.mark.parametrize(
    ("options", "length"),
    [
        ({}, 6),
        ({"row_length": 10}, 10),
        ({"pad_to_multiple_of": 8}, 8),
        ({"row_length": 9, "pad_to_multiple_of": 4}, 12),
        ({"row_length": 6, "pad_to_multiple_of": 1}, 6),
    ],
)
def test_rows_are_padded_to_the_length_asked_for_as_one_run(options, length):
    batch = PackedCollator(pad_token_id=7, **options)(ROWS)
    assert batch["input_ids"].shape == (2, length)
    assert (batch["input_ids"][0, 5:] == 7).all()
    assert (batch["labels"][0, 5:] == -100).all()
    assert batch["position_ids"][0, 5:].tolist() == list(range(length - 5))
    assert len(batch["cu_seq_lens_q"]) == 1 + 5 + (length > 5) + (length > 6)
    assert batch["cu_seq_lens_q"][-1] == 2 * length


def test_labels_of_the_row_win_over_its_ids_and_stay_unshifted():
    row = {"input_ids": [5, 6, 7, 8], "seq_lengths": [2, 2], "labels": [-100, 6, 7, -100]}
    assert PackedCollator()([row])["labels"].tolist() == [[-100, 6, -100, -100]]


@pytest.mark.parametrize("name", ["loss_mask", "completion_mask", "assistant_masks"])
def test_a_zero_in_a_mask_column_takes_the_token_out_of_the_loss(name):
    row = {"input_ids": [5, 6, 7, 8, 9], "seq_lengths": [5], name: [0, 0, 1, 1, 0]}
    assert PackedCollator()([row])["labels"].tolist() == [[-100, -100, 7, 8, -100]]


def test_rows_with_and_without_labels_mix():
    rows = [{**ROWS[0], "labels": [-100, -100, 21, 22, -100]}, {**ROWS[1], "labels": None}]
    assert PackedCollator()(rows)["labels"].tolist() == [
        [-100, -100, -100, 22, -100, -100],
        [-100, -100, 42, -100, 52, 53],
    ]


def test_arrays_and_tensors_of_narrow_types_are_taken_as_they_are():
    as_arrays = [{key: np.array(value, np.uint16) for key, value in row.items()} for row in ROWS]
    as_tensors = [{key: torch.tensor(value) for key, value in row.items()} for row in ROWS]
    expected = PackedCollator()(ROWS)
    for rows in (as_arrays, as_tensors):
        batch = PackedCollator()(rows)
        assert all(torch.equal(batch[key], expected[key]) for key in ("input_ids", "labels", "position_ids", "cu_seq_lens_q"))


def test_collating_does_not_write_into_the_rows():
    row = {"input_ids": np.array([5, 6, 7]), "seq_lengths": np.array([1, 2]), "labels": np.array([5, 6, 7])}
    PackedCollator()([row])
    assert row["labels"].tolist() == row["input_ids"].tolist() == [5, 6, 7]


def test_offsets_equal_what_the_map_alone_gives():
    batch = PackedCollator(return_doc_ids=True)(random_rows(3, count=5))
    assert torch.equal(batch["cu_seq_lens_q"], packed_seq_params_from_doc_ids(batch["doc_ids"]).cu_seqlens)


def test_a_row_without_seq_lengths_is_refused_with_the_trainer_setting_that_drops_it():
    with pytest.raises(MetadataError, match=r"row 1 .* no seq_lengths.*remove_unused_columns=False"):
        PackedCollator()([ROWS[0], {"input_ids": [1, 2]}])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"seq_lengths": [2]}, "row 0 of the batch has no input_ids"),
        ({"input_ids": [1, 2, 3], "seq_lengths": [2]}, "seq_lengths add up to 2, but input_ids has 3 tokens"),
        ({"input_ids": [1, 2], "seq_lengths": [2], "labels": [1]}, "labels has 1 entries, but input_ids has 2"),
        ({"input_ids": [1, 2], "seq_lengths": [2], "loss_mask": [1, 1, 1]}, "loss_mask has 3 entries"),
        ({"input_ids": [1.5, 2], "seq_lengths": [2]}, "input_ids must be a flat list of integers"),
        ({"input_ids": [[1, 2]], "seq_lengths": [2]}, "input_ids must be a flat list of integers"),
        ({"input_ids": [1, 2], "seq_lengths": [2, 0]}, "a document has at least one token"),
        ({"input_ids": [1, 2], "seq_lengths": [2], "attention_mask": [1, 1]}, "does not know: attention_mask"),
    ],
)
def test_a_row_that_does_not_fit_is_one_error_that_names_row_and_column(row, message):
    with pytest.raises(PackError, match=message):
        PackedCollator()([row])


def test_a_row_longer_than_the_row_length_is_refused_not_cut():
    with pytest.raises(MetadataError, match="row 1 of the batch has 6 tokens, more than row_length=5"):
        PackedCollator(row_length=5)(ROWS)


def test_a_column_is_left_out_only_when_named():
    row = {**ROWS[0], "source": "wiki"}
    with pytest.raises(MetadataError, match=r"source.*ignore_columns"):
        PackedCollator()([row])
    assert "source" not in PackedCollator(ignore_columns=["source"])([row])


def test_no_rows_are_refused():
    with pytest.raises(MetadataError, match="got no rows"):
        PackedCollator()([])


def test_a_batch_comes_whole_out_of_a_data_loader_worker():
    loader = DataLoader(
        ROWS, batch_size=2, collate_fn=PackedCollator(return_params=True), num_workers=1, multiprocessing_context="spawn"
    )
    (batch,) = loader
    assert batch["cu_seq_lens_q"].tolist() == [0, 2, 5, 6, 7, 9, 12]
    assert batch["packed_seq_params"].max_seqlen == 3


def test_shifted_labels_come_under_their_own_name_and_labels_stay_aligned():
    batch = PackedCollator(return_shift_labels=True)(ROWS)
    assert batch["labels"].tolist() == [[-100, 12, -100, 22, 23, -100], [-100, -100, 42, -100, 52, 53]]
    assert batch["shift_labels"].tolist() == [[12, -100, 22, 23, -100, -100], [-100, 42, -100, 52, 53, -100]]
    assert batch["shift_labels"].is_contiguous()


def test_columns_with_one_number_a_document_come_in_document_order():
    rows = [{**ROWS[0], "group_ids": [7, 7], "reward": [0.5, 1]}, {**ROWS[1], "group_ids": [8, 8, 9], "reward": [0, 1, 2]}]
    batch = PackedCollator(document_columns=["group_ids", "reward"])(rows)
    assert batch["group_ids"].tolist() == [7, 7, 8, 8, 9]
    assert batch["group_ids"].dtype == torch.int64
    assert batch["reward"].tolist() == [0.5, 1, 0, 1, 2]


def test_an_empty_row_does_not_change_the_dtype_of_a_document_column():
    rows = [{"input_ids": [], "seq_lengths": [], "group_ids": []}, {**ROWS[0], "group_ids": [7, 7]}]
    assert PackedCollator(document_columns=["group_ids"])(rows)["group_ids"].tolist() == [7, 7]
    assert PackedCollator(document_columns=["group_ids"])(rows)["group_ids"].dtype == torch.int64


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ({}, "row 1 of the batch has no group_ids"),
        ({"group_ids": [1, 2, 3, 4, 5, 6]}, "row 1 of the batch: group_ids must be one number a document, 3 in all"),
        (
            {"group_ids": ["a", "b", "c"]},
            r"group_ids must be one number a document.*<U1.*leave it out: ignore_columns=\['group_ids'\]",
        ),
    ],
)
def test_a_document_column_that_does_not_fit_is_refused_with_its_row(column, message):
    rows = [{**ROWS[0], "group_ids": [7, 7]}, {**ROWS[1], **column}]
    with pytest.raises(MetadataError, match=message):
        PackedCollator(document_columns=["group_ids"])(rows)


def test_columns_with_one_number_a_token_are_padded_with_the_tokens():
    rows = [
        {**ROWS[0], "advantages": [0.5, 1, 2, 3, 4], "turn": np.arange(5, dtype=np.uint8)},
        {**ROWS[1], "advantages": np.zeros(6), "turn": [1] * 6},
    ]
    batch = PackedCollator(token_columns=["advantages", "turn"])(rows)
    assert batch["advantages"].tolist() == [[0.5, 1, 2, 3, 4, 0], [0] * 6]
    assert batch["turn"].tolist() == [[0, 1, 2, 3, 4, 0], [1] * 6]
    assert (batch["advantages"].dtype, batch["turn"].dtype) == (torch.float32, torch.int64)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ({}, "row 1 of the batch has no advantages"),
        ({"advantages": [1, 2, 3]}, "row 1 of the batch: advantages must be one number a token, 6 in all"),
        ({"advantages": list("abcdef")}, "advantages must be one number a token"),
    ],
)
def test_a_token_column_that_does_not_fit_is_refused_with_its_row(column, message):
    rows = [{**ROWS[0], "advantages": [1.0] * 5}, {**ROWS[1], **column}]
    with pytest.raises(MetadataError, match=message):
        PackedCollator(token_columns=["advantages"])(rows)


def test_a_batch_of_empty_rows_has_no_documents_and_empty_document_columns():
    row = {"input_ids": [], "seq_lengths": [], "group_ids": []}
    batch = PackedCollator(row_length=4, document_columns=["group_ids"])([row, row])
    assert batch["group_ids"].shape == (0,)
    assert batch["group_ids"].dtype == torch.int64
    assert batch["cu_seq_lens_q"].tolist() == [0, 4, 8]
    assert (batch["labels"] == -100).all()


def test_a_collator_cannot_be_changed_once_workers_have_it():
    with pytest.raises(AttributeError, match="cannot assign"):
        PackedCollator().row_length = 8


def test_align_gives_every_document_a_slot_of_its_own():
    batch = PackedCollator(pad_token_id=9, align=4, return_doc_ids=True)(ROWS)
    assert batch["input_ids"].tolist() == [
        [11, 12, 9, 9, 21, 22, 23, 9, 9, 9, 9, 9],
        [31, 9, 9, 9, 41, 42, 9, 9, 51, 52, 53, 9],
    ]
    assert batch["doc_ids"].tolist() == [[1, 1, 0, 0, 2, 2, 2, 0, 0, 0, 0, 0], [1, 0, 0, 0, 2, 2, 0, 0, 3, 3, 3, 0]]
    assert batch["labels"][0].tolist() == [-100, 12, -100, -100, -100, 22, 23, *[-100] * 5]
    assert batch["position_ids"][1].tolist() == [0, 0, 1, 2, 0, 1, 0, 1, 0, 1, 2, 0]
    assert batch["cu_seq_lens_q"].tolist() == [0, 2, 4, 7, 12, 13, 16, 18, 20, 23, 24]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("align", [2, 3, 8])
def test_align_starts_every_document_at_a_multiple_and_loses_none(seed, align):
    rows = random_rows(seed)
    batch = PackedCollator(align=align, return_doc_ids=True, token_columns=["turn"])(
        [{**row, "turn": list(range(len(row["input_ids"])))} for row in rows]
    )
    for row, ids, doc_ids, turn in zip(rows, batch["input_ids"], batch["doc_ids"], batch["turn"], strict=True):
        assert ids[doc_ids != 0].tolist() == row["input_ids"]
        assert turn[doc_ids != 0].tolist() == list(range(len(row["input_ids"])))
        starts = [int((doc_ids == number).nonzero()[0]) for number in range(1, len(row["seq_lengths"]) + 1)]
        assert all(start % align == 0 for start in starts)


def test_align_takes_lengths_of_unsigned_types_and_refuses_negative_ones():
    narrow = [{**row, "seq_lengths": np.array(row["seq_lengths"], np.uint8)} for row in ROWS]
    assert torch.equal(PackedCollator(align=3)(narrow)["input_ids"], PackedCollator(align=3)(ROWS)["input_ids"])
    with pytest.raises(MetadataError, match="a document has at least one token"):
        PackedCollator(align=4)([{"input_ids": [1, 2], "seq_lengths": [3, -1]}])


def test_align_of_one_is_the_batch_without_it():
    expected, batch = PackedCollator()(ROWS), PackedCollator(align=1)(ROWS)
    assert all(torch.equal(batch[key], expected[key]) for key in ("input_ids", "labels", "position_ids", "cu_seq_lens_q"))


def test_slots_that_do_not_fit_the_row_are_refused_with_the_plan_that_would():
    with pytest.raises(MetadataError, match=r"row 1 .* 12 tokens in slots of 4, more than row_length=8.*align=4"):
        PackedCollator(align=4, row_length=8)(ROWS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pad_token_id": None}, "pad_token_id must be a token id of zero or more, got None.*eos_token_id"),
        ({"pad_token_id": -1}, "pad_token_id must be a token id of zero or more, got -1"),
        ({"pad_token_id": True}, "got True"),
        ({"pad_to_multiple_of": -4}, "pad_to_multiple_of must be a whole number of 1 or more, got -4"),
        ({"pad_to_multiple_of": 8.0}, r"got 8\.0"),
        ({"pad_to_multiple_of": 0}, "got 0"),
        ({"row_length": 0}, "row_length must be a whole number of 1 or more"),
        ({"align": 0}, "align must be"),
        ({"position_start": -1}, "position_start must be a whole number of 0 or more"),
        ({"mask_builder": "causal"}, "mask_builder must be a function"),
        ({"token_columns": "advantages"}, r"must be a list of column names.*Pass \['advantages'\]"),
        ({"token_columns": ["a"], "document_columns": ["a"]}, "'a' is in token_columns and in document_columns"),
        ({"token_columns": ["position_ids"]}, "the collator makes itself"),
        (
            {"document_columns": ["source"]},
            r"'source'.*losses take for an argument.*rename_column\('source', 'source_column'\)",
        ),
        ({"token_columns": ["value"]}, r"token_columns names 'value'.*ignore_columns=\['value'\]"),
        ({"vocab_size": 0}, "vocab_size must be a whole number of 1 or more, got 0"),
        ({"vocab_size": 8, "pad_token_id": 8}, r"pad_token_id=8 is outside of the vocabulary: ids are 0 to 7"),
        ({"ignore_columns": ["labels"]}, "reads by itself"),
    ],
)
def test_an_option_that_no_batch_can_honour_is_refused_when_the_collator_is_built(options, message):
    with pytest.raises(MetadataError, match=message):
        PackedCollator(**options)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([5, -1], r"input_ids\[1\] is -1; a token id is zero or more"),
        ([True, False], "input_ids must be a flat list of integers"),
        (np.array([5, 2**63], np.uint64), "input_ids holds 9223372036854775808, more than int64"),
    ],
)
def test_token_ids_that_no_vocabulary_has_are_refused_not_wrapped(ids, message):
    with pytest.raises(MetadataError, match=message):
        PackedCollator()([{"input_ids": ids, "seq_lengths": [2]}])


@pytest.mark.parametrize("kind", [list, np.array, np.uint8, np.uint64, torch.tensor])
def test_an_id_past_the_vocabulary_is_refused_by_row_and_place(kind):
    given = [kind(row["input_ids"]) for row in ROWS]
    rows = [{**row, "input_ids": ids} for row, ids in zip(ROWS, given, strict=True)]
    assert PackedCollator(vocab_size=54)(rows)["input_ids"].max() == 53
    with pytest.raises(
        MetadataError, match=r"row 1 of the batch: input_ids\[5\] is 53, expected 0 to 52 .vocab_size=53.*--tokenizer"
    ):
        PackedCollator(vocab_size=53)(rows)
    assert PackedCollator(vocab_size=1)([{"input_ids": [], "seq_lengths": []}, {"input_ids": [0], "seq_lengths": [1]}])


def test_a_column_of_a_reserved_name_may_be_left_out():
    assert "source" not in PackedCollator(ignore_columns=["source"])([{**ROWS[0], "source": [1, 2]}])


def test_a_collators_options_are_named_and_stay_as_they_were_checked():
    with pytest.raises(TypeError, match="positional"):
        PackedCollator(0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        PackedCollator().row_length = -1


def test_positions_of_padding_stay_at_the_limit_and_those_of_documents_do_not():
    row = {"input_ids": [5, 6, 7, 8, 9], "seq_lengths": [1, 4]}
    batch = PackedCollator(row_length=12, position_limit=3)([row])
    assert batch["position_ids"].tolist() == [[0, 0, 1, 2, 3, 0, 1, 2, 2, 2, 2, 2]]
    assert batch["cu_seq_lens_q"].tolist() == [0, 1, 5, 12]
    shifted = PackedCollator(row_length=12, position_limit=4, position_start=2)([row])
    assert shifted["position_ids"].tolist() == [[2, 2, 3, 4, 5, 2, 3, 3, 3, 3, 3, 3]]
    with pytest.raises(MetadataError, match="position_limit must be a whole number of 3 or more"):
        PackedCollator(position_start=2, position_limit=2)
