"""Flash attention over offsets: FlashAttention 2, 3 and 4 and torch's own `varlen_attn`, and the activations they take.

All of them read the same offsets under other names, trust them blindly, and take queries `[T, H, D]`:

    form A  q/k/v are the whole batch, `[B*S, H, D]`; every row of the output is written. Prefer it.
    form B  q/k/v hold the real tokens only: `indices, real = unpad_params(params)`, `unpad(x, indices)`, any function here
            on `real`, then `pad(output, indices, B, S)`.
    form C  q/k/v are the whole batch, and `seqused_*` says how much of each slot is real. Rows of the output past it are
            uninitialised memory: zero them before use.

On the CPU each function checks the offsets (a wrong one is an illegal access on the device); on an accelerator the check
would be a sync, so convert on the CPU and move the result, or call `check_params` yourself.
"""

from __future__ import annotations

import inspect
from typing import Any, Literal

import torch

from neatpack.convert.segments import (
    check_form,
    check_params,
    check_window,
    segment_documents,
    segment_index,
    segment_lengths,
    slots,
)
from neatpack.errors import ContractError, MetadataError
from neatpack.packed_seq import PackedSeqParams


def to_fa2(
    params: PackedSeqParams,
    *,
    window: int | None = None,
    pad_segments_to: int | None = None,
    round_max_seqlen_to: int | None = None,
) -> dict[str, Any]:
    """Convert to the arguments of FlashAttention 2's `flash_attn_varlen_func` (form A, or B on unpadded params).

    Args:
        params: the batch's metadata.
        window: sliding window in tokens, the query's own included; None for unlimited.
        pad_segments_to: repeat the last offset until there are this many segments, for CUDA graphs and compilation.
            The added segments are empty. `max_seqlen` is then at least 2: at 1 the kernel takes a decoding path that
            assumes one token a segment.
        round_max_seqlen_to: round `max_seqlen` up to a multiple of this. Larger costs empty blocks, never correctness.

    Returns:
        `cu_seqlens_q`, `cu_seqlens_k` (one `[N+1] int32` tensor), `max_seqlen_q`, `max_seqlen_k`, `causal`, `window_size`;
        `[0, 2, 5, 6, 7, 9, 12]` and 3 on the worked example.

    Raises:
        MetadataError: offsets that do not fit the map (checked on the CPU), more segments than `pad_segments_to`, or a window
            or rounding below 1.

    Source: `flash_attn/flash_attn_interface.py` of flash-attention.
    """
    offsets, longest = _offsets(params, pad_segments_to, round_max_seqlen_to)
    return {**_shared(offsets, longest), "causal": True, "window_size": _window(window, unlimited=-1)}


def to_fa3(
    params: PackedSeqParams,
    *,
    form: Literal["A", "C"] = "A",
    window: int | None = None,
    pad_segments_to: int | None = None,
    round_max_seqlen_to: int | None = None,
) -> dict[str, Any]:
    """Convert to the keyword arguments of FlashAttention 3's `flash_attn_varlen_func` (form A or C, B on unpadded params).

    Args:
        params: the batch's metadata.
        form: "C" gives slot offsets and `seqused_q`, `seqused_k`: padding costs nothing, and its output is not written.
        window: sliding window in tokens, the query's own included; None for unlimited.
        pad_segments_to: repeat the last offset until there are this many segments (see `to_fa2`).
        round_max_seqlen_to: round `max_seqlen` up to a multiple of this.

    Returns:
        What `to_fa2` gives; in form C `[0, 2, 6, 7, 9, 12]`, 3 and `seqused_q = seqused_k = [2, 3, 1, 2, 3]` (int32) on
        the worked example.

    Raises:
        MetadataError: what `to_fa2` refuses, or another form.

    Source: `hopper/flash_attn_interface.py` of flash-attention.
    """
    check_form(form)
    if form == "A":
        return to_fa2(params, window=window, pad_segments_to=pad_segments_to, round_max_seqlen_to=round_max_seqlen_to)
    arguments = _slot_arguments(params, pad_segments_to, round_max_seqlen_to)
    return {**arguments, "causal": True, "window_size": _window(window, unlimited=-1)}


def to_fa4(
    params: PackedSeqParams,
    *,
    form: Literal["A", "C"] = "A",
    window: int | None = None,
    pad_segments_to: int | None = None,
    round_max_seqlen_to: int | None = None,
) -> dict[str, Any]:
    """Convert to the keyword arguments of FlashAttention 4's `flash_attn_varlen_func` (form A or C, B on unpadded params).

    Pass them by keyword: its fourth positional parameter is no offset. At head size 256 its backward pass is known to
    fail on empty segments, so leave `pad_segments_to` out there.

    Args:
        params: the batch's metadata.
        form: "C" gives slot offsets and `seqused_q`, `seqused_k`: padding costs nothing, and its output is not written.
        window: sliding window in tokens, the query's own included; None for unlimited.
        pad_segments_to: repeat the last offset until there are this many segments (see `to_fa2`).
        round_max_seqlen_to: round `max_seqlen` up to a multiple of this.

    Returns:
        What `to_fa3` gives, with None for an unlimited side of `window_size`.

    Raises:
        MetadataError: what `to_fa2` refuses.

    Source: `flash_attn/cute/interface.py` of flash-attention.
    """
    arguments = to_fa3(params, form=form, pad_segments_to=pad_segments_to, round_max_seqlen_to=round_max_seqlen_to)
    return {**arguments, "window_size": _window(window, unlimited=None)}


def to_varlen(
    params: PackedSeqParams,
    *,
    window: int | None = None,
    pad_segments_to: int | None = None,
    round_max_seqlen_to: int | None = None,
) -> dict[str, Any]:
    """Convert to the arguments of `torch.nn.attention.varlen.varlen_attn` (form A, or B on unpadded params).

    Causality is written the way the installed torch takes it: `window_size=(-1, 0)`, or `is_causal=True` in early versions.
    `enable_gqa=True` is yours to add when there are fewer key heads.

    Args:
        params: the batch's metadata.
        window: sliding window in tokens, the query's own included; None for unlimited.
        pad_segments_to: repeat the last offset until there are this many segments (see `to_fa2`).
        round_max_seqlen_to: round the maxima up to a multiple of this.

    Returns:
        `cu_seq_q`, `cu_seq_k`, `max_q`, `max_k` and the causal argument; `[0, 2, 5, 6, 7, 9, 12]` and 3 on the worked example.

    Raises:
        MetadataError: what `to_fa2` refuses.
        ContractError: a window that the installed torch's function cannot take.
    """
    offsets, longest = _offsets(params, pad_segments_to, round_max_seqlen_to)
    boundaries = {"cu_seq_q": offsets, "cu_seq_k": offsets, "max_q": longest, "max_k": longest}
    return {**boundaries, **_varlen_causality(_varlen_parameters(), window)}


def to_attention_mask_in_length(params: PackedSeqParams) -> torch.Tensor:
    """Convert to the lengths that `bert_padding.unpad_input_for_concatenated_sequences` takes (form B, by row).

    On an accelerator this reports to the host.

    Returns:
        `[B, S] int32`: the lengths of each row's documents from the left, then zeros;
        `[[2, 3, 0, 0, 0, 0], [1, 2, 3, 0, 0, 0]]` on the worked example.

    Raises:
        MetadataError: padding before a document of its row, whose place lengths alone cannot say.

    Source: `flash_attn/bert_padding.py` of flash-attention.
    """
    documents, lengths = segment_documents(params), segment_lengths(params)
    rows = params.cu_seqlens[:-1].long() // max(params.doc_ids.shape[1], 1)
    early = (documents[:-1] == 0) & (rows[1:] == rows[:-1])
    if bool(early.any()):
        segment = int(early.nonzero()[0])
        raise MetadataError(
            f"row {int(rows[segment])} has padding before a document, at flat position {int(params.cu_seqlens[segment])}; "
            "lengths from the left cannot describe it. Pad at the end of the row, or use unpad_params."
        )
    columns = segment_index(params).reshape(-1)[params.cu_seqlens[:-1].long()].long()
    in_length = torch.zeros(params.doc_ids.shape, dtype=torch.int32, device=lengths.device)
    in_length[rows, columns] = lengths * (documents != 0)
    return in_length


def unpad(tensor: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Gather the real tokens (form B) of a batch: `[B, S, ...]` to `[n_real, ...]`, differentiable.

    Args:
        tensor: activations or ids with the batch and sequence axes in front.
        indices: `[n_real]`, from `unpad_params`.
    """
    return tensor.flatten(0, 1).index_select(0, indices.to(tensor.device))


def pad(tensor: torch.Tensor, indices: torch.Tensor, batch: int, length: int, *, fill: float = 0) -> torch.Tensor:
    """Scatter real tokens (form B) back: `[n_real, ...]` to `[batch, length, ...]`, `fill` on the padding; differentiable.

    Args:
        tensor: `[n_real, ...]`, one entry a real token.
        indices: `[n_real]`, from `unpad_params`.
        batch: B.
        length: S.
        fill: what padded positions hold.

    Raises:
        MetadataError: another number of tokens than of indices.
    """
    if len(tensor) != len(indices):
        raise MetadataError(f"{len(tensor)} tokens for {len(indices)} indices. Use the indices that unpadded this batch.")
    empty = tensor.new_full((batch * length, *tensor.shape[1:]), fill)
    return empty.index_copy(0, indices.to(tensor.device), tensor).reshape(batch, length, *tensor.shape[1:])


def _offsets(params: PackedSeqParams, pad_segments_to: int | None, round_max_seqlen_to: int | None) -> tuple[torch.Tensor, int]:
    """Form A offsets and maximum with the static options applied."""
    if params.cu_seqlens.device.type == "cpu":
        check_params(params)
    added = _added_segments(len(params.cu_seqlens) - 1, pad_segments_to)
    return _repeat_last(params.cu_seqlens, added), _rounded(params.max_seqlen, added, round_max_seqlen_to)


def _slot_arguments(params: PackedSeqParams, pad_segments_to: int | None, round_max_seqlen_to: int | None) -> dict[str, Any]:
    """Form C offsets, maxima and `seqused_*` with the static options applied."""
    if params.cu_seqlens.device.type == "cpu":
        check_params(params)
    layout = slots(params)
    added = _added_segments(len(layout.lengths), pad_segments_to)
    used = torch.cat([layout.lengths, layout.lengths.new_zeros(added)])
    longest = _rounded(layout.max_length, added, round_max_seqlen_to)
    return {**_shared(_repeat_last(layout.cu_seqlens, added), longest), "seqused_q": used, "seqused_k": used}


def _shared(offsets: torch.Tensor, longest: int) -> dict[str, Any]:
    return {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": longest, "max_seqlen_k": longest}


def _added_segments(segments: int, pad_segments_to: int | None) -> int:
    if pad_segments_to is not None and pad_segments_to < segments:
        raise MetadataError(
            f"the batch has {segments} segments, more than pad_segments_to = {pad_segments_to}. "
            "Raise it, or limit the documents of a row when packing."
        )
    return 0 if pad_segments_to is None else pad_segments_to - segments


def _repeat_last(offsets: torch.Tensor, times: int) -> torch.Tensor:
    return torch.cat([offsets, offsets[-1:].expand(times)]) if times else offsets


def _rounded(longest: int, added: int, multiple: int | None) -> int:
    if multiple is not None and multiple < 1:
        raise MetadataError(f"round_max_seqlen_to is {multiple}; it must be at least 1.")
    # With empty segments a maximum of 1 would be taken for decoding, one token a segment.
    longest = max(longest, 2) if added else longest
    return longest if multiple is None else -(-longest // multiple) * multiple


def _window(window: int | None, *, unlimited: int | None) -> tuple[int | None, int | None]:
    """Keys to the left and to the right of the query, its own excluded."""
    check_window(window)
    return (unlimited, unlimited) if window is None else (window - 1, 0)


def _varlen_parameters() -> frozenset[str]:
    """Parameters of the installed torch's `varlen_attn`; those of the current version where torch has none yet."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset({"window_size"})
    return frozenset(inspect.signature(varlen_attn).parameters)


def _varlen_causality(parameters: frozenset[str], window: int | None) -> dict[str, Any]:
    check_window(window)
    if "window_size" in parameters:
        return {"window_size": (-1 if window is None else window - 1, 0)}
    if window is not None:
        raise ContractError(
            f"the installed torch's varlen_attn takes no window_size, so it would ignore the window of {window} tokens. "
            "Update torch, or use to_block_mask."
        )
    return {"is_causal": True}
