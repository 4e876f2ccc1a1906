"""JSON Lines in, chunks of records out.

A block of whole lines goes through Arrow's JSON reader with the types we need. Where that fails, or leaves anything open
(a null, a blank line, a column that other lines lack), the same block is read line by line with the standard library,
which knows exactly which line is wrong and why. Blocks are cut by byte positions alone, so results never depend on who reads.

The first record of a file shows its columns. Columns of later lines alone are never passed over in silence: Arrow's reader
stops at a name that it was not told. Where it stops, the standard library lists the names, and the block is read again
without them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.json as pa_json

from neatpack.data.json_values import BadLineError, check_further, find_kinds, find_types, is_number_list, show
from neatpack.data.records import LISTS, Chunk, ColumnChoice, Layout, Places, Problems, choose_layout
from neatpack.data.sources import Part, compression_of
from neatpack.errors import SourceError

BLOCK_BYTES = 1 << 24
LINE_BYTES = 1 << 30
"""The longest line that is read: memory must not depend on what a compressed file expands to."""

_BOM = b"\xef\xbb\xbf"


_BLANK_LINE = re.compile(rb"(?:\A|\n)[ \t\r]*\n")


def read_jsonl(part: Part, choice: ColumnChoice, problems: Problems) -> Iterator[Chunk]:
    """Read the lines that start within the part.

    Args:
        part: a JSONL file, plain or compressed, or a byte range of a plain one.
        choice: the columns the user named.
        problems: takes lines that cannot be used.
    """
    path = part.files[0]
    layout = _layout(path, choice, problems)
    if layout is None:
        return
    kinds = find_kinds(records_of(path), layout)
    ignored = find_types(records_of(path), layout.ignored)
    number = 0
    for block in _blocks(path, part):
        lines = block.count(b"\n") + (not block.endswith(b"\n"))
        places = Places((path,), np.arange(number, number + lines), "line", lambda: 1 + _lines_before(path, part.start))
        chunk = _fast_chunk(block, layout, choice, kinds, ignored, places) or _slow(
            block, layout, choice, kinds, places, problems
        )
        if len(chunk):
            yield chunk
        number += lines


def _open(path: str) -> BinaryIO:
    stream: BinaryIO = pa.input_stream(path, compression=compression_of(path), buffer_size=1 << 20)
    return stream


def _blocks(path: str, part: Part) -> Iterator[bytes]:
    """Blocks of whole lines; a line belongs to the part in which its first byte lies."""
    if part.start or part.stop is not None:
        yield from _range_blocks(path, part.start, part.stop)
        return
    with _open(path) as stream:
        rest: list[bytes] = []  # of a line that has not ended; joined once, however long it is
        while data := stream.read(BLOCK_BYTES):
            cut = data.rfind(b"\n") + 1
            if cut:
                yield b"".join([*rest, data[:cut]]).removeprefix(_BOM)
                rest = []
            rest.append(data[cut:])
            _check_line(path, sum(map(len, rest)))
    if any(rest):
        yield b"".join(rest).removeprefix(_BOM)


def _range_blocks(path: str, start: int, stop: int | None) -> Iterator[bytes]:
    with open(path, "rb") as stream:  # noqa: PTH123
        if start:
            stream.seek(start - 1)
            stream.readline()
        while stop is None or stream.tell() < stop:
            data = stream.read(BLOCK_BYTES if stop is None else min(BLOCK_BYTES, stop - stream.tell()))
            if not data:
                return
            end = b"" if data.endswith(b"\n") else stream.readline(LINE_BYTES + 1)
            _check_line(path, len(end))
            yield (data + end).removeprefix(_BOM)


def _lines_before(path: str, position: int) -> int:
    """Lines whose first byte lies before a byte position."""
    left, lines = position - 1, int(position > 0)
    with open(path, "rb") as stream:  # noqa: PTH123
        while left > 0 and (data := stream.read(min(BLOCK_BYTES, left))):
            lines += data.count(b"\n")
            left -= len(data)
    return lines


def records_of(path: str) -> Iterator[dict[str, Any]]:
    """Records of a file, as far as they can be read, from the first on."""
    with _open(path) as stream:
        for line in _lines(path, stream):
            try:
                record = json.loads(line.removeprefix(_BOM))
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict):
                yield record


def _layout(path: str, choice: ColumnChoice, problems: Problems) -> Layout | None:
    """The layout that the first usable record of the file shows; None where no line holds one."""
    with _open(path) as stream:
        for number, line in enumerate(_lines(path, stream), 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line.removeprefix(_BOM))
            except (ValueError, RecursionError):
                if problems.skip:
                    continue
                return Layout(choice.text or "text")  # the reader names the broken line
            if isinstance(record, dict):
                lists = [name for name, value in record.items() if is_number_list(value)]
                return choose_layout(list(record), choice, f"{path} line {number}", lists)
            if not problems.skip:
                return Layout(choice.text or "text")
    problems.report(path, "empty file", "no line holds a record, expected one JSON object a line.")
    return None


def _lines(path: str, stream: BinaryIO) -> Iterator[bytes]:
    """Lines of a stream, read in small pieces."""
    rest: list[bytes] = []
    size = 0
    while data := stream.read(1 << 16):
        *lines, begun = data.split(b"\n")
        if lines:
            yield b"".join([*rest, lines[0]])
            yield from lines[1:]
            rest, size = [], 0
        rest.append(begun)
        size += len(begun)
        _check_line(path, size)
    if any(rest):
        yield b"".join(rest)


def _check_line(path: str, size: int) -> None:
    if size > LINE_BYTES:
        raise SourceError(
            f"{path}: a line of more than {LINE_BYTES} bytes, expected one JSON object a line. If the file is JSON Lines, "
            "split its longest document; if it is something else, convert it."
        )


def _null_line(block: bytes) -> bool:
    """Whether a value of the block, not one inside an object, may be null: Arrow's reader crashes on those."""
    at = block.find(b"null")
    while at >= 0:
        before = block[max(0, at - 64) : at].rstrip(b" \t\r")
        if not before or before.endswith((b"\n", b"}")):
            return True
        at = block.find(b"null", at + 4)
    return False


def _fast_chunk(
    block: bytes,
    layout: Layout,
    choice: ColumnChoice,
    kinds: dict[str, pa.DataType],
    ignored: dict[str, pa.DataType],
    places: Places,
) -> Chunk | None:
    """The records by Arrow's reader, or None where a closer look is needed."""
    further = (*layout.token_columns, *layout.document_columns)
    # A blank line would make up, in the count of lines, for a line that holds two records.
    if _null_line(block) or _BLANK_LINE.search(block) or any(name not in kinds for name in further):
        return None
    lines = len(places.numbers)
    columns = _fast(block, layout, kinds, lines, ignored)
    if columns is not None:
        return Chunk(layout, columns, places)
    late = _late(block, layout, choice)
    columns = None if late is None else _fast(block, layout, kinds, lines)
    return None if columns is None else Chunk(layout, columns, places, late or {})


def _late(block: bytes, layout: Layout, choice: ColumnChoice) -> dict[str, int] | None:
    """Columns to leave out that the layout does not know, and the first line that has each; None where a line is bad."""
    late: dict[str, int] = {}
    known = {*layout.columns, *layout.ignored}
    try:
        for index, line in enumerate(block.removesuffix(b"\n").split(b"\n")):
            for name in _unexpected(json.loads(line), known, layout, choice):
                late.setdefault(name, index)
    except (BadLineError, ValueError, RecursionError, AttributeError):
        return None
    return late


def _unexpected(record: dict[str, Any], known: set[str], layout: Layout, choice: ColumnChoice) -> set[str]:
    """Columns of a record that the first record of the file lacks, and that may be left out.

    Raises:
        BadLineError: one that may not, as it has a number a token or may well have.
    """
    names = record.keys() - known
    for name in names if layout.text is None else ():
        advice = "" if name in LISTS else f" Give it to every record, or leave it out with --ignore-columns {name}."
        if name in LISTS or (is_number_list(record[name]) and not choice.ignores(name)):
            raise BadLineError(
                "unexpected column", f"a column {name!r}, which the first record of the file does not have.{advice}"
            )
    return names


def _fast(
    block: bytes,
    layout: Layout,
    kinds: dict[str, pa.DataType],
    lines: int,
    ignored: dict[str, pa.DataType] | None = None,
) -> dict[str, pa.Array] | None:
    """The columns by Arrow's reader, or None where something is wrong; with `ignored`, also where there are other columns."""
    further = (*layout.token_columns, *layout.document_columns)
    # Every known column is named, so that one that appears in later lines only is noticed.
    own: tuple[str, ...] = LISTS if layout.text is None else (layout.text,)
    type_ = pa.list_(pa.int64()) if layout.text is None else pa.string()
    types = {**dict.fromkeys(own, type_), **{name: kinds[name] for name in further}}
    try:
        table = pa_json.read_json(
            pa.BufferReader(block),
            read_options=pa_json.ReadOptions(use_threads=False, block_size=len(block) + 1),
            parse_options=pa_json.ParseOptions(
                explicit_schema=pa.schema({**(ignored or {}), **types}),
                unexpected_field_behavior="ignore" if ignored is None else "error",
            ),
        )
    except pa.ArrowException:
        return None
    nulls = {name: table[name].null_count for name in types if name not in layout.document_columns}
    if table.num_rows != lines or any(count != (0 if name in layout.columns else lines) for name, count in nulls.items()):
        return None
    columns = {name: table[name].combine_chunks() for name in layout.columns}
    try:
        for column in columns.values():  # Arrow's reader takes any bytes for text
            column.validate(full=True)
    except pa.ArrowException:
        return None
    return columns


def _slow(
    block: bytes, layout: Layout, choice: ColumnChoice, kinds: dict[str, pa.DataType], places: Places, problems: Problems
) -> Chunk:
    values: dict[str, list[Any]] = {name: [] for name in layout.columns}
    known = {*layout.columns, *layout.ignored}
    kept: list[int] = []
    late: dict[str, int] = {}
    for index, line in enumerate(block.removesuffix(b"\n").split(b"\n")):
        if not line.strip():
            continue
        try:
            record = _record(line, layout)
            unexpected = _unexpected(record, known, layout, choice)
            check_further(record, layout, kinds)
        except BadLineError as bad:
            problems.report(places.name(index), bad.reason, str(bad), cause=bad)
            continue
        late.update((name, len(kept)) for name in unexpected - late.keys())
        kept.append(index)
        for name, column in values.items():
            column.append(record.get(name))
    type_ = pa.large_list(pa.int64()) if layout.text is None else pa.large_string()
    own = layout.lists if layout.text is None else (layout.text,)
    arrays = {name: pa.array(column, type_ if name in own else None) for name, column in values.items()}
    return Chunk(layout, arrays, places.take(np.array(kept, np.int64)), late)


def _record(line: bytes, layout: Layout) -> dict[str, Any]:
    """The wanted values of a line."""
    try:
        record = json.loads(line)
    except UnicodeDecodeError as error:
        raise BadLineError("invalid UTF-8", f"invalid UTF-8 at byte {error.start}, expected UTF-8 text.") from error
    except json.JSONDecodeError as error:  # its own line number is always 1
        wrong = f"{error.msg} at column {error.colno}"
        raise BadLineError("broken JSON", f"broken JSON ({wrong}), expected one JSON object.") from error
    except (ValueError, RecursionError) as error:
        raise BadLineError("broken JSON", f"broken JSON ({error}), expected one JSON object.") from error
    if not isinstance(record, dict):
        raise BadLineError("broken JSON", f"got a JSON {type(record).__name__}, expected one JSON object a line.")
    for name in layout.columns:
        if name not in record and name not in layout.document_columns:
            raise BadLineError("missing column", f"no column {name!r} (got {', '.join(map(repr, record))}).")
    if layout.text is not None:
        _check_text(record[layout.text], layout.text)
        return record
    for name in layout.lists:
        _check_list(record[name], name)
        record[name] = [int(value) for value in record[name]]  # masks may be booleans
    return record


def _check_text(text: object, name: str) -> None:
    if text is None:
        raise BadLineError("null text", f"{name!r} is null, expected a string.")
    if not isinstance(text, str):
        raise BadLineError("not text", f"{name!r} is {show(text)}, expected a string.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadLineError("invalid UTF-8", f"{name!r} holds half of a surrogate pair at character {error.start}.") from error


def _check_list(values: object, name: str) -> None:
    if not isinstance(values, list):
        raise BadLineError("not a list", f"{name!r} is {show(values)}, expected a list of integers.")
    for position, value in enumerate(values):
        if not isinstance(value, int) or (isinstance(value, bool) and name == "input_ids"):
            raise BadLineError("not an integer", f"{name!r}[{position}] is {show(value)}, expected an integer.")
        if not -(2**63) <= value < 2**63:
            raise BadLineError("not an integer", f"{name!r}[{position}] is {value}, which does not fit 64 bits.")
