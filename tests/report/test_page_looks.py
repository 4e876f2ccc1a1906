"""Pages can be read in both themes, and stay small and quick however large the packing is."""

from __future__ import annotations

import time

import numpy as np
import pytest

pytest.importorskip("selenium")
import transformers
from pages import contrasts, errors_of, open_page, set_theme, set_width, settle, text_of, write_inspect_page

from neatpack.audit import audit_model
from neatpack.planning import plan_rows, save_plan
from neatpack.report import audit_page, write_page

READABLE = 4.5  # the least contrast of text that WCAG 2 (AA) allows


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_text_of_a_packings_page_can_be_read(browser, packed, tmp_path, theme):
    set_theme(browser, theme)
    write_inspect_page(tmp_path / "page.html", packed)
    open_page(browser, tmp_path / "page.html")
    found = contrasts(browser)
    assert len(found) > 100
    assert [(ratio, text) for ratio, text in found if ratio < READABLE] == []
    on_runs = browser.execute_script("return theme.runs.map((run) => [luminance(run), luminance(inkOn(run))])")
    assert all((max(pair) + 0.05) / (min(pair) + 0.05) >= READABLE for pair in on_runs)
    dark = browser.execute_script("return luminance(colour('page')) < 0.05")
    assert dark == (theme == "dark")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_text_of_an_audits_page_can_be_read(browser, tmp_path, theme):
    transformers.LlamaConfig(num_key_value_heads=8).save_pretrained(tmp_path)
    write_page(audit_page(audit_model(tmp_path, attention=["eager"], row_length=32, control=True)), tmp_path / "page.html")
    set_theme(browser, theme)
    open_page(browser, tmp_path / "page.html")
    found = contrasts(browser)
    assert len(found) > 100
    assert [(ratio, text) for ratio, text in found if ratio < READABLE] == []
    assert errors_of(browser) == []


def test_the_contrast_check_sees_grey_on_grey(browser, packed, tmp_path):
    write_inspect_page(tmp_path / "page.html", packed)
    open_page(browser, tmp_path / "page.html")
    browser.execute_script("byId('lede').style.color = '#bbbbbb'")
    assert min(contrasts(browser))[0] < READABLE


def test_the_rows_are_drawn_anew_when_the_theme_changes(browser, packed, tmp_path):
    write_inspect_page(tmp_path / "page.html", packed)
    open_page(browser, tmp_path / "page.html")
    pixel = "return [...canvas.getContext('2d').getImageData(GUTTER + 3, RULER + RUN - 2, 1, 1).data]"
    settle(browser)
    light = browser.execute_script(pixel)
    set_theme(browser, "dark")
    settle(browser)
    assert browser.execute_script(pixel) != light


def test_a_million_rows_are_a_page_below_two_megabytes_that_opens_at_once(browser, tmp_path):
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(6, 1, 3_500_000), 1, 2048).astype(np.int32)
    plan = plan_rows(lengths, 2048, seed=0)
    assert plan.num_rows > 1_000_000
    save_plan(plan, tmp_path / "plan.npz")
    started = time.perf_counter()
    size = write_inspect_page(tmp_path / "page.html", tmp_path / "plan.npz")
    written = time.perf_counter() - started
    assert size < 2_000_000
    open_page(browser, tmp_path / "page.html")
    load_ms = browser.execute_script("return performance.getEntriesByType('navigation')[0].loadEventEnd")
    print(f"{plan.num_rows:,} rows: page of {size:,} bytes, written in {written:.1f} s, loaded in {load_ms:.0f} ms")
    assert "4,000 of" in text_of(browser, "rows-note")
    assert "drawn at random" in text_of(browser, "rows-note")
    assert errors_of(browser) == []
    set_width(browser, 1280)
    browser.execute_script("viewport.scrollTop = viewport.scrollHeight")
    settle(browser)
    assert browser.execute_script("return canvas.height / devicePixelRatio") < 1000  # a window on the rows, not all of them
