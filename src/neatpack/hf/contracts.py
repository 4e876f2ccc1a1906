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
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, cast

import torch

from neatpack.convert.dense import to_additive_mask, to_dense_mask, to_mask_dict
from neatpack.errors import ContractError
from neatpack.hf.heads import refuse_wrappers_and_heads
from neatpack.hf.model_facts import ATTENTION_KINDS, ModelFacts, model_facts
from neatpack.hf.register import NO_WAY_BACK
from neatpack.hf.row_limit import RowLimit, row_limit
from neatpack.packed_seq import PackedSeqParams

Payload = Literal["offsets", "positions", "mask", "mask_dict"]

_STOCK = ("eager", "sdpa", "flex_attention")
# Layers that select keys among those a mask allows: where their attention function takes the mask and the selection.
_SELECTING = "indexed_attention"
_LOST = "offsets do not reach the attention, because {} takes no keyword arguments or does not pass them on"
_STANDING_IN = "its attention layers are those of neatpack.hf.layers"
_REPLACE = "neatpack.hf.use_packed_varlen(model), which gives it attention layers that read boundaries"
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
        position_start: the position of a document's first token: 0, or `padding_idx + 1` in the RoBERTa family.
        row_limit: the longest rows in which documents are what they are alone, None where any will do.
        why: the reason in words.

    Example:
        >>> print(contract_for(model))                                             # doctest: +SKIP
        LlamaForCausalLM on sdpa: positions: no attention_mask, use_cache=False, position_ids that restart
    """

    model: str
    attention: str
    payload: Payload
    window: int | None = None
    dtype: torch.dtype | None = None
    position_start: int = 0
    row_limit: RowLimit | None = None
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
        start = f" from {self.position_start} on" if self.position_start else ""
        rows = f", rows of at most {self.row_limit.tokens} tokens" if self.row_limit else ""
        why = f" ({self.why})" if self.why else ""
        return f"{self.model} on {self.attention}: {self.payload}: {_PAYLOADS[self.payload]}{start}{rows}{why}"

    def refuse_longer_rows(self, length: int | None) -> None:
        """Refuse rows of `length` tokens, padding included (None: of any), where this model takes shorter ones only.

        Raises:
            ContractError: documents of such rows would not be what they are alone.
        """
        limit = self.row_limit
        if limit is None or (length is not None and length <= limit.tokens):
            return
        rows = "rows of any length" if length is None else f"rows of {length} tokens"
        raise ContractError(
            f"{self.model} keeps documents as they are alone in rows of at most {limit.tokens} tokens, and here are {rows}: "
            f"{limit.why}. Pack with --seq-len {limit.tokens} (or less), and build the collator with "
            f"collator_for(model, row_length={limit.tokens})."
        )


_PAYLOADS: dict[str, str] = {
    "offsets": "no attention_mask, flash kwargs cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k with position_ids",
    "positions": "no attention_mask, use_cache=False, position_ids that restart",
    "mask": "a 4-D attention_mask (bool for sdpa, additive for eager) with position_ids",
    "mask_dict": "4-D masks by layer type as attention_mask (bool for sdpa, additive for eager) with position_ids",
}

_SENT = {"positions": "position_ids that restart", "mask": "a 4-D mask", "mask_dict": "4-D masks by layer type"}


def contract_for(model: torch.nn.Module) -> Contract:
    """Name the boundaries that a built transformers model honours, or refuse it.

    Args:
        model: a causal language model; wrappers (PEFT adapters, data parallel, compiled) are looked through. It is not
            run, so it may be sharded or on the meta device.

    Returns:
        What the model must be sent.

    Raises:
        MissingDependencyError: transformers is not installed.
        ContractError: nothing that can be sent would keep documents apart in this model as it is: a recurrent or
            convolution layer, a head or a wrapper that packing does not support, an attention layer that neither reads
            offsets nor a mask. The message says what, where, why and the ways out.

    Source: measured on every causal language model of transformers; `docs/isolation.md` holds the results.
    """
    return _decide(model_facts(refuse_wrappers_and_heads(model)), model)


def _decide(facts: ModelFacts, model: torch.nn.Module) -> Contract:
    payload = replace(_payload(facts, model), row_limit=row_limit(model))
    if not facts.other_inputs:
        return payload
    text_only = f"text only: rows carry no {' or '.join(facts.other_inputs)}"
    return replace(payload, why="; ".join(filter(None, (payload.why, text_only))))


def _payload(facts: ModelFacts, model: torch.nn.Module) -> Contract:
    kind = _kind_of(facts.attention)
    if facts.standing_in and kind != "packed":
        raise ContractError(f"{facts.attention!r} was selected on {facts.name}, whose attention layers {NO_WAY_BACK}")
    _refuse_what_no_payload_reaches(facts, known=ATTENTION_KINDS if kind == "flash" else ATTENTION_KINDS | {_SELECTING})
    start = cast(int, facts.position_start)
    if kind in ("flash", "packed"):
        dtypes = {parameter.dtype for parameter in model.parameters()}
        if kind == "flash" and torch.float32 in dtypes and not facts.flash_finds_dtype:
            raise ContractError(
                f"{facts.name} on {facts.attention}: in float32 transformers' flash path looks for an nn.Linear in the "
                "attention layer to cast to, finds none and stops. Load the model in bfloat16."
            )
        _refuse_own_attention(facts, model)
        if kind == "flash" or not _selects_by_positions(facts):
            _refuse_rewritten_masks(facts, model)
        if kind == "packed" and facts.standing_in:
            if not facts.takes_starts:
                raise ContractError(
                    f"{facts.name} on {facts.attention}: in this version of transformers its code computes on a 2-D "
                    "attention_mask before it hands one on, so no map of segment starts reaches its layers. "
                    "Upgrade transformers (5.24 hands it on)."
                )
            return Contract(
                model=facts.name, attention=facts.attention, payload="offsets", position_start=start, why=_STANDING_IN
            )
        if facts.loses_kwargs and kind == "packed" and _masks_carry_positions(facts):
            lost = _LOST.format(_listed(facts))
            return Contract(model=facts.name, attention=facts.attention, payload="positions", position_start=start, why=lost)
        if facts.loses_kwargs:
            lost = _LOST.format(_listed(facts))
            raise ContractError(f"{facts.name} on {facts.attention}: {lost}. {_stock_way_out(facts, model)}")
        return Contract(model=facts.name, attention=facts.attention, payload="offsets", position_start=start)
    if facts.attention == "flex_attention":
        _refuse_rewritten_masks(facts, model)
    if _masks_carry_positions(facts):
        return Contract(model=facts.name, attention=facts.attention, payload="positions", position_start=start)
    return _mask_contract(facts, next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32))


def _selects_by_positions(facts: ModelFacts) -> bool:
    """Do its layers select keys by a mask that knows the documents, and tell the attention function which?"""
    return "indices" in facts.asks_attention_for and _masks_carry_positions(facts)


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
    if unknown and "block_indices" in facts.asks_attention_for:
        raise ContractError(
            f"{facts.name} has layers of kind {', '.join(unknown)}, which select keys in blocks (block_indices=): they number "
            "the blocks along the row but the queries by position_ids, and in every document but a row's first select "
            "other blocks than alone. Train it on one document a row."
        )
    if unknown:
        raise ContractError(
            f"{facts.name} has layers of kind {', '.join(unknown)} (config.layer_types), which are not known to keep documents "
            f"apart on {facts.attention}. Train it on one document a row."
        )
    if facts.window is not None and facts.window < 1:
        raise ContractError(
            f"{facts.name} is configured with config.sliding_window={facts.window}: no token would see anything, itself "
            "included, and implementations disagree about what that means. Set config.sliding_window=None for no window."
        )
    if "chunked_attention" in facts.layer_kinds and not _chunks_restart():
        raise ContractError(
            f"{facts.name} attends in chunks, and this version of transformers counts them from the row's start, not from each "
            "document's: a document would be cut elsewhere than alone. Upgrade transformers (5.24 restarts them)."
        )
    if facts.selects_by_itself:
        raise ContractError(
            f"{facts.name}: {', '.join(facts.selects_by_itself)} keeps the few keys of a row that score highest, and tokens "
            "that repeat score the same: which of them stay depends on where in the row the document lies. "
            "Train it on one document a row."
        )
    if facts.made_causal_by is not None:
        raise ContractError(
            f"{facts.name} is configured as an encoder: its tokens see later ones, so causal packing does not describe it. "
            f"Set config.{facts.made_causal_by} if it is meant to be a causal language model."
        )
    if not facts.through_interface and not facts.by_themselves:
        raise ContractError(
            f"{facts.name} has no attention layer that could be told boundaries. Train it on one document a row."
        )
    if facts.position_start is None:
        raise ContractError(
            f"{facts.name} numbers its tokens by itself, and not from one padding id on: where a document's positions would "
            "have to start is not known. Train it on one document a row."
        )
    if not facts.takes_positions and not facts.biased_by_distance and not facts.standing_in:
        raise ContractError(
            f"{facts.name}.forward takes no position_ids: it counts positions along the whole row, so every document but the "
            f"first would be read as a continuation. {_alone(facts)}"
        )
    if not facts.shifts_labels:
        raise ContractError(
            f"{facts.name}: its loss shows no sign of shifting labels. It compares the logits of a token with the label of the "
            "same token, as decoders of encoder-decoder families do, whose labels were shifted before. Those of a packed batch "
            "are aligned with its tokens, so it would learn to repeat its input. Train it on one document a row."
        )
    if facts.blocks is not None:
        raise ContractError(
            f"{facts.name} is configured for attention in blocks of the row (config.attention_type={facts.blocks!r}): "
            "blocks do not end where documents do. Load it with attention_type='original_full'."
        )


def _chunks_restart() -> bool:
    """Does transformers count chunks within the segments that it finds in position ids? Up to 5.20 it does not."""
    from transformers import masking_utils

    return hasattr(masking_utils, "remap_positions_for_packed_sequence")


def _refuse_own_attention(facts: ModelFacts, model: torch.nn.Module) -> None:
    if facts.by_themselves:
        raise ContractError(
            f"{facts.name} on {facts.attention}: {', '.join(facts.by_themselves)} computes attention in its own code, past "
            f"transformers' AttentionInterface, and reads no offsets. {_stock_way_out(facts, model)}"
        )


def _refuse_rewritten_masks(facts: ModelFacts, model: torch.nn.Module) -> None:
    if facts.rewrites_mask:
        raise ContractError(
            f"{facts.name} on {facts.attention}: {', '.join(facts.rewrites_mask)} computes a mask of its own from the one it "
            f"is given, and here it is given none that it could. {_stock_way_out(facts, model)}"
        )


def _stock_way_out(facts: ModelFacts, model: torch.nn.Module) -> str:
    """The implementations that this model's documents stay apart on, and what they are sent there."""
    kept: dict[str, str] = {}
    for attention in facts.stock:
        with suppress(ContractError):
            kept[attention] = _payload(replace(facts, attention=attention), model).payload
    if not kept:
        return _alone(facts)
    names, payloads = " or ".join(map(repr, kept)), dict.fromkeys(_SENT[payload] for payload in kept.values())
    stock = f"attn_implementation={names} with collator_for(model), which sends {' or '.join(payloads)} there"
    return f"Call {_REPLACE}, or use {stock}." if facts.replaceable else f"Use {stock}."


def _alone(facts: ModelFacts) -> str:
    """The way out where transformers has none."""
    return f"Call {_REPLACE}." if facts.replaceable else "Train it on one document a row."


def _mask_contract(facts: ModelFacts, dtype: torch.dtype) -> Contract:
    """A 4-D mask, for models whose mask builder never sees position ids."""
    where = f"{facts.name} on {facts.attention}"
    if facts.masks_see_positions is None:
        raise ContractError(
            f"{where}: its code builds its masks itself and does not read position_ids for them, so neither positions nor a "
            f"4-D mask can be relied on. {_alone(facts)}"
        )
    if facts.reads_mask_as_padding:
        raise ContractError(
            f"{where}: its mask builder is never told position_ids, and its distance bias is computed from a 2-D "
            f"attention_mask, so it takes no 4-D one. {_alone(facts)}"
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
    shared["position_start"] = facts.position_start
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
