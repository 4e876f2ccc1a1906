"""The README is true: its code runs, and its tree names every file. `python tests/test_readme.py` rewrites the tree."""

import ast
import re
import sys
from pathlib import Path

from code_blocks import packed_workplace, run_page

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
SOURCE = ROOT / "src" / "neatpack"
WINGS = [
    ("Data wing (NumPy and Arrow, no torch)", ["planning", "data", "engine"]),
    (
        "Model wing (torch, no Arrow)",
        ["packed_seq.py", "convert", "attention*.py", "isolation.py", "train", "hf"],
    ),
    ("Roof, and what all share", ["audit", "report", "cli", "*.py"]),
]
TREE = re.compile(r"(?<=<!-- tree -->\n).*?(?=<!-- /tree -->)", re.DOTALL)


def summary(path: Path) -> str:
    """The first line of a module's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n")[0].strip()


def line(path: Path) -> str:
    return f"{path.relative_to(SOURCE).as_posix():<36} {summary(path)}"


def tree() -> str:
    """A line a file, wing by wing."""
    listed: set[Path] = set()
    parts = []
    for title, patterns in WINGS:
        files = []
        for pattern in patterns:
            for match in sorted(SOURCE.glob(pattern)):
                files += sorted(match.rglob("*.py")) if match.is_dir() else [match]
        files = [path for path in dict.fromkeys(files) if path not in listed]
        listed |= set(files)
        parts.append(
            f"<details><summary>{title}: {len(files)} files</summary>\n\n```\n"
            + "\n".join(map(line, files))
            + "\n```\n</details>\n"
        )
    assert listed == set(SOURCE.rglob("*.py")), "a file that no wing holds"
    return "\n".join(parts)


def test_the_tree_names_every_file_with_its_own_first_line():
    found = TREE.search(README.read_text())
    assert found
    assert found.group() == tree(), "run `python tests/test_readme.py`"


def test_every_module_says_in_one_line_what_it_is():
    assert [path.name for path in SOURCE.rglob("*.py") if not summary(path).endswith((".", "?"))] == []


def test_the_code_of_the_readme_runs(tmp_path, monkeypatch):
    packed_workplace(tmp_path)
    monkeypatch.chdir(tmp_path)
    # Rows of the README have 4096 tokens; here 256 are enough.
    names = run_page(README, {"4096": "256"})
    assert names["report"].isolated
    assert names["params"].max_seqlen == 3


if __name__ == "__main__":
    text = README.read_text()
    README.write_text(TREE.sub(lambda _: tree(), text))
    sys.exit(0)
