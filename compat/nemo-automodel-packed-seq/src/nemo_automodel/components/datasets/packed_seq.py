"""`nemo_automodel.components.datasets.packed_seq`, provided by neatpack where NeMo AutoModel is not installed.

A package of its own (`nemo-automodel-packed-seq`), never part of neatpack's wheel: namespace packages without an
`__init__.py`, so that it adds one module to the path and nothing else.
"""

from __future__ import annotations

from importlib import metadata

from neatpack.packed_seq import PackedSeqParams, packed_seq_params_from_doc_ids, to_flash_attention_kwargs

__all__ = ["PackedSeqParams", "packed_seq_params_from_doc_ids", "to_flash_attention_kwargs"]


def _refuse_beside_the_real_package() -> None:
    try:
        version = metadata.version("nemo-automodel")
    except metadata.PackageNotFoundError:
        return
    raise ImportError(
        f"nemo-automodel {version} and nemo-automodel-packed-seq both provide nemo_automodel.components.datasets.packed_seq. "
        "Uninstall one: `pip uninstall nemo-automodel-packed-seq` keeps the real package (reinstall it if its file was "
        "overwritten), `pip uninstall nemo-automodel` keeps this re-export."
    )


_refuse_beside_the_real_package()
