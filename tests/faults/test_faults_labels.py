"""Labels: what a token is asked to predict at the end of its document, in padding, in prompts and over slots."""

import numpy as np
import pytest
import torch
from fault_cases import joined, params_of, refuses, runs

from neatpack.convert import align_documents, position_ids_from_doc_ids, slots
from neatpack.convert.jax import target_segmentation
from neatpack.errors import PlanError
from neatpack.planning import plan_rows
from neatpack.train import (
    PackedCollator,
    aligned_labels,
    count_items,
    mask_from_spans,
    shift_within_documents,
    target_weights,
)

KIND = "labels"


@runs(KIND, "rolled_in_slots")
def test_a_shift_stays_in_its_padded_slot(case):
    params = params_of(case.input["lengths"])
    layout = align_documents(params, case.input["multiple"])
    laid_out = layout.move(torch.tensor([case.input["tokens"]]))
    assert laid_out[0].tolist() == case.expected["laid_out"]
    rolled = shift_within_documents(laid_out, layout.params, case.input["shift"], fill=0)
    assert rolled[0].tolist() == case.expected["rolled"]
    assert slots(layout.params).cu_seqlens.tolist() == case.expected["cu_seqlens_padded"]


@runs(KIND, "shifted_targets")
def test_no_target_crosses_a_boundary(case):
    params = params_of(case.input["lengths"])
    tokens = torch.tensor([case.input["tokens"]])
    assert shift_within_documents(tokens, params)[0].tolist() == case.expected["targets"]
    assert int(count_items(tokens, params)) == case.expected["counted"]
    row = {"input_ids": case.input["tokens"], "seq_lengths": case.input["lengths"]}
    batch = PackedCollator(return_shift_labels=True)([row])
    assert batch["shift_labels"][0].tolist() == case.expected["targets"]
    over_the_row = batch["labels"][0, 1:].tolist()  # a model that knows no documents shifts the aligned labels
    assert over_the_row == case.expected["targets"][:-1]
    safe = target_segmentation(np.asarray(params.doc_ids))
    assert (safe[0] != 0).tolist() == [target != -100 for target in case.expected["targets"]]


@runs(KIND, "separator_label")
def test_a_separator_is_the_first_label_of_every_document(case):
    params = params_of(case.input["lengths"])
    tokens = torch.tensor([case.input["tokens"]])
    labels = [aligned_labels(tokens, params, first=first)[0].tolist() for first in case.input["separators"]]
    assert labels == case.expected["labels"]
    assert position_ids_from_doc_ids(params.doc_ids)[0].tolist() == case.expected["position_ids"]


@runs(KIND, "aligned_labels")
def test_first_tokens_and_padding_have_no_label(case):
    collate = PackedCollator(row_length=case.input["row_length"], return_params=True)
    batch = collate([{"input_ids": case.input["tokens"], "seq_lengths": case.input["lengths"]}])
    assert batch["labels"][0].tolist() == case.expected["labels"]
    assert int(count_items(batch["labels"], batch["packed_seq_params"])) == case.expected["counted"]


@runs(KIND, "padding_never_counts")
def test_padding_has_no_weight_and_a_limit_of_false_is_refused(case):
    params = params_of(case.input["lengths"], case.input["row_length"])
    weights = target_weights(torch.tensor([case.input["tokens"]]), params)
    assert weights[0].tolist() == case.expected["weights"]
    with pytest.raises(PlanError, match=r"max_docs_per_row must be a positive number of documents.*False"):
        plan_rows([2, 2], 8, max_docs_per_row=False)
    assert plan_rows([2, 2], 8, max_docs_per_row=1).num_rows == 2


@runs(KIND, "spans")
def test_spans_move_by_the_lengths_before_them(case):
    mask = mask_from_spans(case.input["spans"], params_of(case.input["lengths"]))[0]
    expected = torch.zeros_like(mask)
    for begin, end in case.expected["absolute"]:
        expected[begin:end] = True
    assert mask.tolist() == expected.tolist()


@runs(KIND, "response_masks")
def test_masks_of_responses_alone_are_refused_and_spans_say_it(case):
    pairs = list(zip(case.input["prompts"], case.input["responses"], strict=True))
    lengths = [prompt + len(response) for prompt, response in pairs]
    short = {"input_ids": list(range(sum(lengths))), "seq_lengths": lengths}
    with refuses(case.expected):
        PackedCollator()([{**short, "loss_mask": joined(case.input["responses"])}])
    spans = [
        [(prompt + place, prompt + place + 1) for place, kept in enumerate(response) if kept] for prompt, response in pairs
    ]
    params = params_of(lengths)
    assert mask_from_spans(spans, params)[0].int().tolist() == case.expected["mask"]
    assert params.cu_seqlens.tolist() == case.expected["cu_seqlens"]
