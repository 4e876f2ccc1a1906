"""The other packers, for side-by-side runs: `make bench` sets up `.venv-bench` with this file, and benchmarks load them by it.

Most peers install from PyPI as they are. Two do not:

- seqpacker's Linux wheel is tagged for CPython 3.8, though its compiled module is of the stable ABI: it is downloaded for that
  version, unpacked, and its module renamed to `_core.abi3.so`;
- nemo-automodel is installed without what it depends on, and single files of it are loaded, past its package's imports.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path
from types import ModuleType

SEQPACKER = "seqpacker==0.1.3"


def nemo_module(path: str) -> ModuleType:
    """One file of nemo-automodel, such as `components/datasets/packed_seq`, without the package around it.

    Raises:
        ImportError: nemo-automodel is not installed, or has no such file.
    """
    package = importlib.util.find_spec("nemo_automodel")
    if package is None or package.origin is None:
        raise ImportError("nemo-automodel is not installed (pip install --no-deps nemo-automodel)")
    file = Path(package.origin).parent / f"{path}.py"
    if not file.is_file():
        raise ImportError(f"this nemo-automodel has no {path}.py")
    spec = importlib.util.spec_from_file_location(f"nemo_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def install_seqpacker() -> None:
    """Put seqpacker into this environment's site-packages."""
    target = Path(sysconfig.get_paths()["platlib"])
    shutil.rmtree(target / "seqpacker", ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", folder]
        subprocess.run([*download, "--python-version", "3.8", "--ignore-requires-python", SEQPACKER], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(target)
    (module,) = (target / "seqpacker").glob("_core*.so")
    module.rename(module.with_name("_core.abi3.so"))


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog=f"Called without arguments it installs {SEQPACKER} into this environment."
    ).parse_args()
    install_seqpacker()
