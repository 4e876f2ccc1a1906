"""Add the attention implementation `packed_varlen` to transformers, and select it on a built model."""

from __future__ import annotations

from typing import Any, TypeVar, cast

import torch

from neatpack.errors import ContractError, MissingDependencyError

Model = TypeVar("Model", bound=torch.nn.Module)

NO_WAY_BACK = (
    "are those that use_packed_varlen gave it: they run on packed_varlen only. Load the model again for another attention."
)
# transformers routes on these parts of a name before it looks the name up: kernels from the hub, flash builds, SDPA checks.
_RESERVED = ("flash", "sdpa", "flex_attention", "eager", "paged", "/", "|")


def register(name: str = "packed_varlen") -> str:
    """Register varlen attention, and the mask function that goes with it, under `name`.

    Afterwards `from_pretrained(..., attn_implementation=name)`, `config._attn_implementation = name` and
    `model.set_attn_implementation(name)` select it for any model whose attention goes through transformers' interface.
    Call it once a process (a data-parallel worker is a process); calling it again changes nothing.

    Args:
        name: what to select it by. Parts of a name mean something to transformers; those are refused.

    Returns:
        `name`, so that `attn_implementation=neatpack.hf.register()` reads as one line.

    Raises:
        ContractError: a name that transformers would route elsewhere.
        MissingDependencyError: transformers is not installed.

    Example:
        >>> from transformers import AutoModelForCausalLM                                       # doctest: +SKIP
        >>> model = AutoModelForCausalLM.from_pretrained(path, attn_implementation=register())  # doctest: +SKIP
        >>> model(**PackedCollator(...)(rows))                                                  # doctest: +SKIP

    Source: `transformers.AttentionInterface`, `transformers.AttentionMaskInterface`.
    """
    reserved = [part for part in _RESERVED if part in name]
    if reserved or not name:
        raise ContractError(
            f"attention name {name!r} contains {', '.join(map(repr, reserved)) or 'nothing'}, which transformers routes "
            "elsewhere before it looks registered names up. Use a name like 'packed_varlen'."
        )
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise  # transformers is there, and something that it needs is not
        raise MissingDependencyError("transformers", "neatpack.hf.register", "neatpack[hf]") from error
    from neatpack.hf.attention import PackedVarlenAttention
    from neatpack.hf.mask import packed_mask

    AttentionInterface.register(name, PackedVarlenAttention())
    AttentionMaskInterface.register(name, packed_mask)
    return name


def use_packed_varlen(model: Model, name: str = "packed_varlen") -> Model:
    """Run a built model's attention on packed_varlen, also where its family's code goes past transformers' interface.

    Most families are simply set to it. In bloom, falcon, gpt_neo, gpt_neox_japanese, mpt, openai-gpt, xglm, big_bird,
    megatron-bert, rembert and roformer the attention layers of this one model are given a class of `neatpack.hf.layers`
    instead of their own: same parameters, same names (checkpoints, adapters and optimizers see no difference), another forward.
    The model itself becomes one of a subclass of its class, whose forward reads the boundaries it is called with, and refuses
    those that would be lost. transformers and other models are not touched. There is no way back: for another attention load
    the model again.

    Where a family does not tell its attention layers the positions (llama4, deepseek_v32, persimmon, ...), the model becomes
    one of a subclass too, whose forward refuses positions that restart under a mask or a cache: transformers would pass over
    them, and packed_varlen not see them.

    Args:
        model: a transformers model as it was loaded: call this before it is compiled, hooked or sharded.
        name: what the attention is registered as; see `register`.

    Returns:
        The same model.

    Raises:
        ContractError: neither way leads there, or a layer's forward has been replaced already, so that another class would
            change nothing.
        MissingDependencyError: transformers is not installed.

    Example:
        >>> model = use_packed_varlen(AutoModelForCausalLM.from_pretrained(path))              # doctest: +SKIP
        >>> trainer = Trainer(model, args, train_dataset=rows, data_collator=collator_for(model))  # doctest: +SKIP
    """
    register(name)
    from transformers import PreTrainedModel

    from neatpack.hf.layers import stand_in_for
    from neatpack.hf.layers.base import PackedLayer
    from neatpack.hf.layers.models import ChecksPositions, LooksFirst, ReadsBoundaries, looking
    from neatpack.hf.model_facts import loses_positions, sources_of

    models = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    if not models:
        raise ContractError(f"{type(model).__name__} is no transformers model: nothing in it selects an attention.")
    layers = {part: kind for part in model.modules() if not isinstance(part, LooksFirst) and (kind := stand_in_for(part))}
    layers |= {part: type(part) for part in model.modules() if isinstance(part, PackedLayer)}
    sources = {} if layers else sources_of(models[0])
    lost = not layers and loses_positions(models[0], sources)
    changing = [each for each in models if (layers or lost) and not isinstance(each, LooksFirst)]
    _refuse_replaced(*layers, *changing)
    if not layers:
        _refuse_own_masks(models[0], sources)
        _set(models[0], name)
    for part, kind in layers.items():
        part.__class__ = kind
        cast(Any, part).attention_name = name
    for each in models if layers else ():
        cast(Any, each.config)._attn_implementation = name
    for each in changing:
        each.__class__ = looking(cast(Any, type(each)), ReadsBoundaries if layers else ChecksPositions)
    for each in models if layers or lost else ():
        cast(Any, each).attention_name = name
    return model


def _refuse_own_masks(model: torch.nn.Module, sources: dict[type, str]) -> None:
    from neatpack.hf.model_facts import rewrites_masks, selects_by_indices

    names = rewrites_masks(model, sources)
    if names and not selects_by_indices(sources):
        raise ContractError(
            f"{type(model).__name__}: {', '.join(names)} computes a mask of its own from the one it is given, as numbers to "
            "add, which those of packed_varlen are not. contract_for(model) says what it can be trained on."
        )


def _refuse_replaced(*parts: torch.nn.Module) -> None:
    """Refuse parts whose class does not decide what their call runs."""
    replaced = sorted({type(part).__name__ for part in parts if "forward" in vars(part)})
    if replaced:
        raise ContractError(
            f"the forward of {', '.join(replaced)} has been replaced on this model (accelerate's prepare and dispatch do that, "
            "and torch.compile(model.forward)), so another class would change nothing. Call use_packed_varlen right after "
            "loading, before anything else."
        )


def _set(inner: Any, name: str) -> None:
    """Select a registered name on a model whose attention goes through the interface."""
    try:
        inner.set_attn_implementation(name)
    except ValueError as error:
        raise ContractError(f"{type(inner).__name__} does not take another attention: {error}") from error
    if inner.config._attn_implementation != name:
        raise ContractError(
            f"{type(inner).__name__} computes attention in its own code, past transformers' AttentionInterface, and neatpack "
            "has no layer to put in its place. contract_for(model) says what it can be trained on."
        )
