"""Parquet and Arrow files that lie: about their columns, their rows, and where their values are."""

import hashlib
import json
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.corpora import pieces
from neatpack.audit import audit_data
from neatpack.data import pack, verify
from neatpack.data.dataset import PackedDataset
from neatpack.errors import SourceError, StoreError

READERS = {"pack": lambda path, tmp: pack(path, tmp / "out", 8), "rows": lambda path, _: PackedDataset(path)}


def write_stream(path, column):
    with pa.ipc.new_stream(str(path), pa.schema([("input_ids", column.type)])) as writer:
        writer.write_batch(pa.record_batch([column], names=["input_ids"]))
    return path


def write_table(path, table):
    if path.suffix == ".parquet":
        pq.write_table(table, path, store_schema=False)
    else:
        make = pa.ipc.new_file if path.name.endswith(".file.arrow") else pa.ipc.new_stream
        with path.open("wb") as file, make(file, table.schema) as writer:
            writer.write_table(table)
    return path


def lying(path, offsets, others):
    """The file with other offsets in the place of its own."""
    honest, other = (np.array(values, np.int32).tobytes() for values in (offsets, others))
    data = path.read_bytes()
    assert data.count(honest) == 1
    path.write_bytes(data.replace(honest, other))
    return path


LYING = {
    "far": [0, 10**9, 3],
    "negative": [0, -5, 3],
    "back": [3, 0, 3],
    "end": [0, 2, 10**9],
    "start": [-(2**31), 0, 3],
}
READ_EACH = """
import pathlib, sys
sys.path[:0] = sys.argv[1:3]
from test_hostile_tables import LYING, READERS
from neatpack.errors import SourceError
for name in LYING:
    for reader, read in READERS.items():
        print(name, reader, end=" ", flush=True)
        try:
            read(f"{sys.argv[3]}/{name}.arrow", pathlib.Path(sys.argv[3]))
        except SourceError:
            print("refused")
"""


def test_offsets_that_lead_outside_are_refused_and_no_crash(tmp_path):
    for name, offsets in LYING.items():
        lying(write_stream(tmp_path / f"{name}.arrow", pa.array([[1, 2], [3]])), [0, 2, 3], offsets)
    paths = [__file__.rsplit("/", 1)[0], __file__.rsplit("/", 2)[0], str(tmp_path)]
    # In a process of its own: what is not refused may end it.
    run = subprocess.run([sys.executable, "-c", READ_EACH, *paths], capture_output=True, text=True, timeout=120, check=False)
    assert run.stdout.splitlines() == [f"{name} {reader} refused" for name in LYING for reader in READERS], run.stderr[-500:]
    assert run.returncode == 0


@pytest.mark.parametrize("offsets", [[0, 10**9, 3], [0, -5, 3], [0, 2, 10**9]])
def test_text_offsets_that_lead_outside_are_refused(tmp_path, offsets):
    with pa.ipc.new_stream(str(tmp_path / "x.arrow"), pa.schema([("text", pa.string())])) as writer:
        writer.write_batch(pa.record_batch([pa.array(["ab", "c"])], names=["text"]))
    lying(tmp_path / "x.arrow", [0, 2, 3], offsets)
    with pytest.raises(SourceError, match=r"x.arrow: not readable as arrow .*offset"):
        pack(tmp_path / "x.arrow", tmp_path / "out", 8)


def test_text_that_is_no_utf8_is_still_told_record_by_record(tmp_path):
    column = pa.array([b"good", b"\xff\xfe", b"fine"]).view(pa.string())
    with pa.ipc.new_stream(str(tmp_path / "x.arrow"), pa.schema([("text", pa.string())])) as writer:
        writer.write_batch(pa.record_batch([column], names=["text"]))
    with pytest.raises(SourceError, match="row 1: invalid UTF-8 at byte 0"):
        pack(tmp_path / "x.arrow", tmp_path / "out", 8)
    assert pack(tmp_path / "x.arrow", tmp_path / "out", 8, skip_bad=True).skipped == {"invalid UTF-8": 1}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    "column",
    [
        pa.array([[[1, 2]], [[3]]]),
        pa.array([["1"], ["2"]]),
        pa.array([[1.0], [2.0]]),
        pa.array([1, 2]),
        pa.array([{"x": 1}, {"x": 2}]),
        pa.array(["ab", "cd"]),
        pa.array([b"\x80\x04", b"\x95."]),
        pa.array([[(1, 2)], [(3, 4)]], pa.map_(pa.int64(), pa.int64())),
        pa.array([None, None]),
    ],
    ids=lambda column: str(column.type),
)
def test_columns_of_another_kind_than_token_lists_are_refused(tmp_path, reader, column):
    for path in (write_stream(tmp_path / "x.arrow", column), tmp_path / "x.parquet"):
        if path.suffix == ".parquet":
            pq.write_table(pa.table({"input_ids": column}), path)
        with pytest.raises(SourceError, match="input_ids"):
            READERS[reader](path, tmp_path)


@pytest.mark.parametrize("reader", READERS)
def test_a_stored_schema_that_lies_about_its_columns_changes_nothing(tmp_path, reader):
    """Parquet carries an Arrow schema beside its own; a reader that believed it would read numbers as something else."""
    lie = pa.schema([("input_ids", pa.list_(pa.float64())), ("gone", pa.string())])
    honest = pa.table({"input_ids": pa.array([[1, 2], [3]], pa.list_(pa.int64()))})
    stored = __import__("base64").b64encode(lie.serialize().to_pybytes())
    with pq.ParquetWriter(tmp_path / "x.parquet", honest.schema, store_schema=False) as writer:
        writer.write_table(honest)
        writer.add_key_value_metadata({"ARROW:schema": stored.decode()})
    try:
        READERS[reader](tmp_path / "x.parquet", tmp_path)
    except SourceError as error:
        assert "input_ids" in str(error) or "not readable" in str(error)  # noqa: PT017
    else:
        if reader == "pack":
            assert sorted(pieces(tmp_path / "out")) == [(1, 2), (3,)]


def test_rows_that_a_footer_invents_are_noticed(tmp_path):
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"input_ids": [[1, 2], [3]]}), path)
    data = bytearray(path.read_bytes())
    footer = int.from_bytes(data[-8:-4], "little")
    rows = [at for at in range(len(data) - 8 - footer, len(data) - 8) if data[at] == 4]  # 2 as a zigzag number
    refused = 0
    for at in rows:
        changed = bytearray(data)
        changed[at] = 8
        path.write_bytes(changed)
        try:
            assert pack(path, tmp_path / f"out{at}", 8).tokens == 3
        except SourceError:
            refused += 1
    assert refused


@pytest.mark.parametrize("length", [0, 1, 4, 8, 12, 40])
@pytest.mark.parametrize("name", ["x.parquet", "x.arrow"])
@pytest.mark.parametrize("reader", READERS)
def test_files_that_end_early_are_refused(tmp_path, name, length, reader):
    whole = tmp_path / f"whole.{name[2:]}"
    if name == "x.parquet":
        pq.write_table(pa.table({"input_ids": [[1, 2], [3]]}), whole)
    else:
        write_stream(whole, pa.array([[1, 2], [3]]))
    (tmp_path / name).write_bytes(whole.read_bytes()[:length])
    with pytest.raises(SourceError, match=rf"{name}: |no usable|empty"):
        READERS[reader](tmp_path / name, tmp_path)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("suffix", ["parquet", "arrow", "file.arrow"])
def test_a_name_that_is_no_utf8_is_refused_and_told(tmp_path, reader, suffix):
    """Found by the fuzzer: Arrow decodes names when they are looked at, and says so in an error of Python's own."""
    table = pa.table({"input_ids": [[1, 2], [3]], "qqqqqq": [1, 2]})
    path = write_table(tmp_path / f"x.{suffix}", table)
    READERS[reader](path, tmp_path)  # the honest twin is read
    path.write_bytes(path.read_bytes().replace(b"qqqqqq", b"qq\xff\xfeqq"))
    with pytest.raises(SourceError, match=rf"x.{suffix}: not readable as (arrow|parquet) \(.*utf-8"):
        READERS[reader](path, tmp_path / "again")


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "file.arrow"])
def test_a_name_inside_a_struct_that_is_no_utf8_stops_nobody_who_does_not_read_it(tmp_path, suffix):
    table = pa.table({"input_ids": [[1, 2], [3]], "odd": [{"qqqqqq": 1}, {"qqqqqq": 2}]})
    path = write_table(tmp_path / f"x.{suffix}", table)
    path.write_bytes(path.read_bytes().replace(b"qqqqqq", b"qq\xff\xfeqq"))
    if suffix == "parquet":  # its reader makes the path of every column at once
        with pytest.raises(SourceError, match=r"x.parquet: not readable as parquet .*utf-8"):
            pack(path, tmp_path / "out", 8)
    else:
        assert pack(path, tmp_path / "out", 8).tokens == 3
    with pytest.raises(SourceError, match=r"not readable as parquet .*utf-8|cannot carry: 'odd'"):
        PackedDataset(path)


@pytest.mark.parametrize("file_format", ["parquet", "arrow"])
def test_verify_refuses_a_whole_shard_with_a_name_that_is_no_utf8(tmp_path, file_format):
    """A stranger's checksums fit what the stranger wrote."""
    write_table(tmp_path / "ids.parquet", pa.table({"input_ids": [[1, 2], [3]], "qqqqqq": [1, 2]}))
    out = tmp_path / "out"
    pack(tmp_path / "ids.parquet", out, 8, file_format=file_format, document_columns=["qqqqqq"])
    verify(out)
    shard = out / f"data-00000.{file_format}"
    shard.write_bytes(shard.read_bytes().replace(b"qqqqqq", b"qq\xff\xfeqq"))
    manifest = json.loads((out / "manifest.json").read_text())
    manifest["shards"][0]["sha256"] = hashlib.sha256(shard.read_bytes()).hexdigest()
    (out / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(StoreError, match=rf"{shard.name}: not readable as a shard of packed rows \(.*utf-8"):
        verify(out)
    with pytest.raises(StoreError, match=rf"{shard.name}: not readable as .*utf-8"):
        audit_data(out)


def varint(number):
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def schema_element(name, *, children=None):
    """An element of a Parquet schema in Thrift's compact protocol: a group of `children`, or else a required integer."""
    if children is None:
        return b"\x15\x04\x25\x00\x18" + varint(len(name)) + name + b"\x00"
    return b"\x48" + varint(len(name)) + name + b"\x15" + varint(2 * children) + b"\x00"


def parquet_of(elements, claimed=None):
    """A Parquet file of nothing but a footer: a schema, of `claimed` elements as it says, and no rows."""
    count = b"\x19\xfc" + varint(len(elements) if claimed is None else claimed)
    footer = b"\x15\x04" + count + b"".join(elements) + b"\x16\x00\x19\x0c\x00"
    return b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1"


ROOT, IDS = schema_element(b"schema", children=1), schema_element(b"input_ids")
THRIFT_BOMBS = {
    "a list of two billion": parquet_of([ROOT, IDS], claimed=2**31 - 1),
    "two billion children": parquet_of([schema_element(b"schema", children=2**31 - 1), IDS]),
    "a hundred thousand levels": parquet_of([ROOT, *[schema_element(b"a", children=1)] * 100_000, IDS]),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("bomb", THRIFT_BOMBS)
def test_a_footer_that_claims_or_nests_without_end_is_refused(tmp_path, reader, bomb):
    (tmp_path / "honest.parquet").write_bytes(parquet_of([ROOT, IDS]))
    with pytest.raises(SourceError, match=r"all of them empty|not lists of numbers"):  # the twin is read as far as it goes
        READERS[reader](tmp_path / "honest.parquet", tmp_path)
    path = tmp_path / "x.parquet"
    path.write_bytes(THRIFT_BOMBS[bomb])
    assert len(THRIFT_BOMBS[bomb]) < 1_000_000
    with pytest.raises(SourceError, match=r"x.parquet: not readable as parquet \(.*(size limit|Malformed|too deeply nested)"):
        READERS[reader](path, tmp_path)
