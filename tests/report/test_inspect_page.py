"""The page of a packing, opened in Chromium: drawn, searched, walked by keyboard, pointed at, and right."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from packings_to_look_at import write_texts

pytest.importorskip("selenium")
from pages import (
    errors_of,
    focus,
    focused,
    open_page,
    point_at,
    press,
    set_width,
    settle,
    text_of,
    write_inspect_page,
)
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from neatpack.convert.flex import to_block_mask
from neatpack.data import pack
from neatpack.packed_seq import packed_seq_params_from_doc_ids
from neatpack.planning import plan_rows, save_plan


@pytest.fixture
def page(browser, packed, tmp_path):
    """The browser with the page of the packed folder."""
    write_inspect_page(tmp_path / "page.html", packed)
    open_page(browser, tmp_path / "page.html")
    return browser


def test_the_page_opens_without_a_word_on_the_console(page):
    assert page.title == "packed · neatpack inspect"
    assert page.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert errors_of(page) == []


def test_the_rows_are_drawn_in_the_colours_of_their_documents(page):
    settle(page)
    drawn = page.execute_script(
        "const box = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data, seen = new Set();"
        "for (let at = 0; at < box.length; at += 4) seen.add((box[at] << 16) | (box[at + 1] << 8) | box[at + 2]);"
        "return theme.runs.map((hex) => seen.has(parseInt(hex.slice(1), 16)));"
    )
    assert all(drawn)


def test_neighbouring_documents_never_share_a_hue(page):
    same = "return hues.some((hue, at) => at && rowOf[at] === rowOf[at - 1] && hue === hues[at - 1])"
    assert page.execute_script(same) is False


def test_search_finds_a_document_by_number_and_by_text(page):
    field = page.find_element(By.ID, "search")
    field.send_keys("needle")
    assert text_of(page, "found") == "1 of 1"
    assert "needle in the hay" in text_of(page, "text")
    number = page.execute_script("return R.doc[view.selected]")
    field.clear()
    field.send_keys("#7")
    assert text_of(page, "document") == "Document 7"
    field.clear()
    field.send_keys(f"row:{page.execute_script('return R.rows[rowOf[arguments[0]]]', number)}")
    assert page.execute_script("return view.matches.includes(arguments[0])", number)
    field.clear()
    field.send_keys("nowhere to be found")
    assert text_of(page, "found") == "Not found"


def test_search_walks_its_matches_by_keyboard(page):
    focus(page, "viewport")
    press(page, "/")
    assert focused(page) == "search"
    press(page, *"document 1")
    first = text_of(page, "document")
    total = int(text_of(page, "found").split(" of ")[1])
    assert total > 50
    press(page, Keys.ENTER)
    assert text_of(page, "found") == f"2 of {total}"
    assert text_of(page, "document") != first
    press(page, Keys.ARROW_DOWN, "n", "p", "p")
    assert focused(page) == "viewport"
    assert text_of(page, "document") == first
    press(page, Keys.ESCAPE)
    assert text_of(page, "found") == ""
    assert errors_of(page) == []


def test_arrow_keys_move_the_selection_and_say_where_it_is(page):
    focus(page, "viewport")
    press(page, Keys.HOME)
    assert text_of(page, "document") == "Document 0"
    press(page, Keys.ARROW_RIGHT)
    assert text_of(page, "document") == "Document 1"
    press(page, Keys.ARROW_LEFT, Keys.ARROW_LEFT)
    assert text_of(page, "document") == "Document 0"
    press(page, Keys.ARROW_DOWN)
    assert text_of(page, "of").endswith("in row 1")
    assert text_of(page, "announce").startswith("Row 1, document ")
    press(page, Keys.END)
    last = page.execute_script("return rowCount - 1")
    assert text_of(page, "of").endswith(f"in row {last}")
    assert page.execute_script("return viewport.scrollTop > 0")
    press(page, Keys.PAGE_UP, Keys.ARROW_UP)
    assert page.execute_script("return rowOf[view.selected]") < last - 10


def test_every_tool_is_reached_by_tab_and_shows_its_focus(page):
    page.execute_script("document.body.focus()")
    reached = []
    while True:
        press(page, Keys.TAB)
        if page.execute_script("return document.activeElement === document.body"):
            break
        shown, name = page.execute_script(
            "const at = document.activeElement, style = getComputedStyle(at);"
            "return [style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) > 0, at.id || at.className];"
        )
        assert shown, name
        reached.append(name)
    assert {"skip", "search", "jump", "colour", "viewport", "text", "chart"} <= set(reached)


def test_histograms_are_walked_with_the_arrow_keys(page):
    page.execute_script("document.querySelector('#lengths .chart').focus({focusVisible: true})")
    press(page, Keys.END, Keys.ARROW_LEFT)
    said = page.execute_script("return document.querySelector('#lengths .readout').textContent")
    assert " tokens: " in said
    assert said == page.execute_script("return document.querySelector('#lengths .chart').getAttribute('aria-valuetext')")


def test_pointing_at_a_run_shows_its_document_until_the_pointer_leaves(page):
    before = text_of(page, "document")
    other = page.execute_script("return R.offsets[2]")
    point_at(page, other)
    assert text_of(page, "document") == f"Document {other}"
    expected = page.execute_script("return R.texts[arguments[0]]", other)
    assert text_of(page, "text") == expected
    page.execute_script("viewport.dispatchEvent(new PointerEvent('pointerleave'))")
    assert text_of(page, "document") == before


def test_a_row_that_stands_out_is_one_choice_away(page):
    emptiest = page.execute_script("return R.marks.emptiest")
    page.execute_script("const j = byId('jump'); j.selectedIndex = 1; j.dispatchEvent(new Event('change'))")
    assert text_of(page, "of").endswith(f"in row {emptiest}")


def test_the_mask_counts_the_pairs_and_blocks_that_attention_computes(browser, tmp_path):
    rng = np.random.default_rng(1)
    plan = plan_rows(rng.integers(1, 700, 60), 1024, align=4, seed=0)
    save_plan(plan, tmp_path / "plan.npz")
    write_inspect_page(tmp_path / "page.html", tmp_path / "plan.npz")
    open_page(browser, tmp_path / "page.html")
    starts = plan.slot_starts()
    for row in range(plan.num_rows):
        doc_ids = torch.zeros(1, 1024, dtype=torch.int64)
        allowed = torch.zeros(1024, 1024, dtype=torch.bool)
        for number, at in enumerate(range(plan.row_offsets[row], plan.row_offsets[row + 1])):
            run = slice(int(starts[at]), int(starts[at] + plan.length[at]))
            doc_ids[0, run] = number + 1
            allowed[run, run] = torch.ones(run.stop - run.start, run.stop - run.start).tril() > 0
        mask = to_block_mask(packed_seq_params_from_doc_ids(doc_ids))
        computed = int(mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum())
        browser.execute_script("select(R.offsets[arguments[0]])", row)
        assert browser.execute_script("return blocksOf(arguments[0])", row) == computed
        share = 100 * int(allowed.sum()) / (1024 * 1025 / 2)
        assert f"{share:.1f} % of the pairs" in browser.find_element(By.ID, "mask").get_attribute("aria-label")


def test_what_a_document_holds_cannot_run_or_break_the_page(browser, tmp_path):
    hostile = [
        "</script><script>document.title = 'owned'</script>",
        "<!--<script>",
        "<img src=x onerror=\"document.title='owned'\">",
        "]]>\u2028\u2029\x00\x07 &lt; \\u003c \\ \" '",
    ]
    pack([write_texts(tmp_path / "texts", hostile)], tmp_path / "<b>packed<script>", 256, seed=None)
    write_inspect_page(tmp_path / "page.html", tmp_path / "<b>packed<script>")
    open_page(browser, tmp_path / "page.html")
    assert browser.title == "<b>packed<script> · neatpack inspect"
    assert text_of(browser, "path").endswith("<b>packed<script>")
    shown = browser.execute_script("return R.texts")
    assert sorted(shown) == sorted(text + "<eos>" for text in hostile)
    for at in range(len(hostile)):
        browser.execute_script("select(arguments[0])", at)
        assert text_of(browser, "text") == shown[at]
    assert browser.execute_script("return document.scripts.length") == 2
    assert errors_of(browser) == []


def test_the_policy_lets_nothing_in(page):
    violated = page.execute_async_script(
        "const done = arguments[0], seen = [];"
        "document.addEventListener('securitypolicyviolation', (event) => seen.push(event.effectiveDirective));"
        "fetch('http://127.0.0.1:9/').catch(() => {});"
        "new Image().src = 'http://127.0.0.1:9/x.png';"
        "document.head.append(Object.assign(document.createElement('script'), { textContent: 'document.title = 1' }));"
        "setTimeout(() => done(seen), 200);"
    )
    assert sorted(violated) == ["connect-src", "img-src", "script-src-elem"]
    assert page.title == "packed · neatpack inspect"
    assert errors_of(page)  # and it is the console that tells


def test_a_narrow_window_needs_no_sideways_scrolling(page):
    set_width(page, 390)
    settle(page)
    assert page.execute_script("return document.scrollingElement.scrollWidth - innerWidth") <= 0
    assert errors_of(page) == []


def test_a_plan_without_its_source_says_how_to_read_the_text(browser, tmp_path):
    save_plan(plan_rows([5, 3, 4, 2, 2], 8), tmp_path / "plan.npz")
    write_inspect_page(tmp_path / "page.html", tmp_path / "plan.npz")
    open_page(browser, tmp_path / "page.html")
    assert "A plan holds no tokens" in text_of(browser, "notes")
    assert "Not compared: 2 rows fill no step of 8 ranks" in text_of(browser, "ranks-note")
    browser.find_element(By.ID, "search").send_keys("text")
    assert text_of(browser, "found") == "There is no text here to search"
    assert errors_of(browser) == []


def test_an_empty_plan_is_a_page_too(browser, tmp_path):
    save_plan(plan_rows([0, 0], 8), tmp_path / "plan.npz")
    write_inspect_page(tmp_path / "page.html", tmp_path / "plan.npz")
    open_page(browser, tmp_path / "page.html")
    assert text_of(browser, "document") == "No rows"
    assert errors_of(browser) == []
