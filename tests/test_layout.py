"""Imports run one way, and `import neatpack` stays light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "neatpack"

# What a part may import, besides itself and what all share. The two wings never import each other; the roof looks into both.
DATA_WING = {"planning": set(), "data": {"planning", "engine"}, "engine": {"planning"}}
MODEL_WING = {
    "packed_seq": set(),
    "convert": {"packed_seq"},
    "attention_plan": set(),
    "attention_kernel": set(),
    "attention_op": {"attention_plan"},
    "attention": {"packed_seq", "convert", "attention_plan", "attention_kernel", "attention_op"},
    "isolation": {"packed_seq", "convert"},
    "train": {"packed_seq", "convert", "attention", "isolation"},
    "hf": {"packed_seq", "convert", "attention", "isolation", "train"},
}
SHARED = {"errors", "testing", "reserved"}
ALLOWED = {**{part: set() for part in SHARED}, **DATA_WING, **MODEL_WING}
ROOF = {"audit", "report", "cli", "stream", "__init__", "__main__"}


def part_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_parts(path: Path, *, type_checking: bool = True) -> set[str]:
    parts = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "neatpack":
            names = node.module.split(".")[1:]
            parts |= {names[0]} if names else {alias.name for alias in node.names}
        if isinstance(node, ast.Import):
            parts |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("neatpack.")}
    return parts


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_imports_run_one_way(path):
    part = part_of(path)
    if part in ROOF:
        return
    assert part in ALLOWED, f"{part}: which wing does this part belong to?"
    assert imported_parts(path) <= ALLOWED[part] | {part} | SHARED


def test_the_import_check_sees_a_forbidden_import(tmp_path):
    module = tmp_path / "module.py"
    module.write_text("from neatpack.data.store import write\nimport neatpack.hf\nfrom neatpack import planning\n")
    assert imported_parts(module) == {"data", "hf", "planning"}


def modules_after(statement: str) -> set[str]:
    program = f"import sys; {statement}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    return set(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split())


def test_importing_neatpack_needs_nothing_but_python():
    assert not modules_after("import neatpack") & {"numpy", "torch", "pyarrow", "transformers", "datasets", "rich", "typer"}


def test_planning_needs_numpy_only():
    loaded = modules_after("import neatpack; neatpack.plan_rows([3, 2, 4], 8)")
    assert "numpy" in loaded
    assert not loaded & {"torch", "pyarrow", "transformers", "datasets", "ray", "rich", "typer"}


def test_the_model_wing_needs_no_arrow_and_no_transformers():
    loaded = modules_after("import neatpack.packed_seq, neatpack.train, neatpack.attention, neatpack.isolation")
    assert "torch" in loaded
    assert not loaded & {"pyarrow", "transformers", "datasets", "ray"}


def test_the_data_wing_needs_no_torch():
    loaded = modules_after("import neatpack.data, neatpack.engine")
    assert not loaded & {"torch", "transformers", "datasets", "ray"}


def test_every_public_name_can_be_imported():
    import neatpack

    for name in neatpack.__all__:
        assert getattr(neatpack, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = neatpack.nonsense


def test_no_file_holds_two_rooms():
    folders = (SOURCE, ROOT / "tests", ROOT / "benchmarks", ROOT / "examples", ROOT / "compat")
    files = (path for folder in folders for path in folder.rglob("*.py"))
    long = {path.name: lines for path in files if (lines := len(path.read_text().splitlines())) > 500}
    assert long == {}
