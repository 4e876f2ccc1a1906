"""Position ids: where they start, what they say of boundaries, and which of them reach the model."""

import torch
from fault_cases import params_of, refuses, row_of, runs

from neatpack.convert import doc_ids_from_position_ids, doc_ids_from_seq_lengths, position_ids_from_doc_ids, unpad_params
from neatpack.hf import register
from neatpack.isolation import check_isolation
from neatpack.packed_seq import packed_seq_params_from_doc_ids
from neatpack.train import PackedCollator, document_spans
from tiny_models import tiny_model

KIND = "position ids"


@runs(KIND, "start_at")
def test_positions_start_where_the_model_wants_them(case):
    params = params_of(case.input["lengths"])
    positions = position_ids_from_doc_ids(params.doc_ids, case.input["start"])
    assert positions[0].tolist() == case.expected["position_ids"]
    batch = PackedCollator(position_start=case.input["start"])([row_of(case.input["lengths"])])
    assert batch["position_ids"][0].tolist() == case.expected["position_ids"]
    back = doc_ids_from_position_ids(positions)
    assert packed_seq_params_from_doc_ids(back).cu_seqlens.tolist() == case.expected["cu_seqlens"]
    padded = torch.tensor(case.input["padded"])  # padded with 0, below the start of every document
    with refuses(case.expected):
        doc_ids_from_position_ids(padded)
    masked = packed_seq_params_from_doc_ids(doc_ids_from_position_ids(padded, padded != 0))
    assert unpad_params(masked).params.cu_seqlens.tolist() == case.expected["cu_seqlens"]


@runs(KIND, "imported")
def test_boundaries_are_where_a_position_does_not_follow(case):
    doc_ids = doc_ids_from_position_ids(torch.tensor(case.input["position_ids"]))
    assert packed_seq_params_from_doc_ids(doc_ids).cu_seqlens.tolist() == case.expected["cu_seqlens"]


@runs(KIND, "padded_positions")
def test_padding_and_one_token_documents_are_told_apart(case):
    doc_ids = doc_ids_from_position_ids(torch.tensor(case.input["position_ids"]))
    assert packed_seq_params_from_doc_ids(doc_ids).cu_seqlens.tolist() == case.expected["cu_seqlens"]
    padded = packed_seq_params_from_doc_ids(doc_ids_from_position_ids(torch.tensor(case.input["negative_pads"])))
    assert unpad_params(padded).params.cu_seqlens.tolist() == case.expected["real_cu_seqlens"]


@runs(KIND, "no_positions")
def test_no_positions_are_refused_and_lengths_say_it(case):
    with refuses(case.expected):
        doc_ids_from_position_ids(None)
    assert params_of(case.input["lengths"]).cu_seqlens.tolist() == case.expected["cu_seqlens"]


@runs(KIND, "from_lengths")
def test_equal_lengths_are_two_documents(case):
    doc_ids = doc_ids_from_seq_lengths(case.input["seq_lengths"])
    params = packed_seq_params_from_doc_ids(doc_ids)
    assert position_ids_from_doc_ids(doc_ids).tolist() == case.expected["position_ids"]
    assert len(document_spans(params)) == case.expected["documents"]
    assert params.cu_seqlens.tolist() == case.expected["cu_seqlens"]


class _SeesPositions(torch.nn.Module):
    """A model behind a step that may put its own positions in the place of the batch's."""

    def __init__(self, model, overwrite):
        super().__init__()
        self.model, self.overwrite, self.config, self.seen = model, overwrite, model.config, []

    def forward(self, input_ids, position_ids, **others):
        if self.overwrite:
            position_ids = torch.arange(input_ids.shape[1])[None].expand_as(input_ids)
        self.seen.append(position_ids.tolist())
        return self.model(input_ids=input_ids, position_ids=position_ids, **others)


@runs(KIND, "reach_the_model")
def test_the_probe_sees_the_positions_that_reach_the_model(case):
    batch = PackedCollator()([row_of(case.input["lengths"])])
    assert batch["position_ids"].tolist() == case.expected["position_ids"]
    register()
    model = tiny_model("gpt2")  # learned positions: a token knows where it stands
    honest, broken = _SeesPositions(model, overwrite=False), _SeesPositions(model, overwrite=True)
    assert check_isolation(honest, batch).isolated
    assert honest.seen[0] == case.expected["position_ids"]
    report = check_isolation(broken, batch)
    assert report.verdict == case.expected["verdict"]
    assert "position_ids" in str(report)
