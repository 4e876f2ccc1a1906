"""Every error that neatpack raises on purpose.

    PackError
    ├── PlanError (ValueError)              lengths, capacity or options that no plan can honour
    ├── SourceError (ValueError)            a document, file or column that cannot be read as asked
    ├── StoreError                          an output folder, manifest or shard that is not what it claims
    ├── MetadataError (ValueError)          a document map or offsets that do not describe a packed batch
    │   ├── MetadataTypeError (TypeError)   ... of the wrong dtype or kind
    │   └── MetadataOverflowError (OverflowError)   ... with more tokens than int32 offsets can count
    ├── ContractError                       a consumer that would ignore or override the boundaries
    └── MissingDependencyError (ImportError)   an optional package that the called feature needs

A message says what, where (file, row, segment), what it got, what it expected, and the way out.
"""

from __future__ import annotations

__all__ = [
    "ContractError",
    "MetadataError",
    "MetadataOverflowError",
    "MetadataTypeError",
    "MissingDependencyError",
    "PackError",
    "PlanError",
    "SourceError",
    "StoreError",
]


class PackError(Exception):
    """Base of every neatpack error: catch this to catch them all."""


class PlanError(PackError, ValueError):
    """Lengths, a capacity or options that no plan can honour."""


class SourceError(PackError, ValueError):
    """A document, file or column that cannot be read as asked."""


class StoreError(PackError):
    """An output folder, manifest or shard that is not what it claims to be."""


class MetadataError(PackError, ValueError):
    """A document map or offsets that do not describe a packed batch."""


class MetadataTypeError(MetadataError, TypeError):
    """Metadata of the wrong dtype or kind."""


class MetadataOverflowError(MetadataError, OverflowError):
    """A batch with more tokens than int32 offsets can count."""


class ContractError(PackError):
    """A consumer that would ignore or override the boundaries it is given."""


class MissingDependencyError(PackError, ImportError):
    """An optional package that the called feature needs and that is not installed."""

    def __init__(self, package: str, feature: str, install: str) -> None:
        """Name the `package`, the `feature` that needs it and the pip requirement to `install`."""
        super().__init__(
            f"{feature} needs the package {package!r}, which is not installed. Install it: pip install '{install}'"
        )
