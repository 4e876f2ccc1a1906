"""Feed damaged and hostile files to everything that reads files; only our own errors may come out, and no crash or hang.

    python tests/fuzz/fuzz_readers.py --minutes 10 --seed 0

Every trial is a number: it chooses a reader, a healthy file and what is done to its bytes or its JSON values, so a find is
repeated with `--trial NUMBER`. What a find read is kept in `kept/`, and `test_fuzz_kept.py` reads it again. Trials run in
child processes, a few hundred each, so that a crash in native code is a find like any other; memory is limited, so that one
that allocates without bound is too.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

BATCH = 200
"""Trials a child process runs."""

MEMORY = 6 << 30
"""Address space of a child: what a reader of files of a few kilobytes has no reason to use up."""

ODD = [
    0,
    -1,
    1,
    2**31,
    2**63,
    -(2**63),
    10**30,
    0.5,
    float("nan"),
    float("inf"),
    1e308,
    "",
    "x",
    "[/b]",
    "NaN",
    "../../x",
    "/etc/hostname",
    None,
    True,
    [],
    {},
    [[1]],
    "\ud800",
]
INTERESTING = [b"\x00" * 4, b"\xff" * 4, b"\x7f\xff\xff\xff", b"\xff\xff\xff\x7f", b"\x00\x00\x00\x80", b"\n", b'"', b"{", b"]"]


def make_corpus(folder: Path) -> None:
    """Healthy files of every kind."""
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

    from neatpack.data import pack
    from neatpack.planning import plan_rows, save_plan

    ids = [[1, 2, 3], [], [4] * 9, [5, 6], [7]]
    texts = ["alpha", "", "βeta\nand more", "gamma " * 9, "🙂"]
    table = pa.table({"input_ids": ids, "labels": [[-100] * len(document) for document in ids]})
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    (folder / "ids.jsonl").write_text("".join(json.dumps({"input_ids": document}) + "\n" for document in ids))
    for suffix, codec in ((".gz", "gzip"), (".zst", "zstd")):
        with pa.output_stream(str(folder / f"text.jsonl{suffix}"), compression=codec) as stream:
            stream.write((folder / "text.jsonl").read_bytes())
    pq.write_table(table, folder / "ids.parquet", row_group_size=2)
    pq.write_table(pa.table({"text": texts}), folder / "text.parquet", row_group_size=2, compression="zstd")
    for name, make in (("stream", pa.ipc.new_stream), ("file", pa.ipc.new_file)):
        with (folder / f"{name}.arrow").open("wb") as file, make(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"input_ids": ids}).save_to_disk(str(folder / "saved"))
    for format_ in ("arrow", "parquet"):
        pack(folder / "ids.parquet", folder / f"packed_{format_}", 10, file_format=format_)
    save_plan(plan_rows([5, 3, 4, 2, 2, 30], 8, overflow="split"), folder / "plan.npz")


def damaged(rng: random.Random, data: bytes) -> bytes:
    """The bytes with one to four things done to them."""
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        what = rng.randrange(7)
        if what == 0 and data:
            at = rng.randrange(len(data))
            data = data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
        elif what == 1:
            data = data[:at]
        elif what == 2:
            data = data[:at] + rng.randbytes(rng.randint(1, 8)) + data[at:]
        elif what == 3:
            patch = rng.choice(INTERESTING)
            data = data[:at] + patch + data[at + len(patch) :]
        elif what == 4:
            stop = min(len(data), at + rng.randint(1, 64))
            data = data[:at] + data[at:stop] * rng.randint(0, 3) + data[stop:]
        elif what == 5:
            data = data[:at] + rng.choice(INTERESTING) + data[at:]
        else:
            data = data[:at] + rng.randbytes(4) + data[at + 4 :]
    return data


def twisted(rng: random.Random, value: Any) -> Any:
    """A JSON value with one of the values inside it replaced, removed or doubled."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        if rng.random() < 0.1:
            return {name: inner for name, inner in value.items() if name != key}
        return {**value, key: twisted(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        if rng.random() < 0.2:
            return value[:at] + value[at:] * rng.randint(0, 2)
        return [*value[:at], twisted(rng, value[at]), *value[at + 1 :]]
    return rng.choice(ODD)


def read_packed(path: Path, work: Path, rng: random.Random) -> None:
    """`neatpack pack` over the file."""
    from neatpack.data import pack

    pack(
        path,
        work / "out",
        rng.choice([4, 10]),
        overflow=rng.choice(["split", "drop", "truncate"]),
        skip_bad=rng.random() < 0.5,
        strategy=rng.choice(["best_fit", "wrapped"]),
        vocab_size=rng.choice([None, 1000]),
    )


def read_rows(path: Path, work: Path, rng: random.Random) -> None:
    """Virtual rows over the file, all of them."""
    from neatpack.data.dataset import PackedDataset, lengths_of
    from neatpack.planning import plan_rows

    plan = plan_rows(lengths_of(path), 10, overflow="split") if rng.random() < 0.5 else None
    dataset = PackedDataset(path, plan)
    dataset.__getitems__(range(len(dataset)))


def read_verified(path: Path, work: Path, rng: random.Random) -> None:
    """`neatpack verify` on the folder."""
    from neatpack.data import verify

    verify(path)


def read_audited(path: Path, work: Path, rng: random.Random) -> None:
    """`neatpack audit` on the folder."""
    from neatpack.audit import audit_data

    audit_data(path)


def read_inspected(path: Path, work: Path, rng: random.Random) -> None:
    """`neatpack inspect` on the folder or the plan, rows and all."""
    from neatpack.report.packing import open_packing
    from neatpack.report.sample import sample_rows

    sample_rows(open_packing(path))


def read_streamed(path: Path, work: Path, rng: random.Random) -> None:
    """Rows streamed from the file, all of them."""
    from neatpack.data.stream import RowStream

    for _ in RowStream(path, rng.choice([4, 10]), overflow="split", shuffle_buffer=rng.choice([0, 2]), lookahead=2):
        pass


def read_plan(path: Path, work: Path, rng: random.Random) -> None:
    """A saved plan, and its rows."""
    from neatpack.planning import load_plan

    list(load_plan(path))


FILES = [
    "text.jsonl",
    "ids.jsonl",
    "text.jsonl.gz",
    "text.jsonl.zst",
    "ids.parquet",
    "text.parquet",
    "stream.arrow",
    "file.arrow",
]
READERS: list[tuple[Callable[[Path, Path, random.Random], None], list[str]]] = [
    (read_packed, [*FILES, "saved", "packed_arrow", "packed_parquet"]),
    (read_rows, ["ids.parquet", "stream.arrow", "file.arrow", "saved", "packed_arrow", "packed_parquet"]),
    (read_verified, ["packed_arrow", "packed_parquet"]),
    (read_plan, ["plan.npz"]),
    (read_audited, ["packed_arrow", "packed_parquet", "saved"]),
    (read_inspected, ["packed_arrow", "packed_parquet", "plan.npz"]),
    (read_streamed, [*FILES, "saved", "packed_arrow"]),
]


def trial(number: int, corpus: Path, work: Path) -> str:
    """Run one trial; "read", the name of one of our errors, or a traceback."""
    from neatpack.errors import PackError

    rng = random.Random(number)
    reader, names = rng.choices(READERS, [5, 2, 3, 2, 2, 2, 2])[0]
    source = corpus / rng.choice(names)
    target = work / source.name
    if source.is_dir():
        target.mkdir()
        files = sorted(source.iterdir())
        victim = rng.choice(files)
        for file in files:
            (target / file.name).write_bytes(hurt(rng, file) if file == victim else file.read_bytes())
    else:
        target.write_bytes(hurt(rng, source))
    try:
        reader(target, work, rng)
    except PackError as error:
        if len(str(error)) > 4000:
            return f"{type(error).__name__} with a text of {len(str(error))} characters"
        return type(error).__name__
    except BaseException:
        return f"{reader.__name__} {source.name}\n{traceback.format_exc()}"
    return "read"


def hurt(rng: random.Random, file: Path) -> bytes:
    """The bytes of a file, damaged; of a JSON file mostly its values."""
    data = file.read_bytes()
    if file.suffix == ".json" and rng.random() < 0.85:
        text = json.dumps(twisted(rng, json.loads(data)))
        return (text.replace("{", '{"rows": 1, "format": "x", ', 1) if rng.random() < 0.05 else text).encode()
    if file.suffix == ".jsonl" and rng.random() < 0.5:
        lines = [json.loads(line) for line in data.decode().splitlines()]
        return "\n".join(json.dumps(record) for record in twisted(rng, lines) or [{}]).encode() if lines else data
    return damaged(rng, data)


def child(first: int, count: int, corpus: Path) -> None:
    """Run trials and print a line for each: its number and, in JSON, what came of it."""
    import faulthandler
    import warnings

    faulthandler.enable()
    warnings.simplefilter("ignore")
    import neatpack.data.dataset  # noqa: F401  before the limit, so that imports do not count

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for number in range(first, first + count):
        print(number, end=" ", flush=True)
        with tempfile.TemporaryDirectory() as work:
            try:
                result = trial(number, corpus, Path(work))
            except TypeError:  # the twist made lines that are no records: nothing to read
                result = "read"
        print(json.dumps(result), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trial", type=int, help="run this trial alone")
    parser.add_argument("--child", nargs=3, metavar=("FIRST", "COUNT", "CORPUS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(int(options.child[0]), int(options.child[1]), Path(options.child[2]))
        return 0
    with tempfile.TemporaryDirectory() as corpus:
        make_corpus(Path(corpus))
        if options.trial is not None:
            child(options.trial, 1, Path(corpus))
            return 0
        return hunt(options.minutes, options.seed * 10**9, Path(corpus))


def hunt(minutes: float, first: int, corpus: Path) -> int:
    """Run batches until the time is up; print each kind of find when it is found, and in the end what came of all trials."""
    results: Counter[str] = Counter()
    finds: set[str] = set()

    def found(number: int, story: str) -> None:
        if story not in finds:
            finds.add(story)
            print(f"--- trial {number}\n{story}\n", flush=True)

    end = time.monotonic() + 60 * minutes
    while time.monotonic() < end:
        command = [sys.executable, __file__, "--child", str(first), str(BATCH), str(corpus)]
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=300)
            out, code, story = run.stdout, run.returncode, run.stderr
        except subprocess.TimeoutExpired as expired:
            out, code, story = (expired.stdout or b"").decode(), None, "hangs"
        lines = out.splitlines()
        for line in lines:
            number, _, text = line.partition(" ")
            result = json.loads(text) if text else ""
            if "\n" in result or " " in result:
                found(int(number), "\n".join(result.splitlines()[-6:]))
            results["find" if "\n" in result else result or "crash"] += 1
        last = int(lines[-1].split()[0]) if lines else first
        if code != 0:
            found(last, f"exit code {code}: {story[:1500]}")
        first = last + 1
    print(f"{sum(results.values())} trials: {dict(results.most_common())}", flush=True)
    return 1 if finds else 0


if __name__ == "__main__":
    sys.exit(main())
