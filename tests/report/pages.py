"""What tests do with a page in the browser: open it, read its console, press keys, measure its contrasts."""

from __future__ import annotations

from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By

from neatpack.report import inspect_page, open_packing, summarise, write_page

# Contrast of every text that is seen with what lies behind it, by the WCAG formula.
_CONTRASTS = r"""
const shades = new Map();
const painter = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
function rgba(css) {
  if (!shades.has(css)) {
    painter.clearRect(0, 0, 1, 1);
    painter.fillStyle = css;
    painter.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = painter.getImageData(0, 0, 1, 1).data;
    shades.set(css, [r, g, b, a / 255]);
  }
  return shades.get(css);
}
const linear = (c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
const luminance = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
function behind(element) {
  for (let at = element; at; at = at.parentElement) {
    const colour = rgba(getComputedStyle(at).backgroundColor);
    if (colour[3] > 0.99) return colour;
  }
  return rgba("white");
}
const found = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const element = walker.currentNode.parentElement, text = walker.currentNode.data.trim();
  if (!text || !element.checkVisibility() || ["SCRIPT", "STYLE"].includes(element.tagName) || element.disabled) continue;
  const [one, other] = [luminance(rgba(getComputedStyle(element).color)), luminance(behind(element))];
  found.push([(Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05), text.slice(0, 40)]);
}
return found;
"""


def write_inspect_page(path, target, *, rows=None, source=None, tokenizer=None, world_size=8):
    """Write the page of a packing; returns its bytes."""
    packing = open_packing(target, source=source, tokenizer=tokenizer)
    return write_page(inspect_page(packing, summarise(packing, world_size=world_size), rows=rows), path)


def set_theme(browser, theme):
    """Say what the reader prefers."""
    features = [{"name": "prefers-color-scheme", "value": theme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def set_width(browser, width):
    """Make the window so many CSS pixels wide."""
    metrics = {"width": width, "height": 1200, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def open_page(browser, path):
    """Open a page, whose script must have run to its end."""
    browser.get(path.resolve().as_uri())
    assert browser.execute_script("return document.documentElement.dataset.ready") == "true", errors_of(browser)


def errors_of(browser):
    """Errors and warnings on the console since the last look."""
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def text_of(browser, identifier):
    """Text of an element."""
    return browser.execute_script("return document.getElementById(arguments[0]).textContent", identifier)


def press(browser, *keys):
    """Press keys, one after the other, wherever the focus is."""
    for key in keys:
        ActionChains(browser).send_keys(key).perform()


def focused(browser):
    """Identifier of the element in focus."""
    return browser.execute_script("return document.activeElement.id")


def focus(browser, identifier):
    """Put the focus somewhere, as if by keyboard."""
    browser.execute_script("document.getElementById(arguments[0]).focus({focusVisible: true})", identifier)


def point_at(browser, document):
    """Move the pointer over the run of a document that is in sight, by its place among the rows of the page."""
    x, y = browser.execute_script(
        "const at = arguments[0], v = viewport; v.scrollIntoView();"
        "return [GUTTER + (left[at] + R.length[at] / 2) * scaleOf(v.clientWidth) - v.clientWidth / 2,"
        " RULER + rowOf[at] * ROW - v.scrollTop + RUN / 2 - v.clientHeight / 2];",
        document,
    )
    viewport = browser.find_element(By.ID, "viewport")
    ActionChains(browser).move_to_element_with_offset(viewport, round(x), round(y)).perform()


def settle(browser):
    """Wait until what was asked for is drawn."""
    browser.execute_async_script("const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => done()));")


def contrasts(browser):
    """`(ratio, text)` of every text on the page."""
    return [(ratio, text) for ratio, text in browser.execute_script(_CONTRASTS)]
