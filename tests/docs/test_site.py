"""The docs build without a warning, ask nothing of any other site, and hold every command and every public name."""

import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

import neatpack
from neatpack.cli import app

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "hooks"))

import api_reference  # noqa: E402
import cli_reference  # noqa: E402

API_PAGES = sorted((ROOT / "docs" / "api").glob("*.md"))
ON_PAGES = {
    name for page in API_PAGES for found in api_reference.MARKER.findall(page.read_text()) for name in found.split(", ")
}
COMMANDS = get_command(app).commands


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_the_command_line_page_has_every_option_of_every_command(name):
    page = cli_reference.on_page_markdown((ROOT / "docs" / "cli.md").read_text())
    section = page.split(f"## neatpack {name}\n")[1].split("\n## ")[0]
    for parameter in COMMANDS[name].params:
        for option in parameter.opts if parameter.param_type_name == "option" else []:
            assert option in section


def test_every_public_package_has_a_page():
    public = {"neatpack.packed_seq", "neatpack.attention", "neatpack.isolation", "neatpack.stream", "neatpack.errors"}
    public |= {"neatpack.planning", "neatpack.data", "neatpack.convert", "neatpack.train", "neatpack.train.context_parallel"}
    assert public | {"neatpack.hf", "neatpack.audit", "neatpack.testing"} <= ON_PAGES


@pytest.mark.parametrize("name", sorted(ON_PAGES))
def test_every_public_name_says_what_it_is(name):
    module = importlib.import_module(name)
    names = api_reference.public_names(module)
    assert names
    described = [public for public in names if inspect.isclass(value := getattr(module, public)) or inspect.isfunction(value)]
    assert [public for public in described if not (getattr(module, public).__doc__ or "").strip()] == []


def test_every_name_of_neatpack_itself_is_described_on_a_page():
    listed = {public for name in ON_PAGES for public in api_reference.public_names(importlib.import_module(name))}
    assert set(neatpack.__all__) - {"__version__"} <= listed


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs", reason="mkdocs is not installed (the docs extra)")
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


REQUEST = re.compile(
    r"""<(?:script|img|iframe|source|audio|video)\b[^>]*\bsrc\s*=\s*["']?(https?:)?//"""
    r"""|<link\b(?![^>]*rel=["']?canonical)[^>]*\bhref\s*=\s*["']?(https?:)?//"""
    r"""|url\(\s*["']?(https?:)?//|@import\s*["'](https?:)?//"""
)


@pytest.mark.slow
def test_pages_ask_nothing_of_other_sites(site):
    asking = {}
    for path in [*site.rglob("*.html"), *site.rglob("*.css")]:
        found = REQUEST.search(path.read_text())
        if found:
            asking[path.name] = found.group()
    assert asking == {}


@pytest.mark.slow
def test_the_site_describes_every_public_name_once(site):
    anchors = {
        anchor for page in (site / "api").glob("*.html") for anchor in re.findall(r'id="(neatpack[\w.]*)"', page.read_text())
    }
    for name in ON_PAGES:
        for public in api_reference.public_names(importlib.import_module(name)):
            assert f"{name}.{public}" in anchors


def test_the_check_for_requests_sees_one():
    assert REQUEST.search('<link rel="stylesheet" href="https://fonts.example/css">')
    assert REQUEST.search("<script src=//cdn.example/x.js>")
    assert not REQUEST.search('<a href="https://example.org">a link asks nothing</a>')
