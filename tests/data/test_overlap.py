"""Nothing twice, nothing deleted: sources that overlap, outputs inside sources, folders that hold more than a pack."""

import json

import pytest

from neatpack.data import pack
from neatpack.errors import SourceError, StoreError


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.txt").write_text(f"document {number}")
    return folder


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_an_output_inside_a_source_is_refused_before_anything_is_written(corpus):
    with pytest.raises(SourceError, match=r"lies inside the source .* Choose a folder outside"):
        pack([corpus], corpus / "out", 64)
    assert names(corpus) == ["0.txt", "1.txt", "2.txt"]


def test_a_packed_folder_inside_a_source_is_refused_and_read_when_named(corpus, tmp_path):
    summary = pack([corpus], tmp_path / "packed", 64)
    (tmp_path / "packed").rename(corpus / "old")
    with pytest.raises(SourceError, match="packed by neatpack already"):
        pack([corpus], tmp_path / "again", 64)
    again = pack([corpus / "old"], tmp_path / "again", 64)
    assert again.counts.tokens == summary.counts.tokens


@pytest.mark.parametrize("route", ["the file itself", "a link to the file", "a link to the folder"])
def test_a_file_reached_twice_is_refused_with_both_routes(corpus, tmp_path, route):
    other = tmp_path / "other"
    if route == "a link to the file":
        other.symlink_to(corpus / "1.txt")
    elif route == "a link to the folder":
        other.symlink_to(corpus)
    else:
        other = corpus / "1.txt"
    with pytest.raises(SourceError, match=r"same file as .*1\.txt|same file as .*0\.txt") as caught:
        pack([corpus, other], tmp_path / "out", 64)
    assert "packed twice" in str(caught.value)


def test_overwrite_never_deletes_a_folder_with_somebody_elses_manifest(corpus, tmp_path):
    out = tmp_path / "extension"
    out.mkdir()
    (out / "manifest.json").write_text(json.dumps({"name": "my web extension"}))
    (out / "thesis.md").write_text("years of work")
    with pytest.raises(StoreError, match="was not written by neatpack pack"):
        pack([corpus], out, 64, overwrite=True)
    assert (out / "thesis.md").read_text() == "years of work"


def test_overwrite_never_deletes_a_file_that_pack_did_not_write(corpus, tmp_path):
    out = tmp_path / "packed"
    pack([corpus], out, 64)
    (out / "notes.md").write_text("mine")
    with pytest.raises(StoreError, match=r"holds 'notes\.md'"):
        pack([corpus], out, 64, overwrite=True)
    assert (out / "notes.md").read_text() == "mine"
    (out / "notes.md").unlink()
    pack([corpus], out, 64, overwrite=True)


def test_an_output_that_is_a_link_replaces_what_it_points_to(corpus, tmp_path):
    pack([corpus], tmp_path / "real", 64)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "real")
    pack([corpus], link, 32, overwrite=True)
    assert link.is_symlink()
    assert json.loads((tmp_path / "real" / "manifest.json").read_text())["options"]["seq_len"] == 32
    assert names(tmp_path) == ["corpus", "link", "real"]


def test_a_byte_order_mark_is_no_text(tmp_path):
    plain, marked = tmp_path / "plain.txt", tmp_path / "marked.txt"
    plain.write_bytes(b"ab\r\n")
    marked.write_bytes(b"\xef\xbb\xbfab\r\n")
    assert pack([plain], tmp_path / "a", 64).counts.tokens == pack([marked], tmp_path / "b", 64).counts.tokens == 5


@pytest.mark.parametrize(
    ("name", "way_out"), [("a.json", r"Rename JSON Lines to \.jsonl"), ("a.jsonl.xz", "Decompress"), ("a.txt.gz", "Decompress")]
)
def test_a_named_file_of_another_kind_is_refused_with_the_way_out(tmp_path, name, way_out):
    (tmp_path / name).write_text('{"text": "a"}\n')
    with pytest.raises(SourceError, match=way_out):
        pack([tmp_path / name], tmp_path / "out", 64)


@pytest.mark.parametrize("blank", ["", "\n", "  \n"])
def test_two_records_on_one_line_are_refused_whatever_the_other_lines_are(tmp_path, blank):
    source = tmp_path / "a.jsonl"
    source.write_text('{"text": "a"}{"text": "b"}\n' + blank)
    with pytest.raises(SourceError, match="broken JSON"):
        pack([source], tmp_path / "out", 64)
