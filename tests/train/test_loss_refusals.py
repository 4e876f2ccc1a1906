"""What the packed loss refuses: each with one error that says where it does not fit."""

import pytest
import torch

from neatpack import packed_seq_params_from_doc_ids
from neatpack.errors import MetadataError
from neatpack.testing import WORKED_EXAMPLE
from neatpack.train.loss import count_items, packed_cross_entropy, target_weights


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reduction": "mean"}, "unknown reduction 'mean': choose one of token, document, sqrt_document, none"),
        ({"reduction": "none", "num_items": 3}, "nothing for num_items to divide"),
        ({"label_smoothing": 1.5}, "label_smoothing is 1.5"),
        ({"z_loss": -1.0}, "z_loss is -1.0"),
        ({"chunk_size": 0}, "chunk_size is 0"),
        ({"labels": torch.full((2, 6), 99)}, "target of row 0, position 0 is 99, no entry of a vocabulary of 13"),
        ({"labels": torch.full((2, 6), -1)}, "target of row 0, position 0 is -1"),
        ({"labels": torch.zeros(2, 5, dtype=torch.int64)}, r"labels has shape \(2, 5\)"),
        ({"logits": torch.zeros(2, 5, 13)}, r"logits have shape \(2, 5, 13\).*logits_to_keep"),
        ({"logits": torch.zeros(2, 6)}, r"logits have shape \(2, 6\)"),
        ({"logits": torch.zeros(2, 6, 13, dtype=torch.int64)}, "logits must be floating"),
        ({"logits": [[0.0]]}, "logits must be floating, got list"),
        ({"logits": torch.zeros(2, 6, 0), "labels": torch.full((2, 6), -100)}, "no entry to predict"),
        ({"logits": torch.zeros(2, 6, 13, device="meta")}, r"logits is on meta, the labels on cpu.*params.to"),
        ({"labels": torch.full((2, 6), 2.7)}, "labels must be integers, one token id a position, got torch.float32"),
        ({"labels": torch.ones(2, 6, dtype=torch.bool)}, "labels must be integers, .*got torch.bool"),
        ({"params": None}, "params must be the PackedSeqParams of the batch, got NoneType"),
        ({"chunk_size": 2.5}, "chunk_size is 2.5"),
        ({"num_items": 0}, "num_items is 0, but this batch alone adds 6 to it"),
        ({"num_items": torch.tensor(-3)}, "num_items is -3, but"),
        ({"num_items": float("nan"), "reduction": "document"}, "num_items is nan, but this batch alone adds 4 to it"),
        ({"num_items": torch.tensor([5, 5])}, r"num_items has shape \(2,\).*nn.DataParallel"),
        ({"num_items": "5"}, "num_items must be a number or a tensor of one, got '5'"),
        ({"num_items": True}, "num_items must be a number"),
    ],
)
def test_what_does_not_fit_is_one_clear_error(change, message):
    given = {
        "logits": torch.zeros(2, 6, 13),
        "labels": torch.zeros(2, 6, dtype=torch.int64),
        "params": packed_seq_params_from_doc_ids(torch.as_tensor(WORKED_EXAMPLE)),
    }
    with pytest.raises(MetadataError, match=message):
        packed_cross_entropy(**{**given, **change})


def test_weights_of_no_reduction_are_refused():
    labels = torch.zeros(2, 6, dtype=torch.int64)
    for ask in (target_weights, count_items):
        with pytest.raises(MetadataError, match="has no weights"):
            ask(labels, packed_seq_params_from_doc_ids(torch.as_tensor(WORKED_EXAMPLE)), reduction="none")
