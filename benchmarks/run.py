"""Every benchmark, one after the other, into `benchmarks/RESULTS.md`: `make bench`, or `make bench ONLY="metadata leaks"`.

A section is one script with its arguments and one claim. Scripts print Markdown and end with a line `headline: ...`, which is
collected at the top. Sections that are not asked for keep what the file says of them, from the machine they ran on.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE / "RESULTS.md"
PACKAGES = ("numpy", "torch", "transformers", "datasets", "pyarrow", "trl", "nemo-automodel", "lightbinpack", "ray")


@dataclass(frozen=True)
class Section:
    """A claim and the script that settles it."""

    name: str
    title: str
    command: tuple[str, ...]


SECTIONS = (
    Section("leaks", "Which ways of passing boundaries leak", ("leak_table.py",)),
    Section("metadata", "The metadata builder", ("metadata.py",)),
    Section("planning", "Planning rows", ("planning.py",)),
    Section(
        "growth",
        "How planning grows, to 100 million documents",
        ("plan_scale.py", "100000", "1000000", "10000000", "100000000"),
    ),
    Section("packing", "Packing a dataset", ("packing.py", "--documents", "200000")),
    Section("kills", "`kill -9` at random moments", ("kills.py", "--kills", "100")),
    Section("loading", "Loading packed rows", ("loading.py",)),
    Section("gather", "Gathering rows", ("gather.py",)),
    Section(
        "attention",
        "Attention and a training step",
        ("attention.py", "--lengths", "2048", "4096", "8192", "--repeats", "3", "--flex"),
    ),
    Section("blocks", "BlockMask from offsets", ("block_mask.py",)),
    Section("loss", "Memory of the loss", ("loss_memory.py",)),
    Section("context", "Context parallel: balance and traffic", ("context_parallel_balance.py",)),
    Section(
        "scale", "`neatpack pack` over four decades", ("scale.py", "--tokens", "1000000", "10000000", "100000000", "1000000000")
    ),
    Section("gpu", "The GPU check, on the device that its headline names", ("gpu_check.py",)),
)


def machine() -> str:
    """Processor, cores and memory, and the versions of what was measured."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = re.search(r"model name\s*: (.*)", info)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    packages = []
    for name in PACKAGES:
        try:
            packages.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            packages.append(f"{name} not installed")
    processor = model[1] if model else platform.processor() or platform.machine()
    return f"{processor}, {os.cpu_count()} cores, {memory:.0f} GiB; Python {platform.python_version()}, {', '.join(packages)}"


def measure(section: Section) -> str:
    """Run a section's script; its text in the results file.

    Raises:
        SystemExit: the script failed; what it printed is shown, and the results stay as they were.
    """
    begin, load = time.perf_counter(), os.getloadavg()[0]
    command = [sys.executable, str(HERE / section.command[0]), *section.command[1:]]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if run.returncode != 0:
        raise SystemExit(f"{section.name} failed with exit code {run.returncode}\n{run.stdout}")
    minutes, now = (time.perf_counter() - begin) / 60, datetime.datetime.now(datetime.timezone.utc).date()
    note = f"`python benchmarks/{' '.join(section.command)}`, {now}, {minutes:.1f} minutes, load {load:.1f} before it began."
    return f"## {section.title}\n<!-- {section.name} -->\n{note}\n\n{run.stdout.strip()}\n"


def sections_of(text: str) -> dict[str, str]:
    """What a results file says of each section, by the section's name."""
    parts = re.split(r"^(?=## )", text, flags=re.MULTILINE)[1:]
    names = (re.search(r"<!-- (\w+) -->", part) for part in parts)
    return {name[1]: part.strip() + "\n" for name, part in zip(names, parts, strict=True) if name}


def page(sections: dict[str, str], where: str) -> str:
    """The results file."""
    ordered = [sections[section.name] for section in SECTIONS if section.name in sections]
    heads = [line.removeprefix("headline: ") for text in ordered for line in text.splitlines() if line.startswith("headline: ")]
    return (
        "# Results\n\nMade by `make bench`; do not edit. Peers run side by side with neatpack; each script says how.\n"
        "Ratios come first; absolute numbers are those of the machine that a section ran on.\n"
        "A section that is not measured again keeps its numbers and its date, from the machine it ran on then.\n\n"
        f"Machine of the section measured last: {where}.\n\n"
        + "\n".join(f"- {head}" for head in heads)
        + "\n\n"
        + "\n".join(ordered)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("only", nargs="*", metavar="SECTION", help="sections to run")
    only = parser.parse_args().only
    unknown = set(only) - {section.name for section in SECTIONS}
    if unknown:
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(section.name for section in SECTIONS)}")
    for section in SECTIONS:
        if not only or section.name in only:
            print(f"{section.name}: {' '.join(section.command)}", flush=True)
            text = measure(section)
            known = sections_of(RESULTS.read_text()) if RESULTS.exists() else {}  # others may have run meanwhile
            known[section.name] = text
            RESULTS.write_text(page(known, machine()))  # kept section by section: a later one may fail
            print(known[section.name], flush=True)


if __name__ == "__main__":
    main()
