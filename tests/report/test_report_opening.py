"""What can be looked at is opened, and what cannot be says why; text is shown where there is any."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from packings_to_look_at import TEXTS, write_texts

from neatpack.data import pack
from neatpack.errors import PlanError, SourceError, StoreError
from neatpack.planning import plan_rows, save_plan
from neatpack.report import inspect_page, open_packing, sample, summarise
from neatpack.report.embed import build_page, embedded_json, write_page
from neatpack.report.sample import sample_rows

IDS = [[ord(letter) for letter in text] for text in ("alpha", "be", "gamma ray", "d")]


@pytest.fixture
def plan_file(tmp_path):
    """A plan, and the Parquet file it was made for."""
    pq.write_table(pa.table({"input_ids": IDS}), tmp_path / "ids.parquet")
    save_plan(plan_rows([len(ids) for ids in IDS], 9, overflow="split", seed=0), tmp_path / "plan.npz")
    return tmp_path / "plan.npz"


def test_every_document_of_a_folder_is_read_back(packed):
    found = sample_rows(open_packing(packed))
    assert found.total == len(found.rows)
    assert found.excerpt is None
    assert {text + "<eos>" for text in TEXTS} <= set(found.texts)
    assert sum(len(text.replace("<eos>", "E").encode()) for text in found.texts) == found.plan.num_tokens


@pytest.mark.parametrize("file_format", ["arrow", "parquet"])
def test_a_sample_of_several_shards_shows_the_rows_it_names(tmp_path, monkeypatch, file_format):
    texts = [f"{number:04}" * 4 for number in range(400)]
    pack([write_texts(tmp_path / "in", texts)], tmp_path / "out", 64, unit_tokens=1_000, seed=None, file_format=file_format)
    everything = sample_rows(open_packing(tmp_path / "out"))
    monkeypatch.setattr(sample, "MAX_ROWS", 20)
    some = sample_rows(open_packing(tmp_path / "out"))
    assert len(some.rows) == 20 < some.total == len(everything.rows)
    assert set(some.marks) == {"emptiest", "most_documents", "longest_document"}
    offsets = everything.plan.row_offsets
    expected = [text for row in some.rows for text in everything.texts[offsets[row] : offsets[row + 1]]]
    assert some.texts == expected
    assert sample_rows(open_packing(tmp_path / "out"), seed=1).rows.tolist() != some.rows.tolist()


def test_the_rows_asked_for_are_those_drawn(packed):
    packing = open_packing(packed)
    assert sample_rows(packing, wanted=range(3, 9)).rows.tolist() == [3, 4, 5, 6, 7, 8]
    with pytest.raises(PlanError, match="rows 5 to 999999 were asked for, and the packing has"):
        sample_rows(packing, wanted=range(5, 1_000_000))


def test_a_plan_shows_the_text_of_its_source(plan_file):
    packing = open_packing(plan_file, source=plan_file.with_name("ids.parquet"), tokenizer="bytes")
    found = sample_rows(packing)
    assert sorted(zip(found.plan.doc.tolist(), found.texts, strict=True)) == [
        (0, "alpha"),
        (1, "be"),
        (2, "gamma ray"),
        (3, "d"),
    ]
    as_ids = sample_rows(open_packing(plan_file, source=plan_file.with_name("ids.parquet")))
    assert "98 101" in as_ids.texts
    assert sample_rows(open_packing(plan_file)).texts is None


def test_a_plan_and_another_source_do_not_go_together(plan_file, tmp_path):
    pq.write_table(pa.table({"input_ids": IDS[::-1]}), tmp_path / "other.parquet")
    with pytest.raises(PlanError, match="the plan does not fit its source"):
        open_packing(plan_file, source=tmp_path / "other.parquet")
    with pytest.raises(SourceError, match="holds no tokens to decode: pass its source"):
        open_packing(plan_file, tokenizer="bytes")


def test_long_documents_are_cut_to_what_a_page_holds(tmp_path):
    rng = np.random.default_rng(0)
    for name, letters in {"markup": "<&\x01é🙂", "plain": "abc"}.items():
        texts = ["".join(line) for line in rng.choice(list(letters), (900, 2_000)).tolist()]
        pack([write_texts(tmp_path / name, texts)], tmp_path / f"{name}-out", 8_192, overflow="split")
        packing = open_packing(tmp_path / f"{name}-out")
        found = sample_rows(packing)
        assert 0 < found.excerpt < 2_000
        assert all(text.endswith("…") and "\ufffd" not in text for text in found.texts)
        size = write_page(inspect_page(packing, summarise(packing)), tmp_path / "page.html")
        assert 500_000 < size < 2_000_000


def test_rows_of_more_documents_than_a_page_holds_end_early(tmp_path):
    save_plan(plan_rows([1] * 70_000, 50_000), tmp_path / "plan.npz")
    found = sample_rows(open_packing(tmp_path / "plan.npz"))
    assert found.cut
    assert len(found.plan.length) == sample.MAX_DOCUMENTS
    assert found.to_dict()["offsets"][-1] == sample.MAX_DOCUMENTS


def test_a_tokenizer_that_is_another_one_now_decodes_nothing(packed, tmp_path):
    manifest = json.loads((packed / "manifest.json").read_text())
    manifest["tokenizer"]["fingerprint"] = "another"
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in packed.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    (copy / "manifest.json").write_text(json.dumps(manifest))
    packing = open_packing(copy)
    assert packing.decoder is None
    assert "no longer the one that packed these rows" in packing.notes[0]
    assert open_packing(copy, tokenizer="bytes").decoder is not None
    manifest["options"]["tokenizer"] = "nowhere/tokenizer.json"
    (copy / "manifest.json").write_text(json.dumps(manifest))
    assert "no such tokenizer file" in open_packing(copy).notes[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"counts": {"documents": -1}}, "counts.documents is -1"),
        ({"counts": {"split": "many"}}, "counts.split is 'many'"),
        ({"options": {"seq_len": 0}}, "seq_len must be a positive integer"),
        ({"options": {"seq_len": 5}}, "expected 5 at most"),
    ],
)
def test_a_manifest_that_lies_is_one_error(packed, tmp_path, change, message):
    manifest = json.loads((packed / "manifest.json").read_text())
    for section, values in change.items():
        manifest[section] |= values
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in packed.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(StoreError, match=message):
        open_packing(copy)


def test_what_is_no_packing_is_one_error(packed, tmp_path):
    with pytest.raises(StoreError, match=r"not found\. Pass a folder that neatpack pack wrote, or a file"):
        open_packing(tmp_path / "nowhere")
    with pytest.raises(StoreError, match="not a finished folder of neatpack pack"):
        open_packing(tmp_path)
    (tmp_path / "x.npz").write_text("no plan")
    with pytest.raises(StoreError, match=r"x\.npz: no \.npz archive of save_plan"):
        open_packing(tmp_path / "x.npz")
    (tmp_path / "x.npz").write_bytes(b"PK\x03\x04 the beginning of one")
    with pytest.raises(StoreError, match="not a whole neatpack plan"):
        open_packing(tmp_path / "x.npz")
    with pytest.raises(SourceError, match="holds its tokens itself"):
        open_packing(packed, source=packed)
    with pytest.raises(StoreError, match="the page cannot be written there"):
        write_page("", tmp_path / "no" / "such" / "folder.html")


def test_a_damaged_shard_is_one_error(packed, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in packed.iterdir():
        data = file.read_bytes()
        (copy / file.name).write_bytes(data[: len(data) // 2] if file.suffix == ".arrow" else data)
    with pytest.raises(StoreError, match="not readable as a shard of packed rows"):
        open_packing(copy)


def test_data_in_a_page_can_neither_end_nor_open_an_element():
    hostile = {"a": "</script><!--<script>", "b": "\ud800"}
    text = embedded_json(hostile)
    assert "<" not in text
    assert json.loads(text) == hostile
    page = build_page("<title>", "inspect.html", ["page.js"], hostile)
    assert "<title>&lt;title&gt;</title>" in page
    assert page.count("</script>") == 2
    assert "default-src 'none'" in page


def test_pages_name_no_other_place():
    page = build_page("t", "inspect.html", ["page.js", "charts.js"], {})
    for reference in ("http:", "https:", "//cdn", "@import", "url(", "src=", " style=", " onclick="):
        assert reference not in page, reference
