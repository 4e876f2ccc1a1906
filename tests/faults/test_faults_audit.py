"""How isolation is shown: against the document alone, on documents that are equal, and on the rows that train."""

import torch
from fault_cases import params_of, row_of, runs

from neatpack.hf import register
from neatpack.isolation import check_isolation
from neatpack.train import PackedCollator, packed_cross_entropy
from tiny_models import tiny_model

KIND = "audit method"


@runs(KIND, "equal_documents")
def test_equal_documents_cost_the_same_in_a_row_that_keeps_them_apart(case):
    register()
    copies, length = case.input["copies"], case.input["length"]
    document = torch.randint(3, case.input["vocabulary"], (length,), generator=torch.Generator().manual_seed(0)).tolist()
    row = {"input_ids": document * copies, "seq_lengths": [length] * copies}
    batch = PackedCollator(return_params=True)([row])
    params = batch.pop("packed_seq_params")
    model = tiny_model("llama", max_position_embeddings=copies * length)
    with torch.no_grad():
        apart = packed_cross_entropy(model(**batch).logits, batch["labels"], params, reduction="none")
        one = {"input_ids": batch["input_ids"], "use_cache": False}  # the control: boundaries removed
        together = packed_cross_entropy(model(**one).logits, batch["labels"], params, reduction="none")
    assert float(apart.max() - apart.min()) <= case.expected["spread"]
    assert float(together.max() - together.min()) > 100 * case.expected["spread"]


@runs(KIND, "reference_is_the_document_alone")
def test_the_document_alone_is_the_reference_and_a_left_padded_batch_is_none(case):
    register()
    lengths = case.input["lengths"]
    model = tiny_model("gpt2")
    batch = PackedCollator()([row_of(lengths)])
    report = check_isolation(model, batch)
    assert report.isolated
    assert report.max_difference < case.expected["difference"]
    padded = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
    mask = torch.zeros_like(padded)
    start = 0
    for row, length in enumerate(lengths):
        padded[row, -length:] = batch["input_ids"][0, start : start + length]
        mask[row, -length:] = 1
        start += length
    with torch.no_grad():
        packed = model(**batch).logits[0, : lengths[0]]
        positions = torch.arange(padded.shape[1])[None].expand_as(padded)  # a ramp over the padding too
        left = tiny_model("gpt2", "eager")(input_ids=padded, attention_mask=mask, position_ids=positions).logits
    assert float((left[0, -lengths[0] :] - packed).abs().max()) > 1000 * case.expected["difference"]


@runs(KIND, "starts_and_isolation")
def test_a_packed_batch_is_its_documents_unpacked(case):
    register()
    batch = PackedCollator()([row_of(case.input["lengths"])])
    assert (batch["position_ids"][0] == 0).nonzero().flatten().tolist() == case.expected["starts"]
    assert (
        batch["cu_seq_lens_q"].tolist() == case.expected["cu_seqlens"] == params_of(case.input["lengths"]).cu_seqlens.tolist()
    )
    report = check_isolation(tiny_model("llama"), batch)
    assert report.verdict == case.expected["verdict"]
    assert report.max_influence == 0.0
