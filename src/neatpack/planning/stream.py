"""Rows from a stream of documents, in bounded memory: best fit over a window of documents and a window of rows.

Documents wait until `lookahead` of them are there; then all are placed, from long to short, each into the fullest open
row that holds it. A full row is finished; one open row too many finishes the fullest. What is open at the end is taken
apart and planned anew, so that the end of a stream costs no fill. At the defaults that comes within 0.4 % of the rows that
a plan with all lengths in hand needs on uniform lengths, and closer on skewed ones. Cost: a sort, two bisections and a few
dictionary steps of Python a document, two to three microseconds; NumPy has nothing to add, since every placement depends on
the one before.

Under a limit on documents, best fit would finish rows by number that are half empty; with fewer open rows than documents that
wait, it would finish rows that the shorter ones could have filled. There a document that no open row holds waits on, and rows
are filled as `reserve` has it, until half of the lookahead is left: those that wait are a choice of lengths for the next rows.
That stays within a percent of the lower bound (two, where open rows are very few), for up to half as much time again.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import pairwise, repeat
from operator import itemgetter
from typing import Any

import numpy as np

from neatpack.errors import PlanError
from neatpack.planning.best_fit import plan_best_fit
from neatpack.planning.histogram import count_lengths
from neatpack.planning.lengths import check_lengths
from neatpack.planning.options import check_align, check_choice, check_number
from neatpack.planning.overflow import POLICIES, Overflow, apply_overflow
from neatpack.planning.plan import PlanCounts, Slice
from neatpack.planning.reserve import Row, fill_rows

_STATE_VERSION = 1
_CAPPED_STATE_VERSION = 2
"""Of a planner that a limit on documents or on open rows binds: one of version 1 placed by best fit alone, to other rows."""

_length = itemgetter(2)


class StreamPlanner:
    """Plan rows while documents arrive; `Slice.doc` counts documents from the first one added.

    The rows depend on the documents and the options alone: not on whether they came one at a time, in chunks, or before
    and after a checkpoint. Between calls a planner holds fewer than `lookahead` documents and at most `open_rows` unfinished
    rows, with a limit on documents or without.

    Args:
        capacity: tokens a row can hold.
        open_rows: unfinished rows kept; more of them fill better and hold documents back longer.
        lookahead: documents gathered before they are placed, longest first; 1 places each as it comes. Where
            `max_docs_per_row` binds, or `open_rows` is less, half of them stay for the next rows.
        overflow: what to do with a document longer than `capacity`, as in `plan_rows`.
        max_docs_per_row: the most documents (pieces, where they are cut) in one row. At the defaults that costs less than a
            percent over the bound: 0.1 % or less on lognormal(6, 1) lengths in rows of 4096 with 4, 8 or 16 documents, 0.6 %
            on uniform ones in rows of 2048 with 4. It takes documents to choose from: at `lookahead=1` best fit alone is
            left, which can need several percent more rows. A lookahead of 16,384 takes up to three times as long a document.
        align: round the slot of every document up to a multiple of this many tokens, as in `plan_rows`.

    Raises:
        PlanError: options that mean nothing.

    Example:
        >>> planner = StreamPlanner(capacity=8, lookahead=2)
        >>> planner.extend([5, 4, 3])
        []
        >>> [[slice_.doc for slice_ in row] for row in planner.flush()]
        [[0, 2], [1]]
    """

    def __init__(
        self,
        capacity: int,
        *,
        open_rows: int = 1024,
        lookahead: int = 1024,
        overflow: Overflow = "error",
        max_docs_per_row: int | None = None,
        align: int = 1,
    ) -> None:
        self._capacity = check_number("capacity", capacity, "tokens")
        self._open_limit = check_number("open_rows", open_rows, "rows")
        self._lookahead = check_number("lookahead", lookahead, "documents")
        check_choice("overflow policy", overflow, POLICIES)
        self._overflow = overflow
        self._max_docs = None if max_docs_per_row is None else check_number("max_docs_per_row", max_docs_per_row, "documents")
        self._align = check_number("align", align, "tokens")
        check_align(self._capacity, self._align)
        # A limit of as many documents as there are units in a row never binds; of one document there is nothing to choose.
        units = self._capacity // self._align
        limit = min(self._max_docs or units, units)
        binds = limit < units or self._lookahead > self._open_limit
        self._binding = limit if binds and limit > 1 and self._lookahead > 1 else None
        self._counts = asdict(PlanCounts())
        self._forget()

    def _forget(self) -> None:
        self._waiting: list[Slice] = []
        self._unfitting: list[Slice] = []  # waiting too, from short to long, where a limit binds
        self._gather = self._lookahead  # documents that are to wait before they are placed
        self._rooms: list[int] = []  # sorted: each room, in units of `align`, that some open row has left
        self._rows_by_room: dict[int, list[Row]] = {}
        self._num_open = 0

    @property
    def counts(self) -> PlanCounts:
        """What became of the documents so far; `counts.documents` is where to go on after `load_state_dict`."""
        return PlanCounts(**self._counts)

    def add(self, length: int) -> list[Row]:
        """Take one document of `length` tokens; return the rows that this finished, mostly none.

        Raises:
            PlanError: a length that is none, or over the capacity under `overflow="error"`; the document is not taken.
        """
        if type(length) is not int or not 0 < length <= self._capacity:
            return self.extend([length])
        self._waiting.append(Slice(self._counts["documents"], 0, length))
        self._counts["documents"] += 1
        self._counts["tokens"] += length
        return self._place_waiting() if len(self._waiting) == self._gather else []

    def extend(self, lengths: object) -> list[Row]:
        """Take a chunk of documents, a 1-D sequence or array of lengths; return the rows that this finished.

        Raises:
            PlanError: lengths that are none, or over the capacity under `overflow="error"`; nothing of the chunk is taken.
        """
        first = self._counts["documents"]
        pieces = apply_overflow(check_lengths(lengths, first), self._capacity, self._overflow, first)
        for name, count in asdict(pieces.counts).items():
            self._counts[name] += count
        placed = np.flatnonzero(pieces.length)
        docs = (placed if pieces.doc is None else pieces.doc[placed].astype(np.int64)) + first
        starts = np.zeros_like(placed) if pieces.start is None else pieces.start[placed]
        columns = zip(docs.tolist(), starts.tolist(), pieces.length[placed].tolist(), strict=True)
        slices = list(map(tuple.__new__, repeat(Slice), columns))  # as Slice(...), in a quarter of its time
        finished: list[Row] = []
        begin = 0
        while begin < len(slices):
            end = begin + self._gather - len(self._waiting)
            self._waiting += slices[begin:end]
            begin = end
            if len(self._waiting) == self._gather:
                finished += self._place_waiting()
        return finished

    def flush(self) -> list[Row]:
        """Finish every row. Further documents start new ones; their numbers go on."""
        left = [*(slice_ for row in self._open_rows() for slice_ in row), *reversed(self._unfitting), *self._waiting]
        self._forget()
        slots = -(-np.array([slice_.length for slice_ in left], np.int64) // self._align)
        rows = plan_best_fit(slots, count_lengths(slots), self._capacity // self._align, self._max_docs, None)
        pieces, offsets = rows.pieces.tolist(), rows.row_offsets.tolist()
        return [[left[piece] for piece in pieces[a:b]] for a, b in pairwise(offsets)]

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on elsewhere, in numbers, strings and lists that JSON can hold."""
        return {
            "version": self._version,
            "options": self._options(),
            "counts": dict(self._counts),
            "waiting": [list(slice_) for slice_ in (*reversed(self._unfitting), *self._waiting)],
            "open_rows": [[list(slice_) for slice_ in row] for row in self._open_rows()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that `state_dict` gave; the rows to come are those of a planner that never stopped.

        Raises:
            PlanError: no such state, or that of a planner with other options.
        """
        try:
            version, options = state["version"], dict(state["options"])
            self._check_state(version, options)
            counts = PlanCounts(**state["counts"])
            waiting = [Slice(*slice_) for slice_ in state["waiting"]]
            rows = [[Slice(*slice_) for slice_ in row] for row in state["open_rows"]]
            rooms = [self._room(row) for row in rows]
        except (KeyError, TypeError) as error:
            raise PlanError(f"this is no state of a StreamPlanner: {error!r}. Pass what state_dict() returned.") from error
        full = min(rooms, default=1) <= 0 or max(map(len, rows), default=0) >= (self._max_docs or self._capacity)
        if full or len(waiting) >= self._lookahead or len(rows) > self._open_limit:
            raise PlanError("this is no state of a StreamPlanner: it holds more than its own options allow.")
        self._counts = asdict(counts)
        self._forget()
        self._waiting = waiting
        for row, room in zip(rows, rooms, strict=True):
            self._keep_open(row, room)
        self._num_open = len(rows)

    @property
    def _version(self) -> int:
        return _CAPPED_STATE_VERSION if self._binding else _STATE_VERSION

    def _check_state(self, version: object, options: dict[str, Any]) -> None:
        mine = self._options()
        differing = [f"{name}={options.get(name)!r}" for name in {**mine, **options} if options.get(name) != mine.get(name)]
        if version in (_STATE_VERSION, _CAPPED_STATE_VERSION) and differing:
            raise PlanError(f"the state is that of a planner with {', '.join(differing)}: make this one with the same.")
        if version != self._version:
            which = "with these limits, " if self._binding else ""
            raise PlanError(f"a planner state of version {version!r}; {which}this release reads version {self._version}.")

    def _room(self, row: Row) -> int:
        """Room that a row has left, in units of `align`."""
        return self._capacity // self._align - sum(-(-slice_.length // self._align) for slice_ in row)

    def _options(self) -> dict[str, Any]:
        return {
            "capacity": self._capacity,
            "open_rows": self._open_limit,
            "lookahead": self._lookahead,
            "overflow": self._overflow,
            "max_docs_per_row": self._max_docs,
            "align": self._align,
        }

    def _open_rows(self) -> Iterator[Row]:
        """Open rows, fullest first, in the order that `_keep_open` needs to put them back as they were."""
        return (row for room in self._rooms for row in self._rows_by_room[room])

    def _keep_open(self, row: Row, room: int) -> None:
        rows = self._rows_by_room.get(room)
        if rows is None:
            self._rows_by_room[room] = [row]
            insort(self._rooms, room)
        else:
            rows.append(row)

    def _place_waiting(self) -> list[Row]:
        """Best fit, longest first, of all that waits; returns the rows that were finished.

        Nearly all of the planner's time is spent in this loop, so it calls nothing of its own. Where a limit binds,
        a document that no open row holds opens none: it stays, and `_fill_rows` sees to it.
        """
        finished: list[Row] = []
        unplaced: list[Slice] = []
        rooms, rows_by_room, max_docs, binding = self._rooms, self._rows_by_room, self._max_docs, self._binding
        self._waiting.sort(key=_length, reverse=True)
        for slice_ in self._waiting:
            slot = -(-slice_[2] // self._align)
            tightest = bisect_left(rooms, slot)
            opens = tightest == len(rooms)
            if opens and binding:
                unplaced.append(slice_)
                continue
            if opens and self._num_open < self._open_limit:
                self._num_open += 1
                room, row = self._capacity // self._align, [slice_]
            else:
                room = rooms[0 if opens else tightest]
                rows = rows_by_room[room]
                row = rows.pop()
                if not rows:
                    del rooms[0 if opens else tightest], rows_by_room[room]
                if opens:
                    finished.append(row)  # one too many: the fullest is done
                    room, row = self._capacity // self._align, []
                row.append(slice_)
            room -= slot
            if not room or len(row) == max_docs:
                finished.append(row)
                self._num_open -= 1
            elif room in rows_by_room:
                rows_by_room[room].append(row)
            else:
                rows_by_room[room] = [row]
                insort(rooms, room)
        self._waiting.clear()
        if binding:
            finished += self._fill_rows(unplaced, binding)
        return finished

    def _fill_rows(self, unplaced: list[Slice], max_docs: int) -> list[Row]:
        """Rows out of what no open row holds, until half of the window is left; returns those that were finished.

        What is left fits into no open row either, today or later: it is offered to none again.
        """
        finished: list[Row] = []
        unplaced.reverse()
        self._unfitting[:0] = unplaced
        self._unfitting.sort(key=_length)
        slots = [-(-slice_[2] // self._align) for slice_ in self._unfitting]
        for row, room in fill_rows(self._unfitting, slots, self._capacity // self._align, max_docs, self._lookahead // 2):
            if not room or len(row) == max_docs:
                finished.append(row)
                continue
            if self._num_open < self._open_limit:
                self._num_open += 1
            else:
                finished.append(self._take_fullest())
            self._keep_open(row, room)
        self._gather = self._lookahead - len(self._unfitting)
        return finished

    def _take_fullest(self) -> Row:
        """One of the fullest open rows, out of them; the caller has another to put in its place."""
        rows = self._rows_by_room[self._rooms[0]]
        row = rows.pop()
        if not rows:
            del self._rows_by_room[self._rooms.pop(0)]
        return row
