"""Documents and segments without tokens."""

import pytest
import torch
from fault_cases import params_of, refuses, runs

from neatpack.attention import varlen_attention
from neatpack.convert import doc_ids_from_cu_seqlens, doc_ids_from_seq_lengths
from neatpack.data import pack
from neatpack.errors import MetadataError
from neatpack.planning import plan_rows

KIND = "zero length"


@runs(KIND, "empty_documents")
def test_empty_documents_are_refused_in_metadata_and_counted_in_plans(case):
    lengths = case.input["lengths"]
    with refuses(case.expected):
        doc_ids_from_seq_lengths([lengths])
    offsets = [sum(lengths[:end]) for end in range(len(lengths) + 1)]
    with pytest.raises(MetadataError, match="Drop segments without tokens"):
        doc_ids_from_cu_seqlens(offsets)
    plan = plan_rows(lengths, 4)
    (row,) = plan
    assert [slice_.doc for slice_ in row] == case.expected["kept"]  # the way back to the documents given
    assert plan.counts.empty == case.expected["empty"]
    params = params_of([slice_.length for slice_ in row])
    assert params.cu_seqlens.tolist() == case.expected["cu_seqlens"]
    assert params.max_seqlen == 1
    x = torch.randn(sum(lengths), 2, 4)
    empty_segments = varlen_attention(x, x, x, torch.tensor(offsets, dtype=torch.int32), 1)
    assert torch.equal(empty_segments, varlen_attention(x, x, x, params.cu_seqlens, 1))


@runs(KIND, "empty_segments_backward")
def test_empty_segments_change_no_gradient(case):
    gradients = []
    for offsets in (case.input["cu_seqlens"], case.expected["same_as"]):
        x = torch.randn(offsets[-1], 2, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
        varlen_attention(x, x, x, torch.tensor(offsets, dtype=torch.int32), 3).square().sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)
    assert gradients[0].isfinite().all()


@runs(KIND, "only_empty")
def test_data_of_empty_documents_plans_no_row_and_loses_nothing_else(case, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    plan = plan_rows([len(ids) for ids in case.input["all_empty"]], case.input["row_length"])
    assert (plan.num_rows, plan.counts.empty) == (case.expected["rows"], len(case.input["all_empty"]))
    types = {"null": pa.list_(pa.null()), "int": pa.list_(pa.int64())}
    for name, type_ in types.items():
        nothing = tmp_path / f"{name}.parquet"
        pq.write_table(pa.table({"input_ids": pa.array(case.input["all_empty"], type_)}), nothing)
        with refuses(case.expected):
            pack(nothing, tmp_path / "out", case.input["row_length"])
    some = tmp_path / "some.parquet"
    pq.write_table(pa.table({"input_ids": case.input["some_empty"]}), some, row_group_size=case.input["batch"])
    summary = pack(some, tmp_path / "out", case.input["row_length"])
    assert summary.tokens == case.expected["tokens_kept"]
    assert summary.counts.empty == 2
