"""`verify`: right folders pass, and every fault is found and named. A checker that passes everything fails here."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from data.corpora import TEXTS, random_ids, write_jsonl
from data.test_pipeline import write_ids
from neatpack.data import content, pack, verify
from neatpack.data.content import ContentHash, expected_pieces
from neatpack.data.store import row_schema, write_shard
from neatpack.errors import StoreError


def hash_of(documents: list[list[int]], labels: list[list[int]] | None = None) -> int:
    found = ContentHash()
    flat = np.array([token for document in documents for token in document], np.int32)
    flat_labels = None if labels is None else np.array([label for document in labels for label in document], np.int32)
    found.add(flat, np.array([len(document) for document in documents], np.int64), flat_labels)
    return found.total


def slow_hash(documents: list[list[int]]) -> int:
    """The hash from its definition, a token at a time."""
    total = 0
    for document in documents:
        if document:
            value = sum((token + 1) * pow(content._BASE, position, 2**64) for position, token in enumerate(document))
            value = (value + len(document) * content._LABEL_WEIGHT) % 2**64
            value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
            value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) % 2**64
            total += value ^ (value >> 31)
    return total % 2**64


@pytest.mark.parametrize("block", [1, 7, 100, 1 << 18])
def test_the_hash_is_the_one_defined_whatever_the_block(monkeypatch, block):
    monkeypatch.setattr(content, "_BLOCK", block)
    documents = random_ids(1, 60, 40)
    assert hash_of(documents) == slow_hash(documents)


def test_the_hash_ignores_order_and_empty_documents_and_labels_that_repeat_the_ids():
    documents = random_ids(2, 50, 20)
    assert hash_of(documents) == hash_of([*documents[::-1], []]) == hash_of(documents, documents)


@pytest.mark.parametrize(
    "altered",
    [
        [[1, 2, 3], [4]],  # one document lost
        [[1, 2, 3], [4], [0], [0]],  # one doubled
        [[1, 2, 3], [4], [0, 0]],  # a token more
        [[1, 2, 3], [5], [0]],  # another token
        [[1, 3, 2], [4], [0]],  # two swapped
        [[1, 2], [3, 4], [0]],  # a boundary moved
        [[1, 2, 3, 4], [0]],  # a boundary gone
    ],
)
def test_the_hash_sees(altered):
    assert hash_of(altered) != hash_of([[1, 2, 3], [4], [0]])


def test_the_hash_sees_a_label():
    assert hash_of([[1, 2]], [[-100, 2]]) != hash_of([[1, 2]])
    assert hash_of([[1, 2]], [[-100, 2]]) != hash_of([[1, 2]], [[1, -100]])


@pytest.mark.parametrize("overflow", ["drop", "truncate", "split"])
def test_expected_pieces_follow_the_policy(overflow):
    lengths, keep = expected_pieces(np.array([3, 9, 4, 0, 8]), 4, overflow, wrapped=False)
    expected = {
        "drop": ([3, 9, 4, 0, 8], [3, 4, 0]),
        "truncate": ([3, 4, 5, 4, 0, 4, 4], [3, 4, 4, 0, 4]),
        "split": ([3, 4, 4, 1, 4, 0, 4, 4], [3, 4, 4, 1, 4, 0, 4, 4]),
    }
    assert (lengths.tolist(), lengths[keep].tolist()) == expected[overflow]


@pytest.mark.parametrize("strategy", ["best_fit", "in_order", "wrapped"])
@pytest.mark.parametrize("overflow", ["drop", "truncate", "split"])
def test_a_right_folder_passes_with_and_without_its_source(tmp_path, strategy, overflow):
    ids = random_ids(3, 200, 70)
    masks = [[index % 3 > 0 for index in range(len(document))] for document in ids]
    source = write_ids(tmp_path / "a.arrow", ids, loss_mask=pa.array(masks, pa.list_(pa.bool_())))
    text = write_jsonl(tmp_path / "t.jsonl", [{"text": text} for text in TEXTS])
    summary = pack([source, text], tmp_path / "out", 50, strategy=strategy, overflow=overflow, unit_tokens=900)
    report = verify(tmp_path / "out")
    assert (report.rows, report.tokens, report.shards) == (summary.rows, summary.tokens, summary.shards)
    assert verify(tmp_path / "out", [text, source]).content == report.content


@pytest.fixture
def packed(tmp_path):
    source = write_ids(tmp_path / "a.arrow", random_ids(4, 300, 40))
    pack(source, tmp_path / "out", 64, unit_tokens=2000)
    return tmp_path / "out"


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(bytes(data))


def rewrite(folder: Path, change) -> None:
    """Rewrite the first shard with other rows, and the manifest so that its checksum fits: only the content is wrong."""
    path = folder / "data-00000.arrow"
    rows = pa.ipc.open_stream(path.read_bytes()).read_all().to_pylist()
    change(rows)
    schema = row_schema(np.dtype("int32"), labels=False)
    record = write_shard(path, [pa.RecordBatch.from_pylist(rows, schema)], schema)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["shards"][0].update(bytes=record.bytes, sha256=record.sha256, rows=record.rows, tokens=record.tokens)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_rewriting_a_shard_unchanged_still_passes(packed):
    rewrite(packed, lambda rows: None)
    verify(packed)


def lose_a_row(rows):
    del rows[0]


def double_a_row(rows):
    rows[1] = dict(rows[0])


def alter_a_token(rows):
    rows[0]["input_ids"][0] += 1


def move_a_boundary(rows):
    row = next(row for row in rows if len(row["seq_lengths"]) > 1 and row["seq_lengths"][0] > 1)
    row["seq_lengths"][0] -= 1
    row["seq_lengths"][1] += 1


@pytest.mark.parametrize("change", [lose_a_row, double_a_row, alter_a_token, move_a_boundary])
def test_content_that_is_not_what_was_packed_is_found_though_checksums_fit(packed, change):
    rewrite(packed, change)
    with pytest.raises(StoreError, match=r"lost, doubled or altered|rows, expected|tokens, expected"):
        verify(packed)


def test_lengths_that_do_not_sum_to_the_row_are_named_by_row(packed):
    def change(rows):
        rows[3]["seq_lengths"][0] += 1

    rewrite(packed, change)
    with pytest.raises(StoreError, match=r"data-00000\.arrow row 3: seq_lengths sum to (\d+), expected (\d+)"):
        verify(packed)


def test_a_truncated_shard_is_named(packed):
    path = packed / "data-00001.arrow"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(StoreError, match=r"data-00001\.arrow: truncated: \d+ bytes, expected \d+"):
        verify(packed)


def test_one_flipped_bit_is_found(packed):
    flip(packed / "data-00001.arrow", 2000)
    with pytest.raises(StoreError, match=r"data-00001\.arrow: altered since it was written"):
        verify(packed)


def test_a_missing_and_a_stray_shard_are_named(packed):
    (packed / "data-00009x.arrow").write_bytes(b"")
    with pytest.raises(StoreError, match=r"data-00009x\.arrow: not in the manifest"):
        verify(packed)
    (packed / "data-00009x.arrow").unlink()
    (packed / "data-00000.arrow").unlink()
    with pytest.raises(StoreError, match=r"data-00000\.arrow: missing"):
        verify(packed)


def test_another_source_is_found(packed, tmp_path):
    ids = random_ids(4, 300, 40)
    ids[17] = [*ids[17], 1]
    with pytest.raises(
        StoreError, match=r"other\.arrow: .*lost, doubled or altered.*Give all that it was packed from .*a\.arrow"
    ):
        verify(packed, [write_ids(tmp_path / "other.arrow", ids)])


def test_a_folder_that_is_not_packed_is_named(tmp_path):
    with pytest.raises(StoreError, match="not a finished folder"):
        verify(tmp_path)
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(StoreError, match="expected a neatpack manifest"):
        verify(tmp_path)


def test_any_number_of_processes_finds_the_same(packed, tmp_path):
    source = tmp_path / "a.arrow"
    seen: list[tuple[str, int, int]] = []
    alone = verify(packed, [source])
    together = verify(packed, [source], workers=2, progress=lambda *report: seen.append(report))
    assert together == alone
    assert alone.shards > 2
    for step, size in (
        ("shards", sum(path.stat().st_size for path in packed.glob("data-*"))),
        ("source", source.stat().st_size),
    ):
        assert max(done for name, done, _ in seen if name == step) == size
    for name in ("data-00002.arrow", "data-00001.arrow"):
        flip(packed / name, 2000)
        with pytest.raises(StoreError, match=rf"{name}: altered since it was written"):
            verify(packed, workers=2)


def test_options_that_no_run_can_have_had_are_named(packed):
    manifest = json.loads((packed / "manifest.json").read_text())
    manifest["options"]["seq_len"] = 0
    (packed / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(StoreError, match=r"manifest.json: options that no run can have had \(seq_len must be"):
        verify(packed)
