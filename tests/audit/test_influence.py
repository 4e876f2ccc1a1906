"""The map of document against document is blank where a model keeps them apart, and dark where it does not."""

from __future__ import annotations

import json

import numpy as np
import pytest
import transformers
from typer.testing import CliRunner

from neatpack.audit import audit_model, influence_map, influence_without_boundaries
from neatpack.audit.model_audit import packed_batch
from neatpack.cli import app
from neatpack.hf import register
from neatpack.isolation import Document, IsolationReport, check_isolation
from neatpack.report import audit_page
from tiny_models import tiny_model


@pytest.fixture(autouse=True, scope="module")
def _registered():
    register()


@pytest.fixture
def packed():
    """Two rows of 32 tokens: the batch and its document map."""
    return packed_batch(128, 2, 32, 0)


def off_diagonal(sizes):
    return sizes[~np.eye(len(sizes), dtype=bool)]


def later_in_the_row(report):
    """Pairs of a document and one behind it in its row: what causal attention without boundaries mixes."""
    rows = [document.row for document in report.documents]
    return [(i, j) for i in range(len(rows)) for j in range(i + 1, len(rows)) if rows[i] == rows[j]]


def test_an_isolated_model_moves_nothing_off_the_diagonal(packed):
    batch, doc_ids = packed
    found = influence_map(check_isolation(tiny_model("llama"), batch, doc_ids=doc_ids))
    assert np.isnan(np.diagonal(found.sizes)).all()
    assert (off_diagonal(found.sizes) <= found.tolerance).all()
    assert found.moved == []


def test_the_same_model_without_boundaries_moves_every_later_document_of_a_row(packed):
    batch, doc_ids = packed
    model = tiny_model("llama")
    expected = later_in_the_row(check_isolation(model, batch, doc_ids=doc_ids))
    assert len(expected) > 10
    assert influence_without_boundaries(model, batch, doc_ids).moved == expected


def test_a_model_that_ignores_boundaries_is_as_dark_as_its_control(packed):
    batch, doc_ids = packed
    model = tiny_model("llama", "sdpa")
    blind = {**batch, "position_ids": None, "attention_mask": (doc_ids > 0).long()}
    leaking = influence_map(check_isolation(model, blind, doc_ids=doc_ids))
    assert leaking.moved == influence_without_boundaries(model, batch, doc_ids).moved


def test_documents_that_were_not_probed_have_no_numbers():
    documents = tuple(Document(0, at, 1) for at in range(3))
    influence = np.array([[0.0, 2.0, np.inf]])
    found = influence_map(IsolationReport(documents, (0,), influence, np.zeros(1), 1.0, 0.0, 1e-5))
    assert found.moved == [(0, 1), (0, 2)]
    assert found.to_dict() == {"sizes": [[None, 2.0, "inf"], [None] * 3, [None] * 3], "tolerance": 1e-5}
    json.dumps(found.to_dict(), allow_nan=False)


def test_the_page_holds_both_maps_of_every_implementation(tmp_path):
    transformers.LlamaConfig(num_key_value_heads=8).save_pretrained(tmp_path)
    result = CliRunner().invoke(
        app, ["audit", str(tmp_path), "--attn", "packed_varlen", "--seq-len", "32", "--html", str(tmp_path / "page.html")]
    )
    assert result.exit_code == 0, result.output
    page = (tmp_path / "page.html").read_text()
    data = json.loads(page.split('<script type="application/json" id="data">')[1].split("</script>")[0])
    (found,) = data["results"]
    assert found["verdict"] == "isolated"
    assert max(size for row in found["map"]["sizes"] for size in row if size is not None) == 0.0
    assert max(size for row in found["removed"]["sizes"] for size in row if size is not None) > 0.1
    without = audit_model(tmp_path, attention=["packed_varlen"], row_length=32)
    assert without.results[0].removed is None
    assert '"removed":null' in audit_page(without)


def test_a_page_is_of_a_model(tmp_path):
    result = CliRunner().invoke(app, ["audit", "--zoo", "--html", str(tmp_path / "page.html")])
    assert "--html draws how a model's documents move each other" in str(result.exception)
