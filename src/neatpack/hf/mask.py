"""The mask function of `packed_varlen`: what transformers knows about who sees whom, in O(S) instead of O(S * S).

transformers asks for a mask before it runs the layers, and tells neither offsets nor positions, only a function
`allowed(batch, head, query, key)`. A causal function whose document boundaries and window are all there is to it is
read off its first sub-diagonal: a position starts a segment exactly when it may not see its predecessor. So a packed
batch costs a `[B, S]` map and no mask. Everything else (padding, a cache of another length, bidirectional blocks,
custom overlays) is built by transformers' own `sdpa_mask`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import torch

from neatpack.errors import ContractError

FIRST_QUERY = "first_query"
"""What a mask over a cache is told to remember: which of its keys belongs to the first query."""
# Models that work on the mask they get, and would not take None for one.
_WANT_TENSORS = frozenset({"mpt"})

MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, eq=False)
class PackedMask:
    """What a `[B, 1, S, S]` mask would say, for attention that needs no mask.

    It stands where a mask tensor would. A model that computes attention by itself, past the registered function, finds
    no tensor here and stops with a ContractError instead of running without any mask. Only `mask[:, 0]` is answered, with
    the mask in full: layers that select keys ask that way which ones they may select from.

    Attributes:
        starts: `[B, S]` bool, True where a position may not see its predecessor; None where every position may.
        from_positions: transformers found the segments in the position ids (and restarted windows and chunks in each).
        window: sliding-window size of these layers, None for unlimited.
        causal: no position sees a later one.
        sees_later: `[]` bool, only while torch compiles, when values cannot be looked at: True where `causal` does not hold
            after all. Whoever computes attention from this mask has to refuse that when the program runs.
    """

    starts: torch.Tensor | None = None
    from_positions: bool = False
    window: int | None = None
    causal: bool = True
    sees_later: torch.Tensor | None = None
    ndim: ClassVar[int] = 4  # asked by transformers, which hands a mask that it prepared for generation back in

    def to(self, device: torch.device | torch.dtype | str | int, non_blocking: bool = False) -> PackedMask:
        """Return the same mask with its map on `device`: layers may live on several. A dtype changes nothing."""
        if self.starts is None or isinstance(device, torch.dtype):
            return self
        starts = self.starts.to(device, non_blocking=non_blocking)
        later = None if self.sees_later is None else self.sees_later.to(device, non_blocking=non_blocking)
        return PackedMask(starts, self.from_positions, self.window, self.causal, later)

    def dense(self, window: int | None = None) -> torch.Tensor:
        """The mask in full: bool `[B, S, S]`, True where the second position is seen by the first.

        Args:
            window: sliding window in tokens, where the mask itself has none.

        Raises:
            ContractError: this mask says nothing about segments, so its shape is not known.
        """
        if self.starts is None:
            raise _refusal("the shape")
        segment, index = self.starts.cumsum(1), torch.arange(self.starts.shape[1], device=self.starts.device)
        ahead = index[None, :] - index[:, None]
        seen = segment[:, :, None] == segment[:, None, :]
        if self.causal:
            seen &= ahead <= 0
        window = self.window or window
        return seen if window is None else seen & (ahead > -window) & (ahead < window)

    def __getitem__(self, index: Any) -> torch.Tensor:
        """`mask[:, 0]`, the mask of one head, bool `[B, S, S]`; anything else is refused."""
        whole = slice(None)
        if (
            isinstance(index, tuple)
            and index[:1] == (whole,)
            and index[1:2] == (0,)
            and set(map(str, index[2:])) <= {str(whole)}
        ):
            return self.dense()
        raise _refusal("a part")

    def __getattr__(self, name: str) -> NoReturn:
        """What tensors have and this has not: refused like the rest, and still absent for `hasattr`."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise _NoTensorError(str(_refusal(name)))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Stop the model that treats this as a tensor: its attention does not go through transformers' interface."""
        raise _refusal(repr(getattr(func, "__name__", func)))


class _NoTensorError(ContractError, AttributeError):
    """A mask was asked for an attribute that only tensors have."""


def _refusal(what: str) -> ContractError:
    return ContractError(
        f"this model's own code asks for {what} of its attention mask: attention does not go through transformers' "
        "AttentionInterface, so packed_varlen never runs and documents would mix. "
        "Use attn_implementation='sdpa' or 'eager' and the batch of collator_for(model)."
    )


def packed_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction | None = None,
    attention_mask: torch.Tensor | PackedMask | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **options: Any,
) -> PackedMask | torch.Tensor | None:
    """Answer transformers' request for a mask: a `PackedMask` wherever that says it all, else what `sdpa_mask` says.

    The arguments are those of `transformers.masking_utils.sdpa_mask`.

    Returns:
        `PackedMask` for whole rows without padding; a bool `[B, 1, S, K]` mask (or None, for SDPA's own causal flag)
        for padding, a cache of another length, and mask functions that are more than causal segments in a window.
    """
    from transformers.masking_utils import sdpa_mask

    if isinstance(attention_mask, PackedMask):
        return attention_mask
    allow_is_causal_skip &= getattr(options.get("config"), "model_type", None) not in _WANT_TENSORS
    whole_rows = q_length == kv_length and not use_vmap and mask_function is not None
    if whole_rows and not _has_padding(attention_mask):
        if allow_is_bidirectional_skip and local_size is None:
            return PackedMask(causal=False)
        compact = (
            None
            if allow_is_bidirectional_skip
            else _compact(mask_function, batch_size, q_length, q_offset, local_size, not allow_is_causal_skip, device)
        )
        if compact is not None:
            return compact
    overlay = {} if mask_function is None else {"mask_function": mask_function}
    mask: torch.Tensor | None = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=allow_is_causal_skip,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip,
        use_vmap=use_vmap,
        device=device,
        **overlay,
        **options,
    )
    if mask is not None and 1 < q_length < kv_length and not torch.compiler.is_compiling():
        setattr(mask, FIRST_QUERY, int(q_offset) - kv_offset)
    return mask


def _has_padding(attention_mask: torch.Tensor | None) -> bool:
    return attention_mask is not None and not bool(attention_mask.all())


def _compact(
    allowed: MaskFunction | None,
    batch: int,
    length: int,
    offset: int | torch.Tensor,
    local_size: int | None,
    overlaid: bool,
    device: torch.device | str,
) -> PackedMask | None:
    """Read segments off the sub-diagonal; None when later positions are visible (bidirectional blocks)."""
    window = local_size if local_size is not None and local_size < length else None
    if allowed is None or not (overlaid or window is not None):
        return PackedMask(window=window)
    rows = torch.arange(batch, device=device)[:, None]
    later = torch.arange(1, length, device=device)[None, :] + offset
    head = torch.zeros(1, 1, dtype=torch.long, device=device)
    later_seen = allowed(rows, head, later - 1, later).any() if overlaid else None
    joined = allowed(rows, head, later, later - 1).expand(batch, -1)
    starts = torch.cat([torch.ones(batch, 1, dtype=torch.bool, device=device), ~joined], dim=1)
    if torch.compiler.is_compiling():
        return PackedMask(starts, from_positions=overlaid, window=window, sees_later=later_seen)
    if later_seen is not None and bool(later_seen):
        return None
    together = bool(joined.all())
    if together and not overlaid:
        return PackedMask(window=window)
    # models that always want a mask in full ask like those whose positions restart; what tells them apart is the boundaries
    return PackedMask(starts, from_positions=overlaid and not together, window=window)
