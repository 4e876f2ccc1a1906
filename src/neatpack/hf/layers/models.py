"""Models with stand-in layers: each reads the boundaries it is called with in its own forward, whoever calls that.

A hook would not do: `model.forward(...)` runs none, and that is how PEFT calls the model that it adapts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, wraps
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch

from neatpack.errors import ContractError
from neatpack.hf.layers.boundaries import read_boundaries
from neatpack.hf.register import use_packed_varlen


class ReadsBoundaries(torch.nn.Module):
    """A model whose forward reads boundaries for its layers; made of a transformers class by `reading`.

    Copies, pickles and new models of its class (`type(model)(config)`) are on packed_varlen too.
    """

    if TYPE_CHECKING:
        config: Any

    _original: type[torch.nn.Module]

    def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
        config = copy.deepcopy(config)  # which may name packed_varlen, and Falcon looks for a layer of that name
        config._attn_implementation = "eager"
        super().__init__(config, *arguments, **options)
        use_packed_varlen(self)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        made: Any = super().__reduce_ex__(max(int(protocol), 2))
        return _empty, (self._original,), *made[2:]


@cache
def reading(original: Any) -> type[torch.nn.Module]:
    """A subclass of a model's class, whose models read boundaries.

    It has the name of the original, which saved configs hold, and its place, by which transformers and PEFT look things up.
    """
    body = {"forward": _reading(original.forward), "_original": original}
    body |= {name: getattr(original, name) for name in ("__doc__", "__module__", "__qualname__")}
    return type(original.__name__, (ReadsBoundaries, original), body)


def _reading(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that reads boundaries first; its signature stays what trainers and `generate` look at."""
    parameters = [*signature(forward).parameters.values()][1:]
    names = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    unnamed = any(each.kind is each.VAR_POSITIONAL for each in parameters)

    @wraps(forward)
    def read_first(self: Any, *arguments: Any, **options: Any) -> Any:
        if unnamed and len(arguments) > len(names):
            raise ContractError(
                f"{type(self).__name__}.forward takes *arguments, so nobody knows what the {len(arguments)} given by place "
                "are, and boundaries cannot be looked for. Give them by name: model(input_ids=...)."
            )
        arguments, options = read_boundaries(self, names, arguments, options)
        return forward(self, *arguments, **options)

    return read_first


def _empty(original: Any) -> torch.nn.Module:
    kind = reading(original)
    return kind.__new__(kind)
