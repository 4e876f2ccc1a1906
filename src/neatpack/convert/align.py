"""Give every document a slot of its own whose width is a multiple: what context parallelism by document demands.

Kernels that cut each document over `cp` ranks need every slot offset to divide by `2 * cp`. A packed batch seldom has
that, so its documents are laid out anew in one row, each padded at its end. Short documents make this expensive.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from neatpack.convert.segments import cumulative, segment_documents, segment_lengths, unpad_params
from neatpack.errors import MetadataError
from neatpack.packed_seq import PackedSeqParams, packed_seq_params_from_doc_ids


class Aligned(NamedTuple):
    """A batch laid out anew, one slot a document.

    Attributes:
        params: metadata of the new layout, `doc_ids [1, T]`: documents numbered over the batch, each followed by its padding.
        source: `[n_real] int64`, where each real token was in the flattened old batch.
        target: `[n_real] int64`, where it is in the new row.
    """

    params: PackedSeqParams
    source: torch.Tensor
    target: torch.Tensor

    def move(self, tensor: torch.Tensor, *, fill: float = 0) -> torch.Tensor:
        """Lay out `[B, S, ...]` of the old batch as `[1, T, ...]`, `fill` on the padding; differentiable.

        Labels must be shifted before they are moved, and take `fill=-100`.
        """
        row = tensor.new_full((self.params.doc_ids.shape[1], *tensor.shape[2:]), fill)
        tokens = tensor.flatten(0, 1).index_select(0, self.source.to(tensor.device))
        return row.index_copy(0, self.target.to(tensor.device), tokens)[None]


def align_documents(params: PackedSeqParams, multiple: int) -> Aligned:
    """Lay the documents of a batch out in one row, each padded to a multiple of `multiple` tokens (form A in, form C out).

    The old padding is dropped. Convert on the CPU; on an accelerator this reports to the host.

    Args:
        params: the batch's metadata.
        multiple: `2 * cp` for zigzag context parallelism by document; 1 only drops the padding.

    Returns:
        The new metadata and where every token goes. With `multiple=4` the worked example becomes five slots of 4:
        `slots(result.params)` has offsets `[0, 4, 8, 12, 16, 20]` and lengths `[2, 3, 1, 2, 3]`.

    Raises:
        MetadataError: `multiple` below 1.
    """
    if multiple < 1:
        raise MetadataError(f"multiple is {multiple}; documents are padded to a multiple of at least 1.")
    lengths = segment_lengths(params)[segment_documents(params) != 0]
    widths = (lengths + multiple - 1) // multiple * multiple
    starts = cumulative(widths)
    total = int(starts[-1])
    # How far into its document each real token is, added to where the document's slot begins.
    tokens = torch.arange(int(lengths.sum()), device=lengths.device)
    shift = (starts[:-1] - cumulative(lengths)[:-1]).long()
    target = tokens + torch.repeat_interleave(shift, lengths)
    numbers = torch.arange(1, len(lengths) + 1, device=lengths.device)
    doc_ids = torch.zeros(total, dtype=torch.int64, device=lengths.device)
    doc_ids[target] = torch.repeat_interleave(numbers, lengths)
    return Aligned(packed_seq_params_from_doc_ids(doc_ids[None]), unpad_params(params).indices, target)
