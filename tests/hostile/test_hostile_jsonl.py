"""JSON Lines that nobody writes on purpose: top-level nulls, endless lines, bottomless nesting, bombs."""

import gzip
import json
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pyarrow as pa
import pytest

from data.corpora import pieces
from neatpack.data import jsonl, pack
from neatpack.errors import SourceError

PEAK = """
    import sys
    from pathlib import Path
    from neatpack.data import pack
    from neatpack.errors import SourceError

    def peak():
        (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
        return int(line.split()[1])

    before = peak()
    try:
        pack(sys.argv[1], sys.argv[2], 4096, overflow="split")
    except SourceError as error:
        print(error)
    print((peak() - before) >> 10)
"""


def run_apart(source, out):
    """Pack in a process of its own: what it said, and by how many MiB its memory grew."""
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PEAK), source, out], capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr
    *said, mebibytes = run.stdout.splitlines()
    return "\n".join(said), int(mebibytes)


@pytest.mark.parametrize("line", ["null", "  null  ", "null\r", '{"input_ids": [9]} null', "true", "7", '"x"', "[]"])
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("ending", ["\n", ""])
def test_a_line_that_is_no_object_is_an_error_and_no_crash(tmp_path, line, place, ending):
    lines = ['{"input_ids": [1, 2]}', '{"input_ids": [3]}']
    lines.insert(place, line)
    source = tmp_path / "ids.jsonl"
    source.write_text("\n".join(lines) + ending)
    with pytest.raises(SourceError, match=rf"line {place + 1}: .*expected one JSON object.*--skip-bad"):
        pack(source, tmp_path / "out", 8)
    summary = pack(source, tmp_path / "out", 8, skip_bad=True)
    assert summary.skipped == {"broken JSON": 1}
    assert sorted(pieces(tmp_path / "out")) == [(1, 2), (3,)]


def test_the_word_null_inside_a_text_is_a_text(tmp_path):
    texts = ["null", "} null", "a\nnull", "null}", " null"]
    source = tmp_path / "texts.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    pack(source, tmp_path / "out", 64, eos=False)
    assert sorted(bytes(piece).decode() for piece in pieces(tmp_path / "out")) == sorted(texts)


@pytest.mark.parametrize("compressed", [False, True])
def test_a_line_of_tens_of_megabytes_takes_time_in_proportion(tmp_path, compressed):
    size = 48 << 20
    source = tmp_path / ("long.jsonl.gz" if compressed else "long.jsonl")
    line = b'{"text": "' + b"word " * (size // 5) + b'"}\n{"text": "short"}\n'
    source.write_bytes(gzip.compress(line, 1) if compressed else line)
    begin = time.process_time()
    summary = pack(source, tmp_path / "out", 1 << 20, overflow="split")
    assert time.process_time() - begin < 20
    assert summary.counts.documents == 2
    assert summary.tokens == size // 5 * 5 + 1 + len("short") + 1


def test_lines_are_put_together_across_reads(tmp_path, monkeypatch):
    monkeypatch.setattr(jsonl, "BLOCK_BYTES", 64)
    lines = [{"input_ids": list(range(length))} for length in (3, 90, 1, 1, 200, 2)]
    source = tmp_path / "ids.jsonl.gz"
    source.write_bytes(gzip.compress(("\n".join(map(json.dumps, lines))).encode()))
    pack(source, tmp_path / "out", 256)
    assert sorted(pieces(tmp_path / "out")) == sorted(tuple(line["input_ids"]) for line in lines)


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("first", [b"", b'{"text": "fine"}\n'])
def test_an_endless_line_is_refused(tmp_path, monkeypatch, suffix, first):
    monkeypatch.setattr(jsonl, "BLOCK_BYTES", 64)
    monkeypatch.setattr(jsonl, "LINE_BYTES", 1000)
    data = first + b"x" * 70_000
    source = tmp_path / f"endless.jsonl{suffix}"
    source.write_bytes(gzip.compress(data) if suffix else data)
    with pytest.raises(SourceError, match=r"a line of more than 1000 bytes.*split its longest document.*convert it"):
        pack(source, tmp_path / "out", 64)


def test_an_endless_line_is_refused_in_a_byte_range(tmp_path, monkeypatch):
    from neatpack.data import sources

    monkeypatch.setattr(sources, "PART_BYTES", 256)
    monkeypatch.setattr(jsonl, "LINE_BYTES", 4000)
    source = tmp_path / "endless.jsonl"
    source.write_bytes(b'{"text": "fine"}\n' + b"x" * 70_000)
    with pytest.raises(SourceError, match="a line of more than 4000 bytes"):
        pack(source, tmp_path / "out", 64, overflow="split")


@pytest.mark.parametrize("place", [0, 1])
def test_bottomless_nesting_is_broken_json(tmp_path, place):
    lines = ['{"input_ids": [1, 2]}']
    lines.insert(place, '{"input_ids": ' + "[" * 100_000 + "]" * 100_000 + "}")
    source = tmp_path / "deep.jsonl"
    source.write_text("\n".join(lines))
    with pytest.raises(SourceError, match=f"line {place + 1}: "):
        pack(source, tmp_path / "out", 8)
    assert pack(source, tmp_path / "out", 8, skip_bad=True).counts.documents == 1


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("[[1, 2], [3]]", r"'input_ids'\[0\] is \[1, 2\], expected an integer"),
        ('[{"a": 1}]', r"'input_ids'\[0\] is .*expected an integer"),
        ('{"0": 1}', "'input_ids' is .*expected a list of integers"),
        ("[1e400]", r"'input_ids'\[0\] is Infinity, expected an integer"),
        ("[" + "9" * 5000 + "]", "broken JSON|does not fit 64 bits"),
    ],
)
def test_lists_that_are_no_token_ids_are_named(tmp_path, value, message):
    source = tmp_path / "ids.jsonl"
    source.write_text('{"input_ids": [1]}\n{"input_ids": ' + value + "}\n")
    with pytest.raises(SourceError, match=f"line 2: {message}") as raised:
        pack(source, tmp_path / "out", 8)
    assert len(str(raised.value)) < 500


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak of a process from /proc")
@pytest.mark.parametrize(
    ("suffix", "codec", "line", "blocks"),
    [
        (".gz", "gzip", b'{"text": "' + b"a" * 4000 + b'"}\n', 24),
        (".zst", "zstd", b"\n" * 4096, 2),
        (".zst", "zstd", b"{" * 4096, 6),
    ],
    ids=["texts", "blank lines", "one line"],
)
def test_a_bomb_stays_in_bounded_memory(tmp_path, suffix, codec, line, blocks):
    source = tmp_path / f"bomb.jsonl{suffix}"
    block = line * (1 << 12)
    with pa.output_stream(str(source), compression=codec) as stream:
        for _ in range(blocks):
            stream.write(block)
    expanded = blocks * len(block)
    said, mebibytes = run_apart(source, tmp_path / "out")
    assert source.stat().st_size < expanded / 100
    limit = 300 if b"\n" in line else 4 * (expanded >> 20)  # a line is held whole, up to LINE_BYTES
    assert mebibytes < limit, said
