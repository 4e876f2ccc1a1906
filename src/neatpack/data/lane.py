"""One lane of a stream: a share of the source, shuffled in a buffer and packed, that can stop after any row and go on.

Its state holds no tokens: positions of the documents that wait (in the buffer, in open rows), each with a checksum, and
from where to read the source again to find them.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from neatpack.data.feeds import Feed
from neatpack.data.flat import as_numbers
from neatpack.data.in_memory import Document
from neatpack.data.records import IDS, SEQ_LENGTHS
from neatpack.errors import PlanError, SourceError
from neatpack.planning import Slice, StreamPlanner

Row = dict[str, Any]


class Entry(NamedTuple):
    """A document, the how many-th of its lane it is, and a checksum of its tokens."""

    position: int
    document: Document
    checksum: int


class Lane:
    """Rows of one lane, in the same order whoever asks for them.

    Args:
        feed: the source.
        number: the lane.
        lanes: lanes in all.
        planner: packs the documents.
        capacity: tokens a row can hold, and `overflow` what to do with longer documents, as the planner has them.
        overflow: see above.
        shuffle_buffer: documents to draw from at random; 0 or 1 keeps the source's order.
        seed: of the drawing, together with `epoch` and the lane's number.
        epoch: see above.
    """

    def __init__(
        self,
        feed: Feed,
        number: int,
        lanes: int,
        planner: StreamPlanner,
        *,
        capacity: int,
        overflow: str,
        shuffle_buffer: int,
        seed: int,
        epoch: int,
    ) -> None:
        self.number, self.planner = number, planner
        self._feed, self._lanes, self._epoch = feed, lanes, epoch
        self._capacity, self._overflow = capacity, overflow
        self._buffer_size = max(shuffle_buffer, 1)
        self._rng = np.random.default_rng([seed, epoch, number])
        self._documents = feed.read(number, lanes, epoch)
        self._position = 0
        self._marks: deque[tuple[int, Any]] = deque([(0, None)])
        self._kinds: dict[str, bool] | None = None
        self._exhausted = self._flushed = False
        self._buffer: list[Entry] = []
        self._held: dict[int, tuple[Entry, int]] = {}  # by the planner's number: tokens that no finished row has yet
        self._added = 0
        self._ready: deque[list[Slice]] = deque()

    @property
    def done(self) -> bool:
        """Whether every row was given."""
        return self._flushed and not self._ready

    def next_row(self) -> Row | None:
        """The next row, or None after the last."""
        while not self._ready:
            if self._flushed:
                return None
            entry = self._draw()
            if entry is None:
                self._flushed = True
                self._ready.extend(self.planner.flush())
            else:
                self._ready.extend(self._plan(entry))
        return self._make(self._ready.popleft())

    def _draw(self) -> Entry | None:
        """A document out of the buffer, which is filled up first."""
        while not self._exhausted and len(self._buffer) < self._buffer_size:
            entry = self._read()
            if entry is not None:
                self._buffer.append(entry)
        if not self._buffer:
            return None
        if self._buffer_size > 1:
            at = int(self._rng.integers(len(self._buffer)))
            self._buffer[at], self._buffer[-1] = self._buffer[-1], self._buffer[at]
        return self._buffer.pop()

    def _read(self) -> Entry | None:
        found = next(self._documents, None)
        if found is None:
            self._exhausted = True
            return None
        document, mark, name = found
        self._check_columns(document, name)
        self._check_length(len(document[IDS]), name)
        if mark != self._marks[-1][1]:
            self._marks.append((self._position, mark))
        ids = np.ascontiguousarray(document[IDS])
        entry = Entry(self._position, document, zlib.crc32(ids.view(np.uint8).data))
        self._position += 1
        return entry

    def _check_columns(self, document: Document, name: Callable[[], str]) -> None:
        kinds = {name: isinstance(value, np.ndarray) for name, value in document.items()}
        self._kinds = self._kinds or kinds
        if kinds != self._kinds:
            raise SourceError(
                f"{name()} has columns {_list(kinds)}; those before it {_list(self._kinds)}. Give every document the same."
            )

    def _check_length(self, length: int, name: Callable[[], str]) -> None:
        """Refuse a document that is too long when it is read: later nobody knows where it came from."""
        if length > self._capacity and self._overflow == "error":
            raise PlanError(
                f"{name()}: a document of {length} tokens, and a row holds {self._capacity}. Raise the capacity, or choose "
                "overflow='split' (pieces become documents), 'truncate' or 'drop'."
            )

    def _name(self, position: int) -> str:
        return f"document {position}" + (f" of lane {self.number} of {self._lanes}" if self._lanes > 1 else "")

    def _plan(self, entry: Entry) -> list[list[Slice]]:
        length = len(entry.document[IDS])
        placed = min(length, self._capacity) if self._overflow == "truncate" else length
        if placed and not (placed > self._capacity and self._overflow == "drop"):
            self._held[self._added] = (entry, placed)
        self._added += 1
        return self.planner.add(length)

    def _make(self, slices: list[Slice]) -> Row:
        """The row of these slices; documents that are in rows as a whole are let go."""
        documents = [self._held[slice_.doc][0].document for slice_ in slices]
        row: Row = {}
        for name, value in documents[0].items():
            column = [document[name] for document in documents]
            if isinstance(value, np.ndarray):
                parts = zip(column, slices, strict=True)
                row[name] = np.concatenate([own[piece.start : piece.start + piece.length] for own, piece in parts])
            else:
                numbers = as_numbers([column])
                row[name] = column if numbers is None else numbers
        row[SEQ_LENGTHS] = np.array([slice_.length for slice_ in slices], np.int32)
        for slice_ in slices:
            entry, left = self._held.pop(slice_.doc)
            if left > slice_.length:
                self._held[slice_.doc] = (entry, left - slice_.length)
        return row

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on with the next row, in values that JSON can hold."""
        waiting = [*self._buffer, *(entry for entry, _ in self._held.values())]
        lowest = min((entry.position for entry in waiting), default=self._position)
        while len(self._marks) > 1 and self._marks[1][0] <= lowest:
            self._marks.popleft()
        return {
            "lane": self.number,
            "position": self._position,
            "mark": list(self._marks[0]),
            "checksums": [[entry.position, entry.checksum] for entry in waiting],
            "buffer": [entry.position for entry in self._buffer],
            "held": [[number, entry.position, left] for number, (entry, left) in self._held.items()],
            "added": self._added,
            "ready": [[list(slice_) for slice_ in row] for row in self._ready],
            "exhausted": self._exhausted,
            "flushed": self._flushed,
            "rng": self._rng.bit_generator.state,
            "planner": self.planner.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of this lane: the source is read again from its mark, up to where it was.

        Raises:
            SourceError: the source does not give the documents that it gave before.
        """
        self.planner.load_state_dict(state["planner"])
        self._rng.bit_generator.state = state["rng"]
        found = self._read_again(state)
        self._buffer = [found[position] for position in state["buffer"]]
        self._held = {number: (found[position], left) for number, position, left in state["held"]}
        self._added = state["added"]
        self._ready = deque([Slice(*slice_) for slice_ in row] for row in state["ready"])
        self._exhausted, self._flushed = state["exhausted"], state["flushed"]

    def _read_again(self, state: Mapping[str, Any]) -> dict[int, Entry]:
        """Documents that waited, by position."""
        if state["flushed"] and not state["checksums"]:
            return {}
        first, mark = state["mark"]
        self._documents = self._feed.read(self.number, self._lanes, self._epoch, mark)
        self._position, self._marks = first, deque([(first, mark)])
        expected = dict(state["checksums"])
        found: dict[int, Entry] = {}
        while self._position < state["position"]:
            entry = self._read()
            if entry is None:
                raise SourceError(self._changed(self._position, "it has no such document"))
            if entry.position in expected:
                if entry.checksum != expected[entry.position]:
                    raise SourceError(self._changed(entry.position, "it has other tokens"))
                found[entry.position] = entry
        return found

    def _changed(self, position: int, how: str) -> str:
        return (
            f"the source does not give again what it gave before the stop: {self._name(position)}: {how}. Resume over the same "
            "source, in the same order, or start the epoch anew."
        )


def _list(kinds: Mapping[str, bool]) -> str:
    return ", ".join(f"{name} ({'a value a token' if is_token else 'one value'})" for name, is_token in kinds.items())


def take_turns(lanes: list[Lane], first: int) -> Iterator[tuple[Row, int]]:
    """Rows of several lanes in turn, each with the number of the lane whose turn is next.

    Args:
        lanes: in order of their numbers.
        first: the lane that begins, or where it has no more rows, the one after it.
    """
    going = [lane for lane in lanes if not lane.done]
    at = next((index for index, lane in enumerate(going) if lane.number >= first), 0)
    while going:
        row = going[at].next_row()
        if row is None:
            going.pop(at)
            at = at % len(going) if going else 0
        else:
            at = (at + 1) % len(going)
            yield row, going[at].number
