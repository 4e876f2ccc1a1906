"""Print the cases by kind: right before they were tried, mended, or not applicable. Run: python tests/faults/report.py."""

import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from fault_cases import Case, all_cases

COLUMNS = ("right", "mended", "not applicable")


def table(cases: list[Case]) -> list[tuple[str, int, int, int]]:
    """Kind and number of cases by verdict, the sum of all last."""
    counts = Counter((case.kind, case.found or "not applicable") for case in cases)
    kinds = list(dict.fromkeys(case.kind for case in cases))
    rows = [(kind, *(counts[kind, verdict] for verdict in COLUMNS)) for kind in kinds]
    return [*rows, ("all", *(sum(row[column] for row in rows) for column in (1, 2, 3)))]


def main() -> None:
    cases = all_cases()
    lines = ["| kind | right before | mended | not applicable |", "|---|---:|---:|---:|"]
    lines += [f"| {kind} | {right} | {mended} | {away} |" for kind, right, mended, away in table(cases)]
    lines += [""] + [f"- {case.id} ({case.source}): {case.not_applicable}" for case in cases if case.not_applicable]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
