"""Preference pairs and other groups in a packed batch: which documents a loss compares.

`neatpack.data.groups` packs a group into one row and numbers it (`group_ids`, one number a document);
`PackedCollator(document_columns=["group_ids"])` hands the numbers on. Here they become indices into anything that has one
entry a document: log-probabilities, pooled states, rewards.

    logprobs = document_logprobs(logits, labels, params).sum          [num_docs]
    chosen, rejected = split_pairs(logprobs, group_ids, params)       [num_pairs] each
"""

from __future__ import annotations

import torch

from neatpack.errors import MetadataError, MetadataTypeError
from neatpack.packed_seq import PackedSeqParams
from neatpack.train.documents import document_spans


def group_documents(group_ids: torch.Tensor, params: PackedSeqParams, *, size: int | None = None) -> torch.Tensor:
    """Find the documents of every group (form A in).

    Args:
        group_ids: `[num_docs]` integer, in the order of `document_spans`; equal ids in a row are one group.
        params: the batch's metadata.
        size: documents a group must have; None takes the size of the first.

    Returns:
        `[num_groups, size] int64` document numbers: groups in the order of their first document, members as they lie.

    Raises:
        MetadataTypeError: ids that are no tensor of integers.
        MetadataError: another number of ids than documents, a `size` below 1, a group of another size (one spread over rows has
            too few in each), or members that do not lie side by side; names row and group.

    Example:
        >>> from neatpack.packed_seq import packed_seq_params_from_doc_ids
        >>> params = packed_seq_params_from_doc_ids(torch.tensor([[1, 1, 2, 2, 2, 0], [1, 2, 2, 0, 0, 0]]))
        >>> group_documents(torch.tensor([7, 7, 3, 3]), params).tolist()
        [[0, 1], [2, 3]]
    """
    if not isinstance(group_ids, torch.Tensor) or group_ids.is_floating_point():
        got = group_ids.dtype if isinstance(group_ids, torch.Tensor) else type(group_ids).__name__
        raise MetadataTypeError(f"group_ids must be a tensor of integers, one a document, got {got}.")
    if size is not None and size < 1:
        raise MetadataError(f"size is {size}; a group has at least one document.")
    spans = document_spans(params)
    if group_ids.shape != spans.row.shape:
        raise MetadataError(
            f"group_ids has shape {tuple(group_ids.shape)}, but the batch holds {len(spans)} documents. Give one id a "
            "document, as PackedCollator(document_columns=['group_ids']) does."
        )
    found: dict[tuple[int, int], list[int]] = {}  # a row drawn twice holds its groups twice
    for number, place in enumerate(zip(spans.row.tolist(), group_ids.tolist(), strict=True)):
        found.setdefault(place, []).append(number)
    expected = size if size is not None else len(next(iter(found.values()), []))
    for (row, group), members in found.items():
        _check_group(row, group, members, expected, [other for other, same in found if same == group and other != row])
    return torch.tensor(list(found.values()), dtype=torch.long, device=group_ids.device).reshape(len(found), expected)


def split_pairs(values: torch.Tensor, group_ids: torch.Tensor, params: PackedSeqParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Split values a document into those of the first and of the second document of each pair (form A in).

    Args:
        values: `[num_docs, ...]` in the order of `document_spans`: log-probabilities, rewards.
        group_ids: `[num_docs]` the pair of each document.
        params: the batch's metadata.

    Returns:
        Two tensors `[num_pairs, ...]`: chosen and rejected, as `pack_pairs` lays them.

    Raises:
        MetadataError: what `group_documents` refuses, or another number of values.
        MetadataTypeError: ids that are no tensor of integers.

    Example:
        >>> from neatpack.packed_seq import packed_seq_params_from_doc_ids
        >>> params = packed_seq_params_from_doc_ids(torch.tensor([[1, 1, 2, 2, 2, 0], [1, 2, 2, 0, 0, 0]]))
        >>> chosen, rejected = split_pairs(torch.tensor([10, 20, 30, 40]), torch.tensor([7, 7, 3, 3]), params)
        >>> chosen.tolist(), rejected.tolist()
        ([10, 30], [20, 40])
    """
    pairs = group_documents(group_ids, params, size=2)
    if values.shape[:1] != group_ids.shape:
        raise MetadataError(f"{tuple(values.shape)} values for {len(group_ids)} documents; give one entry a document.")
    return values[pairs[:, 0]], values[pairs[:, 1]]


def _check_group(row: int, group: int, members: list[int], size: int, elsewhere: list[int]) -> None:
    if len(members) != size:
        hint = f"; row {elsewhere[0]} has more of it, but its documents must share a row" if elsewhere else ""
        raise MetadataError(
            f"group {group} in row {row} has {len(members)} documents, expected {size}{hint}. Pack groups with pack_groups or "
            "plan_groups, and do not cut rows after packing."
        )
    if members != list(range(members[0], members[0] + size)):
        raise MetadataError(
            f"group {group} in row {row} has other documents between its own (numbers {members}); members lie side by side."
        )
