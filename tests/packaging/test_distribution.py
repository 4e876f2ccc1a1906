"""What is published: sdist and wheel are whole and clean, and the wheel works alone."""

import ast
import email
import re
import resource
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path, PurePosixPath

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import neatpack

ROOT = Path(__file__).parents[2]
JUNK = re.compile(
    r"__pycache__|\.pyc$|\.hypothesis|\.pytest_cache|demo-out|\.egg-info|\.venv|(^|/)\.git/|trainer_output|\.log$"
)
OLDEST = (3, 10)


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """The folder with the sdist, and the wheel that was built from it."""
    pytest.importorskip("build", reason="build is not installed (the dev extra)")
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def wheel(distributions):
    [path] = distributions.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def sdist_files(distributions):
    [path] = distributions.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        return {PurePosixPath(*PurePosixPath(member.name).parts[1:]).as_posix() for member in archive if member.isfile()}


@pytest.fixture(scope="module")
def wheel_files(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def wheel_metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_string(archive.read(name).decode())


def package_files() -> set[str]:
    """Everything of the package that is no leftover, relative to `src`."""
    source = ROOT / "src"
    files = {path.relative_to(source).as_posix() for path in (source / "neatpack").rglob("*") if path.is_file()}
    return {name for name in files if not JUNK.search(name)}


def test_twine_finds_nothing_to_complain_about(distributions):
    pytest.importorskip("twine", reason="twine is not installed (the dev extra)")
    files = [str(path) for path in distributions.iterdir()]
    done = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *files], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_sdist_has_everything_that_is_needed_to_build_and_test(sdist_files):
    needed = {"LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "pyproject.toml", "constraints.txt", "Makefile"}
    needed |= {"mkdocs.yml", "docs/index.md", "examples/demo.py", "tests/conftest.py", "src/neatpack/py.typed"}
    assert needed <= sdist_files
    assert {f"src/{name}" for name in package_files()} <= sdist_files


def test_nothing_that_a_run_leaves_behind_is_published(sdist_files, wheel_files):
    assert [name for name in sorted(sdist_files | wheel_files) if JUNK.search(name)] == []
    known = {"src", "tests", "examples", "benchmarks", "docs", "compat"}
    assert {name.split("/")[0] for name in sdist_files if "/" in name} <= known


def test_the_wheel_is_the_package_its_types_its_pages_and_its_licence(wheel_files):
    info = {name for name in wheel_files if ".dist-info/" in name}
    assert wheel_files - info == package_files()
    assert any(name.endswith("licenses/LICENSE") for name in info)


def test_the_metadata_says_who_may_install_it(wheel_metadata):
    assert wheel_metadata["Version"] == neatpack.__version__
    assert wheel_metadata["License-Expression"] == "Apache-2.0"
    assert wheel_metadata["Requires-Python"] == ">=3.10"
    assert wheel_metadata["Description-Content-Type"] == "text/markdown"
    allowed = SpecifierSet(wheel_metadata["Requires-Python"])
    named = [c.rpartition(" ")[2] for c in wheel_metadata.get_all("Classifier") if re.search(r"Python :: 3\.\d+$", c)]
    assert named[0] == "3.10"
    assert all(version in allowed for version in named)


def test_every_requirement_has_a_lower_bound_that_the_tested_version_meets(wheel_metadata):
    unbounded, outside = [], []
    for line in wheel_metadata.get_all("Requires-Dist"):
        requirement = Requirement(line)
        if requirement.name == "neatpack":
            continue
        bare = requirement.name in ("psutil", "hatchling")
        if not bare and not any(part.operator == ">=" for part in requirement.specifier):
            unbounded.append(line)
        try:
            installed = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            continue
        if not requirement.specifier.contains(installed.split("+")[0], prereleases=True):
            outside.append(f"{line}: {installed}")
    assert unbounded == []
    assert outside == []


@pytest.fixture(scope="module")
def bare_python(wheel, tmp_path_factory):
    """The Python of an environment that holds the wheel and nothing else."""
    folder = tmp_path_factory.mktemp("alone")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", str(python)]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", str(wheel)], check=True, capture_output=True)
    return python


def output_of(python, program: str) -> str:
    done = subprocess.run([python, "-I", "-c", program], capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_wheel_is_imported_alone_and_loads_no_package(bare_python):
    loaded = output_of(
        bare_python, "import sys, neatpack; print(neatpack.__version__, neatpack.__file__, *sys.modules)"
    ).split()
    assert loaded[0] == neatpack.__version__
    assert str(bare_python.parents[1]) in loaded[1]
    assert not {name.partition(".")[0] for name in loaded[2:]} & {"torch", "numpy", "pyarrow", "rich", "typer"}


def test_a_missing_package_is_named_and_not_before_it_is_needed(bare_python):
    program = "import neatpack\ntry: neatpack.plan_rows\nexcept ImportError as error: print(error.name)"
    assert output_of(bare_python, program) == "numpy"


def cpu_seconds(python, program: str) -> float:
    """The least of several runs: what the machine does besides only adds."""
    used = []
    for _ in range(7):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        output_of(python, program)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(used)


def test_importing_costs_little_more_than_starting_python(bare_python, capsys):
    bare, imported = cpu_seconds(bare_python, "pass"), cpu_seconds(bare_python, "import neatpack")
    with capsys.disabled():
        print(f"\nimport neatpack: {1000 * imported:.0f} ms of CPU time, {1000 * bare:.0f} ms of it Python's start")
    assert imported < 10 * bare


@pytest.mark.parametrize("folder", ["src", "tests", "examples", "benchmarks", "docs", "compat"])
def test_every_file_is_valid_for_the_oldest_python(folder):
    wrong = []
    for path in (ROOT / folder).rglob("*.py"):
        try:
            ast.parse(path.read_text(), feature_version=OLDEST)
        except SyntaxError as error:
            wrong.append(f"{path}: {error}")
    assert wrong == []
