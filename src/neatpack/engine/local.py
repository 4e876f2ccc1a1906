"""Tasks on this machine: in this process, or on N spawned ones. Results come in task order either way.

A worker builds its job once (so a tokenizer is loaded once a process, not once a task), then serves tasks over a pipe.
"""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, NamedTuple

from neatpack.errors import PackError

Tick = Callable[[int], None]
"""Called with the progress made since the last call."""

Job = Callable[[Any, Tick], Any]
"""What a worker does with a task: `job(task, tick) -> result`."""


class _Worker(NamedTuple):
    process: Any
    pipe: Connection


class LocalEngine:
    """Runs tasks on this machine.

    Args:
        make_job: builds the job; picklable, and called once in every process that does tasks.
        workers: processes; with 1 the tasks run in this process.

    Use it as a context manager: leaving the block ends the processes. They start with the first `run` that has several
    tasks for them, and serve every later one.
    """

    def __init__(self, make_job: Callable[[], Job], workers: int = 1) -> None:
        self._make_job = make_job
        self._wanted = workers
        self._job: Job | None = None
        self._workers: list[_Worker] = []

    def __enter__(self) -> LocalEngine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for worker in self._workers:
            worker.process.terminate()
        for worker in self._workers:
            worker.process.join()
            worker.pipe.close()

    def run(self, tasks: Sequence[Any], tick: Tick) -> Iterator[Any]:
        """Run every task and yield the results in task order.

        Args:
            tasks: picklable, independent of each other.
            tick: told of progress as it is made, in any order.

        Raises:
            PackError: a worker process died.
            Exception: whatever the job raised for the first task, in task order, that failed.
        """
        if min(self._wanted, len(tasks)) <= 1 and not self._workers:
            for task in tasks:
                self._job = self._job or self._make_job()
                yield self._job(task, tick)
            return
        while len(self._workers) < min(self._wanted, len(tasks)):
            self._workers.append(_start_worker(self._make_job))
        yield from self._run_on_workers(tasks, tick)

    def _run_on_workers(self, tasks: Sequence[Any], tick: Tick) -> Iterator[Any]:
        waiting = deque(enumerate(tasks))
        running: dict[Connection, int] = {}
        done: dict[int, tuple[str, Any]] = {}
        for worker in self._workers:
            _give(worker.pipe, waiting, running)
        for following in range(len(tasks)):
            while following not in done:
                for pipe in wait(list(running)):
                    assert isinstance(pipe, Connection)
                    kind, value = self._receive(pipe)
                    if kind == "tick":
                        tick(value)
                        continue
                    done[running.pop(pipe)] = kind, value
                    _give(pipe, waiting, running)
            kind, value = done.pop(following)
            if kind == "error":
                raise value
            yield value

    def _receive(self, pipe: Connection) -> tuple[str, Any]:
        try:
            message: tuple[str, Any] = pipe.recv()
        except (EOFError, ConnectionResetError) as error:
            worker = next(worker for worker in self._workers if worker.pipe is pipe)
            worker.process.join(5)
            raise PackError(
                f"a worker process ended unexpectedly (exit code {worker.process.exitcode}; -9 is usually a lack of memory). "
                "Run the same command again, with fewer --workers if memory is short: finished work is kept."
            ) from error
        return message


def _start_worker(make_job: Callable[[], Job]) -> _Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(make_job, theirs), daemon=True)
    process.start()
    theirs.close()
    return _Worker(process, ours)


def _give(pipe: Connection, waiting: deque[tuple[int, Any]], running: dict[Connection, int]) -> None:
    if waiting:
        index, task = waiting.popleft()
        pipe.send(task)
        running[pipe] = index


def _serve(make_job: Callable[[], Job], pipe: Connection) -> None:
    """A worker's life: build the job, then one task after the other until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means

    def tick(amount: int) -> None:
        pipe.send(("tick", amount))

    job: Job | None = None
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        try:
            job = job or make_job()
            reply = ("result", job(task, tick))
        except BrokenPipeError:
            return  # the parent is gone
        except Exception as error:
            reply = ("error", portable_error(error))
        try:
            pipe.send(reply)
        except BrokenPipeError:
            return


def portable_error(error: Exception) -> Exception:
    """The exception itself where it survives a pipe, else one that tells its story."""
    story = "".join(traceback.format_exception(error))
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"a worker failed:\n{story}")
    return copy if isinstance(copy, PackError) else RuntimeError(f"a worker failed:\n{story}")
