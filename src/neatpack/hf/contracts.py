"""Which boundaries a built model honours: one payload, or a refusal that says what would leak and what to do instead.

transformers drops boundaries without a word wherever a model, a layer or an attention implementation does not read the
form they come in. A contract names the form that all of them read:

    offsets     flash kwargs (`cu_seq_lens_*`, `max_length_*`) with position_ids; flash builds and packed_varlen
    positions   position_ids that restart, without a mask and without a cache; eager, sdpa and flex_attention
    mask        a 4-D mask, bool for sdpa and additive for eager, where the mask builder is never told positions
    mask_dict   such masks by layer type, where layers with and without a sliding window alternate

`contract_for` decides on `ModelFacts` alone and runs nothing, so it works on sharded models and on the meta device.
`check_isolation` is the proof by measurement.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import torch

from neatpack.convert.dense import to_additive_mask, to_dense_mask, to_mask_dict
from neatpack.errors import ContractError
from neatpack.hf.heads import refuse_wrappers_and_heads
from neatpack.hf.model_facts import ATTENTION_KINDS, ModelFacts, model_facts
from neatpack.packed_seq import PackedSeqParams

Payload = Literal["offsets", "positions", "mask", "mask_dict"]

_STOCK = ("eager", "sdpa", "flex_attention")
# Keyword arguments by which attention classes ask for more than a registered function computes from boundaries alone.
_SPARSE = {"indices", "block_indices"}
# Layers that select keys among those a mask allows keep documents apart under a mask, and only there.
_KINDS_UNDER_A_MASK = ATTENTION_KINDS | {"indexed_attention"}
_LOST = "offsets do not reach the attention, because {} takes no keyword arguments or does not pass them on"
_ON_PACKED_VARLEN = "Use attn_implementation=neatpack.hf.register() (packed_varlen), which reads the offsets"


@dataclass(frozen=True, kw_only=True)
class Contract:
    """What a model must be sent for its documents to stay apart.

    Attributes:
        model: the model's class.
        attention: its attention implementation.
        payload: `offsets`, `positions`, `mask` or `mask_dict`; see the module.
        window: sliding window in tokens that the masks must carry, since an explicit mask switches the model's own off.
        dtype: of additive masks, None for bool ones.
        why: the reason in words.

    Example:
        >>> print(contract_for(model))                                             # doctest: +SKIP
        LlamaForCausalLM on sdpa: positions: position_ids that restart, no attention_mask, use_cache=False
    """

    model: str
    attention: str
    payload: Payload
    window: int | None = None
    dtype: torch.dtype | None = None
    why: str = ""

    @property
    def mask_builder(self) -> Callable[[PackedSeqParams], Any] | None:
        """What builds `attention_mask` from a batch's params: None where no mask may be sent. Picklable."""
        if self.payload == "mask_dict":
            return partial(to_mask_dict, window=cast(int, self.window), dtype=self.dtype)
        if self.payload == "mask":
            build = to_dense_mask if self.dtype is None else partial(to_additive_mask, dtype=self.dtype)
            return partial(build, window=self.window)
        return None

    def __str__(self) -> str:
        return f"{self.model} on {self.attention}: {self.payload}: {_PAYLOADS[self.payload]}{self.why and f' ({self.why})'}"


_PAYLOADS: dict[str, str] = {
    "offsets": "flash kwargs cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k with position_ids, no attention_mask",
    "positions": "position_ids that restart, no attention_mask, use_cache=False",
    "mask": "a 4-D attention_mask (bool for sdpa, additive for eager) with position_ids",
    "mask_dict": "4-D masks by layer type as attention_mask (bool for sdpa, additive for eager) with position_ids",
}


def contract_for(model: torch.nn.Module) -> Contract:
    """Name the boundaries that a built transformers model honours, or refuse it.

    Args:
        model: a causal language model; wrappers (PEFT adapters, data parallel, compiled) are looked through. It is not
            run, so it may be sharded or on the meta device.

    Raises:
        ContractError: nothing that can be sent would keep documents apart in this model as it is: a recurrent or
            convolution layer, a head or a wrapper that packing does not support, an attention layer that neither reads
            offsets nor a mask. The message says what, where, why and the ways out.

    Source: measured on every causal language model of transformers; `docs/isolation.md` holds the results.
    """
    return _decide(model_facts(refuse_wrappers_and_heads(model)), model)


def _decide(facts: ModelFacts, model: torch.nn.Module) -> Contract:
    kind = _kind_of(facts.attention)
    _refuse_what_no_payload_reaches(facts, known=_KINDS_UNDER_A_MASK if kind == "stock" else ATTENTION_KINDS)
    if kind in ("flash", "packed"):
        dtypes = {parameter.dtype for parameter in model.parameters()}
        if kind == "flash" and torch.float32 in dtypes and not facts.flash_finds_dtype:
            raise ContractError(
                f"{facts.name} on {facts.attention}: in float32 transformers' flash path looks for an nn.Linear in the "
                "attention layer to cast to, finds none and stops. Load the model in bfloat16."
            )
        if kind == "packed" and facts.loses_kwargs and not facts.by_themselves and _masks_carry_positions(facts):
            lost = _LOST.format(_listed(facts))
            return Contract(model=facts.name, attention=facts.attention, payload="positions", why=lost)
        _refuse_unless_offsets_arrive(facts, packed=kind == "packed")
        return Contract(model=facts.name, attention=facts.attention, payload="offsets")
    if facts.attention == "flex_attention":
        _refuse_rewritten_masks(facts)
    if _masks_carry_positions(facts):
        return Contract(model=facts.name, attention=facts.attention, payload="positions")
    return _mask_contract(facts, next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32))


def _masks_carry_positions(facts: ModelFacts) -> bool:
    return bool(facts.masks_see_positions) and facts.takes_positions


def _listed(facts: ModelFacts) -> str:
    return ", ".join(facts.loses_kwargs)


def _kind_of(attention: str) -> str:
    """`flash`, `packed` (ours, under whatever name) or `stock`; anything else is refused: nobody knows what it reads."""
    from transformers import AttentionInterface

    from neatpack.hf.attention import PackedVarlenAttention

    if isinstance(AttentionInterface._global_mapping.get(attention), PackedVarlenAttention):
        return "packed"
    if attention in _STOCK:
        return "stock"
    if "flash" in attention and "paged" not in attention:
        return "flash"
    raise ContractError(
        f"attn_implementation={attention!r} is not one whose treatment of boundaries is known. Use a flash build, eager, sdpa, "
        "flex_attention, or neatpack.hf.register()."
    )


# --- refusals ---------------------------------------------------------------------------------------------------------


def _refuse_what_no_payload_reaches(facts: ModelFacts, known: frozenset[str]) -> None:
    unknown = sorted(set(facts.layer_kinds) - known)
    if facts.recurrent:
        raise ContractError(
            f"{facts.name} carries a state from token to token in {', '.join(facts.recurrent)}: in transformers it runs on "
            "from one document into the next, whatever offsets, positions or masks are sent. "
            "Train it on one document a row, or choose an attention-only model."
        )
    if unknown:
        raise ContractError(
            f"{facts.name} has layers of kind {', '.join(unknown)} (config.layer_types), which are not known to keep documents "
            f"apart on {facts.attention}. Try another attn_implementation (sdpa, eager), or train it on one document a row."
        )
    if not facts.causal:
        raise ContractError(
            f"{facts.name} is configured as an encoder: its tokens see later ones, so causal packing does not describe it. "
            "Set config.is_decoder=True if it is meant to be a causal language model."
        )
    if not facts.through_interface and not facts.by_themselves:
        raise ContractError(
            f"{facts.name} has no attention layer that could be told boundaries. Train it on one document a row."
        )
    if facts.counts_own_positions:
        raise ContractError(
            f"{facts.name} numbers its tokens from the padding id on, along the whole row: positions that restart at 0 mean "
            "something else to it. Train it on one document a row."
        )
    if not facts.takes_positions and not facts.biased_by_distance:
        raise ContractError(
            f"{facts.name}.forward takes no position_ids: it counts positions along the whole row, so every document but the "
            "first would be read as a continuation. Train it on one document a row."
        )


def _refuse_unless_offsets_arrive(facts: ModelFacts, *, packed: bool) -> None:
    where = f"{facts.name} on {facts.attention}"
    if facts.by_themselves:
        raise ContractError(
            f"{where}: {', '.join(facts.by_themselves)} computes attention in its own code, past transformers' "
            f"AttentionInterface, and reads no offsets. {_stock_way_out(facts)}"
        )
    if facts.loses_kwargs:
        raise ContractError(f"{where}: {_LOST.format(_listed(facts))}. {_stock_way_out(facts)}")
    _refuse_rewritten_masks(facts)
    sparse = sorted(_SPARSE & facts.asks_attention_for)
    if sparse and packed:
        raise ContractError(
            f"{where}: its attention selects keys ({', '.join(sparse)}=), which packed_varlen does not compute. "
            f"{_stock_way_out(facts)}"
        )


def _refuse_rewritten_masks(facts: ModelFacts) -> None:
    if facts.rewrites_mask:
        raise ContractError(
            f"{facts.name} on {facts.attention}: {', '.join(facts.rewrites_mask)} computes a mask of its own from the one it "
            f"is given, and here it is given none that it could. {_stock_way_out(facts)}"
        )


def _stock_way_out(facts: ModelFacts) -> str:
    return (
        "Use attn_implementation='eager' and collator_for(model), which sends what its mask builder reads."
        if facts.masks_see_positions is not None
        else "Train it on one document a row."
    )


def _mask_contract(facts: ModelFacts, dtype: torch.dtype) -> Contract:
    """A 4-D mask, for models whose mask builder never sees position ids."""
    where = f"{facts.name} on {facts.attention}"
    if facts.masks_see_positions is None:
        raise ContractError(
            f"{where}: its code builds its masks itself and does not read position_ids for them, so neither positions nor a "
            "4-D mask can be relied on. Train it on one document a row."
        )
    if facts.reads_mask_as_padding:
        raise ContractError(
            f"{where}: its mask builder is never told position_ids, and its distance bias is computed from a 2-D "
            "attention_mask, so it takes no 4-D one. Train it on one document a row."
        )
    if facts.attention == "flex_attention":
        raise ContractError(
            f"{where}: its mask builder is never told position_ids, so flex_attention would see one document a row. "
            f"{_ON_PACKED_VARLEN}, or sdpa or eager with a 4-D mask."
        )
    blind = "its mask builder is never told position_ids"
    kinds = set(facts.layer_kinds)
    additive = None if facts.attention == "sdpa" else dtype
    shared: dict[str, Any] = {"model": facts.name, "attention": facts.attention, "dtype": additive, "why": blind}
    if facts.window is None and "chunked_attention" not in kinds:
        return Contract(payload="mask", **shared)
    if facts.takes_mask_dict and kinds <= {"full_attention", "sliding_attention"}:
        return Contract(payload="mask_dict", window=facts.window, **shared)
    if facts.all_sliding and "chunked_attention" not in kinds:
        return Contract(payload="mask", window=facts.window, **shared)
    raise ContractError(
        f"{where}: {blind}, and one explicit 4-D mask would switch off the windows of its {', '.join(sorted(kinds))} layers. "
        f"{_ON_PACKED_VARLEN}."
    )
