"""`neatpack pack`: documents in, packed rows out."""

from __future__ import annotations

import json
import sys
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from neatpack.cli.progress import progress_bar
from neatpack.data import PackSummary
from neatpack.data.pack import pack as pack_documents
from neatpack.data.tokenize import BYTES
from neatpack.reserved import BATCH_KEYS, MODEL_ARGUMENTS

EXAMPLES = (
    "neatpack pack corpus/ --out packed --seq-len 4096 --overflow split",
    "neatpack pack chat.jsonl --out packed --seq-len 8192 --tokenizer path/to/tokenizer",
    "neatpack pack corpus/ -o packed --seq-len 8192 --overflow split --max-docs-per-row 64 --align 16",
    "neatpack pack ids.parquet -o packed --seq-len 2048 --document-columns url,score --format parquet",
)

_reading = partial(typer.Option, rich_help_panel="What is read")
_planning = partial(typer.Option, rich_help_panel="How rows are planned")
_writing = partial(typer.Option, rich_help_panel="What is written")
_working = partial(typer.Option, rich_help_panel="Who does the work")


class Strategy(Enum):
    """How documents share rows."""

    best_fit = "best_fit"
    in_order = "in_order"
    wrapped = "wrapped"


class Engine(Enum):
    """Who does the work."""

    local = "local"
    ray = "ray"


class Format(Enum):
    """Format of the files written."""

    arrow = "arrow"
    parquet = "parquet"


class Overflow(Enum):
    """What becomes of a document longer than a row."""

    error = "error"
    drop = "drop"
    truncate = "truncate"
    split = "split"


def pack(
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="SRC...",
            help="Files, folders and saved datasets: .jsonl (also .gz, .zst), .parquet, .arrow, text and source files.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write.", show_default=False)],
    seq_len: Annotated[int, typer.Option(min=1, help="Tokens a row holds.", show_default=False)],
    tokenizer: Annotated[
        str, _reading(help="'bytes' (embedded), a tokenizer.json, a tokenizer's folder or a hub name.")
    ] = "bytes",
    text_column: Annotated[
        str | None, _reading(help="Column with the text (default: text, unless there are input_ids).", show_default=False)
    ] = None,
    token_columns: Annotated[
        list[str] | None,
        _reading(help="Carry these columns with a number a token (a,b; may be repeated).", show_default=False),
    ] = None,
    document_columns: Annotated[
        list[str] | None,
        _reading(help="Carry these columns with a value a document; rows hold a list of them.", show_default=False),
    ] = None,
    ignore_columns: Annotated[
        list[str] | None,
        _reading(
            help="Leave out these lists of numbers beside input_ids (names or patterns); others are refused.",
            show_default=False,
        ),
    ] = None,
    include: Annotated[
        list[str] | None,
        _reading(help="Read only these files of folders, by pattern; may be repeated.", show_default=False),
    ] = None,
    strategy: Annotated[
        Strategy,
        _planning(help="best_fit: fewest rows; in_order: next-fit; wrapped: one stream cut into full rows, documents too."),
    ] = Strategy.best_fit,
    overflow: Annotated[Overflow, _planning(help="What becomes of a document longer than a row.")] = Overflow.error,
    max_docs_per_row: Annotated[
        int | None,
        _planning(
            min=1, help="The most documents (or pieces of them) in a row, where a kernel limits them.", show_default=False
        ),
    ] = None,
    align: Annotated[
        int,
        _planning(
            min=1,
            help="Leave room to round every document up to a multiple of this many tokens, as context parallelism (twice its "
            "size) and 8-bit kernels need; the collator then pads them.",
        ),
    ] = 1,
    seed: Annotated[int, _planning(min=0, help="Shuffles the rows, reproducibly.")] = 0,
    no_shuffle: Annotated[bool, _planning("--no-shuffle", help="Keep rows in the planner's order.")] = False,
    workers: Annotated[
        int | None,
        _working(
            min=1, help="Processes; any number gives the same bytes (default: by size; with Ray, all CPUs).", show_default=False
        ),
    ] = None,
    engine: Annotated[
        Engine, _working(help="local: processes of this machine; ray: a Ray cluster. The bytes are the same.")
    ] = Engine.local,
    ray_address: Annotated[
        str | None, _working(help="The Ray cluster (default: start one on this machine).", show_default=False)
    ] = None,
    overwrite: Annotated[
        bool, _writing("--overwrite", help="Replace an existing output, once the new one is complete.")
    ] = False,
    restart: Annotated[
        bool, _writing("--restart", help="Throw away what an interrupted run left, instead of going on with it.")
    ] = False,
    skip_bad: Annotated[bool, _reading("--skip-bad", help="Count and report bad records instead of stopping.")] = False,
    no_eos: Annotated[
        bool,
        _reading(
            "--no-eos",
            help="Do not end documents with the end-of-sequence token; one that the tokenizer appends itself is left off too.",
        ),
    ] = False,
    eos_token: Annotated[
        str | None, _reading(help="End-of-sequence token, where the tokenizer does not say.", show_default=False)
    ] = None,
    split_special_tokens: Annotated[
        bool,
        _reading(
            "--split-special-tokens",
            help="Read </s> and the like in texts as plain characters, not as the special tokens they spell.",
        ),
    ] = False,
    vocab_size: Annotated[
        int | None, _reading(min=1, help="Refuse ids at or above this; also narrows the stored type.", show_default=False)
    ] = None,
    unit_tokens: Annotated[
        int | None,
        _writing(
            min=1,
            help="Tokens planned together and written as one file (default: 2**25, more for long rows).",
            show_default=False,
        ),
    ] = None,
    file_format: Annotated[Format, _writing("--format", help="Format of the files.")] = Format.arrow,
    trust_remote_code: Annotated[
        bool, _reading("--trust-remote-code", help="Let a hub tokenizer run the code that it ships.")
    ] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Pack documents into rows that a trainer can read, with their boundaries."""
    with progress_bar() as progress:
        summary = pack_documents(
            sources,
            out,
            seq_len,
            workers=workers,
            engine=engine.value,
            ray_address=ray_address,
            overwrite=overwrite,
            restart=restart,
            progress=progress,
            tokenizer=tokenizer,
            text_column=text_column,
            token_columns=_names(token_columns),
            document_columns=_names(document_columns),
            ignore_columns=_names(ignore_columns),
            include=tuple(include or ()),
            strategy=strategy.value,
            overflow=overflow.value,
            max_docs_per_row=max_docs_per_row,
            align=align,
            seed=None if no_shuffle else seed,
            skip_bad=skip_bad,
            eos=not no_eos,
            eos_token=eos_token,
            split_special_tokens=split_special_tokens,
            vocab_size=vocab_size,
            unit_tokens=unit_tokens,
            file_format=file_format.value,
            trust_remote_code=trust_remote_code,
        )
    if json_output:
        sys.stdout.write(json.dumps(summary.to_json(), indent=1) + "\n")
    else:
        print_summary(summary, Console())


def _names(given: list[str] | None) -> tuple[str, ...]:
    """Column names, from options with one name or several with commas between them."""
    return tuple(name for entry in given or () for name in entry.split(",") if name)


def print_summary(summary: PackSummary, console: Console) -> None:
    """Print what a run did, and the next step."""
    table = Table(title=escape(f"Packed into {summary.out}"), show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim", overflow="fold")
    for name, value, note in summary_lines(summary):
        table.add_row(*map(escape, (name, value, note)))  # names and examples come from the source
    console.print(table)
    load = f"load_from_disk({summary.out!r})"
    if summary.file_format == "parquet":
        load = f'load_dataset("parquet", data_files="{summary.out}/*.parquet", split="train")'
    plain: dict[str, Any] = {"highlight": False, "markup": False, "soft_wrap": True}
    console.print(f"Next: rows = datasets.{load}", **plain)
    console.print(f"      loader = DataLoader(rows, batch_size=8, collate_fn={collator_call(summary)})", **plain)


def collator_call(summary: PackSummary) -> str:
    """The collator that takes these rows, as Python: one length for all, and further columns named.

    A batch cannot hold text, nor a column by the name of something else; those are left out of it.
    """
    options = [f"row_length={summary.seq_len}", *([f"align={summary.align}"] if summary.align > 1 else [])]
    left_out = {*summary.text_columns, *_to_rename(summary)}
    further = (*summary.token_columns, *summary.document_columns)
    named = {
        "token_columns": [name for name in summary.token_columns if name not in left_out],
        "document_columns": [name for name in summary.document_columns if name not in left_out],
        "ignore_columns": [name for name in further if name in left_out],
    }
    options += [f"{option}={names!r}" for option, names in named.items() if names]
    return f"neatpack.PackedCollator({', '.join(options)})"


def _to_rename(summary: PackSummary) -> list[str]:
    """Columns of numbers that a batch could hold under another name."""
    further = (*summary.token_columns, *summary.document_columns)
    return [name for name in further if name in BATCH_KEYS | MODEL_ARGUMENTS and name not in summary.text_columns]


def _tokenizer_line(info: dict[str, Any]) -> tuple[str, str, str]:
    """The tokenizer's line of the table: the default is told as such, since it may be one that was forgotten."""
    name = f"{info['name']} (embedded), the default: one token a byte; --tokenizer names another"
    return "tokenizer", f"{info['vocab_size']:,} ids", name if info["name"] == BYTES else str(info["name"])


def summary_lines(summary: PackSummary) -> list[tuple[str, str, str]]:
    """Name, value and note of every line of the summary table."""
    counts = summary.counts
    resumed = ", going on with an interrupted run" if summary.resumed else ""
    lines = [
        ("documents", f"{counts.documents:,}", ""),
        ("tokens", f"{counts.tokens:,}", f"{summary.tokens:,} in rows, stored as {summary.dtype}"),
        ("rows", f"{summary.rows:,}", f"of {summary.seq_len:,} tokens at most, in {summary.shards} shard(s)"),
        ("efficiency", f"{summary.efficiency:.2%}", f"lower bound {summary.lower_bound:,} rows"),
        ("padding", f"{summary.padding:,}", "tokens, added when rows are batched; not stored"),
        ("time", f"{summary.seconds:.2f} s", f"{summary.tokens_per_second / 1e6:,.2f} M tokens/s{resumed}"),
    ]
    if summary.tokenizer:
        lines.insert(2, _tokenizer_line(summary.tokenizer))
    if summary.max_docs_per_row:
        lines.append(("documents a row", f"{summary.max_docs_per_row:,}", "at most, pieces of documents included"))
    if summary.align > 1:
        lines.append(("align", f"{summary.align:,}", "tokens: documents have room for slots of a multiple of it"))
    optional = [
        ("split", counts.split, "documents lie in more than one piece"),
        ("truncated", counts.truncated, f"documents, {counts.truncated_tokens:,} tokens cut off"),
        ("dropped", counts.dropped, f"documents, {counts.dropped_tokens:,} tokens"),
        ("empty", counts.empty, "documents without a token, in no row"),
    ]
    lines += [(name, f"{value:,}", note) for name, value, note in optional if value]
    lines += [
        (f"skipped: {reason}", f"{count:,}", f"first: {summary.skipped_examples[reason]}")
        for reason, count in summary.skipped.items()
    ]
    if summary.spelled:
        found = ", ".join(f"{name} in {count:,}" for name, count in summary.spelled.items())
        note = f"spelled out in documents: {found}. They became those tokens; --split-special-tokens keeps them text"
        lines.append(("special tokens", f"{len(summary.spelled)}", note))
    if summary.ignored_files:
        total = sum(summary.ignored_files.values())
        shown = sorted(summary.ignored_files.items(), key=lambda item: (-item[1], item[0]))[:8]
        lines.append(("ignored files", f"{total:,}", ", ".join(f"{count} x {suffix}" for suffix, count in shown)))
    if summary.labels_repeat_ids:
        lines.append(("labels", "not stored", "they repeat the ids, as collators assume where there are none"))
    if "labels" in summary.columns:
        lines.append(("labels", "stored", "as the source has them, aligned with input_ids"))
    if summary.ignored_columns:
        lines.append(("columns left out", str(len(summary.ignored_columns)), ", ".join(summary.ignored_columns)))
    if renamed := _to_rename(summary):
        note = "a model, or the collator, has arguments of that name; a batch holds the column once it is renamed"
        lines.append(("columns to rename", str(len(renamed)), f"{', '.join(renamed)}: {note} (rows.rename_column)"))
    return lines
