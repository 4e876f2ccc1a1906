"""The reference API, exactly: names, dtypes, shapes and semantics, on every kind of input."""

import copy
import dataclasses
import inspect
import pickle
import tracemalloc

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from neatpack.errors import MetadataError, MetadataOverflowError, MetadataTypeError, PackError
from neatpack.packed_seq import (
    PackedSeqParams,
    _run_starts_on_device,
    packed_seq_params_from_doc_ids,
    to_flash_attention_kwargs,
    validate_doc_ids,
)
from neatpack.testing import WORKED_EXAMPLE, random_doc_ids, segment_offsets

INTEGER_DTYPES = [
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]


def offsets(doc_ids) -> list[int]:
    return packed_seq_params_from_doc_ids(torch.as_tensor(doc_ids)).cu_seqlens.tolist()


@pytest.mark.parametrize("dtype", INTEGER_DTYPES, ids=str)
def test_worked_example_gives_form_a_offsets_for_every_integer_dtype(dtype):
    doc_ids = torch.tensor(WORKED_EXAMPLE, dtype=dtype)
    params = packed_seq_params_from_doc_ids(doc_ids)
    assert params.cu_seqlens.tolist() == [0, 2, 5, 6, 7, 9, 12]
    assert params.cu_seqlens.dtype == torch.int32
    assert params.cu_seqlens.is_contiguous()
    assert params.max_seqlen == 3
    assert type(params.max_seqlen) is int
    assert params.doc_ids is doc_ids


def test_fields_come_in_the_reference_order():
    assert [field.name for field in dataclasses.fields(PackedSeqParams)] == ["cu_seqlens", "max_seqlen", "doc_ids"]


def test_row_boundary_keeps_equal_ids_apart():
    assert offsets([[1, 1, 1, 1], [1, 1, 2, 2]]) == [0, 4, 6, 8]
    # The twin: without the forced row boundary the flattened map merges the two documents.
    flattened = offsets([[1, 1, 1, 1, 1, 1, 2, 2]])
    assert flattened == [0, 6, 8]


def test_padding_runs_are_segments_and_count_for_the_longest():
    params = packed_seq_params_from_doc_ids(torch.tensor([[1, 0, 0, 0], [0, 0, 0, 0]]))
    assert params.cu_seqlens.tolist() == [0, 1, 4, 8]
    assert params.max_seqlen == 4


def test_an_index_that_comes_back_is_a_segment_of_its_own():
    assert offsets([[1, 1, 2, 2, 1, 1]]) == [0, 2, 4, 6]


@pytest.mark.parametrize("shape", [(0, 6), (3, 0), (0, 0)])
def test_an_empty_map_gives_one_zero_offset(shape):
    params = packed_seq_params_from_doc_ids(torch.zeros(shape, dtype=torch.int64))
    assert params.cu_seqlens.tolist() == [0]
    assert params.cu_seqlens.dtype == torch.int32
    assert params.max_seqlen == 0
    assert type(params.max_seqlen) is int


@pytest.mark.parametrize("seed", range(200))
def test_generated_maps_equal_the_token_by_token_twin(seed):
    rng = np.random.default_rng(seed)
    doc_ids = random_doc_ids(rng, int(rng.integers(1, 5)), int(rng.integers(1, 40)))
    params = packed_seq_params_from_doc_ids(torch.from_numpy(doc_ids))
    expected = segment_offsets(doc_ids)
    assert params.cu_seqlens.tolist() == expected
    assert params.max_seqlen == max(np.diff(expected))


def strided_views():
    base = torch.from_numpy(random_doc_ids(np.random.default_rng(7), 6, 12))
    return {
        "transposed": base.t(),
        "every second row": base[::2],
        "every second column": base[:, ::2],
        "columns of a wider tensor": torch.cat([base, base], 1)[:, 3:10],
        "one row expanded": base[:1].expand(5, -1),
        "one column expanded": base[:, :1].expand(-1, 7),
        "one element expanded": base[:1, :1].expand(3, 4),
        "Fortran order": base.t().contiguous().t(),
        "one column": base[:, 2:3],
        "one row": base[2:3],
        "expanded row, one column": base[:1, :1].expand(4, 1),
        "expanded column, one row": base[:1, :1].expand(1, 4),
    }


@pytest.mark.parametrize("name", strided_views())
def test_any_memory_layout_gives_what_its_contiguous_copy_gives(name):
    view = strided_views()[name]
    assert offsets(view) == segment_offsets(view.contiguous()) == offsets(view.clone(memory_format=torch.contiguous_format))


def test_a_billion_token_view_is_not_looked_at_token_by_token():
    import tracemalloc

    view = torch.ones(1, 1, dtype=torch.int64).expand(1, 10**9)
    tracemalloc.start()
    params = packed_seq_params_from_doc_ids(view)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert params.cu_seqlens.tolist() == [0, 10**9]
    assert peak < 1_000_000


@pytest.mark.parametrize("shape", [(2, 2**30), (2**31, 1), (537_109, 4096)])
def test_more_tokens_than_int32_offsets_are_refused_before_anything_is_allocated(shape):
    import tracemalloc

    view = torch.ones(1, 1, dtype=torch.uint8).expand(shape)
    tracemalloc.start()
    with pytest.raises(OverflowError, match="Split the batch") as caught:
        packed_seq_params_from_doc_ids(view)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000
    assert isinstance(caught.value, MetadataOverflowError | ValueError)


@pytest.mark.parametrize("shape", [(6,), (), (1, 2, 3)])
def test_a_map_that_is_not_2d_is_a_value_error_that_says_2d_and_the_shape(shape):
    with pytest.raises(ValueError, match="2D") as caught:
        packed_seq_params_from_doc_ids(torch.zeros(shape, dtype=torch.int64))
    assert str(tuple(shape)) in str(caught.value)
    assert isinstance(caught.value, PackError)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.bool], ids=str)
def test_ids_that_are_no_integers_are_a_type_error(dtype):
    with pytest.raises(TypeError, match=str(dtype)) as caught:
        packed_seq_params_from_doc_ids(torch.zeros(1, 4, dtype=dtype))
    assert isinstance(caught.value, MetadataTypeError)


def test_a_list_is_a_type_error_that_names_the_way_out():
    with pytest.raises(TypeError, match=r"torch\.as_tensor"):
        packed_seq_params_from_doc_ids([[1, 1, 2]])


def test_building_writes_nothing_into_the_map_it_was_given():
    doc_ids = torch.tensor(WORKED_EXAMPLE)
    before = doc_ids.clone()
    packed_seq_params_from_doc_ids(doc_ids)
    assert torch.equal(doc_ids, before)


def test_flash_attention_kwargs_share_one_tensor_and_one_int():
    params = packed_seq_params_from_doc_ids(torch.tensor(WORKED_EXAMPLE))
    kwargs = to_flash_attention_kwargs(params)
    assert list(kwargs) == ["cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"]
    assert kwargs["cu_seq_lens_q"] is kwargs["cu_seq_lens_k"] is params.cu_seqlens
    assert kwargs["max_length_q"] == kwargs["max_length_k"] == 3
    assert type(kwargs["max_length_q"]) is int


class HostReads(TorchDispatchMode):
    """Counts the operations that would make an accelerator wait for the host: scalar reads, data-dependent sizes, copies."""

    SYNCING = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "unique", "masked_select")

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(name in str(func) for name in self.SYNCING):
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Elsewhere(torch.Tensor):
    """A tensor that the builder must treat as living on an accelerator: not a plain CPU tensor."""

    def numpy(self, *, force=False):
        raise TypeError("can't convert it to numpy, as from an accelerator")


def test_the_device_path_gives_the_same_offsets_and_reads_nothing_but_one_copy():
    doc_ids = torch.tensor(WORKED_EXAMPLE)
    with HostReads() as reads:
        starts = _run_starts_on_device(doc_ids)
    assert np.flatnonzero(starts).tolist() == [0, 2, 5, 6, 7, 9]
    assert reads.seen == []
    params = packed_seq_params_from_doc_ids(doc_ids.as_subclass(Elsewhere))
    assert params.cu_seqlens.tolist() == [0, 2, 5, 6, 7, 9, 12]


def test_the_sync_counter_sees_a_sync():
    with HostReads() as reads:
        torch.tensor([1, 0]).nonzero()
        torch.tensor(3).item()
    assert len(reads.seen) == 2


def test_moving_waits_unless_it_is_told_not_to():
    assert inspect.signature(PackedSeqParams.to).parameters["non_blocking"].default is False


def test_moving_keeps_the_values_and_the_int():
    params = packed_seq_params_from_doc_ids(torch.tensor(WORKED_EXAMPLE))
    assert params.to("cpu", non_blocking=True).doc_ids is params.doc_ids
    moved = params.to("meta")
    assert moved.cu_seqlens.device.type == moved.doc_ids.device.type == "meta"
    assert moved.max_seqlen == 3


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))])
def test_metadata_survives_copies_and_pickling(copied):
    params = packed_seq_params_from_doc_ids(torch.tensor(WORKED_EXAMPLE))
    other = copied(params)
    assert type(other) is PackedSeqParams
    assert torch.equal(other.cu_seqlens, params.cu_seqlens)
    assert torch.equal(other.doc_ids, params.doc_ids)
    assert other.max_seqlen == 3


def build(rows):
    return packed_seq_params_from_doc_ids(torch.tensor(rows))


def test_metadata_built_in_a_data_loader_worker_arrives_whole():
    loader = DataLoader(WORKED_EXAMPLE, batch_size=2, collate_fn=build, num_workers=1, multiprocessing_context="spawn")
    (params,) = loader
    assert params.cu_seqlens.tolist() == [0, 2, 5, 6, 7, 9, 12]
    assert params.max_seqlen == 3


def test_negative_ids_are_refused_by_the_validator_with_row_and_position():
    with pytest.raises(MetadataError, match=r"doc_ids\[1, 2\] is -1"):
        validate_doc_ids(torch.tensor([[1, 1, 0], [1, 2, -1]]))
    validate_doc_ids(torch.tensor(WORKED_EXAMPLE))


def test_reappearing_ids_are_refused_only_when_asked():
    doc_ids = torch.tensor([[1, 2, 2, 3], [1, 2, 1, 0]])
    validate_doc_ids(doc_ids)
    with pytest.raises(MetadataError, match=r"doc_ids\[1, 2\]: document 1 comes back .* row 1"):
        validate_doc_ids(doc_ids, unique=True)


def test_padding_may_reappear_in_a_valid_map():
    validate_doc_ids(torch.tensor([[0, 1, 0, 2, 0]]), unique=True)


@pytest.mark.parametrize("shape", [(0, 6), (3, 0)])
def test_the_validator_accepts_empty_maps(shape):
    validate_doc_ids(torch.zeros(shape, dtype=torch.int64), unique=True)


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (torch.zeros(3, dtype=torch.int64), MetadataError),
        (torch.zeros(1, 2, 2, dtype=torch.int64), MetadataError),
        (torch.zeros(2, 3), MetadataTypeError),
        (torch.ones(2, 3, dtype=torch.bool), MetadataTypeError),
        ([[1, 2]], MetadataTypeError),
        (torch.ones(1, 1, dtype=torch.int8).expand(2**16, 2**15), MetadataOverflowError),
    ],
)
def test_the_validator_refuses_what_the_builder_refuses(bad, error):
    for check in (packed_seq_params_from_doc_ids, validate_doc_ids):
        with pytest.raises(error):
            check(bad)


def test_the_most_tokens_that_int32_counts_are_accepted():
    params = packed_seq_params_from_doc_ids(torch.ones(1, 1, dtype=torch.uint8).expand(1, 2**31 - 1))
    assert (params.cu_seqlens.tolist(), params.max_seqlen) == ([0, 2**31 - 1], 2**31 - 1)
    with pytest.raises(OverflowError):
        packed_seq_params_from_doc_ids(torch.ones(1, 1, dtype=torch.uint8).expand(1, 2**31))


@pytest.mark.parametrize("shape", [(1, 2**12), (2**12, 1)])
def test_an_axis_that_expand_repeats_is_looked_at_once(shape):
    expanded = torch.ones(shape, dtype=torch.uint8).expand(2**12, 2**12)
    tracemalloc.start()
    params = packed_seq_params_from_doc_ids(expanded)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert params.cu_seqlens.tolist() == list(range(0, 2**24 + 1, 2**12))
    assert peak < 2**20  # one byte a token would be 2**24


@pytest.mark.parametrize("unique", [False, True])
def test_a_billion_token_view_is_validated_without_a_look_at_every_token(unique):
    for view in (torch.ones(1, 1).long().expand(1, 10**9), torch.tensor([[1], [2]]).expand(2, 10**9)):
        tracemalloc.start()
        validate_doc_ids(view, unique=unique)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1_000_000
    with pytest.raises(MetadataError, match=r"doc_ids\[1, 0\] is -1"):
        validate_doc_ids(torch.tensor([[1], [-1]]).expand(2, 10**9))


@pytest.mark.parametrize("unique", [False, True])
def test_the_validator_looks_at_what_an_expanded_axis_does_not_repeat(unique):
    row = torch.tensor([[1, 2, 1]]).expand(10**6, 3)
    if unique:
        with pytest.raises(MetadataError, match=r"doc_ids\[0, 2\]: document 1 comes back"):
            validate_doc_ids(row, unique=True)
    else:
        validate_doc_ids(row)


@pytest.mark.filterwarnings("ignore")  # torch warns that these layouts are young
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda ids: ids.to_sparse(), r"got layout torch.sparse_coo. Use .to_dense\(\)"),
        (lambda ids: ids.to_sparse_csr(), r"got layout torch.sparse_csr. Use .to_dense\(\)"),
        (lambda ids: torch.nested.nested_tensor(list(ids)), r"got a nested tensor. Pad its rows with 0"),
        (lambda ids: torch.nested.nested_tensor(list(ids), layout=torch.jagged), r"got a nested tensor. Pad its rows with 0"),
        (lambda ids: ids.to("meta"), r"on the meta device .*no values.*Build it on the CPU"),
    ],
    ids=["coo", "csr", "nested", "jagged", "meta"],
)
def test_a_map_without_dense_values_is_one_clear_error(make, message):
    ids = torch.tensor(WORKED_EXAMPLE)
    for check in (packed_seq_params_from_doc_ids, validate_doc_ids):
        with pytest.raises(MetadataTypeError, match=message):
            check(make(ids))


@pytest.mark.filterwarnings("ignore")
def test_the_ways_out_of_maps_without_dense_values_lead_out():
    ids = torch.tensor(WORKED_EXAMPLE)
    ways = [ids.to_sparse().to_dense(), torch.nested.to_padded_tensor(torch.nested.nested_tensor(list(ids)), 0)]
    ways.append(torch.nested.to_padded_tensor(torch.nested.nested_tensor([ids[0, :5], ids[1]], layout=torch.jagged), 0))
    for way in ways:
        assert offsets(way) == offsets(ids)


def test_the_device_path_looks_at_an_expanded_axis_once():
    row = torch.tensor([[1, 1, 2, 0]]).as_subclass(Elsewhere)
    assert offsets(row.expand(3, 4)) == offsets([[1, 1, 2, 0]] * 3)
    column = torch.tensor([[1], [0]]).as_subclass(Elsewhere)
    assert offsets(column.expand(2, 3)) == [0, 3, 6]


def test_metadata_is_equal_to_itself_only():
    params, twin = (packed_seq_params_from_doc_ids(torch.tensor(WORKED_EXAMPLE)) for _ in range(2))
    assert params == params
    assert params != twin
    assert len({params, twin}) == 2
