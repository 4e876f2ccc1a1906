"""Faults that others reported in public, as data: `cases.json`, read by one runner a kind.

A case has an `id`, its public `source`, a `kind`, what the `fault` was in our words, an `input` and what is `expected` of it.
`check` names the test of the kind's runner that runs it; `found` says whether we were right before the case was tried
("right") or had to be mended ("mended"). A case that cannot happen here says why instead (`not_applicable`).
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from neatpack import errors
from neatpack.convert import doc_ids_from_seq_lengths
from neatpack.packed_seq import PackedSeqParams, packed_seq_params_from_doc_ids


@dataclass(frozen=True, kw_only=True)
class Case:
    """One reported fault."""

    id: str
    source: str
    kind: str
    fault: str
    input: dict[str, Any]
    expected: dict[str, Any]
    check: str | None = None
    found: str | None = None
    not_applicable: str | None = None
    note: str = field(default="", compare=False)


def all_cases() -> list[Case]:
    """Every case, in the order of the file."""
    return [Case(**entry) for entry in json.loads(Path(__file__).with_name("cases.json").read_text(encoding="utf-8"))]


def runs(kind: str, check: str) -> pytest.MarkDecorator:
    """Run a test on every case of this kind and check, as its argument `case`."""
    chosen = [case for case in all_cases() if (case.kind, case.check) == (kind, check)]
    assert chosen, f"no case of kind {kind!r} asks for {check!r}"
    return pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in chosen])


def refuses(expected: dict[str, Any]) -> Any:
    """A `pytest.raises` for the error that a case expects, its text naming the way out."""
    return pytest.raises(getattr(errors, expected["error"]), match=f"(?s){expected['way_out']}")


def params_of(lengths: list[int], row_length: int | None = None) -> PackedSeqParams:
    """Metadata of one row of documents."""
    return packed_seq_params_from_doc_ids(doc_ids_from_seq_lengths([lengths], row_length))


def params_of_map(doc_ids: list[list[int]]) -> PackedSeqParams:
    return packed_seq_params_from_doc_ids(torch.tensor(doc_ids))


def joined(parts: list[list[Any]]) -> list[Any]:
    """The lists one after the other."""
    return [value for part in parts for value in part]


def row_of(lengths: list[int], first: int = 3) -> dict[str, list[int]]:
    """A row for the collator: documents of these lengths, every token another one."""
    return {"input_ids": list(range(first, first + sum(lengths))), "seq_lengths": lengths}
