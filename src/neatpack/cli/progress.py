"""A progress bar on stderr, where that is a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

_UNITS = {"pack": "Mtok/s", "audit": ""}  # of millions a second; other steps count bytes, and an audit counts models


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None] | None]:
    """Yield a callback that draws `(step, done, total)`, or None where nobody is watching."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description:>9}"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[speed]}"))
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        tasks: dict[str, TaskID] = {}

        def update(step: str, done: int, total: int) -> None:
            if step not in tasks:
                tasks[step] = bar.add_task(step, speed="")
            unit = _UNITS.get(step, "MB/s")
            speed = next(task.speed for task in bar.tasks if task.id == tasks[step])
            bar.update(tasks[step], completed=done, total=total, speed=f"{speed / 1e6:.1f} {unit}" if speed and unit else "")

        yield update
