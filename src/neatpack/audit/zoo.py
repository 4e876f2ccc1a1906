"""The isolation matrix: every causal language model that transformers ships, on every attention implementation.

Each entry is measured in a worker process that answers one line a model, so that a crash or a hang costs that model only:
it is recorded as such, and a fresh worker takes the rest.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from neatpack.errors import SourceError

VERDICTS = ("isolated", "refused", "unavailable", "unbuildable", "wrong")
"""What a cell can be: kept apart, as measured; refused by the contract; not offered by transformers for that model; not
buildable here; or accepted and not isolated, which is a fault of the contract."""


@dataclass(frozen=True)
class Zoo:
    """The matrix.

    Attributes:
        entries: one dict a model type: its `name`, its `cells` by implementation, and the `seconds` that it took.
    """

    entries: tuple[dict[str, Any], ...]

    @property
    def wrong(self) -> list[str]:
        """Cells that the contract accepts and the measurement does not, as `model on implementation`."""
        return [
            f"{entry['name']} on {attention}"
            for entry in self.entries
            for attention, cell in entry["cells"].items()
            if cell["verdict"] == "wrong"
        ]

    def totals(self) -> dict[str, dict[str, int]]:
        """Number of models by implementation and verdict."""
        counts: dict[str, Counter[str]] = {}
        for entry in self.entries:
            for attention, cell in entry["cells"].items():
                counts.setdefault(attention, Counter())[cell["verdict"]] += 1
        return {attention: {verdict: count[verdict] for verdict in VERDICTS} for attention, count in counts.items()}


def audit_zoo(
    names: Sequence[str] = (),
    *,
    workers: int = 2,
    timeout: float = 300.0,
    progress: Callable[[int, int, dict[str, Any]], None] | None = None,
) -> Zoo:
    """Measure the isolation matrix.

    Args:
        names: model types; all of transformers' causal-LM mapping by default.
        workers: processes at a time, one thread each.
        timeout: seconds that one model may take before it is recorded as hanging.
        progress: told how many are done, of how many, and the last entry.

    Returns:
        The matrix, in the order of the names.

    Raises:
        SourceError: a name that is not in the mapping.
    """
    from neatpack.audit.zoo_models import causal_lm_names

    known = causal_lm_names()
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise SourceError(
            f"{', '.join(unknown)}: not among the {len(known)} model types that transformers' AutoModelForCausalLM builds."
        )
    wanted = list(dict.fromkeys(names)) or known
    todo: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in wanted:
        todo.put(name)
    done: dict[str, dict[str, Any]] = {}
    lock = threading.Lock()

    def finished(entry: dict[str, Any]) -> None:
        with lock:
            done[entry["name"]] = entry
            if progress is not None:
                progress(len(done), len(wanted), entry)

    threads = [threading.Thread(target=_serve, args=(todo, timeout, finished)) for _ in range(min(workers, len(wanted)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Zoo(tuple(done[name] for name in wanted))


def _serve(todo: queue.SimpleQueue[str], timeout: float, finished: Callable[[dict[str, Any]], None]) -> None:
    """Feed one worker after another from the queue until it is empty."""
    worker: subprocess.Popen[str] | None = None
    try:
        while True:
            try:
                name = todo.get_nowait()
            except queue.Empty:
                return
            worker = worker or _start()
            answer = _ask(worker, name, timeout)
            if not answer:
                worker.kill()
                _stop(worker)
                answer, worker = _crashed(name, worker.returncode, timeout), None
            finished(answer)
    finally:
        if worker is not None:
            _stop(worker)


def _start() -> subprocess.Popen[str]:
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        [sys.executable, "-m", "neatpack.audit.zoo_entry"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **quiet},
    )


def _ask(worker: subprocess.Popen[str], name: str, timeout: float) -> dict[str, Any]:
    """The worker's answer, or nothing: it died, or was stopped after `timeout` seconds."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    alarm = threading.Timer(timeout, worker.kill)
    alarm.start()
    try:
        worker.stdin.write(name + "\n")
        worker.stdin.flush()
        line = worker.stdout.readline()
    except BrokenPipeError:
        line = ""
    finally:
        alarm.cancel()
    answer: dict[str, Any] = json.loads(line) if line else {}
    return answer


def _stop(worker: subprocess.Popen[str]) -> None:
    """Close both pipes, which ends a worker that is idle, and wait for it."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    with suppress(BrokenPipeError):
        worker.stdin.close()
    worker.wait()
    worker.stdout.close()


def _crashed(name: str, code: int, timeout: float) -> dict[str, Any]:
    from neatpack.audit.zoo_entry import IMPLEMENTATIONS

    why = f"its process ended with code {code}, or took more than {timeout:g} s"
    return {
        "name": name,
        "cells": {each: {"verdict": "unbuildable", "why": why} for each in IMPLEMENTATIONS},
        "seconds": timeout,
    }
