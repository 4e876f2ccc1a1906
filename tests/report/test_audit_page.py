"""The heat map of an audit, opened in Chromium: cells off the diagonal where documents move each other, and only there."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("selenium")
from pages import errors_of, open_page, press, set_theme, settle, text_of
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from neatpack.audit import ModelAudit
from neatpack.audit.influence import InfluenceMap
from neatpack.audit.model_audit import AttentionAudit
from neatpack.isolation import Document, IsolationReport
from neatpack.report import audit_page, write_page

DOCUMENTS = (Document(0, 0, 3), Document(0, 3, 5), Document(1, 0, 2), Document(1, 2, 6))


def report_of(moved):
    """A report of four documents in two rows, in which these pairs move by so much."""
    influence = np.zeros((4, 4))
    for (source, target), size in moved.items():
        influence[source, target] = size
    return IsolationReport(DOCUMENTS, (0, 1, 2, 3), influence, np.zeros(4), 3.0, 0.0, 1e-5)


@pytest.fixture
def page(browser, tmp_path):
    """An isolated implementation, a leaking twin of it, and one that does not run."""
    removed = InfluenceMap(np.where(np.eye(4, dtype=bool), np.nan, 2.0), 1e-5)
    results = (
        AttentionAudit("packed_varlen", report_of({(0, 1): 1e-6}), None, True, "offsets", None, None, removed),
        AttentionAudit("sdpa", report_of({(0, 1): 5.0, (2, 3): 0.02, (3, 0): np.inf}), None, True, "positions"),
        AttentionAudit("eager", None, "ValueError: <no such thing>", False),
    )
    audit = ModelAudit("models/<tiny>", "llama", "random", 2, 8, 0, results)
    write_page(audit_page(audit), tmp_path / "page.html")
    open_page(browser, tmp_path / "page.html")
    return browser


def tables(page):
    return page.find_elements(By.CSS_SELECTOR, "table.heat")


def painted(table):
    """Cells that stand out: `(changed, moved)`."""
    cells = table.find_elements(By.TAG_NAME, "td")
    marked = [at for at, cell in enumerate(cells) if not {"blank", "self"} & set(cell.get_attribute("class").split())]
    return [divmod(at, 4) for at in marked]


def test_an_isolated_model_is_blank_and_its_leaking_twin_is_not(page):
    isolated, control, leaking = tables(page)
    assert painted(isolated) == []
    assert len(painted(control)) == 12
    assert painted(leaking) == [(0, 1), (2, 3), (3, 0)]
    assert "3 of 12 pairs above the tolerance" in leaking.get_attribute("aria-label")


def test_the_page_states_the_verdict_and_the_scale(page):
    assert text_of(page, "model") == "models/<tiny>"
    verdicts = [each.text for each in page.find_elements(By.CSS_SELECTOR, "#figures .verdict")]
    assert verdicts == ["isolated", "leaking", "unsupported"]
    assert "up to the tolerance, 1e-5" in text_of(page, "results")
    assert "to 5.0 (logarithmic)" in text_of(page, "results")
    assert "ValueError: <no such thing>" in text_of(page, "results")
    assert "document 0 (row 0, tokens 0 to 2) moves document 1" in text_of(page, "results")
    assert page.title == "models/<tiny> · neatpack audit"
    assert errors_of(page) == []


def test_cells_are_walked_with_the_arrow_keys_and_read_out(page):
    page.execute_script("arguments[0].querySelector('td[tabindex=\"0\"]').focus({focusVisible: true})", tables(page)[2])
    press(page, Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.HOME)
    said = page.execute_script("return document.activeElement.getAttribute('aria-label')")
    assert said == "Document 3 moves document 0 by inf"
    assert said in text_of(page, "results")
    assert page.execute_script("return getComputedStyle(document.activeElement).outlineStyle") != "none"


def test_the_maps_are_drawn_anew_when_the_theme_changes(page):
    colour = "return getComputedStyle(document.querySelectorAll('table.heat')[2].querySelectorAll('td')[11]).backgroundColor"
    light = page.execute_script(colour)
    set_theme(page, "dark")
    settle(page)
    assert page.execute_script(colour) != light
    assert len(tables(page)) == 3
