"""The public surface of `neatpack.convert`: light to import, and every conversion says which layout form it takes."""

import inspect
import re
import subprocess
import sys

import pytest

import neatpack.convert as convert

CONVERSIONS = sorted(name for name, value in vars(convert).items() if name.startswith("to_") and inspect.isfunction(value))


def test_importing_conversions_needs_torch_and_numpy_only():
    program = "import sys, neatpack.convert; print(*{name.split('.')[0] for name in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert {"torch", "numpy"} <= set(loaded)
    assert not set(loaded) & {"pyarrow", "transformers", "datasets", "xformers", "transformer_engine", "megatron", "fla", "jax"}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_the_first_line_names_the_layout_form(name):
    first = inspect.getdoc(getattr(convert, name)).splitlines()[0]
    assert re.search(r"\bform [ABC]\b", first), first


def test_conversions_are_here_under_the_consumers_names():
    expected = "varlen hf_kwargs block_mask dense_mask nested megatron te xformers fla seq_idx flashinfer segment_ids"
    assert {f"to_{name}" for name in expected.split()} <= set(CONVERSIONS)
