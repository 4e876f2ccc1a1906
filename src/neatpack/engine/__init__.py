"""Who runs the units of work. Units know nothing of each other, and results come back in the order of the tasks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from neatpack.engine.local import Job as Job
from neatpack.engine.local import LocalEngine as LocalEngine
from neatpack.engine.local import Tick as Tick
from neatpack.engine.ray import RayEngine as RayEngine
from neatpack.errors import PackError

EngineName = Literal["local", "ray"]
ENGINES = ("local", "ray")

__all__ = ["ENGINES", "EngineName", "Job", "LocalEngine", "RayEngine", "Tick", "make_engine"]


def make_engine(
    name: EngineName, make_job: Callable[[], Job], *, workers: int | None, ray_address: str | None = None
) -> LocalEngine | RayEngine:
    """The engine of that name.

    Args:
        name: "local" (processes of this machine) or "ray".
        make_job: builds the job in every process that does tasks.
        workers: processes, or with Ray most tasks at once; None is one process, or every CPU of the cluster.
        ray_address: the cluster; None starts one on this machine.

    Raises:
        PackError: an unknown name, or an address for another engine than Ray.
        MissingDependencyError: ray is not installed.
    """
    if name not in ENGINES:
        raise PackError(f"unknown engine {name!r}: choose one of {', '.join(ENGINES)}.")
    if name == "ray":
        return RayEngine(make_job, workers, ray_address)
    if ray_address is not None:
        raise PackError(f"the address of a Ray cluster ({ray_address}) was given for engine={name!r}: choose engine='ray'.")
    return LocalEngine(make_job, workers or 1)
