"""transformers: packed attention that isolates documents on any device, through its public interfaces only."""

from neatpack.hf.context_parallel import ContextParallel as ContextParallel
from neatpack.hf.context_parallel import context_parallel as context_parallel
from neatpack.hf.register import register as register

__all__ = ["ContextParallel", "context_parallel", "register"]
