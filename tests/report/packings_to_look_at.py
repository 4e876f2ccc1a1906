"""Texts and folders that the tests of pages pack."""

from __future__ import annotations

import numpy as np

TEXTS = ["def first():\n    return 1", "alpha beta gamma", "naïve ünïcode 🙂", "needle in the hay", "x", "a longer text " * 9]


def short_texts(count, seed=0):
    """The texts above, and numbered ones of 2 to 60 words."""
    rng = np.random.default_rng(seed)
    return TEXTS + [f"document {number} " + "word " * int(rng.integers(1, 60)) for number in range(count - len(TEXTS))]


def write_texts(folder, texts):
    """A text file a document."""
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"{number:05}.txt").write_text(text, encoding="utf-8")
    return folder
