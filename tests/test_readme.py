"""The README is true: its code runs, and its tree names every file. `python tests/test_readme.py` rewrites the tree."""

import ast
import re
import sys
from pathlib import Path

import pytest

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


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.fixture
def packed_corpus_and_model(tmp_path, monkeypatch):
    """What the README's code finds: a packed folder and a checkpoint."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from neatpack.data import pack

    monkeypatch.chdir(tmp_path)
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(12):
        (corpus / f"{number}.txt").write_text(f"document {number} " * (number + 1))
    pack([corpus], "packed", 256)
    config = LlamaConfig(vocab_size=258, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    LlamaForCausalLM(config).save_pretrained("path/to/model")


def test_the_code_of_the_readme_runs(packed_corpus_and_model):
    first, *others = blocks()
    # Rows of the README have 4096 tokens; here 256 are enough.
    names: dict = {}
    exec(first.replace("4096", "256"), names)
    assert names["report"].isolated
    for block in others:
        exec(block, {})
    assert others


if __name__ == "__main__":
    text = README.read_text()
    README.write_text(TREE.sub(lambda _: tree(), text))
    sys.exit(0)
