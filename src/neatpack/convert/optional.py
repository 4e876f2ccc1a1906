"""Optional packages, imported when an object of theirs is asked for."""

from __future__ import annotations

import importlib
from typing import Any

from neatpack.errors import MissingDependencyError


def attribute_of(module: str, name: str, *, feature: str, install: str) -> Any:
    """Import `name` from `module`, a part of an optional package.

    Raises:
        MissingDependencyError: the package is not installed, or has no such part; names the `feature` and what to `install`.
    """
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise MissingDependencyError(module.split(".")[0], feature, install) from error
