"""What all stand-in layers share: how boundaries reach them, and ALiBi for attention that takes no bias."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from neatpack.errors import ContractError
from neatpack.hf.layers.boundaries import CACHES, SegmentStarts, places_within
from neatpack.hf.mask import PackedMask

_FINE = 256  # positions below this are exact in bfloat16, and so are its multiples up to 65536
_EXTRA = 8  # columns that ALiBi adds to a head: four in use, eight because kernels want multiples of eight


class PackedLayer(torch.nn.Module):
    """An attention layer of its own code that calls the registered attention instead.

    Boundaries come as `attention_mask`: the map `[B, 1, 1, S]` of segment starts that `read_boundaries` put there, or the
    `PackedMask` that the model's mask builder made.

    Attributes:
        attention_name: what the attention is registered as.
    """

    attention_name = "packed_varlen"

    if TYPE_CHECKING:  # what the layers hold is declared by transformers, untyped

        def __getattr__(self, name: str) -> Any: ...

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | PackedMask | None,
        *,
        scaling: float,
        dropout: float = 0.0,
        window: int | None = None,
        slopes: torch.Tensor | None = None,
        skips_padding: bool = False,
    ) -> torch.Tensor:
        """Causal attention within documents; heads are merged.

        Args:
            query: `[B, H, S, D]`.
            key: `[B, Hkv, K, D]`.
            value: `[B, Hkv, K, D]`.
            mask: boundaries, or the mask in full where there is a cache or padding.
            scaling: factor on the scores.
            dropout: probability of dropping an attention weight, in training.
            window: sliding window in tokens, the query's own included.
            slopes: `[H]` of ALiBi, in units of the scores after scaling.
            skips_padding: ALiBi counts the tokens that a mask keeps, not those that it leaves out.

        Returns:
            `[B, S, H * D]`.
        """
        causal = bool(getattr(self, "is_decoder", True))
        boundaries = _boundaries(mask, causal)
        if (
            window is not None
            and not isinstance(boundaries, PackedMask)
            and (mask is not None or query.shape[2] != key.shape[2])
        ):
            boundaries, window = _within(window, boundaries, query.shape[2], key), None
        width = value.shape[-1]
        if slopes is not None:
            places = _places(boundaries, key, skips_padding)
            query, key, value = with_alibi(query, key, value, slopes / scaling, places)
        attended, _ = ALL_ATTENTION_FUNCTIONS[self.attention_name](
            self,
            query,
            key,
            value,
            boundaries,
            dropout=dropout if self.training else 0.0,
            scaling=scaling,
            sliding_window=window,
            is_causal=causal,
        )
        merged: torch.Tensor = attended[..., :width].flatten(2)
        return merged

    def cached(
        self, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any], layer: int | None, window: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values with those of a cache in front, where the call has one.

        Raises:
            ContractError: a window over a cache of fixed size, in which the last keys are not the last places.
        """
        cache = next((options[name] for name in CACHES if options.get(name) is not None), None)
        if cache is None:
            return key, value
        if window is not None and getattr(cache, "is_compileable", False):
            raise ContractError(
                f"{type(self).__name__} has a window of {window} tokens and was given a cache of fixed size, where it would be "
                "counted from the end of the cache. Generate with a dynamic cache, which is the default."
            )
        keys, values = getattr(cache, "self_attention_cache", cache).update(key, value, layer)
        return keys, values


def in_heads(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """`[B, S, H * D]` to `[B, H, S, D]`."""
    return tensor.view(*tensor.shape[:-1], heads, -1).transpose(1, 2)


def rate(dropout: torch.nn.Module) -> float:
    """The probability of an `nn.Dropout`, 0 for what stands in its place."""
    return float(getattr(dropout, "p", 0.0))


def refuse_cross_attention(states: torch.Tensor | None) -> None:
    """Refuse keys of another sequence: rows carry one sequence of documents."""
    if states is not None:
        raise ContractError(
            "cross-attention over encoder_hidden_states: the documents of another sequence are not described by this batch's "
            "boundaries. Build the model without use_packed_varlen, and train it on one document a row."
        )


def with_alibi(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slopes: torch.Tensor, places: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Fold ALiBi into the dot product, so that any attention computes it.

    The bias of a key is its slope times its place; a softmax does not change where all scores of a query move together, so
    the query's own place can be left out. That is a product of two more columns: the slope on the query's side, the place
    on the key's. Both are split into a coarse and a fine part, which keeps them exact in bfloat16.

    Args:
        query: `[B, H, S, D]`.
        key: `[B, Hkv, K, D]`.
        value: `[B, Hkv, K, D]`.
        slopes: `[H]`, in units of the scores before scaling.
        places: `[B, K]`, each key's place in its document.

    Returns:
        The three with `D + 8` columns; those of the value are zeros.

    Source: Press et al., Train Short, Test Long (ALiBi), 2022, section 3.
    """
    high = slopes.float().to(query.dtype)
    low = (slopes.float() - high.float()).to(query.dtype)
    sides = torch.stack([high * _FINE, high, low * _FINE, low], dim=-1)
    coarse, fine = (part.to(key.dtype) for part in (places // _FINE, places % _FINE))
    columns = torch.stack([coarse, fine, coarse, fine], dim=-1)
    spare = (0, _EXTRA - columns.shape[-1])
    for_query = functional.pad(sides, spare)[None, :, None, :].expand(len(query), -1, query.shape[2], -1)
    for_key = functional.pad(columns, spare)[:, None].expand(-1, key.shape[1], -1, -1)
    return torch.cat([query, for_query], dim=-1), torch.cat([key, for_key], dim=-1), functional.pad(value, (0, _EXTRA))


def _boundaries(mask: torch.Tensor | PackedMask | None, causal: bool) -> torch.Tensor | PackedMask | None:
    """The map of segment starts as what the attention reads; everything else as it is."""
    if isinstance(mask, SegmentStarts):
        with torch._C.DisableTorchFunctionSubclass():  # a plain tensor from here on
            return PackedMask(mask[:, 0, 0], from_positions=True, causal=causal)
    return mask


def _within(window: int, mask: torch.Tensor | None, queries: int, key: torch.Tensor) -> torch.Tensor:
    """A mask in full that knows no window, with one: `[B or 1, 1, S, K]`, bool or additive as it came."""
    index = torch.arange(key.shape[2], device=key.device)
    ahead = index[None, :] - index[-queries:, None]
    seen = ((ahead <= 0) & (ahead > -window))[None, None]
    if mask is None:
        return seen
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, torch.finfo(mask.dtype).min)


def _places(boundaries: torch.Tensor | PackedMask | None, key: torch.Tensor, skips_padding: bool) -> torch.Tensor:
    """Each key's place in its document, `[B, K]`; in its row where the mask, bool `[B, 1, S, K]`, says who sees whom."""
    if isinstance(boundaries, torch.Tensor) and skips_padding:
        return (boundaries.any(2)[:, 0].cumsum(1) - 1).clamp(min=0)
    starts = boundaries.starts if isinstance(boundaries, PackedMask) else None
    if starts is None or starts.shape[1] != key.shape[2]:  # keys of a cache in front: the attention refuses that
        return torch.arange(key.shape[2], device=key.device).expand(len(key), -1)
    return places_within(starts.to(key.device))
