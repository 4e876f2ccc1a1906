"""`max_docs_per_row` and `align` from the command's options to the batch: planned, recorded, checked and laid out."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest

from data.corpora import packed_rows, random_ids, same_documents
from data.test_pipeline import folder_bytes, write_ids
from data.test_resume import KilledError, stop_at
from neatpack import PackedCollator, PackedDataset, plan_rows
from neatpack.data import pack, verify
from neatpack.errors import PlanError, StoreError
from neatpack.report import open_packing

OPTIONS = {"max_docs_per_row": 3, "align": 8, "unit_tokens": 3000, "overflow": "split"}


@pytest.fixture
def documents() -> list[list[int]]:
    return [document for document in random_ids(7, 600, 60) if document]


@pytest.fixture
def source(tmp_path, documents) -> Path:
    return write_ids(tmp_path / "a.arrow", documents)


def slots(lengths: list[int], align: int) -> list[int]:
    return [-(-length // align) * align for length in lengths]


def edit_options(folder: Path, **changes: object) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["options"].update(changes)
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("strategy", ["best_fit", "in_order"])
def test_rows_keep_to_both_options_and_hold_no_padding(tmp_path, source, documents, strategy):
    summary = pack(source, tmp_path / "out", 64, strategy=strategy, **OPTIONS)
    rows = packed_rows(tmp_path / "out")
    assert max(len(row["seq_lengths"]) for row in rows) == 3
    assert max(sum(slots(row["seq_lengths"], 8)) for row in rows) == 64
    assert all(len(row["input_ids"]) == sum(row["seq_lengths"]) for row in rows)
    assert same_documents(tmp_path / "out", documents)
    assert (summary.max_docs_per_row, summary.align) == (3, 8)
    assert summary.lower_bound <= summary.rows
    options = json.loads((tmp_path / "out" / "manifest.json").read_text())["options"]
    assert (options["max_docs_per_row"], options["align"]) == (3, 8)


def test_rows_without_the_options_break_both_limits(tmp_path, source):
    """The check above is not vacuous: these documents are packed tighter and in greater number where they may be."""
    pack(source, tmp_path / "out", 64, unit_tokens=3000)
    rows = packed_rows(tmp_path / "out")
    assert max(len(row["seq_lengths"]) for row in rows) > 3
    assert max(sum(slots(row["seq_lengths"], 8)) for row in rows) > 64


def test_one_and_two_workers_write_the_same_bytes(tmp_path, source):
    for workers in (1, 2):
        pack(source, tmp_path / str(workers), 64, workers=workers, **OPTIONS)
    assert folder_bytes(tmp_path / "1") == folder_bytes(tmp_path / "2")


def test_the_wrapped_stream_keeps_to_its_slots(tmp_path, source):
    pack(source, tmp_path / "out", 64, strategy="wrapped", align=8)
    rows = packed_rows(tmp_path / "out")
    assert max(sum(slots(row["seq_lengths"], 8)) for row in rows) == 64
    assert verify(tmp_path / "out", [source]).source
    assert PackedDataset(tmp_path / "out").align == 8


@pytest.mark.parametrize(("option", "was", "is_"), [("align", 8, 4), ("max_docs_per_row", 3, None)])
def test_an_unfinished_run_is_not_gone_on_with_under_another_value(tmp_path, source, option, was, is_):
    with pytest.raises(KilledError):
        pack(source, tmp_path / "out", 64, progress=stop_at("pack", 2), **OPTIONS)
    with pytest.raises(StoreError, match=rf"{option} was {was}, is {is_}"):
        pack(source, tmp_path / "out", 64, **{**OPTIONS, option: is_})
    assert pack(source, tmp_path / "out", 64, **OPTIONS).resumed
    pack(source, tmp_path / "whole", 64, **OPTIONS)
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "whole")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"align": 24}, "64 is not a multiple of align=24.*48 or 72"),
        ({"align": 0}, "align must be a positive number"),
        ({"align": True}, "align must be a positive number"),
        ({"max_docs_per_row": 0}, "max_docs_per_row must be a positive number"),
        ({"max_docs_per_row": 2, "strategy": "wrapped"}, "'wrapped' fills every row"),
    ],
)
def test_options_that_no_row_can_honour_are_refused_before_anything_is_read(tmp_path, options, message):
    with pytest.raises(PlanError, match=message):
        pack(tmp_path / "nothing there", tmp_path / "out", 64, **options)


def test_the_folder_tells_the_dataset_and_the_collator_lays_documents_in_slots(tmp_path, source):
    pack(source, tmp_path / "out", 64, **OPTIONS)
    dataset = pickle.loads(pickle.dumps(PackedDataset(tmp_path / "out")))
    assert dataset.align == 8
    assert dataset.plan.capacity == 64
    assert not (dataset.plan.slot_starts() % 8).any()
    rows = [dataset[row] for row in range(20)]
    batch = PackedCollator(row_length=64, align=dataset.align)(rows)
    for index, row in enumerate(rows):
        starts = np.cumsum([0, *slots(row["seq_lengths"].tolist(), 8)])
        token = 0
        for start, length in zip(starts, row["seq_lengths"].tolist(), strict=False):
            found = batch["input_ids"][index, start : start + length].tolist()
            assert found == row["input_ids"][token : token + length].tolist()
            token += length
    again = plan_rows(dataset.lengths, 128, align=16)
    assert dataset.with_plan(again).align == 16


def test_a_folder_of_somebody_else_has_no_align(tmp_path, source):
    folder = tmp_path / "theirs"
    folder.mkdir()
    source.rename(folder / "a.arrow")
    assert PackedDataset(folder).align == 1
    for foreign in ("{", "[]", '{"format": "other", "options": {"align": 8}}'):
        (folder / "manifest.json").write_text(foreign)
        assert PackedDataset(folder).align == 1


@pytest.mark.parametrize("align", [0, -8, 24])
def test_an_align_that_no_run_can_have_had_is_refused(tmp_path, source, align):
    pack(source, tmp_path / "out", 64, **OPTIONS)
    edit_options(tmp_path / "out", align=align)
    for read in (PackedDataset, verify, open_packing):
        with pytest.raises(StoreError, match="options that no run can have had"):
            read(tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_docs_per_row": 2}, r"row \d+: 3 documents, expected at most 2"),
        ({"align": 64}, r"row \d+: (128|192) tokens in slots of 64, expected at most 64"),
    ],
)
def test_verify_refuses_rows_that_break_what_the_manifest_records(tmp_path, source, changes, message):
    pack(source, tmp_path / "out", 64, **OPTIONS)
    assert verify(tmp_path / "out", [source]).source
    edit_options(tmp_path / "out", **changes)
    with pytest.raises(StoreError, match=message):
        verify(tmp_path / "out")


def test_inspect_shows_slots_as_they_were_planned(tmp_path, source):
    pack(source, tmp_path / "out", 64, **OPTIONS)
    packing = open_packing(tmp_path / "out")
    assert (packing.plan.align, packing.plan.max_docs_per_row) == (8, 3)
    assert any("PackedCollator(align=8)" in note for note in packing.notes)
    edit_options(tmp_path / "out", align=64)
    with pytest.raises(StoreError, match="in slots of 64, expected 64 at most"):
        open_packing(tmp_path / "out")
