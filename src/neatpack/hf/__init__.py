"""transformers: packed attention that isolates documents on any device, through its public interfaces only."""

from neatpack.hf.register import register as register

__all__ = ["register"]
