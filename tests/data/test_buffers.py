"""Arrow arrays of numbers and NumPy arrays share their buffers, and nobody imports pandas for it."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

from data.corpora import random_ids
from data.test_pipeline import write_ids
from neatpack.data.buffers import array_of, numbers_of


@pytest.mark.parametrize("kind", ["uint8", "uint16", "int32", "int64", "uint64", "float16", "float32", "float64", "bool"])
@pytest.mark.parametrize("window", [slice(0, 9), slice(3, 7), slice(2, 2), slice(0, 0)])
def test_numbers_go_to_arrow_and_back(kind, window):
    values = (np.arange(9) % 3).astype(kind)[window]
    array = array_of(values)
    array.validate(full=True)
    assert array.to_pylist() == values.tolist()
    if kind != "bool":
        assert numbers_of(array).tolist() == values.tolist()
        assert np.shares_memory(numbers_of(array), values) or not len(values)


def test_a_slice_of_an_arrow_array_is_read_from_its_offset():
    array = pa.array([5, 6, 7, 8], pa.uint16())[1:3]
    assert numbers_of(array).tolist() == [6, 7]


def test_packing_imports_neither_pandas_nor_torch(tmp_path):
    source = write_ids(tmp_path / "a.arrow", random_ids(1, 50, 20))
    program = f"""
import sys
from neatpack.data import pack
pack({str(source)!r}, {str(tmp_path / "out")!r}, 64)
print([name for name in ("pandas", "torch", "datasets", "ray") if name in sys.modules])
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
