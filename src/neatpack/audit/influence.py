"""Document against document: who moves whom, as the model takes the batch, and with every boundary of it removed.

The second map is what the first one is read against. Where it is dark and the first one blank, the model would have mixed
these documents, and the boundaries kept them apart; where both are blank, blankness shows nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from neatpack.isolation import IsolationReport, check_isolation
from neatpack.packed_seq import packed_seq_params_from_doc_ids, to_flash_attention_kwargs


@dataclass(frozen=True, eq=False)
class InfluenceMap:
    """How far each document moves each other one.

    Attributes:
        sizes: `[D, D] float64`: largest change of a logit of document `j` when the tokens of document `i` changed. NaN
            where nothing was measured: on the diagonal, and in the rows of documents that were not probed.
        tolerance: what counts as rounding.
    """

    sizes: np.ndarray
    tolerance: float

    @property
    def moved(self) -> list[tuple[int, int]]:
        """Pairs `(source, target)` above the tolerance."""
        return [(int(i), int(j)) for i, j in np.argwhere(np.nan_to_num(self.sizes, posinf=np.inf) > self.tolerance)]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: None where nothing was measured, a text where a number is not finite."""
        plain = [
            [None if np.isnan(size) else float(size) if np.isfinite(size) else str(size) for size in row] for row in self.sizes
        ]
        return {"sizes": plain, "tolerance": self.tolerance}


def influence_map(report: IsolationReport) -> InfluenceMap:
    """The map that a probe measured, square: documents that it left out have a row of NaN.

    Args:
        report: from `check_isolation`.
    """
    documents = len(report.documents)
    sizes = np.full((documents, documents), np.nan)
    sizes[list(report.probed)] = report.influence
    np.fill_diagonal(sizes, np.nan)
    return InfluenceMap(sizes, report.tolerance)


def influence_without_boundaries(
    model: torch.nn.Module, batch: Mapping[str, Any], doc_ids: torch.Tensor, *, position_start: int = 0, max_documents: int = 64
) -> InfluenceMap:
    """Measure the map of the same tokens with the boundaries removed: every row one document from its start.

    Args:
        model: as for `check_isolation`.
        batch: holds `input_ids [B, S]`; what else it holds is the boundaries, and is left out.
        doc_ids: `[B, S]` document map, 1-based, 0 is padding; padding stays padding.
        position_start: where the model counts positions from.
        max_documents: as for `check_isolation`.

    Returns:
        The map, `[D, D]`.

    Raises:
        MetadataError: a map that does not fit the batch.
        MetadataTypeError: a map that holds no integers.
    """
    one_a_row = (doc_ids > 0).to(doc_ids.dtype)
    removed = {
        "input_ids": batch["input_ids"],
        "position_ids": (position_start + torch.arange(doc_ids.shape[1], device=doc_ids.device)).expand(doc_ids.shape),
        **to_flash_attention_kwargs(packed_seq_params_from_doc_ids(one_a_row)),
        "use_cache": False,
    }
    return influence_map(check_isolation(model, removed, doc_ids=doc_ids, max_documents=max_documents))
