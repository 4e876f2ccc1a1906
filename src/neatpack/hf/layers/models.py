"""Models that look at the boundaries they are called with, in their own forward, whoever calls that.

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
from neatpack.hf.layers.boundaries import check_positions, read_boundaries
from neatpack.hf.register import use_packed_varlen


class LooksFirst(torch.nn.Module):
    """A model whose forward looks at its call first; made of a transformers class by `looking`.

    Copies, pickles and new models of its class (`type(model)(config)`) are on packed_varlen too.
    """

    if TYPE_CHECKING:
        config: Any
        attention_name: str

    _original: type[torch.nn.Module]

    def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
        config = copy.deepcopy(config)  # which may name packed_varlen, and Falcon looks for a layer of that name
        config._attn_implementation = "eager"
        super().__init__(config, *arguments, **options)
        use_packed_varlen(self)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        made: Any = super().__reduce_ex__(max(int(protocol), 2))
        kind = ReadsBoundaries if isinstance(self, ReadsBoundaries) else ChecksPositions
        return _empty, (self._original, kind), *made[2:]

    def _look(self, names: list[str], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """The call to make instead."""
        raise NotImplementedError


class ReadsBoundaries(LooksFirst):
    """A model with stand-in layers, for which it reads boundaries."""

    def _look(self, names: list[str], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return read_boundaries(self, names, arguments, options)


class ChecksPositions(LooksFirst):
    """A model that does not tell its attention layers the positions, so that those cannot see them restart."""

    def _look(self, names: list[str], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        check_positions(self, names, arguments, options)
        return arguments, options


@cache
def looking(original: Any, kind: Any) -> type[torch.nn.Module]:
    """A subclass of a model's class that is of a kind of `LooksFirst` too.

    It has the name of the original, which saved configs hold, and its place, by which transformers and PEFT look things up.
    """
    body = {"forward": _looking(original.forward), "_original": original}
    body |= {name: getattr(original, name) for name in ("__doc__", "__module__", "__qualname__")}
    return type(original.__name__, (kind, original), body)


def _looking(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that looks first; its signature stays what trainers and `generate` look at."""
    parameters = [*signature(forward).parameters.values()][1:]
    names = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    unnamed = any(each.kind is each.VAR_POSITIONAL for each in parameters)

    @wraps(forward)
    def look_first(self: Any, *arguments: Any, **options: Any) -> Any:
        if unnamed and len(arguments) > len(names):
            raise ContractError(
                f"{type(self).__name__}.forward takes *arguments, so nobody knows what the {len(arguments)} given by place "
                "are, and boundaries cannot be looked for. Give them by name: model(input_ids=...)."
            )
        arguments, options = self._look(names, arguments, options)
        return forward(self, *arguments, **options)

    return look_first


def _empty(original: Any, kind: Any) -> torch.nn.Module:
    made = looking(original, kind)
    return made.__new__(made)
