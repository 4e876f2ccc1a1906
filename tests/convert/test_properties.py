"""On any map: who attends to whom under every conversion that a kernel reads; and no conversion is without such a test."""

import ast
import inspect
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packings import (
    agrees,
    doc_maps,
    equal_ids_pairs,
    flat_pairs,
    flatten_rows,
    merged,
    offsets_pairs,
    packings,
    params_of,
    real,
    renumbered,
)
from torch.nn.attention.flex_attention import create_mask

import neatpack.convert
from neatpack.convert import (
    align_documents,
    check_params,
    doc_ids_from_cu_seqlens,
    doc_ids_from_position_ids,
    first_keys,
    flatten_params,
    position_ids,
    position_ids_from_doc_ids,
    segment_index,
    slots,
    target_segmentation,
    target_segmentation_kind,
    to_additive_mask,
    to_block_mask,
    to_dense_mask,
    to_fa2,
    to_fa3,
    to_fa4,
    to_fla,
    to_flashinfer,
    to_grain,
    to_hf_kwargs,
    to_jagged,
    to_magi,
    to_mamba2,
    to_mask_dict,
    to_mask_mod,
    to_maxtext,
    to_megatron_fields,
    to_nested,
    to_olmo,
    to_segment_ids,
    to_seq_idx,
    to_te,
    to_te_jax,
    to_torchtitan,
    to_varlen,
    to_xformers_lengths,
)
from neatpack.errors import MetadataError

any_map = settings(max_examples=40, deadline=None)


def by_offsets(arguments, total, offsets, lengths=None):
    """Pairs that a varlen kernel computes; `lengths` names the real lengths of slots."""
    return offsets_pairs(arguments[offsets], total, lengths=None if lengths is None else arguments[lengths])


def by_lengths(lengths, total):
    return offsets_pairs([0, *itertools.accumulate(lengths)], total)


def by_first_keys(params):
    """Pairs of one interval a query: from its first key to itself."""
    first, length = first_keys(params), params.doc_ids.shape[1]
    keys, queries = torch.arange(length), torch.arange(length)[:, None]
    return flatten_rows((keys >= first[..., None]) & (keys <= queries))


def by_slots(arguments, total):
    """Pairs of Megatron's and TransformerEngine's two arrays: slots where documents lie, real lengths that count."""
    return offsets_pairs(arguments["cu_seqlens_kv_padded"], total, lengths=arguments["cu_seqlens_kv"].diff())


def by_mask_mod(params):
    batch, length = params.doc_ids.shape
    return flatten_rows(create_mask(to_mask_mod(params), batch, 1, length, length, device="cpu")[:, 0])


def by_ranges(params):
    ranges = to_magi(params)
    pairs = np.zeros((params.doc_ids.numel(),) * 2, bool)
    for (start, end), (first, last) in zip(ranges["q_ranges"].tolist(), ranges["k_ranges"].tolist(), strict=True):
        pairs[start:end, first:last] = np.tri(end - start, last - first, dtype=bool)
    return pairs


PAIRS = {
    "to_fa2": lambda params, total: by_offsets(to_fa2(params), total, "cu_seqlens_q"),
    "to_fa3": lambda params, total: by_offsets(to_fa3(params), total, "cu_seqlens_k"),
    "to_fa3 in slots": lambda params, total: by_offsets(to_fa3(params, form="C"), total, "cu_seqlens_q", "seqused_q"),
    "to_fa4": lambda params, total: by_offsets(to_fa4(params), total, "cu_seqlens_k"),
    "to_fa4 in slots": lambda params, total: by_offsets(to_fa4(params, form="C"), total, "cu_seqlens_q", "seqused_q"),
    "to_varlen": lambda params, total: by_offsets(to_varlen(params), total, "cu_seq_k"),
    "to_hf_kwargs": lambda params, total: by_offsets(to_hf_kwargs(params), total, "cu_seq_lens_q"),
    "to_flashinfer": lambda params, total: by_offsets(to_flashinfer(params), total, "qo_indptr"),
    "to_torchtitan": lambda params, total: by_offsets(to_torchtitan(params), total, "cu_seq_q"),
    "to_fla": lambda params, total: by_offsets(to_fla(params), total, "cu_seqlens"),
    "to_jagged": lambda params, total: by_offsets(to_jagged(params), total, "offsets"),
    "to_nested": lambda params, total: by_lengths([len(part) for part in to_nested(params, ones(params)).unbind()], total),
    "to_xformers_lengths": lambda params, total: by_lengths(to_xformers_lengths(params), total),
    "to_olmo": lambda params, total: by_lengths([n for row in to_olmo(params)["doc_lens"].tolist() for n in row if n], total),
    "to_magi": lambda params, total: by_ranges(params),
    "to_te": lambda params, total: by_slots(to_te(params), total),
    "to_te, real lengths": lambda params, total: by_slots(to_te(params, offsets="real"), total),
    "to_megatron_fields": lambda params, total: by_slots(to_megatron_fields(params, offsets="real"), total),
    "to_megatron_fields, recurrent": lambda params, total: equal_ids_pairs(to_megatron_fields(params)["seq_idx"]),
    "to_seq_idx": lambda params, total: equal_ids_pairs(to_seq_idx(params)),
    "to_mamba2": lambda params, total: equal_ids_pairs(to_mamba2(params)["seq_idx"]),
    "segment_index": lambda params, total: equal_ids_pairs(segment_index(params)),
    "to_segment_ids": lambda params, total: equal_ids_pairs(to_segment_ids(params)),
    "to_splash's ids": lambda params, total: equal_ids_pairs(to_te_jax(params)["segment_ids"]),
    "to_grain": lambda params, total: equal_ids_pairs(to_grain(params, "x")["x_segment_ids"]),
    "to_maxtext": lambda params, total: equal_ids_pairs(to_maxtext(params)["inputs_segmentation"]),
    "to_dense_mask": lambda params, total: flatten_rows(to_dense_mask(params)[:, 0]),
    "to_additive_mask": lambda params, total: flatten_rows(to_additive_mask(params, dtype=torch.float32)[:, 0] == 0),
    "to_mask_dict": lambda params, total: flatten_rows(to_mask_dict(params, window=total)["sliding_attention"][:, 0]),
    "to_mask_mod": lambda params, total: by_mask_mod(params),
    "to_block_mask": lambda params, total: flatten_rows(to_block_mask(params, block_size=1).to_dense()[:, 0].bool()),
    "flatten_params": lambda params, total: flatten_rows(to_dense_mask(flatten_params(params))[:, 0]),
    "first_keys": lambda params, total: by_first_keys(params),
}


def ones(params):
    return torch.ones(*params.doc_ids.shape, 1)


@pytest.mark.parametrize("name", PAIRS)
@given(doc_maps())
@any_map
def test_real_tokens_see_what_the_oracle_allows_on_any_map(name, doc_ids):
    assert agrees(PAIRS[name](params_of(doc_ids), doc_ids.numel()), doc_ids)


@pytest.mark.parametrize("name", PAIRS)
def test_a_dropped_boundary_is_noticed(name):
    noticed = 0
    for doc_ids in packings():
        twin = merged(doc_ids)
        if twin is not None:
            assert not agrees(PAIRS[name](params_of(twin), doc_ids.numel()), doc_ids)
            noticed += 1
    assert noticed > 3


@given(doc_maps(), st.integers(0, 3))
@any_map
def test_positions_and_the_map_lead_to_each_other(doc_ids, start):
    params = params_of(doc_ids)
    np.testing.assert_array_equal(position_ids(params, start), position_ids_from_doc_ids(doc_ids, start))
    back = doc_ids_from_position_ids(position_ids(params, start), doc_ids != 0)
    np.testing.assert_array_equal(back, renumbered(doc_ids))


@given(doc_maps(), st.integers(1, 5))
@any_map
def test_aligned_slots_lead_back_to_the_documents(doc_ids, multiple):
    layout = align_documents(params_of(doc_ids), multiple)
    form_c = slots(layout.params)
    assert not (form_c.cu_seqlens % multiple).any()
    assert bool((form_c.cu_seqlens.diff() - form_c.lengths < multiple).all())  # no slot is wider than it must be
    if real(doc_ids).any():
        back = doc_ids_from_cu_seqlens(form_c.cu_seqlens, real_lengths=form_c.lengths)
        assert torch.equal(back, layout.params.doc_ids)
    owners = torch.from_numpy(renumbered(doc_ids)) + 1000 * torch.arange(len(doc_ids))[:, None]
    moved = layout.move(owners)[layout.params.doc_ids != 0]
    assert moved.tolist() == owners[doc_ids != 0].tolist()


@given(doc_maps())
@any_map
def test_the_safe_shift_is_told_from_the_plain_one_wherever_they_differ(doc_ids):
    ids = renumbered(doc_ids)
    safe, plain = target_segmentation(ids), np.pad(ids[:, 1:], ((0, 0), (0, 1)))
    if (safe == plain).all():
        return
    assert target_segmentation_kind(ids, safe) == "safe"
    assert target_segmentation_kind(ids, plain) == "shifted"


@given(doc_maps(), st.integers(1, 6), st.data())
@any_map
def test_offsets_that_were_altered_are_refused(doc_ids, by, data):
    params = params_of(doc_ids)
    check_params(params, total_tokens=doc_ids.numel())
    at = data.draw(st.integers(0, len(params.cu_seqlens) - 1))
    altered = params.cu_seqlens.clone()
    altered[at] += by
    with pytest.raises(MetadataError):
        check_params(type(params)(altered, params.max_seqlen, doc_ids), total_tokens=doc_ids.numel())


NEEDS_A_PACKAGE = {"to_megatron", "to_splash", "to_xformers"}
"""They build an object of their package from what `to_megatron_fields`, `to_segment_ids` and `to_xformers_lengths` give."""


def test_every_conversion_has_a_property_test():
    public = {name for name, value in vars(neatpack.convert).items() if inspect.isfunction(value)}
    missing = public - NEEDS_A_PACKAGE - names_under_test()
    assert not missing
    assert public >= NEEDS_A_PACKAGE


def names_under_test():
    """Every name that a test under `@given` of this folder reaches, through the functions and tables of its module."""
    return {name for path in Path(__file__).parent.glob("test_*.py") for name in _reached(ast.parse(path.read_text()))}


def _reached(tree):
    uses, waiting = {}, []
    for node in ast.walk(tree):
        names = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
        if isinstance(node, ast.FunctionDef):
            uses.setdefault(node.name, set()).update(names)
            if any("given" in ast.dump(decorator) for decorator in node.decorator_list):
                waiting.append(node.name)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            uses.setdefault(node.targets[0].id, set()).update(names)
    reached = set()
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += uses.get(name, ())
    return reached


@given(doc_maps())
@any_map
def test_the_oracle_itself_lets_nothing_over_a_boundary(doc_ids):
    pairs = flat_pairs(doc_ids)
    owners = (renumbered(doc_ids) + 1000 * np.arange(len(doc_ids))[:, None]).reshape(-1)
    assert (owners[pairs.nonzero()[0]] == owners[pairs.nonzero()[1]]).all()
    assert pairs.diagonal()[real(doc_ids)].all()
