"""Columns beside the tokens: packed, padded and shifted with them, or refused by name."""

import pytest
from fault_cases import joined, params_of, refuses, row_of, runs

from neatpack.data.groups import pack_groups
from neatpack.errors import MetadataError
from neatpack.train import PackedCollator, document_spans
from neatpack.train.context_parallel import pad_batch

KIND = "columns"


@runs(KIND, "unknown_column")
def test_a_column_nobody_knows_is_refused_by_name(case):
    documents, column = case.input["documents"], case.input["column"]
    tokens = joined(documents)
    row = {"input_ids": tokens, "seq_lengths": [len(document) for document in documents], column: case.input["values"]}
    collate = {"row_length": case.input["row_length"]}
    with refuses(case.expected):
        PackedCollator(**collate)([row])
    batch = PackedCollator(**collate, ignore_columns=[column])([row])
    assert batch["input_ids"][0].tolist() == case.expected["input_ids"]
    assert column not in batch
    per_token = {**PackedCollator()([{**row_of([3]), "input_ids": tokens}]), column: batch["input_ids"][:, :3]}
    with pytest.raises(MetadataError, match=f"column '{column}' is per token.*fills="):
        pad_batch(per_token, 4)
    values = [case.input["values"][:2], case.input["values"][2:]]
    group = [{"input_ids": ids, column: own} for ids, own in zip(documents, values, strict=True)]
    (packed,) = pack_groups([group], case.input["row_length"])
    assert packed[column].tolist() == case.input["values"]


@runs(KIND, "local_indices")
def test_indices_within_documents_move_by_their_starts(case):
    starts = document_spans(params_of(case.input["lengths"])).start.tolist()
    moved = [start + index for start, local in zip(starts, case.input["local"], strict=True) for index in local]
    assert moved == case.expected["global"]


@runs(KIND, "collator_call")
def test_the_collator_takes_rows_and_nothing_else(case):
    batch = PackedCollator()([row_of(case.input["lengths"])])
    assert batch["cu_seq_lens_q"].tolist() == case.expected["cu_seqlens"]
    assert str(batch["cu_seq_lens_q"].dtype) == "torch.int32"
    assert list(batch["labels"].shape) == case.expected["labels_shape"]
    with pytest.raises(TypeError, match="positional"):
        PackedCollator(0, 15)
