"""Boundaries read from tokens: an EOS that is somewhere else, another one, or closes its document."""

import torch
from fault_cases import joined, params_of, refuses, runs

from neatpack.convert import doc_ids_from_eos, doc_ids_from_seq_lengths, position_ids_from_doc_ids
from neatpack.train import IGNORE_INDEX, prediction_targets

KIND = "boundaries from tokens"


@runs(KIND, "eos_lives_in_labels")
def test_inputs_without_their_eos_are_refused_and_lengths_say_it(case):
    inputs = torch.tensor(case.input["inputs"])
    with refuses(case.expected):
        doc_ids_from_eos(inputs, case.input["eos"])
    doc_ids = doc_ids_from_seq_lengths([[len(document) - 1 for document in case.input["documents"]]])
    assert doc_ids.tolist() == case.expected["doc_ids"]
    assert position_ids_from_doc_ids(doc_ids).tolist() == case.expected["position_ids"]
    documents = case.input["documents"]
    whole = torch.tensor([joined(documents)])
    targets = prediction_targets(whole, params_of([len(document) for document in documents]))
    assert targets[targets != IGNORE_INDEX].tolist() == case.expected["targets"]


@runs(KIND, "wrong_eos")
def test_an_eos_that_never_occurs_is_refused(case):
    tokens = torch.tensor(case.input["tokens"])
    with refuses(case.expected):
        doc_ids_from_eos(tokens, case.input["wrong_eos"])
    assert doc_ids_from_eos(tokens, case.input["eos"]).tolist() == case.expected["doc_ids"]


@runs(KIND, "separator_closes")
def test_a_separator_belongs_to_the_document_it_closes(case):
    doc_ids = doc_ids_from_eos(torch.tensor(case.input["tokens"]), case.input["eos"], pad_token_id=case.input["pad"])
    assert doc_ids.tolist() == case.expected["doc_ids"]
