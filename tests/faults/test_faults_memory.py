"""Memory and limits of kernels: nothing quadratic is built unasked, and what a kernel cannot do is said."""

import numpy as np
import pytest
import torch
from fault_cases import params_of, refuses, row_of, runs

from neatpack.convert import first_keys, to_additive_mask, to_block_mask, to_dense_mask, to_mamba2
from neatpack.packed_seq import packed_seq_params_from_doc_ids
from neatpack.planning import plan_rows
from neatpack.train import PackedCollator, document_spans
from neatpack.train.context_parallel import padding_to

KIND = "memory and limits"


@runs(KIND, "long_recurrent_rows")
def test_rows_too_long_for_a_recurrent_kernel_are_warned_of(case):
    with pytest.warns(UserWarning, match=case.expected["warning"]):
        to_mamba2(params_of([case.input["length"]]))


@runs(KIND, "multiple_of_128")
def test_rows_can_be_padded_to_the_kernels_block(case):
    length, multiple = case.input["length"], case.input["multiple"]
    assert padding_to(length, multiple) == case.expected["padding"]
    batch = PackedCollator(pad_to_multiple_of=multiple)([row_of([length])])
    assert batch["input_ids"].shape[1] == case.expected["padded"]
    assert f"pad_to_multiple_of={multiple}" in to_block_mask.__doc__


@runs(KIND, "dense_mask_refused")
def test_a_dense_mask_above_the_limit_is_refused_before_it_is_built(case):
    doc_ids = torch.ones(case.input["batch"], 1, dtype=torch.int64).expand(-1, case.input["length"])
    params = packed_seq_params_from_doc_ids(doc_ids)
    limit = {} if case.input["max_bytes"] is None else {"max_bytes": case.input["max_bytes"]}
    with refuses(case.expected) as raised:
        to_dense_mask(params, **limit)
    assert f"needs {case.expected['bytes']:,} bytes" in str(raised.value)
    with refuses(case.expected):
        to_additive_mask(params, dtype=torch.bfloat16, **limit)
    if "blocks" in case.expected:
        assert to_block_mask(params).kv_indices.numel() == case.expected["blocks"]


@runs(KIND, "nothing_quadratic_stored")
def test_a_batch_holds_a_few_numbers_a_token(case):
    rows, length = case.input["rows"], case.input["row_length"]
    collate = PackedCollator(return_doc_ids=True, return_params=True)
    batch = collate([row_of([length // 2, length // 2])] * rows)
    tensors = [value for value in batch.values() if isinstance(value, torch.Tensor)]
    tensors.append(batch["packed_seq_params"].cu_seqlens)
    stored = sum(tensor.nbytes for tensor in tensors)
    assert stored < case.expected["most_bytes"] + 10_000
    assert max(tensor.dim() for tensor in tensors) == 2
    assert rows * length * length == case.expected["dense_bytes"]


@runs(KIND, "long_plain_row")
def test_a_long_row_of_one_document_gets_no_dense_mask(case):
    params = params_of([case.input["length"]])
    assert params.cu_seqlens.tolist() == case.expected["cu_seqlens"]
    assert len(document_spans(params)) == case.expected["documents"]
    with refuses(case.expected):
        to_dense_mask(params)
    assert not first_keys(params).any()  # one interval a query says the same in S numbers


@runs(KIND, "plan_from_lengths")
def test_a_plan_costs_eight_bytes_a_document(case):
    lengths = np.full(case.input["documents"], case.input["tokens_each"], np.int32)
    plan = plan_rows(lengths, case.input["capacity"])
    assert plan.doc.nbytes + plan.length.nbytes == case.expected["bytes"]
    assert plan.start.strides == (0,)
    assert 4 * plan.num_tokens == case.expected["token_bytes"]
