"""Change a module in one place at a time and see whether its tests notice.

    python tests/fuzz/mutants.py src/neatpack/packed_seq.py tests/test_packed_seq.py [--only 12] [--sample 100]

Each mutant is a copy of the package with one operator, comparison, constant or condition of the module changed. Its tests
run in a forked process (the heavy imports are made once). Survivors are printed with their line: either a test is missing,
or the change changes nothing that can be seen.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

COMPARISONS: dict[type[ast.cmpop], list[type[ast.cmpop]]] = {
    ast.Lt: [ast.LtE, ast.GtE],
    ast.LtE: [ast.Lt, ast.Gt],
    ast.Gt: [ast.GtE, ast.LtE],
    ast.GtE: [ast.Gt, ast.Lt],
    ast.Eq: [ast.NotEq],
    ast.NotEq: [ast.Eq],
    ast.Is: [ast.IsNot],
    ast.IsNot: [ast.Is],
    ast.In: [ast.NotIn],
    ast.NotIn: [ast.In],
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
TIMEOUT = 120


def mutants(source: str) -> Iterator[tuple[int, str, ast.Module]]:
    """Line, description and tree of every mutant of a module; text (docstrings, messages) and annotations are left alone."""
    tree = ast.parse(source)
    skipped = {id(inner) for node in ast.walk(tree) for inner in _silent(node)}
    for index, node in enumerate(ast.walk(tree)):
        if id(node) in skipped:
            continue
        for number, (what, change) in enumerate(_changes(node)):
            changed = copy.deepcopy(tree)
            target = next(inner for place, inner in enumerate(ast.walk(changed)) if place == index)
            _changes(target)[number][1](target)
            del change
            yield getattr(node, "lineno", 0), what, ast.fix_missing_locations(changed)


def _silent(node: ast.AST) -> Iterator[ast.AST]:
    """What a mutant must not touch: annotations, error texts, exports."""
    parts: list[ast.AST | None] = []
    if isinstance(node, ast.AnnAssign | ast.arg):
        parts.append(node.annotation)
    if isinstance(node, ast.FunctionDef):
        parts.append(node.returns)
    if isinstance(node, ast.Raise | ast.JoinedStr):
        parts.append(node)
    for part in parts:
        if part is not None:
            yield from ast.walk(part)


def _changes(node: ast.AST) -> list:
    changes = []
    if isinstance(node, ast.Compare):
        for place, operator in enumerate(node.ops):
            for other in COMPARISONS.get(type(operator), []):
                changes.append((f"{type(operator).__name__} -> {other.__name__}", _set_op(place, other)))
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in OPERATORS:
        other = OPERATORS[type(node.op)]
        changes.append((f"{type(node.op).__name__} -> {other.__name__}", lambda n, o=other: setattr(n, "op", o())))
    if isinstance(node, ast.BoolOp):
        other = ast.Or if isinstance(node.op, ast.And) else ast.And
        changes.append((f"{type(node.op).__name__} -> {other.__name__}", lambda n, o=other: setattr(n, "op", o())))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
        changes.append(
            (
                f"without {type(node.op).__name__}",
                lambda n: setattr(n, "op", ast.UAdd()) if isinstance(n.op, ast.USub) else _drop_not(n),
            )
        )
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        changes.append((f"{node.value} -> {not node.value}", lambda n: setattr(n, "value", not n.value)))
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        for step in (1, -1):
            changes.append((f"{node.value} -> {node.value + step}", lambda n, s=step: setattr(n, "value", n.value + s)))
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        for value in (True, False):
            if not (isinstance(node, ast.While) and value):
                changes.append((f"condition -> {value}", lambda n, v=value: setattr(n, "test", ast.Constant(v))))
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        changes.append(("call left out", lambda n: setattr(n, "value", ast.Constant(None))))
    return changes


def _set_op(place: int, other: type[ast.cmpop]):
    def change(node: ast.Compare) -> None:
        node.ops[place] = other()

    return change


def _drop_not(node: ast.UnaryOp) -> None:
    node.op, node.operand = ast.Not(), ast.UnaryOp(ast.Not(), node.operand)


def survives(package: Path, tests: list[str], keyword: str) -> bool:
    """Whether the tests pass with the package at this path, in a forked process."""
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException), Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
            sys.path.insert(0, str(package))
            signal.alarm(TIMEOUT)
            import pytest

            options = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", "-m", "not slow", "-k", keyword]
            os._exit(int(pytest.main([*options, *tests])))
        os._exit(99)
    _, status = os.waitpid(child, 0)
    return status == 0


def preload() -> None:
    """Import what every child needs, and nothing of the package itself."""
    import numpy  # noqa: F401
    import pytest  # noqa: F401
    import torch

    torch.set_num_threads(1)
    assert not any(name.startswith("neatpack") for name in sys.modules)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("module", type=Path)
    parser.add_argument("tests", nargs="+")
    parser.add_argument("--only", type=int, nargs="*", help="run these mutants alone")
    parser.add_argument("--sample", type=int, help="run so many, drawn at random")
    parser.add_argument("--keyword", default="", help="which of the tests to run, as pytest's -k")
    options = parser.parse_args()
    preload()
    source = options.module.read_text(encoding="utf-8")
    found = list(enumerate(mutants(source)))
    chosen = [entry for entry in found if options.only is None or entry[0] in options.only]
    if options.sample and options.sample < len(chosen):
        chosen = sorted(random.Random(0).sample(chosen, options.sample), key=lambda entry: entry[0])
    root = next(parent for parent in options.module.resolve().parents if parent.name == "neatpack")
    begin, survivors = time.monotonic(), []
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(folder) / "neatpack"
        shutil.copytree(root, copied, ignore=shutil.ignore_patterns("__pycache__"))
        victim = copied / options.module.resolve().relative_to(root)
        if not survives(Path(folder), options.tests, options.keyword):
            print("the tests fail on the module as it is")
            return 2
        sys.dont_write_bytecode = True
        for number, (line, what, tree) in chosen:
            victim.write_text(ast.unparse(tree), encoding="utf-8")
            if survives(Path(folder), options.tests, options.keyword):
                survivors.append(number)
                print(f"{number:4d} line {line:3d} {what:24s} {source.splitlines()[line - 1].strip()}", flush=True)
    seconds = time.monotonic() - begin
    print(f"{options.module.name}: {len(chosen)} of {len(found)} mutants, {len(survivors)} survive, {seconds:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
