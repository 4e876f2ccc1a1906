"""Run the fenced code of a Markdown page: Python in one namespace, `neatpack ...` lines through the command line itself.

A `text` block below a code block is what that code prints, and is compared with it (`...` stands for anything). Pages read
from top to bottom in a folder that `packed_workplace` filled. What a block needs and a reader does not, stands in an HTML
comment that begins with `<!-- test`.
"""

import contextlib
import doctest
import io
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from neatpack.cli import app

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))  # the ingredients that the examples and the pages share

BLOCK = re.compile(
    r"^(?P<indent> *)```(?P<language>\w+)[^\n]*\n(?P<code>.*?)^(?P=indent)```|^<!-- test\n(?P<hidden>.*?)^-->",
    re.DOTALL | re.MULTILINE,
)
CHECKER = doctest.OutputChecker()
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Block:
    """A piece of code and the line of its page that it starts at."""

    language: str
    code: str
    line: int


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, and its hidden ones as Python, in order."""
    text = page.read_text()
    found = []
    for match in BLOCK.finditer(text):
        code = match["hidden"] if match["code"] is None else match["code"]
        code = re.sub(rf"^{match['indent'] or ''}", "", code, flags=re.MULTILINE)
        found.append(Block(match["language"] or "python", code, text.count("\n", 0, match.start()) + 2))
    return found


def run_page(page: Path, smaller: dict[str, str] | None = None) -> dict:
    """Run every block of a page; `smaller` replaces sizes by ones that a test can afford. Returns Python's namespace."""
    names: dict = {"__name__": "__main__"}
    printed = None
    for block in blocks(page):
        if block.language == "text":
            compare(block, printed, page)
        elif block.language in RUNNERS:
            code = block.code
            for large, small in (smaller or {}).items():
                code = code.replace(large, small)
            printed = RUNNERS[block.language](code, block.line, page, names)
    return names


def run_python(code: str, line: int, page: Path, names: dict) -> str:
    """Execute a block; its lines keep their numbers on the page, so that a traceback points there."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile("\n" * (line - 1) + code, str(page), "exec"), names)
    return output.getvalue()


def run_shell(code: str, line: int, page: Path, names: dict) -> str:
    """Run the `neatpack` commands of a block in this process; other commands must name files that are there."""
    output = io.StringIO()
    for command in code.replace("\\\n", " ").splitlines():
        words = shlex.split(command, comments=True)
        if words[:1] == ["neatpack"]:
            with contextlib.redirect_stdout(output):
                status = app(words[1:], prog_name="neatpack", standalone_mode=False)
            assert not status, f"{page}:{line}: {command} ended with {status}"
        else:
            check_files(words, f"{page}:{line}: {command}")
    return output.getvalue()


def check_files(words: list[str], where: str) -> None:
    root = Path(__file__).parents[1]
    for word in words:
        if word.endswith(".py"):
            assert (root / word).is_file(), f"{where}: there is no {word}"


def compare(block: Block, printed: str | None, page: Path) -> None:
    assert printed is not None, f"{page}:{block.line}: nothing before this prints anything"
    if not CHECKER.check_output(block.code, printed, FLAGS):
        pytest.fail(f"{page}:{block.line}: the page says\n{block.code}\nbut its code printed\n{printed}", pytrace=False)


RUNNERS = {"python": run_python, "bash": run_shell}


def packed_workplace(folder: Path) -> None:
    """What pages find where they run: text in `corpus/`, a packed folder `packed`, a tokenizer and a checkpoint."""
    import torch
    from ingredients import byte_tokenizer, small_llama_config
    from transformers import LlamaForCausalLM

    from neatpack.data import pack

    corpus = folder / "corpus"
    corpus.mkdir()
    for number in range(12):
        (corpus / f"{number}.txt").write_text(f"document {number} " * (number + 1))
    pack([corpus], folder / "packed", 256)
    torch.manual_seed(0)
    LlamaForCausalLM(small_llama_config()).save_pretrained(folder / "path/to/model")
    byte_tokenizer().save_pretrained(folder / "path/to/tokenizer")
