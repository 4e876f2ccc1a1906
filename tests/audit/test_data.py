"""The audit of packed rows finds each kind of fault, says where it is first, and passes what is right."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from neatpack.audit import audit_data, is_packed_folder
from neatpack.data import pack
from neatpack.errors import SourceError, StoreError


def folder(path, rows, *, parquet=False):
    """Rows as any trainer would store them: an Arrow stream or a Parquet file, without a manifest."""
    path.mkdir()
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    table = pa.table({name: pa.array(values, pa.list_(pa.int64())) for name, values in columns.items()})
    if parquet:
        pq.write_table(table, path / "data.parquet")
    else:
        with pa.OSFile(str(path / "data-00000.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    return path


def row(*documents, **changes):
    ids = [token for document in documents for token in document]
    return {"input_ids": ids, "seq_lengths": [len(document) for document in documents], **changes}


GOOD = [row([5, 6, 7], [8, 9]), row([4, 3], [2], [6, 5, 4]), row([7, 7, 7, 7])]


@pytest.mark.parametrize("parquet", [False, True])
def test_right_rows_pass_and_what_could_not_be_checked_is_said(tmp_path, parquet):
    found = audit_data(folder(tmp_path / "rows", GOOD, parquet=parquet))
    assert found.passed
    assert (found.rows, found.documents, found.tokens, found.largest_id) == (3, 6, 15, 9)
    assert [missing.split(":")[0] for missing in found.not_checked] == ["ids against the vocabulary", "conservation"]
    assert audit_data(tmp_path / "rows", vocab_size=10).passed


FAULTS = {
    "lengths that do not add up": ([row([1, 2], [3], seq_lengths=[2, 2])], "boundaries", "add up to 4, the row has 3 tokens"),
    "an empty document": ([row([1, 2], [3], seq_lengths=[2, 0, 1])], "boundaries", "a document of 0 tokens"),
    "a negative length": ([row([1, 2], [3], seq_lengths=[4, -1])], "boundaries", "a document of -1 tokens"),
    "an id past the vocabulary": ([row([1, 2], [10])], "vocabulary", "token id 10 is past the vocabulary of 10"),
    "a masked id": ([row([1, -100], [3])], "vocabulary", "token id -100 is negative"),
    "pads as documents of one token": ([row([1, 2], [0], [0], [0])], "padding", "3 documents (3 tokens) hold nothing but id 0"),
    "pads as one document": ([row([1, 2], [0, 0, 0])], "padding", "1 documents (3 tokens) hold nothing but id 0"),
    "labels of another length": ([row([1, 2], [3], labels=[1, 2])], "labels", "labels of another length"),
    "labels that are shifted": (
        [row([1, 2], [3, 4], labels=[2, 3, 4, -100])],
        "labels",
        "first token of the next document (id 3)",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_found_with_its_place(tmp_path, fault):
    rows, check, message = FAULTS[fault]
    good = [{**each, "labels": each["input_ids"]} if "labels" in rows[0] else each for each in GOOD]
    found = audit_data(folder(tmp_path / "rows", [*good, *rows]), vocab_size=10)
    assert [finding.check for finding in found.findings] == [check]
    assert message in found.findings[0].message
    assert found.findings[0].where == f"{tmp_path / 'rows' / 'data-00000.arrow'} row 3"
    assert found.findings[0].count == 1
    assert not found.passed
    assert json.loads(json.dumps(found.to_dict()))["passed"] is False


def test_without_the_fault_the_same_rows_pass(tmp_path):
    """The checks are not satisfied by rejecting everything near a fault."""
    near = [
        row([1, 2], [0]),  # one token of an id is a document like others
        row([1, 2], [3, 4], labels=[1, 2, 3, 4]),
        row([1, 2], [3, 4], labels=[-100, 2, -100, 4]),
        row([0, 0], [3, 4]),  # not at the end of its row
    ]
    near = [{**each, "labels": each.get("labels", each["input_ids"])} for each in near]
    assert audit_data(folder(tmp_path / "rows", near), vocab_size=10).passed


def test_a_known_pad_id_is_found_wherever_it_stands_and_others_are_data(tmp_path):
    rows = folder(tmp_path / "rows", [row([9], [1, 2]), row([1, 2], [0], [0])])
    found = audit_data(rows, pad_token_id=9)
    assert [(finding.check, finding.where.split()[-1]) for finding in found.findings] == [("padding", "0")]


def test_rows_with_one_fault_are_counted_and_the_first_is_named(tmp_path):
    bad = row([1, 2], [3], seq_lengths=[1, 1])
    (finding,) = audit_data(folder(tmp_path / "rows", [*GOOD, bad, GOOD[0], bad])).findings
    assert finding.count == 2
    assert finding.where.endswith("row 3")
    assert "2 row(s)" in str(finding)


def packed(tmp_path, seed=0):
    rng = np.random.default_rng(seed)
    texts = ["".join(rng.choice(list("abc "), size)) for size in rng.integers(1, 40, 50)]
    source = tmp_path / "source.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    pack(source, tmp_path / "packed", 64)
    return source, tmp_path / "packed"


def test_a_folder_of_neatpack_pack_passes_and_is_compared_with_its_manifest_and_source(tmp_path):
    source, out = packed(tmp_path)
    found = audit_data(out)
    assert found.passed
    assert (found.conserved, found.not_checked) == ("manifest", [])
    assert found.vocab_size == json.loads((out / "manifest.json").read_text())["tokenizer"]["vocab_size"]
    assert audit_data(out, sources=[source]).conserved == "source"


def test_another_source_is_a_fault_of_conservation(tmp_path):
    source, out = packed(tmp_path)
    source.write_text(source.read_text() + json.dumps({"text": "one more"}) + "\n")
    (finding,) = audit_data(out, sources=[source]).findings
    assert finding.check == "conservation"
    assert "lost, doubled or altered" in finding.message


def test_a_shard_that_was_altered_is_a_fault_of_conservation(tmp_path):
    _, out = packed(tmp_path)
    shard = next(out.glob("data-*.arrow"))
    data = bytearray(shard.read_bytes())
    at = data.index(b"abc"[:1], 600) if b"a" in data[600:] else len(data) // 2
    data[at] ^= 1
    shard.write_bytes(bytes(data))
    assert "conservation" in [finding.check for finding in audit_data(out).findings]


def test_what_cannot_be_audited_is_one_clear_error(tmp_path):
    with pytest.raises(StoreError, match=r"no \.arrow or \.parquet files"):
        audit_data(tmp_path)
    assert not is_packed_folder(tmp_path)
    rows = folder(tmp_path / "rows", [{"input_ids": [1, 2]}])
    assert is_packed_folder(rows)
    with pytest.raises(StoreError, match="no column seq_lengths, only input_ids"):
        audit_data(rows)
    good = folder(tmp_path / "good", GOOD)
    with pytest.raises(SourceError, match=r"no manifest\.json"):
        audit_data(good, sources=[tmp_path / "source.jsonl"])
    (good / "data-00000.arrow").write_bytes(b"not arrow")
    with pytest.raises(StoreError, match="not readable as Arrow stream or Parquet"):
        audit_data(good)
