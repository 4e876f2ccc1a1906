"""Change a module in one place at a time and see whether its tests notice.

    python tests/fuzz/mutants.py src/neatpack/packed_seq.py --tests tests/test_packed_seq.py --sample 100
    python tests/fuzz/mutants.py src/neatpack/convert/*.py --tests tests/convert/test_{name}.py tests/convert --sample 60

Each mutant is a copy of the package with one operator, comparison, constant or condition of a module changed. Its tests run
in a forked process (the heavy imports are made once), with a limit on the processor time that they take: a machine with other
work kills no mutant. Tests named `{name}` after their module run first, and the others only on what these let pass. Survivors
are printed with their line: either a test is missing, or the change changes nothing that can be seen.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import importlib
import json
import os
import random
import shutil
import signal
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
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
VERBS = {"killed": "killed", "hangs": "hang", "survives": "survive"}
SECONDS = 180
"""Processor time that the tests of a mutant may take: one that runs for longer hangs."""


def mutants(source: str) -> Iterator[tuple[int, str, Callable[[], ast.Module]]]:
    """Line, description and maker of every mutant of a module; text (docstrings, messages) and annotations are left alone."""
    tree = ast.parse(source)
    skipped = {id(inner) for node in ast.walk(tree) for inner in _silent(node)}
    for index, node in enumerate(ast.walk(tree)):
        if id(node) in skipped:
            continue
        for number, (what, _) in enumerate(_changes(node)):
            yield getattr(node, "lineno", 0), what, partial(_changed, tree, index, number)


def _changed(tree: ast.Module, index: int, number: int) -> ast.Module:
    """The tree with one change: the one of this number among those of the node that comes at this index."""
    changed = copy.deepcopy(tree)
    target = next(inner for place, inner in enumerate(ast.walk(changed)) if place == index)
    _changes(target)[number][1](target)
    return ast.fix_missing_locations(changed)


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


def outcome(package: Path, stages: list[list[str]], keyword: str) -> str:
    """What the tests say of the package at this path, one stage after the other: "survives", "killed" or "hangs"."""
    for tests in stages:
        child = os.fork()
        if not child:
            _run_tests(package, tests, keyword)
        _, status = os.waitpid(child, 0)
        if status:
            return "hangs" if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGPROF, signal.SIGALRM) else "killed"
    return "survives"


def warm_up(package: Path, tests: list[str], keyword: str) -> bool:
    """Whether the tests pass on the module as it is; what else they import is imported here, once for all mutants."""
    listed = package / "imported.json"
    child = os.fork()
    if not child:
        _run_tests(package, tests, keyword, listed)
    _, status = os.waitpid(child, 0)
    for name in json.loads(listed.read_text()) if listed.exists() else []:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    return status == 0


def _run_tests(package: Path, tests: list[str], keyword: str, listed: Path | None = None) -> None:
    with contextlib.suppress(BaseException), Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
        sys.path.insert(0, str(package))
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        signal.alarm(30 * SECONDS)  # for one that waits
        import pytest
        from hypothesis import Phase, settings

        # An example that fails is enough: it is neither made smaller nor kept for a run on the module as it is.
        settings.register_profile("mutants", phases=(Phase.explicit, Phase.generate), database=None)
        settings.load_profile("mutants")
        # The plugins are imported already, and pytest warns of it.
        options = ["-x", "-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
        options += ["--hypothesis-seed=0", "-m", "not slow", "-k", keyword]
        status = int(pytest.main([*options, *tests]))
        if listed:
            folders = sysconfig.get_paths()
            roots = (folders["purelib"], folders["platlib"], folders["stdlib"])
            listed.write_text(json.dumps([name for name, module in sys.modules.items() if _lies_in(module, roots)]))
        os._exit(status)
    os._exit(99)


def _lies_in(module: object, roots: tuple[str, ...]) -> bool:
    return (getattr(module, "__file__", None) or "").startswith(roots)


def preload() -> None:
    """Import what every child needs, and nothing of the package itself."""
    import numpy  # noqa: F401
    import pytest  # noqa: F401
    import torch

    torch.set_num_threads(1)
    assert not any(name.startswith("neatpack") for name in sys.modules)


def stages_of(module: Path, patterns: list[str]) -> list[list[str]]:
    """The tests named after the module, where there are any, and then the others."""
    named = [pattern.replace("{name}", module.stem) for pattern in patterns if "{name}" in pattern]
    stages = [[path for path in named if Path(path).exists()], [path for path in patterns if "{name}" not in path]]
    return [stage for stage in stages if stage]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", type=Path, nargs="+")
    parser.add_argument("--tests", nargs="+", required=True)
    parser.add_argument("--only", type=int, nargs="*", help="run these mutants alone")
    parser.add_argument("--sample", type=int, help="run so many of all modules' mutants, drawn at random")
    parser.add_argument("--keyword", default="", help="which of the tests to run, as pytest's -k")
    options = parser.parse_args()
    preload()
    found = [(module, *mutant) for module in sorted(options.modules) for mutant in mutants(module.read_text(encoding="utf-8"))]
    chosen = [number for number in range(len(found)) if options.only is None or number in options.only]
    if options.sample and options.sample < len(chosen):
        chosen = sorted(random.Random(0).sample(chosen, options.sample))
    root = next(parent for parent in options.modules[0].resolve().parents if parent.name == "neatpack")
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(root, Path(folder) / "neatpack", ignore=shutil.ignore_patterns("__pycache__"))
        everything = sorted(
            {path for module in options.modules for stage in stages_of(module, options.tests) for path in stage}
        )
        if not warm_up(Path(folder), everything, options.keyword):
            print("the tests fail on the modules as they are")
            return 2
        sys.dont_write_bytecode = True
        assert not any(name.startswith("neatpack") for name in sys.modules)
        if outcome(Path(folder), [everything], options.keyword) != "survives":
            print("the tests fail on the modules as they are, once their imports are made")
            return 2
        return hunt(root, Path(folder), [(number, *found[number]) for number in chosen], options.tests, options.keyword)


def hunt(root: Path, folder: Path, chosen: list, patterns: list[str], keyword: str) -> int:
    """Run the mutants; print those that survive, and in the end how many of each kind there were."""
    begin, outcomes = time.monotonic(), Counter()
    for number, module, line, what, mutant in chosen:
        source = module.read_text(encoding="utf-8")
        victim = folder / "neatpack" / module.resolve().relative_to(root)
        victim.write_text(ast.unparse(mutant()), encoding="utf-8")
        told = outcome(folder, stages_of(module, patterns), keyword)
        outcomes[told] += 1
        if told == "survives":
            print(f"{number:4d} {module.name} {line:3d} {what:24s} {source.splitlines()[line - 1].strip()}", flush=True)
        victim.write_text(source, encoding="utf-8")
    seconds = time.monotonic() - begin
    counted = ", ".join(f"{outcomes[name]} {verb}" for name, verb in VERBS.items())
    print(f"{len(chosen)} mutants: {counted}, {seconds:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
