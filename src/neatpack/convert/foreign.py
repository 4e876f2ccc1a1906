"""Document maps from another library's record of boundaries: offsets, positions, an indexed mask, EOS tokens.

This is the edge. Inside the library boundaries come from `doc_ids` (or the `seq_lengths` that encode it) and are never
guessed again; here a foreign record is read once, checked, and refused where it cannot say what is asked.

| from | cannot know, so it is refused or asked for |
|---|---|
| `cu_seqlens` | which segments are padding |
| position ids | a chunk that continues its neighbour's count; padding that repeats one position; image tokens on several axes |
| an indexed 2-D mask | whether 0 and 1 mean one document or a plain padding mask |
| EOS tokens | an EOS that was cut off; padding that is itself EOS |

All of it runs in NumPy on the host; the map is sent back to the device that the record came from.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from neatpack.convert.doc_map import Lengths, integer_vector
from neatpack.errors import MetadataError, MetadataTypeError
from neatpack.packed_seq import validate_doc_ids


def doc_ids_from_cu_seqlens(
    cu_seqlens: Lengths,
    row_length: int | None = None,
    *,
    real_lengths: Lengths | None = None,
    padding_segments: Sequence[int] = (),
    total_tokens: int | None = None,
) -> torch.Tensor:
    """Build a document map from offsets over a flattened batch (form A or B; form C with `real_lengths`).

    Offsets cannot say which segments are padding, so each segment is taken for a document unless the caller names it.
    Repeats of the last offset (a static number of segments) are dropped, and so are negative entries behind the offsets.

    Args:
        cu_seqlens: `[N+1]` offsets, strictly increasing from 0 up to repeats of the last.
        row_length: `S`, to cut the flattened batch into rows; every row start must be an offset. None: one row.
        real_lengths: `[N]` real tokens at the start of each slot; the rest of the slot becomes padding.
        padding_segments: numbers of the segments that are padding.
        total_tokens: length of the flattened batch, if it goes on past the last offset; that tail becomes padding.

    Returns:
        `[B, S] int64` on the CPU, documents numbered from 1 in each row.

    Raises:
        MetadataError: offsets that do not start at 0, do not increase or end past `total_tokens`; rows that the tokens do not
            fill, or a segment that straddles two; another number of real lengths than of slots, or one that its slot cannot
            hold; or a padding segment that does not exist.
        MetadataTypeError: offsets or real lengths that are not integers.

    Example:
        >>> doc_ids_from_cu_seqlens([0, 2, 5, 6, 7, 9, 12], row_length=6, padding_segments=[2]).tolist()
        [[1, 1, 2, 2, 2, 0], [1, 2, 2, 3, 3, 3]]
    """
    offsets = _offsets(cu_seqlens)
    total = int(offsets[-1]) if total_tokens is None else total_tokens
    if total < offsets[-1]:
        raise MetadataError(
            f"cu_seqlens ends at {offsets[-1]}, past the {total} tokens of the batch. Give the offsets of this batch."
        )
    width = total if row_length is None else row_length
    rows = _row_starts(offsets, width, total)
    lengths = np.diff(offsets)
    real = lengths if real_lengths is None else _real_lengths(real_lengths, lengths)
    real = real.copy()
    for segment in padding_segments:
        if not 0 <= segment < len(real):
            raise MetadataError(f"padding segment {segment} does not exist: cu_seqlens has segments 0 to {len(real) - 1}.")
        real[segment] = 0
    runs = np.column_stack([real, lengths - real]).reshape(-1)
    flags = np.repeat(np.tile([True, False], len(lengths)), runs)
    starts = np.zeros(total, bool)
    starts[offsets[:-1]] = True
    pads = np.ones(total, bool)
    pads[: len(flags)] = ~flags
    return _number_runs(starts.reshape(rows, width), pads.reshape(rows, width))


def doc_ids_from_position_ids(position_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
    """Build a document map from position ids: a document starts wherever a position is not its neighbour's successor.

    Documents start at one value, the lowest of their row (0, `padding_idx + 1`), or ahead of where the one before ended (a
    later chunk). A position that repeats or falls to another value is that of an image token as likely as that of a chunk,
    and refused. A chunk that happens to continue its neighbour's count merges with it: positions cannot show that boundary,
    so keep `seq_lengths` instead.

    Args:
        position_ids: `[B, S]` integers, or `[S]` for one row. Negative positions are padding. On several axes
            (`[3, B, S]`, mRoPE) they must agree, as they do for text.
        attention_mask: `[B, S]`, 0 for padding. Needed when rows end in padding that repeats one position.

    Returns:
        `[B, S] int64` on the device of `position_ids`, documents numbered from 1 in each row.

    Raises:
        MetadataError: axes that differ (multimodal positions), or one that repeats or falls, but to no start; without
            a mask, a row that ends by repeating one position, where padding and one-token documents look alike; positions or
            a mask of another shape.
        MetadataTypeError: None, or not integers.

    Example:
        >>> doc_ids_from_position_ids(torch.tensor([2, 3, 4, 2, 3])).tolist()
        [[1, 1, 1, 2, 2]]
    """
    positions = _integer_map("position_ids", _text_axis(position_ids))
    pads = positions < 0
    if attention_mask is not None:
        pads |= _padding(attention_mask, positions.shape)
    elif positions.shape[1] > 1:
        repeats = (positions[:, -1] == positions[:, -2]) & ~pads[:, -1]
        if repeats.any():
            row = int(np.argmax(repeats))
            raise MetadataError(
                f"position_ids[{row}] ends in {positions[row, -2]}, {positions[row, -1]}: padding that repeats a position, or "
                "documents of one token? Pass attention_mask (all ones if there is no padding), or keep seq_lengths."
            )
    starts = np.ones(positions.shape, bool)
    starts[:, 1:] = (positions[:, 1:] != positions[:, :-1] + 1) | pads[:, :-1]
    _refuse_other_starts(positions, pads)
    return _number_runs(starts, pads).to(position_ids.device)


def doc_ids_from_indexed_mask(attention_mask: torch.Tensor, *, single_document: bool = False) -> torch.Tensor:
    """Build a document map from an indexed 2-D attention mask, which numbers the documents of a row and has 0 for padding.

    Args:
        attention_mask: `[B, S]` integers.
        single_document: say that each row of a mask of zeros and ones holds one document.

    Returns:
        `[B, S] int64` on the mask's device, documents renumbered from 1 in each row.

    Raises:
        MetadataError: a mask of only zeros; of only zeros and ones (unless `single_document`), which is also what a padding
            mask without boundaries looks like; a negative index, or one that comes back after another; another shape.
        MetadataTypeError: no tensor, or a bool or float mask, which has lost the indices.

    Example:
        >>> doc_ids_from_indexed_mask(torch.tensor([[7, 7, 9, 9, 9, 0]])).tolist()
        [[1, 1, 2, 2, 2, 0]]
    """
    mask = _integer_map("attention_mask", attention_mask)
    if mask.size and not mask.any():
        raise MetadataError(
            "attention_mask holds only zeros: no document at all. Number the documents of each row 1, 2, ...; "
            "zeros often mean that the separator the numbers came from never occurs."
        )
    if mask.size and mask.max() == 1 and not single_document:
        raise MetadataError(
            "attention_mask holds only 0 and 1: a padding mask, which knows no boundaries, looks the same. "
            "Pass single_document=True if every row holds one document; otherwise build the map from seq_lengths."
        )
    validate_doc_ids(torch.from_numpy(mask), unique=True)
    starts = np.ones(mask.shape, bool)
    starts[:, 1:] = mask[:, 1:] != mask[:, :-1]
    return _number_runs(starts, mask == 0).to(attention_mask.device)


def doc_ids_from_eos(
    input_ids: torch.Tensor,
    eos_token_id: int | Sequence[int],
    *,
    pad_token_id: int | None = None,
    attention_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Build a document map from end-of-sequence tokens; an EOS belongs to the document that it closes.

    A last resort: tokens say where documents end only if every document kept its EOS and no text contains one. The last
    document of a row may lack it (its EOS may live in the labels only).

    Args:
        input_ids: `[B, S]` integers.
        eos_token_id: the id, or ids, that close a document.
        pad_token_id: the id whose run at the end of a row is padding; another id than EOS.
        attention_mask: `[B, S]`, 0 for padding; settles padding that is itself EOS.

    Returns:
        `[B, S] int64` on the device of `input_ids`, documents numbered from 1 in each row.

    Raises:
        MetadataError: a row with real tokens and no EOS among them; without a mask, two EOS side by side, where padding and
            empty documents look alike, or a `pad_token_id` that is EOS; tokens or a mask of another shape.
        MetadataTypeError: `input_ids` that are not integers.

    Example:
        >>> doc_ids_from_eos(torch.tensor([[11, 12, 9, 11, 12, 9, 0, 0]]), 9, pad_token_id=0).tolist()
        [[1, 1, 1, 2, 2, 2, 0, 0]]
    """
    tokens = _integer_map("input_ids", input_ids)
    closing = np.isin(tokens, np.atleast_1d(eos_token_id))
    pads = _trailing_padding(tokens, closing, pad_token_id, eos_token_id, attention_mask)
    closing &= ~pads
    missing = ~closing.any(1) & ~pads.all(1)
    if missing.any():
        raise MetadataError(
            f"input_ids[{int(np.argmax(missing))}] never holds the EOS token {eos_token_id}, so its boundaries are unknown. "
            "Check the id against the tokenizer, keep EOS in the inputs, or build the map from seq_lengths."
        )
    starts = np.ones(tokens.shape, bool)
    starts[:, 1:] = closing[:, :-1] | pads[:, :-1]
    return _number_runs(starts, pads).to(input_ids.device)


def _text_axis(position_ids: torch.Tensor) -> torch.Tensor:
    """One axis of positions `[3, B, S]` or `[4, B, S]` that agree, as they do for text; anything else as it is."""
    several = isinstance(position_ids, torch.Tensor) and position_ids.dim() == 3 and len(position_ids) in (3, 4)
    return position_ids[0] if several and bool((position_ids == position_ids[:1]).all()) else position_ids


def _refuse_other_starts(positions: np.ndarray, pads: np.ndarray) -> None:
    """A position of a row that does not go up falls to the row's lowest, where documents start, or means something else."""
    lowest = np.where(pads, np.iinfo(np.int64).max, positions).min(axis=1, keepdims=True, initial=np.iinfo(np.int64).max)
    falls = (positions[:, 1:] <= positions[:, :-1]) & ~pads[:, 1:] & ~pads[:, :-1]
    wrong = falls & (positions[:, 1:] != lowest)
    if wrong.any():
        row, before = np.argwhere(wrong)[0].tolist()
        raise MetadataError(
            f"position_ids[{row}] goes from {positions[row, before]} to {positions[row, before + 1]} at {before + 1}, and its "
            f"documents start at {lowest[row, 0]}: a chunk from elsewhere, or the image tokens of one document (mRoPE)? "
            "Positions cannot say. Keep the documents' seq_lengths, and build the map with doc_ids_from_seq_lengths."
        )


def _offsets(cu_seqlens: Lengths) -> np.ndarray:
    """Checked offsets as `[N+1] int64`; repeats of the last, and negative entries behind it, are dropped."""
    offsets = integer_vector("cu_seqlens", cu_seqlens).astype(np.int64, copy=False)
    if not len(offsets) or offsets[0] != 0:
        raise MetadataError(
            f"cu_seqlens must start at 0, got {offsets[:1].tolist()}. Give cumulative offsets; for lengths use "
            "doc_ids_from_seq_lengths."
        )
    offsets = offsets[: int(np.flatnonzero(offsets >= 0)[-1]) + 1]
    below = np.flatnonzero(offsets != offsets[-1])
    offsets = offsets[: int(below[-1]) + 2 if len(below) else 1]
    falls = np.diff(offsets) < 1
    if falls.any():
        index = int(np.argmax(falls))
        raise MetadataError(
            f"cu_seqlens[{index + 1}] is {offsets[index + 1]} after {offsets[index]}: offsets must increase. "
            "Drop segments without tokens; only the last offset may repeat."
        )
    return offsets


def _row_starts(offsets: np.ndarray, width: int, total: int) -> int:
    """Check that rows of `width` tokens begin at offsets; how many rows there are."""
    if not total:
        return 0 if width else 1
    if width < 1 or total % width:
        raise MetadataError(
            f"{total} tokens do not fill rows of {width}. Give the row length of the batch these offsets describe."
        )
    starts = np.arange(0, total, width)
    inside = starts[starts < offsets[-1]]
    straddled = inside[~np.isin(inside, offsets)]
    if len(straddled):
        raise MetadataError(
            f"row {int(straddled[0]) // width} starts at {straddled[0]}, which is not in cu_seqlens: a segment straddles rows. "
            "Give form A offsets (a boundary at every row start), or leave row_length out to get one row."
        )
    return len(starts)


def _real_lengths(real_lengths: Lengths, slots: np.ndarray) -> np.ndarray:
    """Checked real lengths `[N] int64`, each between 0 and its slot."""
    real = integer_vector("real_lengths", real_lengths).astype(np.int64, copy=False)
    if len(real) != len(slots):
        raise MetadataError(
            f"real_lengths has {len(real)} entries for {len(slots)} slots. Give one for each segment of cu_seqlens."
        )
    wrong = (real < 0) | (real > slots)
    if wrong.any():
        index = int(np.argmax(wrong))
        raise MetadataError(
            f"real_lengths[{index}] is {real[index]}, but its slot has {slots[index]} tokens. "
            "Give the slot offsets (padding included), not the cumulative real lengths."
        )
    return real


def _integer_map(name: str, values: torch.Tensor) -> np.ndarray:
    """A `[B, S]` integer tensor (or `[S]`, one row) as an `int64` array on the host, or an error that names it."""
    if not isinstance(values, torch.Tensor):
        raise MetadataTypeError(
            f"{name} must be a torch.Tensor of integers, got {type(values).__name__}. Use torch.as_tensor, or, where there are "
            "none, build the map with doc_ids_from_seq_lengths."
        )
    if values.dtype == torch.bool or values.is_floating_point() or values.is_complex():
        raise MetadataTypeError(
            f"{name} must hold integers, got {values.dtype}: boundaries are lost in it. Pass it as it was built."
        )
    if values.dim() == 3:
        raise MetadataError(
            f"{name} has shape {tuple(values.shape)}: multimodal (mRoPE) positions, whose axes do not restart together. "
            f"Keep the documents' seq_lengths, and build the map with doc_ids_from_seq_lengths."
        )
    if values.dim() not in (1, 2):
        raise MetadataError(f"{name} must be [B, S], or [S] for one row, got shape {tuple(values.shape)}.")
    array = values.detach().cpu().numpy().astype(np.int64)
    return array[None] if array.ndim == 1 else array


def _padding(attention_mask: torch.Tensor, shape: tuple[int, ...]) -> np.ndarray:
    """Bool `[B, S]`: True where a 2-D mask says padding."""
    mask = np.asarray(torch.as_tensor(attention_mask).detach().cpu() != 0)
    mask = mask[None] if mask.ndim == 1 else mask
    if mask.shape != shape:
        raise MetadataError(f"attention_mask has shape {mask.shape}, expected {shape}. Pass the 2-D mask of this batch.")
    return ~mask


def _trailing_padding(
    tokens: np.ndarray,
    closing: np.ndarray,
    pad_token_id: int | None,
    eos_token_id: int | Sequence[int],
    attention_mask: torch.Tensor | None,
) -> np.ndarray:
    """Bool `[B, S]`: the padding, from the mask if there is one, else the run of pad tokens that ends each row."""
    if attention_mask is not None:
        return _padding(attention_mask, tokens.shape)
    if pad_token_id is not None and pad_token_id in np.atleast_1d(eos_token_id):
        raise MetadataError(f"pad_token_id {pad_token_id} is also EOS: the two look alike. Pass attention_mask.")
    twice = closing[:, 1:] & closing[:, :-1]
    if twice.any():
        row, position = np.argwhere(twice)[0].tolist()
        raise MetadataError(
            f"input_ids[{row}] holds EOS at {position} and {position + 1}: padding, or an empty document? "
            "Pass attention_mask (all ones if there is no padding), or build the map from seq_lengths."
        )
    is_pad = tokens == pad_token_id if pad_token_id is not None else np.zeros(tokens.shape, bool)
    return np.logical_and.accumulate(is_pad[:, ::-1], axis=1)[:, ::-1]


def _number_runs(starts: np.ndarray, pads: np.ndarray) -> torch.Tensor:
    """Number the documents of each row from 1 where `starts` (bool `[B, S]`) opens one, 0 where `pads`."""
    numbers = np.cumsum(starts & ~pads, axis=1)
    numbers[pads] = 0
    return torch.from_numpy(numbers)
