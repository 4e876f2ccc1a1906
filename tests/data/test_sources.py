"""Which files are read, in which order and pieces."""

from __future__ import annotations

import datasets
import pyarrow as pa
import pytest

from data.corpora import TEXTS, encoded, pieces, same_documents, write_arrow, write_jsonl, write_parquet
from neatpack.data import jsonl, pack, readers, sources
from neatpack.data.sources import find_parts
from neatpack.errors import SourceError


def names(found: sources.SourceList) -> list[str]:
    return [path.rsplit("/", 1)[-1] for path, _, _ in found.files]


@pytest.fixture
def tree(tmp_path):
    for name in ("b.py", "a.txt", "z/c.md", "z/d.bin", ".hidden.txt", "__pycache__/e.py", "x.jsonl", ".git/f.txt", "LICENSE"):
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"text": "j"}' if name.endswith("jsonl") else name)
    return tmp_path / "tree"


def test_a_folder_is_walked_in_sorted_order_and_what_it_ignores_is_counted(tree):
    found = find_parts([tree])
    assert names(found) == ["a.txt", "b.py", "x.jsonl", "c.md"]
    assert found.ignored == {".bin": 1, "LICENSE": 1}
    assert [part.format for part in found.parts] == ["text", "jsonl", "text"]


def test_include_selects_by_name_or_by_path(tree):
    assert names(find_parts([tree], ["*.py", "z/*"])) == ["b.py", "c.md", "d.bin"]


def test_a_file_that_is_named_is_read_whatever_its_name(tree):
    assert names(find_parts([tree / "z" / "d.bin", tree / "LICENSE"])) == ["d.bin", "LICENSE"]


@pytest.mark.parametrize("name", ["rows.csv", "rows.TSV"])
def test_a_table_of_text_is_no_document_unless_that_is_asked_for(tree, name):
    """Its records would be one document: named it is refused, in a folder it is counted, as .json is."""
    table = tree / name
    table.write_text("text,url\na,b\n")
    with pytest.raises(
        SourceError, match=rf"{name}: \{table.suffix.lower()} is a table, expected .*Convert it.*rename it to \.txt"
    ):
        find_parts([table])
    assert name not in names(find_parts([tree]))
    assert find_parts([tree]).ignored[table.suffix] == 1
    assert names(find_parts([tree], [name])) == [name]


def test_sources_keep_the_order_they_are_given_in(tree):
    assert names(find_parts([tree / "z", tree / "a.txt"])) == ["c.md", "a.txt"]


def test_a_saved_dataset_keeps_the_order_of_its_shards(tmp_path):
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(str(tmp_path / "ds"), num_shards=3)
    assert names(find_parts([tmp_path / "ds"])) == [f"data-0000{number}-of-00003.arrow" for number in range(3)]


def test_the_splits_of_a_dataset_are_never_mixed(tmp_path):
    data = datasets.Dataset.from_dict({"text": TEXTS})
    datasets.DatasetDict(train=data, test=data).save_to_disk(str(tmp_path / "both"))
    with pytest.raises(SourceError, match=r"2 splits \(train, test\).*both/train"):
        find_parts([tmp_path / "both"])
    datasets.DatasetDict(train=data).save_to_disk(str(tmp_path / "one"))
    pack(tmp_path / "one", tmp_path / "out", 64)
    assert same_documents(tmp_path / "out", [encoded(text) for text in TEXTS])


def test_a_missing_shard_of_a_saved_dataset_is_named(tmp_path):
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(str(tmp_path / "ds"), num_shards=2)
    (tmp_path / "ds" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(SourceError, match=r"data-00001-of-00002\.arrow: missing"):
        find_parts([tmp_path / "ds"])


def test_a_selection_is_packed_and_its_neighbours_are_not(tmp_path):
    data = datasets.Dataset.from_dict({"input_ids": [[1], [2, 2], [3, 3, 3], [4], [5]]})
    data.select(range(1, 3)).save_to_disk(str(tmp_path / "ds"))
    pack(tmp_path / "ds", tmp_path / "out", 8)
    assert same_documents(tmp_path / "out", [[2, 2], [3, 3, 3]])


def test_a_folder_that_leads_back_to_itself_is_walked_once(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("once")
    (tmp_path / "in" / "loop").symlink_to(tmp_path / "in")
    assert names(find_parts([tmp_path / "in"])) == ["a.txt"]


@pytest.mark.parametrize("size", [1, 7, 64, 1000, 10**6])
def test_a_jsonl_file_cut_into_byte_ranges_loses_and_doubles_no_line(tmp_path, monkeypatch, size):
    texts = [f"{index} " * (index % 13) for index in range(200)]
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts], ending="")
    monkeypatch.setattr(sources, "PART_BYTES", max(size, 37))
    monkeypatch.setattr(jsonl, "BLOCK_BYTES", size)
    parts = find_parts([source]).parts
    assert (len(parts) > 1) == (size < 10**6)
    pack(source, tmp_path / "out", 64, seed=None, strategy="in_order")
    assert pieces(tmp_path / "out") == [tuple(encoded(text)) for text in texts if text]


@pytest.mark.parametrize("size", [1, 50, 333])
def test_a_bad_line_keeps_its_number_in_a_cut_file(tmp_path, monkeypatch, size):
    lines = ['{"text": "fine"}'] * 90
    lines[71] = "{"
    source = tmp_path / "a.jsonl"
    source.write_text("\n".join(lines))
    monkeypatch.setattr(sources, "PART_BYTES", 100)
    monkeypatch.setattr(jsonl, "BLOCK_BYTES", size)
    assert len(find_parts([source]).parts) > 10
    with pytest.raises(SourceError, match=r"a\.jsonl line 72: broken JSON"):
        pack(source, tmp_path / "out", 64)


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_a_table_cut_into_parts_loses_and_doubles_no_row(tmp_path, monkeypatch, form):
    documents = [[index] * (index % 7) for index in range(100)]
    columns = {"input_ids": pa.array(documents, pa.large_list(pa.int32()))}
    source = tmp_path / f"a.{form}"
    if form == "parquet":
        write_parquet(source, columns, row_group_size=9)
    else:
        write_arrow(source, pa.table(columns), batch_rows=9)
    monkeypatch.setattr(sources, "PART_BYTES", 500)
    monkeypatch.setattr(readers, "CHUNK_BYTES", 64)
    assert len(find_parts([source]).parts) > 2
    pack(source, tmp_path / "out", 64, seed=None, strategy="in_order")
    assert pieces(tmp_path / "out") == [tuple(document) for document in documents if document]


def test_a_bad_row_keeps_its_number_in_a_cut_table(tmp_path, monkeypatch):
    documents = [[index] for index in range(100)]
    documents[83] = [-1]
    source = write_parquet(tmp_path / "a.parquet", {"input_ids": documents}, row_group_size=9)
    monkeypatch.setattr(sources, "PART_BYTES", 300)
    with pytest.raises(SourceError, match=r"a\.parquet row 83:"):
        pack(source, tmp_path / "out", 64)
