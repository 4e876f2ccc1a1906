"""How boundaries get to stand-in layers: what the model is called with is read where it is called, and handed on as a map.

Between a model and its attention these families lose keyword arguments, and most tell their mask builder no positions. What
none of them loses is a mask of four dimensions, which transformers takes for finished. So the model's own forward (see
`neatpack.hf.layers.models`) turns offsets (or positions that restart) into the map `[B, 1, 1, S]` of segment starts in the
mask's place, after the checks that packed_varlen makes elsewhere; and refuses what would be dropped on the way. Nothing is
kept between calls: with gradient checkpointing a layer runs again on the very map of its first run.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

from neatpack.errors import ContractError
from neatpack.hf.lost import WAYS_OUT, refuse_lost_boundaries
from neatpack.hf.mask import PackedMask
from neatpack.hf.register import NO_WAY_BACK, register
from neatpack.hf.segments import refuse_short_maximum, segments_from_offsets
from neatpack.hf.segments_op import traced_offsets

_OFFSETS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
CACHES = ("cache", "past_key_values", "layer_past")
"""What transformers' versions and layers call a cache."""

Call = tuple[tuple[Any, ...], dict[str, Any]]


class SegmentStarts(torch.Tensor):
    """The map of segment starts, bool `[B, 1, 1, S]`: a type of its own, so that no mask can be taken for it.

    What a model computes from it on the way to its layers is of this type still.
    """


def read_boundaries(model: Any, names: list[str], arguments: tuple[Any, ...], options: dict[str, Any]) -> Call:
    """A call of a model with stand-in layers, with boundaries in the form that the layers read.

    Args:
        model: the model.
        names: what its forward calls its arguments, in order.
        arguments: positional arguments of the call.
        options: keyword arguments of the call: offsets as `PackedCollator` sends them, or positions that restart; or the map,
            where a model around this one has read them.

    Raises:
        ContractError: boundaries that do not fit the input or would be lost, a mask that nobody but a cache of fixed size
            asks for, or attention weights asked for, which nobody computes here.
    """
    named = _by_name(names, arguments, options)
    if named is None:
        return arguments, options
    mask = named.get("attention_mask")
    if isinstance(mask, SegmentStarts):
        return (), _with_positions(named, names, mask)
    name, width = ("input_ids", 1) if named.get("inputs_embeds") is None else ("inputs_embeds", 2)
    tokens = named.get(name)
    if not isinstance(tokens, torch.Tensor) or tokens.dim() <= width:
        return arguments, options  # the model's own error says what is missing
    _refuse_another_attention(model)
    _register_here(model)
    _refuse_weights(model, named)
    offsets = [named.pop(each, None) for each in _OFFSETS]
    if tokens.dim() > width + 1:
        _refuse_documents_in_choices(named, offsets)
        return (), named
    _refuse_finished_mask(model, mask, named)
    starts = _starts(tokens, named, offsets)
    if starts is None:
        return (), named
    read: SegmentStarts = starts[:, None, None].as_subclass(SegmentStarts)
    return (), _with_positions({**named, "attention_mask": read}, names, read)


def check_positions(model: Any, names: list[str], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Refuse a call whose positions restart where nothing would keep documents apart.

    packed_varlen does that itself wherever it is told positions. This is for models that tell their attention none:
    transformers finds documents in their positions only where neither a mask nor a cache comes along.

    Args:
        model: the model.
        names: what its forward calls its arguments, in order.
        arguments: positional arguments of the call.
        options: keyword arguments of the call.

    Raises:
        ContractError: positions that restart came without offsets, and with a mask that does not part them, or a cache.
    """
    _register_here(model)
    named = _by_name(names, arguments, options) or {}
    positions, mask = named.get("position_ids"), named.get("attention_mask")
    if not isinstance(positions, torch.Tensor) or positions.dim() != 2 or named.get("cu_seq_lens_q") is not None:
        return
    if positions.shape[1] < 2:
        return  # a step on a cache
    asked = named.get("use_cache")
    made = getattr(model.config.get_text_config(), "use_cache", True) if asked is None else asked
    cached = made or any(named.get(name) is not None for name in CACHES)
    if mask is None and not cached:
        return
    for each in mask.values() if isinstance(mask, dict) else [mask]:
        _refuse_where_mask_lets_through(each, positions, named)


def _by_name(names: list[str], arguments: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any] | None:
    """All arguments by name; None where the model's own error is to say what is given twice, or too much."""
    given = names[: len(arguments)]
    if len(given) < len(arguments) or options.keys() & set(given):
        return None
    return {**dict(zip(given, arguments, strict=True)), **options}


def _with_positions(named: dict[str, Any], names: list[str], read: SegmentStarts) -> dict[str, Any]:
    """The call with positions that restart with each document, where it has none and its model takes some."""
    if named.get("position_ids") is not None or "position_ids" not in names:
        return named
    with torch._C.DisableTorchFunctionSubclass():
        return {**named, "position_ids": places_within(read[:, 0, 0])}


def places_within(starts: torch.Tensor) -> torch.Tensor:
    """Each token's place in its segment, `[B, S] int64`, from the map of segment starts `[B, S]`."""
    index = torch.arange(starts.shape[1], device=starts.device).expand(len(starts), -1)
    return index - torch.where(starts, index, 0).cummax(1).values


def _starts(tokens: torch.Tensor, named: dict[str, Any], offsets: list[Any]) -> torch.Tensor | None:
    """The map of segment starts, bool `[B, S]`, or None where every row is one document, or a part of one behind a cache."""
    (batch, length), mask, positions = tokens.shape[:2], named.get("attention_mask"), named.get("position_ids")
    if any(part is not None for part in offsets):
        if mask is not None:
            raise ContractError(
                f"an attention_mask {list(mask.shape)} came along with cu_seq_lens_q: padding is a segment of its own in the "
                f"offsets, so leave the mask out. {WAYS_OUT}"
            )
        return _starts_of_offsets(tokens, positions, offsets)
    if positions is not None and positions.dim() > 2:
        raise ContractError(
            f"position_ids {list(positions.shape)}: these layers read boundaries in offsets, or positions [B, S]. {WAYS_OUT}"
        )
    if positions is None or positions.shape[-1] != length or length < 2:
        return None
    positions = positions.view(-1, length)
    if mask is not None:
        _refuse_where_mask_lets_through(mask, positions, named)
        return None
    breaks = (positions[:, 1:] - positions[:, :-1] != 1).expand(batch, -1)
    # a compiler cannot look; a map without boundaries says the same as none
    return _with_first(breaks) if torch.compiler.is_compiling() or bool(breaks.any()) else None


def _refuse_where_mask_lets_through(mask: Any, positions: torch.Tensor, named: dict[str, Any]) -> None:
    """Refuse positions that restart where a mask lets tokens see past that: of padding `[B, K]`, `[B, 1, S, K]`, ours, none."""
    length = positions.shape[-1]
    cache = next((named[name] for name in CACHES if named.get(name) is not None), None)
    held = None if cache is None or torch.compiler.is_compiling() else int(cache.get_seq_length())
    if mask is None or isinstance(mask, PackedMask):
        refuse_lost_boundaries(positions, len(positions), length, starts=None if mask is None else mask.starts)
    elif isinstance(mask, torch.Tensor) and mask.dim() == 2 and mask.shape[1] >= length:
        tail = mask.shape[1] - length  # of a cache of fixed size the mask may name the unused places too
        first = tail if held is None else min(held, tail)
        kept = mask[:, first : first + length].to(torch.bool)
        refuse_lost_boundaries(positions, max(len(mask), len(positions)), length, kept=kept)
    elif isinstance(mask, torch.Tensor) and mask.dim() == 4:
        covered = held is not None and held + length <= mask.shape[3]  # caches of windows forget
        refuse_lost_boundaries(positions, max(len(mask), len(positions)), length, mask=mask, first=held if covered else None)


def _refuse_finished_mask(model: Any, mask: Any, named: dict[str, Any]) -> None:
    """Refuse a mask that is not `[B, S]`, but for what `generate` makes for a cache of fixed size: bool `[B, 1, S, K]`."""
    if mask is None or (isinstance(mask, torch.Tensor) and mask.dim() == 2):
        return
    fixed = any(getattr(named.get(cache), "is_compileable", False) for cache in CACHES)
    if fixed and isinstance(mask, torch.Tensor) and mask.dim() == 4 and mask.dtype == torch.bool:
        return
    raise ContractError(
        f"{type(model).__name__} has attention layers of neatpack, and was given a mask that is not [B, S]: those layers "
        "take boundaries as offsets. Build the batch with collator_for(model) as the model is now, or leave the mask out."
    )


def _refuse_documents_in_choices(named: dict[str, Any], offsets: list[Any]) -> None:
    """Refuse documents in rows of choices, `[B, C, S]`: a model makes rows of those after it was called."""
    positions, mask = named.get("position_ids"), named.get("attention_mask")
    packed = any(part is not None for part in offsets) or (isinstance(mask, torch.Tensor) and mask.dim() > 3)
    if positions is not None and not packed:
        packed = torch.compiler.is_compiling() or bool((positions[..., 1:] - positions[..., :-1] != 1).any())
    if packed:
        raise ContractError(
            "boundaries of documents came along with several choices a row, input_ids [B, C, S]: each choice is a row of its "
            "own here, and holds one document. Leave position_ids and offsets out, or give choices as rows, [B * C, S]."
        )


def _starts_of_offsets(tokens: torch.Tensor, positions: torch.Tensor | None, offsets: list[Any]) -> torch.Tensor:
    (batch, length), (queries, keys, *longest) = tokens.shape[:2], offsets
    if queries is None:
        raise ContractError(f"cu_seq_lens_k or max_length_* came without cu_seq_lens_q. {WAYS_OUT}")
    if torch.compiler.is_compiling():
        cuts = traced_offsets(tokens.new_empty(batch, 1, length, 0), None, positions, queries, keys)
    else:
        segments = segments_from_offsets(None, positions, queries, keys, batch, length, tokens.device)
        refuse_short_maximum(segments, *longest)
        cuts = segments.cu_seqlens
    # one place more, for the last offset and empty segments at the end
    marks = torch.zeros(batch * length + 1, dtype=torch.bool, device=tokens.device)
    return marks.index_fill(0, cuts.long(), True)[:-1].view(batch, length)


def _with_first(breaks: torch.Tensor) -> torch.Tensor:
    """`[B, S - 1]` to `[B, S]`: a row's first token starts a segment."""
    return torch.cat([breaks.new_ones(len(breaks), 1), breaks], dim=1)


def _refuse_another_attention(model: Any) -> None:
    name = model.config._attn_implementation
    if name != model.attention_name:
        raise ContractError(f"{name!r} was selected on {type(model).__name__}, whose attention layers {NO_WAY_BACK}")


def _register_here(model: Any) -> None:
    """Register what the model runs on: one that was sent to another process does not bring that along."""
    if model.attention_name not in AttentionInterface._global_mapping:
        register(model.attention_name)


def _refuse_weights(model: Any, named: dict[str, Any]) -> None:
    asked = named.get("output_attentions")
    if asked or (asked is None and getattr(model.config, "output_attentions", False)):
        raise ContractError(
            f"{type(model).__name__} on packed_varlen computes no attention weights (output_attentions=True). Load the model "
            "again on 'eager' to look at them."
        )
