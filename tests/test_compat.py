"""The reference's import path as a distribution of its own."""

import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import neatpack.packed_seq

ROOT = Path(__file__).parents[1]


def test_the_reference_import_path_is_neatpacks_own_code():
    from nemo_automodel.components.datasets import packed_seq

    for name in ("PackedSeqParams", "packed_seq_params_from_doc_ids", "to_flash_attention_kwargs"):
        assert getattr(packed_seq, name) is getattr(neatpack.packed_seq, name)


def test_the_import_is_refused_where_the_real_package_is_installed(tmp_path):
    installed = tmp_path / "nemo_automodel-9.9.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: nemo-automodel\nVersion: 9.9\n")
    program = "import nemo_automodel.components.datasets.packed_seq"
    result = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert "ImportError: nemo-automodel 9.9 and nemo-automodel-packed-seq both provide" in result.stderr
    assert "pip uninstall" in result.stderr


def test_the_compat_distribution_holds_one_module_and_claims_no_package():
    files = [str(file) for file in metadata.files("nemo-automodel-packed-seq") or []]
    assert not any(file.endswith("__init__.py") for file in files)
    source = ROOT / "compat/nemo-automodel-packed-seq/src"
    assert [path.relative_to(source).as_posix() for path in source.rglob("*.py")] == [
        "nemo_automodel/components/datasets/packed_seq.py"
    ]


def test_the_main_wheel_holds_neatpack_only(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("neatpack-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "neatpack/packed_seq.py" in names
    assert "neatpack/py.typed" in names
    assert not [name for name in names if not name.startswith(("neatpack/", "neatpack-"))]
