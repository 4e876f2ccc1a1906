"""Add the attention implementation `packed_varlen` to transformers."""

from __future__ import annotations

from neatpack.errors import ContractError, MissingDependencyError

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
