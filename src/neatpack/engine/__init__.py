"""Who runs the units of work. Units know nothing of each other, and results come back in the order of the tasks."""

from neatpack.engine.local import Job as Job
from neatpack.engine.local import LocalEngine as LocalEngine
from neatpack.engine.local import Tick as Tick

__all__ = ["Job", "LocalEngine", "Tick"]
