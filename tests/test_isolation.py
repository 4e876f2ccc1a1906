"""The probe finds the leaks that are there, and none that are not."""

import json

import numpy as np
import pytest
import torch

import neatpack.hf
from neatpack import PackedCollator, check_isolation
from neatpack.errors import ContractError, MetadataError
from neatpack.packed_seq import packed_seq_params_from_doc_ids
from tiny_models import DENSE, DOC_IDS, MIXTURES, packed_batch, tiny_model

neatpack.hf.register()
MAP = torch.tensor(DOC_IDS)


class Mixer(torch.nn.Module):
    """A model that can be told to leak: a running mean over each segment, or over the whole row."""

    def __init__(self, *, leak=0.0, offset=0.0, noisy=False, dtype=torch.float32):
        super().__init__()
        self.embedding = torch.nn.Embedding(128, 16, dtype=dtype)
        self.dropout = torch.nn.Dropout(0.5)
        self.leak, self.offset, self.noisy = leak, offset, noisy

    def forward(self, input_ids, doc_ids=None):
        hidden = self.dropout(self.embedding(input_ids))
        row = hidden.cumsum(1)
        if doc_ids is None:
            return row
        same = (doc_ids[:, :, None] == doc_ids[:, None, :]).tril().to(hidden)
        mixed = same @ hidden + self.leak * row + self.offset * (doc_ids > 1)[..., None]
        return mixed + torch.rand_like(mixed) if self.noisy else mixed


def batch_with_map(doc_ids=MAP, seed=0):
    return {
        "input_ids": torch.randint(0, 128, doc_ids.shape, generator=torch.Generator().manual_seed(seed)),
        "doc_ids": doc_ids,
    }


# --- transformers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", [*DENSE, *MIXTURES])
def test_the_packed_batch_is_isolated_on_packed_varlen(architecture):
    report = check_isolation(tiny_model(architecture), packed_batch(), doc_ids=MAP)
    assert report.isolated, str(report)
    assert report.control > 1.0
    assert report.max_difference < report.tolerance
    if architecture in DENSE:
        assert report.max_influence == 0.0


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("architecture", ["llama", "mistral", "gpt2"])
def test_stock_attention_leaks_with_position_ids_and_the_default_cache(architecture, attention):
    batch = packed_batch()
    stock = {name: batch[name] for name in ("input_ids", "position_ids")}
    report = check_isolation(tiny_model(architecture, attention), stock, doc_ids=MAP)
    assert report.verdict == "leaking"
    assert report.max_influence > 1.0
    moved = {(leak.source, leak.target) for leak in report.leaks if leak.source is not None}
    out_of_reach = {(2, 4)} if architecture == "mistral" else set()  # two layers of a window of 3
    assert moved == {(0, 1), (2, 3), (2, 4), (3, 4)} - out_of_reach
    assert check_isolation(tiny_model(architecture, attention), batch, doc_ids=MAP).isolated


@pytest.mark.parametrize("architecture", ["opt", "gpt_oss"])
def test_models_that_ignore_packed_positions_are_caught(architecture):
    """Their mask builder never sees position ids: the very batch that isolates elsewhere leaks here."""
    assert check_isolation(tiny_model(architecture, "eager"), packed_batch(), doc_ids=MAP).verdict == "leaking"


def test_boundaries_come_from_the_offsets_when_there_is_no_map():
    report = check_isolation(tiny_model("llama"), packed_batch())
    assert [(document.row, document.start, document.length) for document in report.documents][:4] == [
        (0, 0, 5),
        (0, 5, 7),
        (0, 12, 4),
        (1, 0, 6),
    ]
    assert report.isolated


def test_positions_that_do_not_restart_differ_from_the_document_alone():
    batch = packed_batch()
    batch["position_ids"] = torch.arange(16).expand(3, 16)
    report = check_isolation(tiny_model("opt"), batch, doc_ids=MAP)
    assert report.verdict == "differing"
    assert report.max_influence == 0.0
    assert {leak.target for leak in report.leaks} == {1, 3, 4}
    assert "is off by" in str(report)
    assert "position_ids" in str(report)


def test_narrow_dtypes_are_isolated_and_their_leaks_found():
    batch = packed_batch()
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert check_isolation(tiny_model("llama").to(dtype), batch, doc_ids=MAP).isolated
        stock = {name: batch[name] for name in ("input_ids", "position_ids")}
        assert check_isolation(tiny_model("llama", "sdpa").to(dtype), stock, doc_ids=MAP).verdict == "leaking"


def test_rows_longer_than_the_models_positions_can_be_probed():
    doc_ids = torch.tensor([[1] * 40 + [2] * 40 + [3] * 30])
    model = tiny_model("gpt2")
    report = check_isolation(model, packed_batch(doc_ids), doc_ids=doc_ids)
    assert model.config.n_positions < doc_ids.shape[1]
    assert report.isolated, str(report)


# --- any module -------------------------------------------------------------------------------------------------------


def test_a_plain_module_is_probed_by_the_map_in_its_batch():
    assert check_isolation(Mixer(), batch_with_map()).isolated
    assert check_isolation(Mixer(leak=0.1), batch_with_map()).verdict == "leaking"


def test_influence_says_who_moves_whom_and_by_how_much():
    report = check_isolation(Mixer(leak=0.5), batch_with_map())
    moved = report.influence > 0
    expected = np.zeros((6, 6), bool)
    expected[0, 1] = expected[2, 3] = expected[2, 4] = expected[3, 4] = True
    assert (moved == expected).all()
    sizes = [leak.size for leak in report.leaks]
    assert sizes == sorted(sizes, reverse=True)
    assert report.max_influence == report.influence.max() == max(leak.size for leak in report.leaks if leak.source is not None)
    assert "document 0 (row 0, tokens 0 to 4) moves document 1 (row 0, tokens 5 to 11)" in str(report)


def test_a_leak_smaller_than_the_tolerance_is_none_and_a_larger_one_is():
    batch = batch_with_map()
    size = check_isolation(Mixer(leak=1e-3), batch).max_influence
    torch.manual_seed(0)
    assert check_isolation(Mixer(leak=1e-3), batch, tolerance=10 * size).isolated
    assert not check_isolation(Mixer(leak=1e-3), batch, tolerance=size / 10).isolated


def test_a_model_that_is_not_itself_alone_is_no_leak_but_no_pass_either():
    report = check_isolation(Mixer(offset=1.0), batch_with_map())
    assert report.verdict == "differing"
    with pytest.raises(ContractError, match="differing"):
        report.raise_if_leaking()


def test_nothing_is_called_isolated_without_a_row_of_two_documents():
    report = check_isolation(Mixer(), batch_with_map(torch.ones(2, 8, dtype=torch.long)))
    assert report.verdict == "inconclusive"
    assert report.control is None
    assert not report.isolated
    with pytest.raises(ContractError, match="nothing was shown"):
        report.raise_if_leaking()


def test_nothing_is_called_isolated_when_removed_boundaries_do_not_show():
    class Tokenwise(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(128, 16)

        def forward(self, input_ids, **_):
            return self.embedding(input_ids)

    report = check_isolation(Tokenwise(), batch_with_map())
    assert report.control == 0.0
    assert report.verdict == "inconclusive"


def test_a_model_that_does_not_repeat_itself_is_inconclusive():
    report = check_isolation(Mixer(noisy=True), batch_with_map())
    assert report.verdict == "inconclusive"
    assert report.noise > 0.1
    assert "does not repeat itself" in str(report)


def test_numbers_that_are_not_finite_count_as_infinite():
    class Poisoned(Mixer):
        def forward(self, input_ids, doc_ids=None):
            mixed = super().forward(input_ids, doc_ids)
            return mixed if doc_ids is None else mixed.masked_fill((doc_ids == 2)[..., None], float("nan"))

    report = check_isolation(Poisoned(), batch_with_map())
    assert not report.isolated
    assert report.max_difference == float("inf")
    assert json.loads(json.dumps(report.to_dict(), allow_nan=False))["max_difference"] == "inf"
    assert "logits are not finite (NaN)" in str(report)
    assert "repeat itself" not in str(report)


def test_masked_vocabulary_entries_do_not_widen_the_tolerance():
    class Masked(Mixer):
        def forward(self, input_ids, doc_ids=None):
            mixed = super().forward(input_ids, doc_ids)
            return torch.cat([mixed, torch.full_like(mixed[..., :1], float("-inf")), torch.full_like(mixed[..., :1], -1e9)], -1)

    report = check_isolation(Masked(), batch_with_map())
    assert report.isolated
    assert report.tolerance < 1e-3


def test_the_model_is_left_as_it_was():
    model = Mixer().train()
    model.dropout.eval()
    batch = batch_with_map()
    tokens = batch["input_ids"].clone()
    check_isolation(model, batch)
    assert model.training
    assert not model.dropout.training
    assert torch.equal(batch["input_ids"], tokens)
    assert model.embedding.weight.grad is None
    with pytest.raises(MetadataError):
        check_isolation(model, {"input_ids": tokens})
    assert model.training


def test_two_probes_of_one_batch_say_the_same():
    model, batch = Mixer(leak=0.1), batch_with_map()
    assert check_isolation(model, batch).to_dict() == check_isolation(model, batch).to_dict()


def test_many_documents_are_sampled_and_the_report_says_so():
    doc_ids = torch.arange(1, 33).repeat_interleave(2).repeat(3, 1)
    report = check_isolation(Mixer(leak=0.1), batch_with_map(doc_ids), max_documents=10)
    assert len(report.probed) == 10
    assert len(report.documents) == 96
    assert report.influence.shape == (10, 96)
    assert "96 documents in 3 rows, 10 of them probed" in str(report)
    assert report.verdict == "leaking"
    assert {report.documents[index].row for index in report.probed} == {0, 1, 2}
    assert check_isolation(Mixer(), batch_with_map(doc_ids), max_documents=10).isolated


def test_metadata_in_the_batch_serves_as_the_map():
    class WithParams(Mixer):
        def forward(self, input_ids, params=None):
            return super().forward(input_ids, None if params is None else params.doc_ids)

    batch = batch_with_map()
    batch["params"] = packed_seq_params_from_doc_ids(batch.pop("doc_ids"))
    assert check_isolation(WithParams(), batch).isolated
    assert len(check_isolation(WithParams(), batch).documents) == 6


def test_a_batch_without_a_map_or_tokens_is_refused():
    batch = packed_batch()
    stock = {name: batch[name] for name in ("input_ids", "position_ids")}
    with pytest.raises(MetadataError, match="carries no document map"):
        check_isolation(tiny_model("llama"), stock)
    with pytest.raises(MetadataError, match="must hold input_ids"):
        check_isolation(Mixer(), {"inputs_embeds": torch.zeros(1, 2, 3)})
    with pytest.raises(MetadataError, match=r"doc_ids has shape \(2, 16\), input_ids \(3, 16\)"):
        check_isolation(Mixer(), batch_with_map(), doc_ids=MAP[:2])
    with pytest.raises(MetadataError, match="form A covers them all"):
        check_isolation(Mixer(), {**stock, "cu_seq_lens_q": torch.tensor([0, 5], dtype=torch.int32)})
    with pytest.raises(MetadataError, match="crosses the end of row 0"):
        check_isolation(Mixer(), {**stock, "cu_seq_lens_q": torch.tensor([0, 20, 48], dtype=torch.int32)})
    with pytest.raises(MetadataError, match="every token of the batch is the same"):
        check_isolation(Mixer(), {"input_ids": torch.zeros(3, 16, dtype=torch.long), "doc_ids": MAP})


def test_a_model_without_logits_is_refused():
    class Loss(torch.nn.Module):
        def forward(self, input_ids, **_):
            return {"loss": 1.0}

    with pytest.raises(MetadataError, match=r"must return logits \[3, 16, V\]"):
        check_isolation(Loss(), batch_with_map())


class Plain(torch.nn.Module):
    """An ordinary module whose forward knows tokens only: every document sees the whole row."""

    def __init__(self, wrap=lambda logits: logits):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(128, 8)
        self.head = torch.nn.Linear(8, 128)
        self.wrap = wrap

    def forward(self, input_ids):
        return self.wrap(self.head(self.embedding(input_ids).cumsum(1)))


@pytest.mark.parametrize(
    "wrap",
    [lambda logits: logits, lambda logits: (logits,), lambda logits: {"logits": logits}],
    ids=["tensor", "tuple", "dict"],
)
def test_a_module_that_takes_tokens_only_is_called_with_them_and_found_leaking(wrap):
    report = check_isolation(Plain(wrap), packed_batch())
    assert report.verdict == "leaking"


@pytest.mark.parametrize("align", [4, 8])
def test_documents_in_aligned_slots_are_isolated_with_padding_between_them(align):
    rng = np.random.default_rng(0)
    rows = [{"input_ids": rng.integers(0, 128, sum(lengths)), "seq_lengths": lengths} for lengths in ([5, 2, 7], [3, 9])]
    batch = PackedCollator(align=align, return_doc_ids=True)(rows)
    report = check_isolation(tiny_model("llama"), batch)
    assert [document.start for document in report.documents[:3]] == ([0, 8, 12] if align == 4 else [0, 8, 16])
    assert report.isolated, str(report)
    batch["cu_seq_lens_q"] = batch["cu_seq_lens_k"] = torch.tensor([0, *[batch["input_ids"].numel() // 2] * 2]).cumsum(0).int()
    batch["max_length_q"] = batch["max_length_k"] = batch["input_ids"].shape[1]
    batch["position_ids"] = torch.arange(batch["input_ids"].shape[1]).expand(2, -1)
    assert check_isolation(tiny_model("llama"), batch).verdict == "leaking"  # the twin: one segment a row


def test_a_forward_that_demands_the_metadata_is_given_that_of_the_document_alone():
    class Demanding(Mixer):
        def forward(self, input_ids, packed_seq_params):
            return super().forward(input_ids, packed_seq_params.doc_ids)

    batch = {**batch_with_map(), "packed_seq_params": packed_seq_params_from_doc_ids(MAP)}
    del batch["doc_ids"]
    assert check_isolation(Demanding(), batch).isolated
    assert check_isolation(Demanding(leak=0.1), batch).verdict == "leaking"
