"""Tasks on a Ray cluster: one that is there, or one that is started on this machine. Results come in task order.

A task is a Ray task on one CPU. Its arguments and its result are small and travel with the messages, so that the object
store stays empty; what tasks work on lies in files that every machine of the cluster must see under the same path. When a
worker or a machine is lost, Ray runs its task again elsewhere: tasks leave whole files or none, so twice is as good as once.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from types import ModuleType, TracebackType
from typing import Any
from urllib.parse import urlsplit

from neatpack.engine.local import Job, Tick, portable_error
from neatpack.errors import MissingDependencyError, PackError

RETRIES = 8
"""How often a task is run again after its worker or machine was lost: often enough for machines that come and go."""

CONNECT_SECONDS = 5.0
"""How long a cluster has to answer at its address; Ray itself would try for minutes without a word."""


class RayEngine:
    """Runs tasks on a Ray cluster.

    Args:
        make_job: builds the job; picklable and hashable, and called once in every worker process that does tasks.
        workers: most tasks at once; None for as many as the cluster has CPUs, however it grows.
        address: a cluster ("auto", "ray://host:port", "host:port"); None takes the one that this process is connected to or
            that RAY_ADDRESS names, and else starts one on this machine.

    Use it as a context manager: leaving the block ends what it started, and leaves a cluster that was there alone.

    Raises:
        MissingDependencyError: ray is not installed.
        PackError: the cluster cannot be reached.
    """

    def __init__(self, make_job: Callable[[], Job], workers: int | None = None, address: str | None = None) -> None:
        self._ray = _import_ray()
        self._make_job = make_job
        self._wanted = workers
        self._address = address
        self._started = False

    def __enter__(self) -> RayEngine:
        if self._ray.is_initialized():
            return self
        address = self._address or os.environ.get("RAY_ADDRESS")
        where: dict[str, Any] = {"address": address}
        if not address:
            where = {"address": "local", "num_cpus": self._wanted, "include_dashboard": False}
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a cluster of our own reports to nobody
        else:
            _refuse_unreachable(address)
        try:
            self._ray.init(**where, log_to_driver=False, logging_level="error")
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise PackError(
                f"the Ray cluster at {address or 'this machine'} cannot be used ({error}). Check --ray-address, and that "
                "`ray status` works there."
            ) from error
        self._started = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._started:
            self._ray.shutdown()

    def run(self, tasks: Sequence[Any], tick: Tick) -> Iterator[Any]:
        """Run every task and yield the results in task order; see `LocalEngine.run`.

        Args:
            tasks: picklable, independent of each other.
            tick: told of the progress of each task when it is done, in any order.

        Raises:
            PackError: a task was lost with its worker again and again.
            Exception: whatever the job raised for the first task, in task order, that failed.
        """
        serve = self._ray.remote(num_cpus=1, max_retries=RETRIES)(_serve)
        waiting = deque(enumerate(tasks))
        running: dict[Any, int] = {}
        done: dict[int, tuple[str, Any]] = {}
        try:
            for following in range(len(tasks)):
                while following not in done:
                    while waiting and len(running) < self._places():
                        index, task = waiting.popleft()
                        running[serve.remote(self._make_job, task)] = index
                    ready, _ = self._ray.wait(list(running), num_returns=1)
                    for reference in ready:
                        kind, value, progress = self._get(reference)
                        done[running.pop(reference)] = kind, value
                        tick(progress)
                kind, value = done.pop(following)
                if kind == "error":
                    raise value
                yield value
        finally:
            # Not cancelled: Ray ends the driver's process if a task finishes meanwhile. Our own connection ends its tasks.
            if running and not self._started:
                self._ray.wait(list(running), num_returns=len(running))

    def _places(self) -> int:
        """Tasks to hand out: two for each CPU of the moment, so that no worker waits for the next one."""
        return self._wanted or 2 * max(1, int(self._ray.cluster_resources().get("CPU", 1)))

    def _get(self, reference: Any) -> tuple[str, Any, int]:
        try:
            reply: tuple[str, Any, int] = self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:  # ours are replies; this one came before our code ran
            reason = str(error).strip().splitlines()[-1]
            raise PackError(
                f"a Ray worker cannot do neatpack's tasks ({reason}). Install the same versions of neatpack and Python on "
                "every machine of the cluster."
            ) from error
        except self._ray.exceptions.RayError as error:
            reason = str(error).strip().splitlines()[0]
            raise PackError(
                f"a task was lost with its Ray worker {RETRIES + 1} times ({type(error).__name__}: {reason}). If memory is "
                "short, give each machine fewer CPUs for Ray. Run the same command again: finished work is kept."
            ) from error
        return reply


def _import_ray() -> ModuleType:
    try:
        import ray
    except ImportError as error:
        raise MissingDependencyError("ray", "--engine ray", "neatpack[ray]") from error
    module: ModuleType = ray
    return module


def _refuse_unreachable(address: str) -> None:
    """Refuse an address at which nothing listens; "auto" and schemes that Ray alone knows are left to Ray."""
    scheme, _, place = address.rpartition("://")
    if scheme not in ("", "ray") or place in ("auto", "local"):
        return
    way_out = (
        "Check --ray-address or RAY_ADDRESS: expected host:port or ray://host:port of a cluster that runs (`ray status` "
        "there shows it), or neither, to start one on this machine."
    )
    try:
        parsed = urlsplit(f"//{place}")
        host, port = parsed.hostname, parsed.port
    except ValueError as error:
        raise PackError(f"the address of the Ray cluster, {address}, cannot be read ({error}). {way_out}") from error
    if not host or port is None:
        raise PackError(f"the address of the Ray cluster, {address}, names no {'port' if host else 'host'}. {way_out}")
    try:
        socket.create_connection((host, port), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        reason = error.strerror or str(error)
        raise PackError(
            f"no Ray cluster answers at {address} ({reason}; waited at most {CONNECT_SECONDS:g} seconds). {way_out}"
        ) from error


def _serve(make_job: Callable[[], Job], task: Any) -> tuple[str, Any, int]:
    """What a Ray worker does: ("result" or "error", the value, progress made)."""
    progress = 0

    def tick(amount: int) -> None:
        nonlocal progress
        progress += amount

    try:
        return "result", _job(make_job)(task, tick), progress
    except Exception as error:
        return "error", portable_error(error), progress


@lru_cache(maxsize=1)
def _job(make_job: Callable[[], Job]) -> Job:
    """The job of this process, built once: a tokenizer is loaded once a process, not once a task."""
    return make_job()
