"""Folders from strangers: names that lead elsewhere, links in circles, pipes, pickles, and code that must not run."""

import contextlib
import json
import os
import pickle
import socket
import zipfile

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
import transformers

from data.corpora import pieces
from neatpack.audit import audit_data
from neatpack.data import pack, verify
from neatpack.data.dataset import PackedDataset
from neatpack.errors import PackError, SourceError, StoreError
from neatpack.planning import load_plan, plan_rows, save_plan
from neatpack.report.packing import open_packing


@pytest.fixture
def packed(tmp_path):
    source = tmp_path / "source" / "ids.jsonl"
    source.parent.mkdir()
    source.write_text('{"input_ids": [1, 2, 3]}\n{"input_ids": [4]}\n')
    pack(source, tmp_path / "packed", 4)
    verify(tmp_path / "packed")
    return tmp_path / "packed"


def rewrite(path, change):
    """Change the JSON in a file in place."""
    value = json.loads(path.read_text())
    changed = change(value)
    path.write_text(json.dumps(value if changed is None else changed))


class Trap:
    """Unpickled, it leaves a file behind."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (os.mkdir, (str(self.mark),))


ELSEWHERE = ["../outside.arrow", "/etc/hostname", "..", ".", "", "sub/data-00000.arrow", "data-00000.arrow/../../x", "a\\b"]


@pytest.mark.parametrize("name", [*ELSEWHERE, "data-00000.arrow\0", "\ud800", "x" * 5000, "data-00000.exe"])
def test_a_manifest_cannot_lead_out_of_its_folder(packed, name):
    def change(manifest):
        manifest["shards"][0]["file"] = name

    rewrite(packed / "manifest.json", change)
    with pytest.raises(StoreError, match=r"shards\[0\].file is .*expected a name like data-00000.arrow.*do not use the folder"):
        verify(packed)


MALFORMED = {
    "no options": lambda m: m.pop("options"),
    "options of another kind": lambda m: m.update(options="all"),
    "an unknown option": lambda m: m["options"].update(run="rm"),
    "a strategy that is a number": lambda m: m["options"].update(strategy=3),
    "a row length that is true": lambda m: m["options"].update(seq_len=True),
    "patterns that are numbers": lambda m: m["options"].update(include=[1]),
    "no counts": lambda m: m.update(counts={}),
    "content of another kind": lambda m: m.update(content=["hash"]),
    "a hash that is null": lambda m: m["content"].update(hash=None),
    "a tokenizer that is a name": lambda m: m.update(tokenizer="bytes"),
    "a tokenizer of another size": lambda m: m.update(tokenizer={"vocab_size": "x"}),
    "nothing of a tokenizer": lambda m: m.pop("tokenizer"),
    "shards of another kind": lambda m: m.update(shards={"0": {}}),
    "a shard that is a name": lambda m: m.update(shards=["data-00000.arrow"]),
    "bytes that are text": lambda m: m["shards"][0].update(bytes="12"),
}


@pytest.mark.parametrize("what", MALFORMED)
@pytest.mark.parametrize("read", [verify, audit_data])
def test_a_manifest_of_another_shape_is_one_clear_error(packed, what, read):
    rewrite(packed / "manifest.json", lambda manifest: MALFORMED[what](manifest) and None)
    with pytest.raises(StoreError, match=r"manifest.json: .*(Pack again, or restore the file|Use the neatpack that wrote it)"):
        read(packed)


@pytest.mark.parametrize("text", ["[]", "null", '{"format": "another tool", "tokenizer": "x"}'])
def test_the_audit_takes_a_manifest_of_another_tool_for_none(packed, text):
    (packed / "manifest.json").write_text(text)
    assert audit_data(packed).conserved is None


@pytest.mark.parametrize("text", ["", "[]", "null", "[" * 100_000, "\ufeff{}", '{"format": "neatpack", "version": 99}'])
def test_a_manifest_that_is_none_is_refused(packed, text):
    (packed / "manifest.json").write_text(text)
    with pytest.raises(StoreError, match=r"manifest.json: (not readable|expected a neatpack manifest)"):
        verify(packed)


NUMBERS = ["-1", "0", "9007199254740993", "1e3", "2.0", "1e999", "-Infinity", "NaN", "1" + "0" * 30, "1" + "0" * 5000, "true"]


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("place", ["rows", "tokens", "bytes", "counts.rows", "counts.tokens_in_rows", "content.count"])
def test_a_number_that_the_shards_do_not_bear_out_is_refused(packed, place, number):
    manifest = json.loads((packed / "manifest.json").read_text())
    section, _, name = place.rpartition(".")
    (manifest[section] if section else manifest["shards"][0])[name] = "HERE"
    (packed / "manifest.json").write_text(json.dumps(manifest).replace('"HERE"', number))
    with pytest.raises(StoreError) as raised:
        verify(packed)
    assert len(str(raised.value)) < 800


@pytest.mark.parametrize("number", [number for number in NUMBERS if number not in ("9007199254740993", "1" + "0" * 30)])
def test_a_row_length_that_is_none_is_refused(packed, number):
    text = (packed / "manifest.json").read_text()
    assert '"seq_len": 4' in text
    (packed / "manifest.json").write_text(text.replace('"seq_len": 4', f'"seq_len": {number}'))
    with pytest.raises(StoreError):
        verify(packed)


@pytest.mark.parametrize("name", ["format", "shards", "options", "counts"])
def test_a_name_that_is_there_twice_is_refused(packed, name):
    text = (packed / "manifest.json").read_text()
    value = json.dumps(json.loads(text)[name])
    (packed / "manifest.json").write_text(f'{{"{name}": {value}, ' + text.lstrip()[1:])
    with pytest.raises(StoreError, match=f"not readable .the name '{name}' is there twice.*Pack again, or restore the file"):
        verify(packed)


def test_a_file_is_no_packed_folder_and_the_folder_is_named(packed, tmp_path):
    for file in ("manifest.json", "data-00000.arrow"):
        with pytest.raises(StoreError, match=rf"{file}: a file, expected the folder .*Pass the folder it lies in, .*packed\."):
            verify(packed / file)
    (tmp_path / "alone.arrow").write_bytes(b"")
    with pytest.raises(StoreError, match=r"a file, expected the folder .*the --out of its run"):
        verify(tmp_path / "alone.arrow")


@pytest.mark.parametrize("name", [*ELSEWHERE, None, 3, ["x"]])
def test_a_saved_dataset_cannot_lead_out_of_its_folder(packed, name, tmp_path):
    (tmp_path / "outside.arrow").write_bytes((packed / "data-00000.arrow").read_bytes())

    def change(state):
        state["_data_files"] = [{"filename": name}]

    rewrite(packed / "state.json", change)
    with pytest.raises(SourceError, match=r"state.json: names .*expected the plain name.*do not use it"):
        pack(packed, tmp_path / "again", 4)
    with pytest.raises(SourceError, match=r"state\.json: names"):
        PackedDataset(packed)


@pytest.mark.parametrize("splits", [["../packed"], ["/"], [3], {"train": 1}, "train"])
def test_splits_cannot_lead_out_of_their_folder(tmp_path, splits, packed):
    folder = tmp_path / "splits"
    folder.mkdir()
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": splits}))
    with pytest.raises(SourceError, match="Save or copy the dataset again"):
        pack(folder, tmp_path / "out", 4)


def test_links_in_a_circle_are_walked_once(tmp_path):
    for name, other in (("one", "two"), ("two", "one")):
        (tmp_path / "root" / name).mkdir(parents=True)
        (tmp_path / "root" / name / f"{name}.txt").write_text(name)
        (tmp_path / "root" / name / "other").symlink_to(tmp_path / "root" / other, target_is_directory=True)
    (tmp_path / "root" / "up").symlink_to(tmp_path, target_is_directory=True)
    summary = pack(tmp_path / "root" / "one", tmp_path / "out", 64, eos=False)
    assert sorted(bytes(piece).decode() for piece in pieces(tmp_path / "out")) == ["one", "two"]
    assert summary.counts.documents == 2
    # From the root each folder is there by its own name and, once more, through the other's link.
    with pytest.raises(SourceError, match=r"same file as .*packed twice"):
        pack(tmp_path / "root", tmp_path / "all", 64)
    assert not (tmp_path / "all").exists()


def test_links_that_multiply_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("neatpack.data.sources.MAX_LINKED", 50)
    for level in range(30):
        (tmp_path / "levels" / str(level)).mkdir(parents=True)
    for level in range(29):
        for way in "ab":
            link = tmp_path / "levels" / str(level) / way
            link.symlink_to(tmp_path / "levels" / str(level + 1), target_is_directory=True)
    with pytest.raises(SourceError, match=r"more than 50 folders are reached through links.*without the links"):
        pack(tmp_path / "levels" / "0", tmp_path / "out", 64)


def test_pipes_sockets_and_devices_in_a_folder_are_passed_over_and_counted(tmp_path, monkeypatch):
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "good.txt").write_text("good")
    os.mkfifo(folder / "pipe.jsonl")
    (folder / "zero.txt").symlink_to("/dev/zero")
    monkeypatch.chdir(folder)  # a socket's path must be short
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket.txt")
        summary = pack(folder, tmp_path / "out", 64)
    assert summary.counts.documents == 1
    assert summary.ignored_files == {".jsonl": 1, ".txt": 2}
    with pytest.raises(SourceError, match=r"/dev/zero: a socket or a device.*Write what it gives to a file"):
        pack("/dev/zero", tmp_path / "zero", 64)


def test_a_link_to_nothing_is_an_error_and_not_passed_over(tmp_path):
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "lost.txt").symlink_to(tmp_path / "gone.txt")
    with pytest.raises(SourceError, match=r"lost.txt: cannot be read"):
        pack(tmp_path / "source", tmp_path / "out", 64)


@pytest.mark.parametrize("name", ["x.jsonl", "x.arrow", "x.parquet", "x.jsonl.gz", "x.jsonl.zst"])
def test_a_pickle_where_data_is_expected_is_refused_and_not_run(tmp_path, name):
    mark = tmp_path / "ran"
    (tmp_path / name).write_bytes(pickle.dumps(Trap(mark), 0))
    for read in (lambda path: pack(path, tmp_path / "out", 8), PackedDataset):
        with pytest.raises(SourceError):
            read(tmp_path / name)
    assert not mark.exists()


def test_a_pickle_in_a_plan_is_refused_and_not_run(tmp_path):
    mark = tmp_path / "ran"
    path = tmp_path / "plan.npz"
    path.write_bytes(pickle.dumps(Trap(mark)))
    with pytest.raises(StoreError, match="not a whole neatpack plan"):
        load_plan(path)
    np.savez(path, doc=np.array([Trap(mark)], object))
    with pytest.raises(StoreError, match="not a whole neatpack plan"):
        load_plan(path)
    assert not mark.exists()


def test_an_extension_type_in_arrow_metadata_is_not_unpickled(tmp_path):
    mark = tmp_path / "ran"
    metadata = {
        b"ARROW:extension:name": b"arrow.py_extension_type",
        b"ARROW:extension:metadata": pickle.dumps(Trap(mark)),
    }
    schema = pa.schema([pa.field("input_ids", pa.list_(pa.int64()), metadata=metadata)])
    table = pa.table([[[1, 2], [3]]], schema=schema)
    with pa.ipc.new_stream(str(tmp_path / "x.arrow"), schema) as writer:
        writer.write_table(table)
    with contextlib.suppress(SourceError):
        pack(tmp_path / "x.arrow", tmp_path / "out", 4)
    assert not mark.exists()


def code_folder(tmp_path, mark):
    """A tokenizer's and model's folder that wants its own code to run."""
    folder = tmp_path / "stranger"
    folder.mkdir()
    trap = f"import pathlib\npathlib.Path({str(mark)!r}).mkdir()\n"
    (folder / "stranger.py").write_text(
        trap + "class StrangerTokenizer: pass\nclass StrangerConfig: pass\nclass StrangerModel: pass\n"
    )
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {"tokenizer_class": "StrangerTokenizer", "auto_map": {"AutoTokenizer": ["stranger.StrangerTokenizer", None]}}
        )
    )
    config = {
        "model_type": "stranger",
        "auto_map": {"AutoConfig": "stranger.StrangerConfig", "AutoModelForCausalLM": "stranger.StrangerModel"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_code_in_a_tokenizers_folder_does_not_run(tmp_path):
    mark = tmp_path / "ran"
    folder = code_folder(tmp_path, mark)
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(SourceError, match="cannot be loaded"):
        pack(tmp_path / "a.txt", tmp_path / "out", 8, tokenizer=str(folder))
    assert not mark.exists()


def test_code_in_a_models_folder_does_not_run(tmp_path):
    from neatpack.audit import audit_model

    mark = tmp_path / "ran"
    folder = code_folder(tmp_path, mark)
    with pytest.raises(PackError):
        audit_model(folder)
    config = transformers.LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    saved = tmp_path / "weights"
    config.save_pretrained(saved)
    (saved / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(mark)))
    (result,) = audit_model(saved, attention=["sdpa"]).results
    assert result.verdict == "unsupported"
    assert not mark.exists()


def packed_text_that_asks_for_trust(place):
    """A packed folder `text` whose manifest names a tokenizer with code and trusts it; the mark that the code would leave."""
    mark = place / "ran"
    folder = code_folder(place, mark)
    (place / "a.txt").write_text("text")
    pack(place / "a.txt", place / "text", 8)

    def change(manifest):
        manifest["options"].update(tokenizer=str(folder), trust_remote_code=True)

    rewrite(place / "text" / "manifest.json", change)
    return mark


def test_verify_trusts_no_code_that_a_manifest_asks_to_trust(packed, tmp_path):
    mark = packed_text_that_asks_for_trust(tmp_path)
    with pytest.raises(SourceError, match="cannot be loaded"):
        verify(tmp_path / "text", [tmp_path / "a.txt"])
    assert not mark.exists()


def test_a_plan_that_claims_or_unpacks_to_more_than_it_holds_is_refused(tmp_path):
    path = tmp_path / "plan.npz"
    save_plan(plan_rows([5, 3, 4], 8), path)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    claimed = members["doc.npy"].replace(b"'shape': (3,), ", b"'shape': (1099511627776,), ".ljust(15))
    for changed in ({**members, "doc.npy": claimed}, {**members, "header.npy": members["header.npy"][:40]}):
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in changed.items():
                archive.writestr(name, data)
        with pytest.raises(StoreError, match="not a whole neatpack plan"):
            load_plan(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data + b"\0" * (1 << 20))
    with pytest.raises(StoreError, match="compressed"):
        load_plan(path)


def test_a_header_of_bottomless_nesting_is_no_plan(tmp_path):
    path = tmp_path / "plan.npz"
    np.savez(path, header=np.array("[" * 100_000), doc=np.zeros(1, np.int32))
    with pytest.raises(StoreError, match="not a whole neatpack plan"):
        load_plan(path)


def test_a_packed_folder_that_links_to_its_shards_is_read(packed, tmp_path):
    """What a cache of downloads looks like: plain names that are links to blobs."""
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in packed.iterdir():
        (linked / file.name).symlink_to(file)
    assert verify(linked).rows == verify(packed).rows
    assert datasets.load_from_disk(str(linked)).num_rows == 1


@pytest.mark.parametrize("patch", [(4, b"\xad\x00"), (6, b"\x01\x00")])  # a version to come; an encrypted member
def test_a_zip_that_nobody_here_can_read_is_no_plan(tmp_path, patch):
    path = tmp_path / "plan.npz"
    save_plan(plan_rows([5, 3, 4], 8), path)
    data = bytearray(path.read_bytes())
    at, value = patch
    for header in (b"PK\x01\x02", b"PK\x03\x04"):
        start = data.find(header)
        while start >= 0:
            shift = at + 2 if header == b"PK\x01\x02" else at
            data[start + shift : start + shift + 2] = value
            start = data.find(header, start + 4)
    path.write_bytes(data)
    with pytest.raises(StoreError, match="not a whole neatpack plan"):
        load_plan(path)


def test_the_planted_pickle_and_the_planted_code_would_run_if_anyone_ran_them(tmp_path, monkeypatch):
    """The twin of all the tests above that find no mark: the traps work."""
    pickle.loads(pickle.dumps(Trap(tmp_path / "pickled")))
    assert (tmp_path / "pickled").exists()
    np.save(tmp_path / "x.npy", np.array([Trap(tmp_path / "loaded")], object))
    np.load(tmp_path / "x.npy", allow_pickle=True)
    assert (tmp_path / "loaded").exists()
    for module in ("transformers.dynamic_module_utils", "transformers.utils.hub"):
        monkeypatch.setattr(f"{module}.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = code_folder(tmp_path, tmp_path / "trusted")
    (tmp_path / "a.txt").write_text("text")
    with contextlib.suppress(Exception):  # it is no tokenizer, but it has run by then
        pack(tmp_path / "a.txt", tmp_path / "out", 8, tokenizer=str(folder), trust_remote_code=True)
    assert (tmp_path / "trusted").exists()


@pytest.mark.parametrize("name", ["x.npy", "x.npz", "x.pt", "x.bin", "x.pkl"])
def test_files_that_are_pickles_by_their_kind_are_no_source(tmp_path, name):
    mark = tmp_path / "ran"
    path = tmp_path / "source" / name
    path.parent.mkdir()
    if name.startswith("x.np"):
        save = np.savez if name.endswith("z") else np.save
        save(path, np.array([Trap(mark)], object))
    else:
        torch.save(Trap(mark), path)
    for source in (path, path.parent):
        with pytest.raises(SourceError, match=r"x\.|nothing to pack|no .*files"):
            pack(source, tmp_path / "out", 8)
        with pytest.raises(SourceError):
            PackedDataset(source)
    assert not mark.exists()


def test_inspecting_a_strangers_folder_runs_nothing(tmp_path):
    mark = packed_text_that_asks_for_trust(tmp_path)
    packing = open_packing(tmp_path / "text")
    assert packing.plan.num_rows == 1
    assert len(PackedDataset(tmp_path / "text")) == 1
    assert audit_data(tmp_path / "text").rows == 1
    assert not mark.exists()
