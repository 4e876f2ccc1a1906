"""Packed rows from a source that is read in order: sharded, shuffled in a buffer, packed, and resumed to the next row.

The work is split into lanes: lane `l` of `L` reads its share of the source, shuffles and packs it, on its own. Ranks and
workers only take lanes up (lane `l` is of rank `l % world_size`), so a lane's rows do not depend on who makes them, and a
state, which is that of the lanes, can be taken up by another number of workers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields
from typing import Any

from neatpack.data.feeds import open_feed
from neatpack.data.lane import Lane, Row, take_turns
from neatpack.errors import PlanError
from neatpack.planning import Overflow, PlanCounts, StreamPlanner
from neatpack.planning.options import check_number, check_seed

_FORMAT = "neatpack stream"
_VERSION = 1


class RowStream:
    """The stream without torch; `neatpack.PackedStream` is the same for torch's DataLoader, and says what the options mean."""

    def __init__(
        self,
        source: Any,
        capacity: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        lanes: int | None = None,
        shuffle_buffer: int = 0,
        seed: int = 0,
        overflow: Overflow = "error",
        open_rows: int = 1024,
        lookahead: int = 1024,
        max_docs_per_row: int | None = None,
        ignore_columns: Collection[str] = (),
        **reading: Any,
    ) -> None:
        self._world_size = check_number("world_size", world_size, "ranks")
        if not 0 <= rank < self._world_size:
            raise PlanError(f"rank {rank} of a world of {self._world_size}: ranks are 0 to {self._world_size - 1}.")
        self._rank = int(rank)
        self._lanes = None if lanes is None else check_number("lanes", lanes, "lanes a rank")
        self._shuffle_buffer = check_number("shuffle_buffer", shuffle_buffer, "documents") if shuffle_buffer else 0
        self._seed = check_seed(seed)
        self._planner_options: dict[str, Any] = {
            "capacity": capacity,
            "open_rows": open_rows,
            "lookahead": lookahead,
            "overflow": overflow,
            "max_docs_per_row": max_docs_per_row,
        }
        self._make_planner()  # refuses options that mean nothing, here and not in a worker
        self._feed = open_feed(source, capacity, ignore_columns, reading)
        self._options = {
            **self._planner_options,
            "shuffle_buffer": self._shuffle_buffer,
            "seed": self._seed,
            "ignore_columns": sorted(ignore_columns),
            "reading": repr(sorted(reading.items())),
            "source": self._feed.fingerprint,
        }
        self._epoch = 0
        self._loaded: dict[str, Any] | None = None
        self._forget()

    def _make_planner(self) -> StreamPlanner:
        return StreamPlanner(**self._planner_options)

    def _forget(self) -> None:
        self._live: list[Lane] | None = None
        self._num_lanes = self._turn = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_live": None}  # a worker starts its own lanes

    def worker(self) -> tuple[int, int]:
        """Which worker of how many this process is."""
        return 0, 1

    def set_epoch(self, epoch: int) -> None:
        """Shuffle differently from the next iteration on; a state that was loaded for another epoch is let go.

        Raises:
            PlanError: no integer of zero or more.
        """
        if epoch != self._epoch:
            self._epoch, self._loaded = check_seed(epoch), None
            self._forget()

    @property
    def counts(self) -> PlanCounts:
        """What became of the documents read by this process so far."""
        counts = [lane.planner.counts for lane in self._live or []]
        return PlanCounts(**{field.name: sum(getattr(count, field.name) for count in counts) for field in fields(PlanCounts)})

    def __iter__(self) -> Iterator[Row]:
        self._start(*self.worker())
        return self._rows()

    def _start(self, worker: int, workers: int) -> None:
        loaded, self._loaded = self._loaded, None
        self._num_lanes = loaded["num_lanes"] if loaded else self._world_size * (self._lanes or workers)
        own = range(self._rank, self._num_lanes, self._world_size)[worker::workers]
        if loaded:
            _refuse_missing(own, loaded["lanes"], self._num_lanes)
        self._live = [self._make_lane(number) for number in own]
        self._turn = loaded["turn"] if loaded else 0
        for lane in self._live if loaded else []:
            lane.load_state_dict(loaded["lanes"][lane.number])  # type: ignore[index]

    def _make_lane(self, number: int) -> Lane:
        return Lane(
            self._feed,
            number,
            self._num_lanes,
            self._make_planner(),
            capacity=self._planner_options["capacity"],
            overflow=self._planner_options["overflow"],
            shuffle_buffer=self._shuffle_buffer,
            seed=self._seed,
            epoch=self._epoch,
        )

    def _rows(self) -> Iterator[Row]:
        for row, turn in take_turns(self._live or [], self._turn):
            self._turn = turn
            yield row

    def state_dict(self) -> dict[str, Any]:
        """Where this process is, in values that JSON can hold: `load_state_dict` goes on with the very next row."""
        if self._live is not None:
            lanes, turn, num_lanes = [lane.state_dict() for lane in self._live], self._turn, self._num_lanes
        elif self._loaded:
            lanes, turn, num_lanes = list(self._loaded["lanes"].values()), self._loaded["turn"], self._loaded["num_lanes"]
        else:
            lanes, turn, num_lanes = [], 0, 0
        state = {"format": _FORMAT, "version": _VERSION, "options": self._options, "epoch": self._epoch}
        return {**state, "num_lanes": num_lanes, "turn": turn, "lanes": lanes}

    def load_state_dict(self, state: Any) -> None:
        """Go on from a state, at the next iteration.

        Args:
            state: what `state_dict` gave; or, to go on with another number of workers or ranks, anything that holds the
                states of all of them: a list, or the state of a `StatefulDataLoader` that takes a snapshot at every step.

        Raises:
            PlanError: no such state, that of a stream with other options or another source, or states of different moments.
        """
        states = list(_find_states(state))
        if not states:
            raise PlanError(
                "this holds no state of a PackedStream. Pass what state_dict() of the stream or its loader returned."
            )
        for found in states:
            self._check_state(found, states[0])
        self._forget()
        self._epoch = states[0]["epoch"]
        if not states[0]["num_lanes"]:  # taken before the first row
            self._loaded = None
            return
        lanes: dict[int, Any] = {}
        for lane in (lane for found in states for lane in found["lanes"]):
            if lanes.setdefault(lane["lane"], lane) != lane:
                raise PlanError(f"the states are of different moments: they hold lane {lane['lane']} twice. Load one of them.")
        self._loaded = {"num_lanes": states[0]["num_lanes"], "turn": states[0]["turn"], "lanes": lanes}

    def _check_state(self, state: Mapping[str, Any], first: Mapping[str, Any]) -> None:
        if state.get("version") != _VERSION:
            raise PlanError(f"a stream state of version {state.get('version')!r}; this release reads version {_VERSION}.")
        options = state["options"]
        differing = [f"{name}={options.get(name)!r}" for name, own in self._options.items() if options.get(name) != own]
        if differing:
            raise PlanError(f"the state is that of a stream with {', '.join(differing)}: make this one with the same.")
        if (state["epoch"], state["num_lanes"]) != (first["epoch"], first["num_lanes"]):
            raise PlanError("the states are of different runs: their epochs or numbers of lanes differ. Load those of one run.")


def _find_states(state: Any) -> Iterator[Mapping[str, Any]]:
    """The stream states in a nest of mappings and lists."""
    if isinstance(state, Mapping):
        if state.get("format") == _FORMAT:
            yield state
            return
        if state.get("_steps_since_snapshot"):  # a loader's, older than the rows it has given since
            raise PlanError(
                f"the loader's state is {state['_steps_since_snapshot']} steps older than the rows it gave. Make the loader "
                "with snapshot_every_n_steps=1, or load the state into a loader with the same number of workers."
            )
        state = list(state.values())
    if isinstance(state, list | tuple):
        for part in state:
            yield from _find_states(part)


def _refuse_missing(own: range, lanes: Mapping[int, Any], num_lanes: int) -> None:
    missing = [number for number in own if number not in lanes]
    if missing:
        raise PlanError(
            f"the state holds lanes {', '.join(map(str, sorted(lanes)))} of {num_lanes}; this worker needs also "
            f"{', '.join(map(str, missing))}: ranks or workers are others than when it was taken. Load the states of all of "
            "them together: stream.load_state_dict([state, ...])."
        )
