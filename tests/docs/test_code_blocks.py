"""Every code block of the docs runs, page by page, and prints what the page says it prints."""

import shutil
from pathlib import Path

import pytest

from code_blocks import Block, blocks, compare, packed_workplace, run_page

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(page for page in DOCS.rglob("*.md") if any(block.language != "text" for block in blocks(page)))
SMALLER = {"4096": "256", "8192": "256"}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    packed_workplace(folder)
    return folder


# Of other packages, on machines without an accelerator and from one of their own modules to another.
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")
@pytest.mark.filterwarnings("ignore:.*deprecated and will be removed in v6:FutureWarning")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_the_code_of_a_page_runs_and_prints_what_it_says(page, workplace, tmp_path, monkeypatch):
    shutil.copytree(workplace, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    run_page(page, SMALLER)


def test_there_are_pages_with_code():
    assert len(PAGES) > 10


def test_only_languages_that_are_run_or_data_are_used():
    used = {block.language for page in DOCS.rglob("*.md") for block in blocks(page)}
    assert used <= {"python", "bash", "text", "yaml", "toml", "json"}


def test_a_page_that_prints_something_else_is_found():
    with pytest.raises(pytest.fail.Exception, match="the page says"):
        compare(Block("text", "[0, 2]\n", 1), "[0, 3]\n", Path("page.md"))


def test_hidden_and_indented_blocks_are_run(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- test\na = 1\n-->\n\n=== tab\n\n    ```python\n    if a:\n        b = a + 1\n    ```\n")
    assert run_page(page)["b"] == 2
