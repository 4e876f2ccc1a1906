"""What readers hand on: a chunk of records as Arrow columns, where each record came from, and what was wrong with some."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

import numpy as np
import pyarrow as pa

from neatpack.errors import SourceError

IDS = "input_ids"
LABELS = "labels"
MASKS = ("loss_mask", "completion_mask", "assistant_masks")
SEQ_LENGTHS = "seq_lengths"
ATTENTION_MASK = "attention_mask"
LISTS = (IDS, LABELS, *MASKS, SEQ_LENGTHS, ATTENTION_MASK)


@dataclass(frozen=True)
class Layout:
    """Which columns of a file are read, decided once a file.

    Attributes:
        text: name of the text column, or None for a pre-tokenised file.
        lists: the columns of integers a token, `input_ids` first; `seq_lengths` if documents are packed already.
        ignored: columns that are not carried into the output; reported, never dropped without a word.
    """

    text: str | None
    lists: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    token_columns: tuple[str, ...] = ()
    document_columns: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns to read."""
        own = self.lists if self.text is None else (self.text,)
        return (*own, *self.token_columns, *self.document_columns)


@dataclass(frozen=True)
class ColumnChoice:
    """The columns that the user named.

    Attributes:
        text: holds the text; None means `input_ids` if there, else `text`.
        tokens: further columns with a number a token, to be carried.
        documents: further columns with a value a document, to be carried.
        ignore: columns of numbers a token that may be left out.
    """

    text: str | None = None
    tokens: tuple[str, ...] = ()
    documents: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()

    def ignores(self, name: str) -> bool:
        """Whether a column of numbers a token may be left out."""
        return any(fnmatchcase(name, pattern) for pattern in self.ignore)


def choose_layout(names: Sequence[str], choice: ColumnChoice, where: str, number_lists: Collection[str] = ()) -> Layout:
    """Decide what a file with these columns holds.

    Args:
        names: the file's columns.
        choice: the columns the user named.
        where: the file, for the error.
        number_lists: those of its columns that hold lists of numbers.

    Raises:
        SourceError: a named column, or `input_ids` and `text`, are not there; or there are further lists of numbers beside
            `input_ids`, which may well be a value a token, and the user did not say what is to become of them.
    """
    missing = [name for name in (*choice.tokens, *choice.documents) if name not in names]
    if missing:
        raise SourceError(f"{where}: no column {', '.join(map(repr, missing))}, got {', '.join(map(repr, names))}.")
    if choice.text is None and IDS in names:
        lists = tuple(name for name in LISTS if name in names)
        known = {*lists, *choice.tokens, *choice.documents}
        undecided = [name for name in number_lists if name not in known and not choice.ignores(name)]
        if undecided:
            raise SourceError(
                f"{where}: columns with lists of numbers beside {IDS!r}: {', '.join(undecided)}. Carry those that have a "
                "number a token with --token-columns, those of packed rows that have one a document with --document-columns, "
                "and leave the others out with --ignore-columns."
            )
        ignored = tuple(name for name in names if name not in known)
        return Layout(None, lists, ignored, choice.tokens, choice.documents)
    text = choice.text or "text"
    if text not in names:
        wanted = f"the column {text!r}" if choice.text else "a column 'text' or 'input_ids'"
        chats = [name for name in ("messages", "conversations", "prompt") if name in names]
        chat = f" {chats[0]!r} may be a chat: make input_ids of it with the tokenizer's apply_chat_template." if chats else ""
        raise SourceError(
            f"{where}: expected {wanted}, got {', '.join(map(repr, names)) or 'no columns'}. Name the column that holds the "
            f"text with --text-column.{chat}"
        )
    if choice.tokens:
        raise SourceError(
            f"{where}: holds text, so the columns {', '.join(map(repr, choice.tokens))} cannot have a number a token. Tokenise "
            "it first, or name columns with a value a document with --document-columns."
        )
    ignored = tuple(name for name in names if name != text and name not in choice.documents)
    return Layout(text, (), ignored, (), choice.documents)


@dataclass(frozen=True)
class Places:
    """Where the records of a chunk came from, to name them in errors.

    Attributes:
        files: one file, or one file a record (text files).
        numbers: number of each record within its file, from `first()`; unused for text files.
        word: "line", "row", or "" where a file is one record.
        first: number of the record that `numbers` counts from; a call, since counting lines costs and only errors need it.
    """

    files: tuple[str, ...]
    numbers: np.ndarray
    word: str = ""
    first: Callable[[], int] = int

    def name(self, index: int) -> str:
        """Name record `index` of the chunk, such as "a.jsonl line 3"."""
        if not self.word:
            return self.files[int(self.numbers[index])]
        return f"{self.files[0]} {self.word} {self.first() + int(self.numbers[index])}"

    def take(self, keep: np.ndarray) -> Places:
        """The places of the records that a boolean mask or an index array keeps."""
        return replace(self, numbers=self.numbers[keep])


@dataclass(frozen=True)
class Chunk:
    """Consecutive records of one layout.

    Attributes:
        layout: which columns they are.
        columns: Arrow arrays by name, all of one length; they may be slices of larger arrays.
        places: where each record came from.
        late: columns left out that the layout does not know, since the first record of the file lacks them; and the first
            record of the chunk that has each.
    """

    layout: Layout
    columns: dict[str, pa.Array]
    places: Places
    late: Mapping[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.places.numbers)

    @property
    def num_documents(self) -> int:
        """Documents in the records; one each, or as many as `seq_lengths` says where they are packed already."""
        return len(self.columns[SEQ_LENGTHS].flatten()) if SEQ_LENGTHS in self.columns else len(self)

    @property
    def vocab_bound(self) -> int | None:
        """A bound on ids that the type of `input_ids` alone gives: 2**8 or 2**16 for narrow types, else None."""
        kind = self.columns[IDS].type
        narrow = {pa.uint8(): 1 << 8, pa.uint16(): 1 << 16}
        return narrow.get(kind.value_type) if hasattr(kind, "value_type") else None

    def without_labels(self) -> Chunk:
        """The same records without labels and masks."""
        lists = tuple(name for name in self.layout.lists if name in (IDS, SEQ_LENGTHS))
        layout = replace(self.layout, lists=lists)
        return replace(self, layout=layout, columns={name: self.columns[name] for name in layout.columns})

    def keep(self, mask: np.ndarray) -> Chunk:
        """The records that a boolean mask keeps."""
        arrow_mask = pa.array(mask)
        columns = {name: column.filter(arrow_mask) for name, column in self.columns.items()}
        return Chunk(self.layout, columns, self.places.take(mask))


class BadRecordsError(Exception):
    """Records of a chunk that cannot be used: a mask over the chunk, a short reason, and what is wrong with the first."""

    def __init__(self, mask: np.ndarray, reason: str, detail: str) -> None:
        super().__init__(reason)
        self.mask, self.reason, self.detail = mask, reason, detail


@dataclass
class Problems:
    """Bad records: the first is an error, or with `skip` each is counted by its reason. Odd ones are used, and counted.

    Attributes:
        skip: count instead of raising.
        offered: the reader at work can be told to skip; a stream cannot.
        counts: bad records by reason.
        examples: the first message for each reason.
        spelled: documents whose text spells out a special token, by its name.
    """

    skip: bool = False
    offered: bool = True
    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)
    spelled: Counter[str] = field(default_factory=Counter)

    def report(self, where: str, reason: str, detail: str, count: int = 1, cause: Exception | None = None) -> None:
        """Raise for the record at `where`, or count it and `count - 1` more like it.

        Raises:
            SourceError: bad records are not to be skipped.
        """
        message = f"{where}: {detail}"
        if not self.skip:
            way = "pass --skip-bad" if self.offered else "pack the files first, with neatpack pack --skip-bad,"
            raise SourceError(f"{message} Fix the record, or {way} to leave such records out and count them.") from cause
        self.counts[reason] = self.counts.get(reason, 0) + count
        self.examples.setdefault(reason, message)

    def without_bad(self, chunk: Chunk, bad: BadRecordsError) -> Chunk:
        """Report bad records and return the chunk without them."""
        first = int(np.argmax(bad.mask))
        self.report(chunk.places.name(first), bad.reason, bad.detail, int(bad.mask.sum()), bad.__cause__)  # type: ignore[arg-type]
        return chunk.keep(~bad.mask)
