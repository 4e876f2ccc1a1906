"""The numbers of a packing as text for a terminal: a summary, and histograms of block characters."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from neatpack.report.histogram import Histogram
from neatpack.report.summary import Summary

_BLOCKS = " ▏▎▍▌▋▊▉█"
_WIDTH = 36


def print_summary(summary: Summary, console: Console) -> None:
    """Print the summary and the histograms."""
    console.print(f"[bold]{escape(summary.path)}[/]", highlight=False, soft_wrap=True)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim", overflow="fold")
    for name, value, note in summary_lines(summary):
        table.add_row(*map(escape, (name, value, note)))  # names come from the packing
    console.print(table)
    _print_histogram(console, "Document lengths (tokens)", summary.lengths, _range)
    _print_histogram(console, "Fill per row", summary.fill, lambda low, high: _fill(low, high, summary.capacity))
    _print_histogram(console, "Documents per row", summary.docs_in_row, _range)
    for note in summary.notes:
        console.print(f"\n[yellow]note[/] {escape(note)}", highlight=False, soft_wrap=True)


def summary_lines(summary: Summary) -> list[tuple[str, str, str]]:
    """Name, value and note of every line of the summary."""
    counts = summary.counts
    share = summary.attention_pairs / summary.attention_dense if summary.attention_dense else 1.0
    lines = [
        ("documents", f"{counts.documents:,}", f"{summary.pieces:,} pieces of them in rows" if counts.split else ""),
        (
            "rows",
            f"{summary.rows:,}",
            f"of {summary.capacity:,} tokens, {summary.strategy}; lower bound {summary.lower_bound:,}",
        ),
        ("tokens", f"{summary.tokens:,}", "in rows"),
        ("fill", percent(summary.efficiency), f"{summary.padding:,} tokens of padding"),
        ("padding saved", f"{summary.padding_saved:,}", "tokens, against one document a row"),
        ("documents a row", f"{summary.docs_per_row:.1f}", f"{summary.max_docs_in_row:,} at most"),
        ("attention work", percent(share), "of causal attention over whole rows"),
        ("overflow", summary.overflow, _overflow(summary)),
    ]
    ranks = summary.ranks
    if ranks.before is not None and ranks.after is not None:
        note = f"slowest of {ranks.world_size} ranks over the mean; {ranks.after.spread:.2f} with balance_rows"
        lines.append(("rank work", f"{ranks.before.spread:.2f}", note))
    if summary.source is not None:
        size = "" if summary.source_bytes is None else f"{summary.source_bytes:,} bytes"
        lines.append(("source", size, summary.source))
    if summary.tokenizer is not None:
        lines.append(("tokenizer", summary.tokenizer, ""))
    if summary.source_bytes_per_token is not None and summary.stored_bytes_per_token is not None:
        stored = f"of the source; {summary.stored_bytes_per_token:.2f} stored"
        lines.append(("bytes a token", f"{summary.source_bytes_per_token:.2f}", stored))
    return lines


def percent(part: float) -> str:
    """A share with enough digits that what is not all never reads as 100 %, nor what is not nothing as 0 %."""
    if part in (0.0, 1.0):
        return f"{part:.0%}"
    texts = [f"{part:.{digits}%}" for digits in range(1, 5)]
    return next((text for text in texts if float(text[:-1]) not in (0.0, 100.0)), texts[-1])


def _overflow(summary: Summary) -> str:
    counts = summary.counts
    parts = [
        (counts.split, "cut in pieces"),
        (counts.truncated, f"cut off, {counts.truncated_tokens:,} tokens lost"),
        (counts.dropped, f"left out, {counts.dropped_tokens:,} tokens lost"),
        (counts.empty, "empty, in no row"),
    ]
    told = [f"{count:,} {what}" for count, what in parts if count]
    return f"{summary.kept_whole:,} documents whole" + "".join(f"; {text}" for text in told)


def _print_histogram(console: Console, title: str, histogram: Histogram, name: Callable[[int, int], str]) -> None:
    console.print(f"\n[bold]{title}[/]")
    most, total = max(histogram.counts, default=0), sum(histogram.counts)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="blue", width=_WIDTH, no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", style="dim", no_wrap=True)
    for low, high, count in zip(histogram.edges, histogram.edges[1:], histogram.counts, strict=False):
        table.add_row(name(low, high), bar(count, most), f"{count:,}", percent(count / total) if total else "")
    console.print(table)


def bar(count: int, most: int, width: int = _WIDTH) -> str:
    """A bar of block characters, to an eighth of a character; what is not nothing is seen."""
    if not count:
        return ""
    eighths = max(round(8 * width * count / most), 1)
    return "█" * (eighths // 8) + _BLOCKS[eighths % 8].strip()


def _range(low: int, high: int) -> str:
    return f"{low:,}" if high - low == 1 else f"{low:,} to {high - 1:,}"


def _fill(low: int, high: int, capacity: int) -> str:
    return "full" if low >= capacity else f"{percent(low / capacity)} to {percent((high - 1) / capacity)}"
