"""CONTRIBUTING's tour is true: what it names is there, and it names every part of the package where it belongs."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "neatpack"
sys.path.insert(0, str(ROOT / "tests"))

import test_layout  # noqa: E402

TEXT = (ROOT / "CONTRIBUTING.md").read_text()
TOUR = TEXT.split("## A tour of the code")[1].split("## Rules")[0]
# The items of the tour, and the parts of the package that each must name.
ITEMS = dict(zip(("start", "data", "model", "roof", "shared"), re.split(r"^\d\. ", TOUR, flags=re.MULTILINE)[1:], strict=True))
PARTS = {
    "data": set(test_layout.DATA_WING),
    "model": set(test_layout.MODEL_WING) - {"packed_seq"},
    "roof": test_layout.ROOF - {"__init__"},
    "shared": test_layout.SHARED,
}


def parts_named(text: str) -> set[str]:
    return {name.removesuffix(".py").rstrip("/") for name in re.findall(r"`([\w/.]+)`", text.split("\n\n")[0])}


@pytest.mark.parametrize("item", PARTS)
def test_every_part_of_the_package_stands_in_its_wing(item):
    assert parts_named(ITEMS[item]) == PARTS[item]


def test_every_part_of_the_package_is_on_the_tour():
    parts = {
        path.name.removesuffix(".py") for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()
    }
    assert parts - {"__init__"} == set().union(*PARTS.values()) | {"packed_seq"}


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "RELEASING.md"])
def test_every_path_and_target_that_is_named_is_there(page):
    text = (ROOT / page).read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for name in re.findall(r"`((?:src|tests|docs|benchmarks|examples|compat)/[\w/.-]*|[\w-]+\.(?:md|toml|txt|yml))`", text):
        assert (ROOT / name).exists(), name
    assert set(re.findall(r"make ([a-z]+)", text)) <= targets
