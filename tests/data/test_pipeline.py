"""`pack`: nothing lost, nothing twice, the same bytes for everybody, and nothing that looks finished before it is."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest

from data.corpora import (
    TEXTS,
    encoded,
    packed_rows,
    pieces,
    random_ids,
    same_documents,
    token_counts,
    write_arrow,
    write_jsonl,
    write_parquet,
)
from neatpack.data import pack, verify
from neatpack.errors import PlanError, StoreError

STRATEGIES = ("best_fit", "in_order", "wrapped")


def folder_bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def write_ids(path: Path, documents: list[list[int]], **columns: list) -> Path:
    ids = pa.array(documents, pa.list_(pa.int64()))
    return write_arrow(path, pa.table({"input_ids": ids, **columns}), batch_rows=7)


def test_a_text_corpus_packs_into_a_folder_that_datasets_opens(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    summary = pack(source, tmp_path / "out", 64)
    data = datasets.load_from_disk(str(tmp_path / "out"))
    assert data.features == datasets.Features(
        {"input_ids": datasets.List(datasets.Value("uint16")), "seq_lengths": datasets.List(datasets.Value("int32"))}
    )
    assert same_documents(tmp_path / "out", [encoded(text) for text in TEXTS])
    assert summary.counts.documents == len(TEXTS)
    assert summary.counts.empty == 1
    assert summary.rows == len(data)
    assert summary.tokens == sum(len(encoded(text)) for text in TEXTS) == summary.counts.tokens
    assert max(len(row["input_ids"]) for row in data) <= 64


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "arrow", "stream.arrow", "txt", "saved"])
def test_every_format_gives_the_same_documents(tmp_path, kind):
    source = tmp_path / f"a.{kind}"
    table = pa.table({"text": TEXTS})
    if kind.startswith("jsonl"):
        write_jsonl(source, [{"text": text} for text in TEXTS])
    elif kind == "parquet":
        write_parquet(source, {"text": TEXTS})
    elif kind.endswith("arrow"):
        write_arrow(source, table, stream=kind == "stream.arrow")
    elif kind == "txt":
        source = tmp_path / "texts"
        source.mkdir()
        for number, text in enumerate(TEXTS):
            (source / f"{number}.txt").write_bytes(text.encode())
    else:
        datasets.Dataset(table).save_to_disk(str(source), num_shards=3)
    pack(source, tmp_path / "out", 64, seed=None, strategy="in_order")
    assert pieces(tmp_path / "out") == [tuple(encoded(text)) for text in TEXTS if text]


@pytest.mark.parametrize("overflow", ["drop", "truncate", "split"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_token_is_in_the_output_once_or_counted(tmp_path, strategy, overflow):
    documents = random_ids(1, 300, 90)
    source = write_ids(tmp_path / "a.arrow", documents)
    summary = pack(source, tmp_path / "out", 60, strategy=strategy, overflow=overflow, unit_tokens=1500)
    assert summary.shards > 3
    long = [document for document in documents if len(document) > 60]
    assert long
    kept = documents
    if overflow == "drop":
        kept = [document for document in documents if len(document) <= 60]
        assert (summary.counts.dropped, summary.counts.dropped_tokens) == (len(long), sum(map(len, long)))
    elif overflow == "truncate":
        kept = [document[:60] for document in documents]
        assert (summary.counts.truncated, summary.counts.truncated_tokens) == (len(long), sum(map(len, long)) - 60 * len(long))
    found = pieces(tmp_path / "out")
    assert token_counts(found) == token_counts(kept)
    assert summary.tokens == sum(map(len, kept))
    if strategy != "wrapped" and overflow != "split":
        assert same_documents(tmp_path / "out", kept)
    assert max(len(row["input_ids"]) for row in packed_rows(tmp_path / "out")) <= 60


def test_split_pieces_join_to_the_document(tmp_path):
    documents = random_ids(2, 40, 200)
    pack(write_ids(tmp_path / "a.arrow", documents), tmp_path / "out", 50, overflow="split")
    cut = [document[start : start + 50] for document in documents for start in range(0, len(document), 50)]
    assert same_documents(tmp_path / "out", cut)


def test_the_multiset_check_sees_a_lost_and_a_doubled_token():
    documents = [[1, 2, 3], [2]]
    assert token_counts(documents) != token_counts([[1, 2, 3]])
    assert token_counts(documents) != token_counts([[1, 2, 3], [2, 2]])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_in_order_rows_keep_document_order_across_units_without_a_shuffle(tmp_path, strategy):
    documents = random_ids(3, 200, 30)
    source = write_ids(tmp_path / "a.arrow", documents)
    pack(source, tmp_path / "out", 40, strategy=strategy, seed=None, unit_tokens=500)
    tokens = [token for document in pieces(tmp_path / "out") for token in document]
    in_order = [token for document in documents for token in document]
    assert (tokens == in_order) == (strategy != "best_fit")


def test_any_number_of_workers_writes_the_same_bytes(tmp_path):
    for number in range(3):
        write_ids(tmp_path / f"{number}.arrow", random_ids(number, 100, 50))
    write_jsonl(tmp_path / "t.jsonl", [{"text": text} for text in TEXTS])
    sources = sorted(tmp_path.iterdir())
    for workers in (1, 3):
        pack(sources, tmp_path / f"out{workers}", 80, workers=workers, unit_tokens=600)
    alone = folder_bytes(tmp_path / "out1")
    assert len(alone) > 6
    assert alone == folder_bytes(tmp_path / "out3")


def test_the_seed_decides_the_order_of_rows_and_nothing_else(tmp_path):
    documents = random_ids(4, 300, 50)
    source = write_ids(tmp_path / "a.arrow", documents)
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        pack(source, tmp_path / name, 64, seed=seed)
    rows = {name: packed_rows(tmp_path / name) for name in "abc"}
    assert rows["a"] == rows["b"] != rows["c"]
    assert same_documents(tmp_path / "c", documents)


def test_best_fit_reaches_its_lower_bound_on_many_short_documents(tmp_path):
    source = write_ids(tmp_path / "a.arrow", random_ids(5, 2000, 100))
    summary = pack(source, tmp_path / "out", 256)
    assert summary.lower_bound <= summary.rows <= summary.lower_bound * 1.005
    assert summary.padding == summary.rows * 256 - summary.tokens


def test_labels_and_masks_travel_with_their_tokens(tmp_path):
    documents = [document for document in random_ids(6, 50, 20) if document]
    masks = [[index % 2 for index in range(len(document))] for document in documents]
    source = write_ids(tmp_path / "a.arrow", documents, completion_mask=pa.array(masks, pa.list_(pa.int8())))
    pack(source, tmp_path / "out", 32, unit_tokens=100)
    expected = [
        [token if keep else -100 for token, keep in zip(document, mask, strict=True)]
        for document, mask in zip(documents, masks, strict=True)
    ]
    both = zip(pieces(tmp_path / "out"), pieces(tmp_path / "out", "labels"), strict=True)
    assert sorted(both) == sorted((tuple(a), tuple(b)) for a, b in zip(documents, expected, strict=True))


def test_a_file_without_labels_learns_every_token_beside_one_with_labels(tmp_path):
    write_ids(tmp_path / "a.arrow", [[1, 2]], labels=pa.array([[-100, 2]]))
    write_ids(tmp_path / "b.arrow", [[3, 4]])
    pack([tmp_path / "a.arrow", tmp_path / "b.arrow"], tmp_path / "out", 4)
    assert sorted(pieces(tmp_path / "out", "labels")) == [(-100, 2), (3, 4)]


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "int32"), (None, "int32")]
)
def test_ids_take_the_narrowest_type_that_holds_the_vocabulary(tmp_path, vocab_size, dtype):
    source = write_ids(tmp_path / "a.arrow", [[0, 255], [7]])
    assert pack(source, tmp_path / "out", 4, vocab_size=vocab_size).dtype == dtype
    assert datasets.load_from_disk(str(tmp_path / "out")).features["input_ids"].feature.dtype == dtype
    assert same_documents(tmp_path / "out", [[0, 255], [7]])


def test_packed_rows_are_unpacked_before_they_are_packed_again(tmp_path):
    documents = random_ids(7, 60, 20)
    pack(write_ids(tmp_path / "a.arrow", documents), tmp_path / "first", 32)
    pack(tmp_path / "first", tmp_path / "second", 64)
    assert same_documents(tmp_path / "second", documents)


def test_an_overlong_document_is_named_by_file_and_row(tmp_path):
    source = write_ids(tmp_path / "a.arrow", [[1], [2] * 9, [3], [4] * 8])
    with pytest.raises(PlanError, match=r"a\.arrow row 1 \(9 tokens\), .*a\.arrow row 3 \(8 tokens\).*--overflow split"):
        pack(source, tmp_path / "out", 7)
    assert not (tmp_path / "out").exists()


def test_an_existing_folder_is_refused_and_survives_until_it_is_replaced(tmp_path):
    source = write_ids(tmp_path / "a.arrow", [[1, 2]])
    bad = write_ids(tmp_path / "b.arrow", [[-5]])
    pack(source, tmp_path / "out", 4)
    before = folder_bytes(tmp_path / "out")
    with pytest.raises(StoreError, match="--overwrite"):
        pack(source, tmp_path / "out", 4)
    with pytest.raises(ValueError, match="-5"):
        pack(bad, tmp_path / "out", 4, overwrite=True)
    assert folder_bytes(tmp_path / "out") == before
    pack(source, tmp_path / "out", 2, overwrite=True)
    assert folder_bytes(tmp_path / "out") != before


def test_a_folder_that_neatpack_did_not_write_is_never_replaced(tmp_path):
    source = write_ids(tmp_path / "a.arrow", [[1, 2]])
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("precious")
    with pytest.raises(StoreError, match="not written by neatpack"):
        pack(source, tmp_path / "out", 4, overwrite=True)
    assert (tmp_path / "out" / "thesis.txt").read_text() == "precious"


def test_the_manifest_counts_what_the_summary_counts(tmp_path):
    source = write_ids(tmp_path / "a.arrow", random_ids(8, 100, 50))
    summary = pack(source, tmp_path / "out", 30, overflow="truncate", unit_tokens=400)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["counts"]["rows"] == summary.rows == sum(shard["rows"] for shard in manifest["shards"])
    assert manifest["counts"]["truncated"] == summary.counts.truncated > 0
    assert manifest["options"]["seq_len"] == 30
    assert len({shard["sha256"] for shard in manifest["shards"]}) == len(manifest["shards"]) == summary.shards


def test_units_are_shuffled_differently(tmp_path):
    """Twins of one corpus in two units must not come out as two equal shards."""
    documents = [[number] for number in range(64)]
    write_ids(tmp_path / "a.arrow", documents)
    write_ids(tmp_path / "b.arrow", documents)
    pack([tmp_path / "a.arrow", tmp_path / "b.arrow"], tmp_path / "out", 4, unit_tokens=64)
    rows = [row["input_ids"] for row in packed_rows(tmp_path / "out")]
    assert rows[:16] != rows[16:]
    assert np.unique(np.concatenate(rows), return_counts=True)[1].tolist() == [2] * 64


def test_parquet_opens_with_load_dataset_and_holds_the_same_rows(tmp_path):
    documents = random_ids(9, 200, 40)
    masks = [[0] * (number % 2) * len(document) or [1] * len(document) for number, document in enumerate(documents)]
    source = write_ids(tmp_path / "a.arrow", documents, loss_mask=pa.array(masks, pa.list_(pa.int8())))
    pack(source, tmp_path / "arrow", 64, unit_tokens=1000)
    pack(source, tmp_path / "parquet", 64, unit_tokens=1000, file_format="parquet")
    files = str(tmp_path / "parquet" / "*.parquet")
    rows = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=str(tmp_path / "cache"))
    assert rows.to_list() == packed_rows(tmp_path / "arrow")
    assert rows.features == datasets.load_from_disk(str(tmp_path / "arrow")).features
    assert verify(tmp_path / "parquet", [source]).content == verify(tmp_path / "arrow").content
    pack(tmp_path / "parquet", tmp_path / "again", 64)
    assert same_documents(tmp_path / "again", documents)


def test_labels_that_repeat_the_ids_everywhere_are_not_stored(tmp_path):
    documents = random_ids(10, 50, 40)
    source = write_ids(tmp_path / "a.arrow", documents, labels=pa.array(documents, pa.list_(pa.int64())))
    summary = pack(source, tmp_path / "out", 64)
    assert summary.labels_repeat_ids
    assert summary.columns == ("input_ids", "seq_lengths")
    assert verify(tmp_path / "out", [source]).tokens == summary.tokens


def test_labels_are_stored_only_in_rows_where_they_differ(tmp_path):
    documents = [[number] * 8 for number in range(1, 41)]
    labels = [[-100] * 8 if number % 10 == 0 else document for number, document in enumerate(documents)]
    source = write_ids(tmp_path / "a.arrow", documents, labels=pa.array(labels, pa.list_(pa.int64())))
    pack(source, tmp_path / "out", 8)
    rows = packed_rows(tmp_path / "out")
    assert sum(row["labels"] is not None for row in rows) == 4
    assert all(row["labels"] in (None, [-100] * 8) for row in rows)
    stored = pa.ipc.open_stream((tmp_path / "out" / "data-00000.arrow").read_bytes()).read_all()["labels"].combine_chunks()
    assert len(stored.values) == 4 * 8
    pack(tmp_path / "out", tmp_path / "again", 16)
    assert sorted(pieces(tmp_path / "again", "labels")) == sorted(map(tuple, labels))


def test_a_corpus_whose_labels_repeat_the_ids_takes_four_bytes_a_token(tmp_path):
    documents = random_ids(11, 400, 900)
    source = write_ids(tmp_path / "a.arrow", documents, labels=pa.array(documents, pa.list_(pa.int64())))
    summary = pack(source, tmp_path / "out", 1024)
    size = sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
    assert size / summary.tokens < 4.2
