"""A headless Chromium, and a packing to look at in it."""

from __future__ import annotations

import os
import shutil

import pytest
from packings_to_look_at import short_texts, write_texts

from neatpack.data import pack

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1280,1600",
)


@pytest.fixture(scope="session")
def packed(tmp_path_factory):
    """A packed folder of 300 short texts in rows of 256 tokens."""
    place = tmp_path_factory.mktemp("packed")
    pack([write_texts(place / "texts", short_texts(300))], place / "packed", 256, overflow="split", seed=3)
    return place / "packed"


@pytest.fixture(scope="session")
def chromium(tmp_path_factory):
    """A driver of one headless Chromium for all tests; without Chromium they skip, unless NEATPACK_NEEDS_BROWSER is set."""
    binary = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        reason = "no Chromium with its driver to open pages in (Debian: apt-get install chromium chromium-driver)"
        (pytest.fail if os.environ.get("NEATPACK_NEEDS_BROWSER") else pytest.skip)(reason)
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield browser
    browser.quit()


@pytest.fixture
def browser(chromium):
    """The browser with nothing left from the test before: wide, light, and with an empty log."""
    from pages import set_theme

    chromium.get("about:blank")
    chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    set_theme(chromium, "light")
    chromium.get_log("browser")
    return chromium
