"""The pieces that conversions share: segments, documents, the three layout forms, positions, segment numbers.

Everything here is derived from `PackedSeqParams` with a few vectorised torch operations on the device of the params.
Shapes that depend on the data (the real tokens, the slots) make an accelerator report to the host; each such function says so.
Convert on the CPU, where the batch is built, and move the result.

On the worked example, `doc_ids = [[1, 1, 2, 2, 2, 0], [1, 2, 2, 3, 3, 3]]`:

    A  segments, padding runs included      cu_seqlens [0, 2, 5, 6, 7, 9, 12], documents [1, 2, 0, 1, 2, 3]
    B  real tokens only                     indices [0, 1, 2, 3, 4, 6, ..., 11], cu_seqlens [0, 2, 5, 6, 8, 11]
    C  slots: padding joins its document    cu_seqlens [0, 2, 6, 7, 9, 12], lengths [2, 3, 1, 2, 3]
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from neatpack.errors import MetadataError
from neatpack.packed_seq import PackedSeqParams


class Unpadded(NamedTuple):
    """The real tokens of a batch (form B): any form A conversion of `params` is that consumer's form B.

    Attributes:
        indices: `[n_real] int64`, where each real token sits in the flattened `[B*S]` batch.
        params: metadata of the gathered tokens as one row, `doc_ids [1, n_real] int64` numbered 1, 2, ... over the batch.
    """

    indices: torch.Tensor
    params: PackedSeqParams


class Slots(NamedTuple):
    """Physical slots and what is real in them (form C).

    Attributes:
        cu_seqlens: `[num_slots + 1] int32` offsets over `[B*S]`; a padding run belongs to the slot before it in its row, and
            one with no document before it (left padding, an empty row) is a slot of its own with no real token.
        lengths: `[num_slots] int32`, real tokens at the start of each slot.
        max_slot: width of the widest slot.
        max_length: length of the longest document.
    """

    cu_seqlens: torch.Tensor
    lengths: torch.Tensor
    max_slot: int
    max_length: int


def segment_lengths(params: PackedSeqParams) -> torch.Tensor:
    """Length of every segment (form A), padding runs included: `[N] int32`; `[2, 3, 1, 1, 2, 3]` on the worked example."""
    return params.cu_seqlens[1:] - params.cu_seqlens[:-1]


def segment_documents(params: PackedSeqParams) -> torch.Tensor:
    """The index that `doc_ids` gives every segment (form A): `[N] int64`, 0 for padding; `[1, 2, 0, 1, 2, 3]`."""
    starts = params.cu_seqlens[:-1].long()
    length = max(params.doc_ids.shape[1], 1)
    # By row and column, not over a flattened map: a view that torch.expand made would be copied out in full.
    return params.doc_ids[starts // length, starts % length].long()


def segment_index(params: PackedSeqParams, *, pad: Literal["keep"] | int = "keep", flat: bool = False) -> torch.Tensor:
    """Number the segment of every token from 0 (form A, padding runs included).

    Args:
        params: the batch's metadata.
        pad: "keep" numbers padding runs like documents; a number (-1) overwrites every pad with it.
        flat: number over the flattened batch, where no two rows share a number, instead of from 0 in each row.

    Returns:
        `[1, B*S] int32` when flat, else `[B, S] int32`; contiguous. On the worked example
        `[[0, 0, 1, 1, 1, 2], [0, 1, 1, 2, 2, 2]]`, flat `[[0, 0, 1, 1, 1, 2, 3, 4, 4, 5, 5, 5]]`.
    """
    index = _per_segment(params, torch.arange(len(params.cu_seqlens) - 1, dtype=torch.int32, device=params.cu_seqlens.device))
    if not flat and index.numel():
        index -= index[:, :1].clone()
    if pad != "keep":
        index[params.doc_ids == 0] = pad
    return index.reshape(1, -1) if flat else index


def document_numbers(params: PackedSeqParams) -> torch.Tensor:
    """Renumber the documents of each row 1, 2, ... in order, 0 for padding (form A): `[B, S] int64`.

    A well-formed map comes back unchanged. An index that reappears in a row gets two numbers: to every kernel, and to
    this library, its two runs are two documents.
    """
    real = (segment_documents(params) != 0).long()
    running = torch.cumsum(real, 0)
    opens_row = params.cu_seqlens[:-1] % max(params.doc_ids.shape[1], 1) == 0
    before_row = torch.where(opens_row, running - real, 0)
    number = (running - torch.cummax(before_row, 0).values) * real if len(real) else running
    return _per_segment(params, number)


def position_ids(params: PackedSeqParams, start: int = 0) -> torch.Tensor:
    """Number the tokens of every segment (form A) from `start`, padding runs too: `[B, S] int64`.

    Args:
        params: the batch's metadata.
        start: the first position of a document; `padding_idx + 1` for models of the RoBERTa kind.

    Returns:
        Positions on the device of the params; `[[0, 1, 0, 1, 2, 0], [0, 0, 1, 0, 1, 2]]` on the worked example.
    """
    tokens = torch.arange(start, start + params.doc_ids.numel(), device=params.cu_seqlens.device)
    return tokens.reshape(params.doc_ids.shape) - _per_segment(params, params.cu_seqlens[:-1].long())


def first_keys(params: PackedSeqParams, *, window: int | None = None, pad_self: bool = False) -> torch.Tensor:
    """The first key that each query may see (form A): with causality, `first <= key <= query` is the whole mask.

    Args:
        params: the batch's metadata.
        window: sliding window in tokens, the query's own included; None for unlimited.
        pad_self: let a pad see itself; otherwise it sees nothing, written as the position `S`, past every key.

    Returns:
        `[B, S] int32` positions within the row; `[[0, 0, 2, 2, 2, 6], [0, 1, 1, 3, 3, 3]]` on the worked example.

    Raises:
        MetadataError: a window below 1.
    """
    check_window(window)
    batch, length = params.doc_ids.shape
    starts = params.cu_seqlens[:-1] % max(length, 1)
    first = _per_segment(params, starts)
    own = torch.arange(length, dtype=torch.int32, device=first.device).expand(batch, length)
    if window is not None and window < length:
        first = torch.maximum(first, own - (window - 1))
    return torch.where(params.doc_ids == 0, own if pad_self else torch.full_like(own, length), first)


def unpad_params(params: PackedSeqParams) -> Unpadded:
    """Drop the padding (form A in, form B out): the metadata of a batch that was gathered to `[1, n_real]`.

    On an accelerator this reports to the host.

    Example:
        >>> from neatpack.packed_seq import packed_seq_params_from_doc_ids
        >>> params = packed_seq_params_from_doc_ids(torch.tensor([[1, 1, 2, 2, 2, 0], [1, 2, 2, 3, 3, 3]]))
        >>> real = unpad_params(params)
        >>> real.indices.tolist(), real.params.cu_seqlens.tolist()
        ([0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11], [0, 2, 5, 6, 8, 11])
    """
    lengths, real = segment_lengths(params), segment_documents(params) != 0
    keep = torch.repeat_interleave(real, lengths, output_size=params.doc_ids.numel())
    return Unpadded(torch.nonzero(keep).reshape(-1), _one_row(lengths[real]))


def flatten_params(params: PackedSeqParams) -> PackedSeqParams:
    """The same segments (form A) for a batch flattened to `[1, B*S]`: documents numbered over the batch, padding still 0.

    Kernels that demand batch size 1 need it: reshaping `doc_ids` alone would give documents of different rows one number.
    `cu_seqlens` is the same tensor object.
    """
    real = segment_documents(params) != 0
    numbers = torch.cumsum(real, 0) * real
    return PackedSeqParams(params.cu_seqlens, params.max_seqlen, _per_segment(params, numbers).reshape(1, -1))


def slots(params: PackedSeqParams) -> Slots:
    """Fold every padding run into the document before it (form A in, form C out).

    On an accelerator this reports to the host.

    Example:
        >>> from neatpack.packed_seq import packed_seq_params_from_doc_ids
        >>> params = packed_seq_params_from_doc_ids(torch.tensor([[1, 1, 2, 2, 2, 0], [1, 2, 2, 3, 3, 3]]))
        >>> layout = slots(params)
        >>> layout.cu_seqlens.tolist(), layout.lengths.tolist(), layout.max_slot, layout.max_length
        ([0, 2, 6, 7, 9, 12], [2, 3, 1, 2, 3], 4, 3)
    """
    starts, real = params.cu_seqlens[:-1], segment_documents(params) != 0
    opens = real | (starts % max(params.doc_ids.shape[1], 1) == 0)
    offsets = torch.cat([starts[opens], params.cu_seqlens[-1:]])
    lengths = (segment_lengths(params) * real)[opens]
    return Slots(offsets, lengths, longest(offsets[1:] - offsets[:-1]), longest(lengths))


def longest(lengths: torch.Tensor) -> int:
    """The largest of `lengths`, 0 if there is none; on an accelerator this reports to the host."""
    return int(lengths.max()) if lengths.numel() else 0


def cumulative(lengths: torch.Tensor) -> torch.Tensor:
    """Offsets `[N + 1] int32` of pieces of the given `lengths [N]`."""
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=lengths.device)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


def check_form(form: str) -> None:
    """Refuse a layout form that a conversion does not have."""
    if form not in ("A", "C"):
        raise MetadataError(
            f"form must be 'A' (every slot) or 'C' (slots and real lengths), got {form!r}. For tensors without their padding "
            "(form B) convert what unpad_params(params) returns, in form 'A'."
        )


def check_window(window: int | None) -> None:
    """Refuse a sliding window that does not hold the query's own token."""
    if window is not None and window < 1:
        raise MetadataError(
            f"window is {window}; it counts the query's own token, so it must be at least 1. Use None for unlimited."
        )


def check_params(params: PackedSeqParams, *, total_tokens: int | None = None) -> None:
    """Check that the offsets fit the map (form A), as a kernel would take them on trust; free of syncs only on the CPU.

    Args:
        params: the batch's metadata.
        total_tokens: how many tokens the queries hold, if known.

    Raises:
        MetadataError: offsets that are no contiguous int32 vector, do not run from 0 to `B*S` in increasing order, miss a
            boundary of the map or cut a document of it, or whose `max_seqlen` is not the longest segment; or another number
            of tokens.
    """
    offsets, tokens = params.cu_seqlens, params.doc_ids.numel()
    if offsets.dim() != 1 or offsets.dtype != torch.int32 or not offsets.is_contiguous() or not len(offsets):
        raise MetadataError(
            f"cu_seqlens must be a contiguous int32 vector of at least one offset, got shape {tuple(offsets.shape)} of "
            f"{offsets.dtype}. Build the metadata with packed_seq_params_from_doc_ids."
        )
    if total_tokens is not None and total_tokens != tokens:
        raise MetadataError(
            f"the activations hold {total_tokens} tokens, but the metadata describes {tokens}. "
            "Use the metadata of this batch, of its unpadded form if the padding was dropped."
        )
    lengths = segment_lengths(params)
    if int(offsets[0]) != 0 or int(offsets[-1]) != tokens or (len(lengths) and int(lengths.min()) < 1):
        raise MetadataError(
            f"cu_seqlens must increase from 0 to B*S = {tokens}, got {_shown(offsets)}. "
            "Build the metadata with packed_seq_params_from_doc_ids."
        )
    _check_boundaries(params)
    if params.max_seqlen != longest(lengths):
        raise MetadataError(
            f"max_seqlen is {params.max_seqlen}, but the longest segment has {longest(lengths)} tokens; a kernel would leave "
            "the rest of it uncomputed. Build the metadata with packed_seq_params_from_doc_ids."
        )


def _check_boundaries(params: PackedSeqParams) -> None:
    """Refuse offsets that are not the boundaries of the map: attention over a missing one is a leak. Padding may be cut."""
    ids = params.doc_ids
    changes = torch.ones(ids.shape, dtype=torch.bool, device=ids.device)
    changes[:, 1:] = ids[:, 1:] != ids[:, :-1]
    cut = torch.zeros(ids.numel(), dtype=torch.bool, device=ids.device)
    cut[params.cu_seqlens[:-1].long()] = True
    cut = cut.reshape(ids.shape)
    wrong = (changes & ~cut) | (cut & ~changes & (ids != 0))
    if bool(wrong.any()):
        row, position = wrong.nonzero()[0].tolist()
        place = row * ids.shape[1] + position
        found = "has no offset there" if changes[row, position] else "cuts it there"
        raise MetadataError(
            f"doc_ids[{row}, {position}] {'starts a segment' if changes[row, position] else 'is within a document'}, but "
            f"cu_seqlens {found} (flattened position {place}): offsets and map are of different batches, or one was changed. "
            "Build the metadata with packed_seq_params_from_doc_ids."
        )


def _one_row(lengths: torch.Tensor) -> PackedSeqParams:
    """Metadata of documents of the given `lengths [N]` in one row without padding."""
    offsets = cumulative(lengths)
    numbers = torch.arange(1, len(lengths) + 1, device=lengths.device)
    return PackedSeqParams(offsets, longest(lengths), torch.repeat_interleave(numbers, lengths)[None])


def _per_segment(params: PackedSeqParams, values: torch.Tensor) -> torch.Tensor:
    """Spread one value a segment over its tokens: `[N]` to `[B, S]`, without a sync."""
    spread = torch.repeat_interleave(values, segment_lengths(params), output_size=params.doc_ids.numel())
    return spread.reshape(params.doc_ids.shape)


def _shown(offsets: torch.Tensor) -> str:
    values = offsets.tolist()
    return str(values) if len(values) <= 12 else f"[{', '.join(map(str, values[:6]))}, ..., {', '.join(map(str, values[-3:]))}]"
