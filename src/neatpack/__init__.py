"""Sequence packing for LLM training that cannot leak."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from neatpack.data import PackedDataset as PackedDataset
    from neatpack.data import lengths_of as lengths_of
    from neatpack.data import pack_pairs as pack_pairs
    from neatpack.errors import PackError as PackError
    from neatpack.isolation import IsolationReport as IsolationReport
    from neatpack.isolation import check_isolation as check_isolation
    from neatpack.packed_seq import PackedSeqParams as PackedSeqParams
    from neatpack.packed_seq import packed_seq_params_from_doc_ids as packed_seq_params_from_doc_ids
    from neatpack.packed_seq import to_flash_attention_kwargs as to_flash_attention_kwargs
    from neatpack.packed_seq import validate_doc_ids as validate_doc_ids
    from neatpack.planning import PackPlan as PackPlan
    from neatpack.planning import StreamPlanner as StreamPlanner
    from neatpack.planning import balance_rows as balance_rows
    from neatpack.planning import load_plan as load_plan
    from neatpack.planning import plan_groups as plan_groups
    from neatpack.planning import plan_rows as plan_rows
    from neatpack.planning import save_plan as save_plan
    from neatpack.stream import PackedStream as PackedStream
    from neatpack.train import PackedCollator as PackedCollator

__version__ = "0.1.0"

# Name -> module that defines it; imported on first use, so that `import neatpack` stays free of torch and NumPy.
_PUBLIC = {
    "IsolationReport": "neatpack.isolation",
    "PackError": "neatpack.errors",
    "PackPlan": "neatpack.planning",
    "PackedCollator": "neatpack.train",
    "PackedDataset": "neatpack.data",
    "PackedSeqParams": "neatpack.packed_seq",
    "PackedStream": "neatpack.stream",
    "StreamPlanner": "neatpack.planning",
    "balance_rows": "neatpack.planning",
    "check_isolation": "neatpack.isolation",
    "lengths_of": "neatpack.data",
    "load_plan": "neatpack.planning",
    "pack_pairs": "neatpack.data",
    "packed_seq_params_from_doc_ids": "neatpack.packed_seq",
    "plan_groups": "neatpack.planning",
    "plan_rows": "neatpack.planning",
    "save_plan": "neatpack.planning",
    "to_flash_attention_kwargs": "neatpack.packed_seq",
    "validate_doc_ids": "neatpack.packed_seq",
}

__all__ = [*sorted(_PUBLIC), "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'neatpack' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return __all__
