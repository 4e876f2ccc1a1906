"""Whether a model's own loss asks for the next token, as far as its source shows."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from textwrap import dedent
from typing import Any


def shifts_labels(model: Any, sources: dict[type, str]) -> bool:
    """Does the model call transformers' causal loss, or shift labels or logits by itself, as far as its source shows?

    The decoders of encoder-decoder families do neither: they want labels that were shifted before.
    """
    if "labels" not in inspect.signature(model.forward).parameters:
        return True  # it has no loss
    for kind in type(model).__mro__:
        source = sources.get(kind, "")
        if "def forward(" not in source:
            continue
        if any(_shifts(node, model) for node in _nodes_with_helpers(source, kind)):
            return True
        if "super().forward(" not in source:
            return False
    return False


def _nodes_with_helpers(source: str, kind: type) -> Iterator[ast.AST]:
    """The nodes of a class, and of the functions of its module that it calls by name."""
    namespace = vars(sys.modules.get(kind.__module__))
    for node in ast.walk(ast.parse(source)):
        yield node
        called = namespace.get(node.func.id) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else None
        if inspect.isfunction(called) and called.__module__ == kind.__module__:
            yield from ast.walk(ast.parse(dedent(inspect.getsource(called))))  # it may stand in an `if`


def _shifts(node: ast.AST, model: Any) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    if name == "loss_function":
        return getattr(model.loss_function, "__name__", "") != "ForMaskedLMLoss"
    if name == "ForCausalLMLoss" or name.startswith(("shift_l", "shifted_")):
        return True
    return isinstance(node, ast.Subscript) and "label" in ast.unparse(node.value) and "1:" in ast.unparse(node.slice)
