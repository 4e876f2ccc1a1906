"""The isolation matrix: a sample is measured again, and the page in the docs must say the same."""

import re
from pathlib import Path

import pytest
import torch

import neatpack.hf
from neatpack import check_isolation
from neatpack.audit import Zoo, audit_zoo, reference_flash
from neatpack.audit.zoo import _crashed
from neatpack.audit.zoo_entry import IMPLEMENTATIONS
from neatpack.audit.zoo_models import causal_lm_names, small_model
from neatpack.audit.zoo_page import page, versions
from neatpack.audit.zoo_sample import MECHANISMS, SAMPLE
from neatpack.errors import SourceError
from neatpack.hf import collator_for, contract_for
from tiny_models import DOC_IDS, packed_batch, tiny_model

OUTDATED = "docs/isolation.md is out of date; run: neatpack audit --zoo --write docs/isolation.md"
STANDING_IN = "## On packed_varlen through use_packed_varlen"
PAGE = Path(__file__).parents[2] / "docs" / "isolation.md"
SIGNS = {
    "isolated": "isolated", "refused": "refused", "-": "unavailable", "not built": "unbuildable", "**WRONG**": "wrong",
}  # fmt: skip


@pytest.fixture(scope="module")
def sample():
    return audit_zoo(SAMPLE, workers=2)


def verdicts(zoo):
    return {entry["name"]: {name: cell["verdict"] for name, cell in entry["cells"].items()} for entry in zoo.entries}


def verdicts_on(text):
    """The verdicts that a page states, by model type and implementation."""
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == len(IMPLEMENTATIONS) + 1 and re.fullmatch(r"`[\w.-]+`", cells[0]):
            stated = [next(verdict for sign, verdict in SIGNS.items() if cell.startswith(sign)) for cell in cells[1:]]
            found[cells[0].strip("`")] = dict(zip(IMPLEMENTATIONS, stated, strict=True))
    return found


def reasons_on(text):
    """The reasons that a page states, by model type."""
    found = {}
    for line in text.partition("## Reasons")[2].splitlines():
        named = re.match(r"- ((?:`[\w.-]+`(?: \([^)]*\))?(?:, )?)+): (.*)", line)
        for name in re.findall(r"`([\w.-]+)`", named[1]) if named else ():
            found.setdefault(name, set()).add(named[2])
    return found


def test_no_model_that_a_contract_accepts_leaks(sample):
    assert sample.wrong == []
    assert [entry["name"] for entry in sample.entries] == list(SAMPLE)


def test_what_is_isolated_was_measured_and_would_have_shown_a_leak(sample):
    measured = [
        cell["measured"] for entry in sample.entries for cell in entry["cells"].values() if cell["verdict"] == "isolated"
    ]
    assert len(measured) > len(SAMPLE)
    for each in measured:
        assert max(each["max_influence"], each["max_difference"], each["difference_from_plain_call"]) <= each["tolerance"]
        assert each["control"] > 1000 * each["tolerance"]


def test_recurrent_models_are_refused_and_do_leak(sample):
    for entry in sample.entries:
        if entry["name"] in MECHANISMS["state spaces"]:
            cell = entry["cells"]["eager"]
            assert (cell["verdict"], cell["measured"]["verdict"]) == ("refused", "leaking")
            assert "from token to token" in cell["why"]


def test_the_page_in_the_docs_is_of_these_versions_and_models():
    text = PAGE.read_text(encoding="utf-8")
    assert f"Versions: {versions()}\n" in text, OUTDATED
    stated = verdicts_on(text)
    assert list(stated) == causal_lm_names(), OUTDATED
    assert not [name for name, cells in stated.items() if "wrong" in cells.values()]


def test_the_page_in_the_docs_says_what_the_sample_measures(sample):
    stated = verdicts_on(PAGE.read_text(encoding="utf-8"))
    assert {name: stated[name] for name in SAMPLE} == verdicts(sample), OUTDATED


def test_the_page_in_the_docs_gives_the_reasons_that_the_contracts_give_now(sample):
    stated, measured = reasons_on(PAGE.read_text(encoding="utf-8")), reasons_on(page(sample))
    assert {name: stated.get(name) for name in SAMPLE} == {name: measured.get(name) for name in SAMPLE}, OUTDATED


def test_the_page_in_the_docs_is_written_as_a_page_is_written_now(sample):
    """Its words besides the models: the head of it, and the families that layers of ours stand in for."""
    text, fresh = PAGE.read_text(encoding="utf-8"), page(sample)
    assert text.partition("For each of the")[0] == fresh.partition("For each of the")[0], OUTDATED
    of_page, of_sample = (on.partition(STANDING_IN)[2].partition("## Matrix")[0].strip() for on in (text, fresh))
    assert of_page.splitlines()[:-1] == of_sample.splitlines()[:-1], OUTDATED
    assert set(of_sample.splitlines()[-1].strip(".").split(", ")) <= set(of_page.splitlines()[-1].strip(".").split(", ")), (
        OUTDATED
    )


def test_the_sample_is_a_third_of_all_and_meets_every_refusal_that_the_page_states():
    assert len(set(SAMPLE)) == len(SAMPLE) >= len(causal_lm_names()) / 3
    stated = reasons_on(PAGE.read_text(encoding="utf-8"))
    kinds = {name: {what_it_says(reason) for reason in reasons} for name, reasons in stated.items()}
    met = set().union(*(kinds.get(name, set()) for name in SAMPLE))
    assert {kind for of_model in kinds.values() for kind in of_model} <= met
    assert len(met) >= 12


def what_it_says(reason):
    """A reason without the names of this model's classes, modules, arguments and layers, and the way out."""
    told = re.sub(r"\([^)]*\)", "", reason.split(" Use ")[0])
    told = re.sub(r"\b\w*[A-Z]\w*(\.forward)?\b,? ?", "", told)
    return re.sub(r"\s+", " ", told).strip()


# What such a model runs on when it is loaded without a word about attention.
LOADED_AS_THEY_ARE = {
    "falcon": "sdpa", "gpt_neo": "eager", "gpt_neox_japanese": "eager", "mpt": "eager", "xglm": "eager", "big_bird": "eager",
    "megatron-bert": "eager", "rembert": "eager",
}  # fmt: skip


@pytest.mark.parametrize("name", LOADED_AS_THEY_ARE)
def test_models_with_attention_of_their_own_run_isolated_when_loaded_as_they_are(name):
    model = small_model(name, None, 32)
    assert contract_for(model).attention == LOADED_AS_THEY_ARE[name]
    rows = [{"input_ids": list(range(3, 35)), "seq_lengths": [20, 12]}]
    batch = collator_for(model, return_doc_ids=True)(rows)
    report = check_isolation(model, batch)
    assert report.isolated, str(report)


def test_the_page_says_that_packed_varlen_isolates_whatever_is_isolated_anywhere():
    stated = verdicts_on(PAGE.read_text(encoding="utf-8"))
    anywhere = {name for name, cells in stated.items() if "isolated" in cells.values()}
    assert anywhere == {name for name, cells in stated.items() if cells["packed_varlen"] == "isolated"}


def test_the_page_lists_the_families_that_use_packed_varlen_is_needed_for():
    section = PAGE.read_text(encoding="utf-8").partition(STANDING_IN)[2].partition("## Matrix")[0]
    listed = set(re.findall(r"`([\w-]+)`", section.strip().splitlines()[-1]))
    assert listed == {*LOADED_AS_THEY_ARE, "bloom", "openai-gpt", "roformer"}


def test_a_page_can_be_read_back():
    cell = {"verdict": "isolated", "payload": "offsets", "measured": {"max_influence": 0.0, "max_difference": 2e-6}}
    refused = {"verdict": "refused", "why": "X on eager: because", "measured": {"verdict": "leaking", "max_influence": 4.4}}
    wrong = {"verdict": "wrong", "measured": {"error": "E"}}
    cells = dict(
        zip(IMPLEMENTATIONS, [cell, refused, wrong, {"verdict": "unavailable"}, {"verdict": "unbuildable"}], strict=True)
    )
    zoo = Zoo(({"name": "some-model", "cells": cells},))
    text = page(zoo)
    assert verdicts_on(text) == verdicts(zoo)
    assert "isolated 2e-06 (offsets)" in text
    assert "refused (moves 4.4)" in text
    assert zoo.wrong == ["some-model on eager"]
    assert zoo.totals()["sdpa"] == {"isolated": 0, "refused": 1, "unavailable": 0, "unbuildable": 0, "wrong": 0}


def test_a_worker_that_dies_costs_its_model_only(monkeypatch):
    import neatpack.audit.zoo as zoo_module

    found = audit_zoo(["gpt_neox", "llama"], workers=1, timeout=0.05)
    assert {cell["verdict"] for entry in found.entries for cell in entry["cells"].values()} == {"unbuildable"}
    assert "took more than 0.05 s" in found.entries[0]["cells"]["sdpa"]["why"]
    assert set(_crashed("x", -11, 3.0)["cells"]) == set(IMPLEMENTATIONS)
    assert zoo_module.VERDICTS[-1] == "wrong"


def test_an_unknown_name_is_one_clear_error():
    with pytest.raises(SourceError, match="llamma: not among the"):
        audit_zoo(["llamma"])


@pytest.mark.parametrize("name", ["llama", "bert", "gemma4_text", "dbrx"])
def test_small_models_are_small_and_run(name):
    model = small_model(name, "eager", 32)
    assert sum(parameter.numel() for parameter in model.parameters()) < 1_000_000
    with torch.no_grad():
        assert model(input_ids=torch.arange(8)[None]).logits.shape[:2] == (1, 8)


def test_the_reference_kernel_agrees_with_packed_varlen_and_leaves_nothing_behind():
    import sys

    neatpack.hf.register()
    for architecture in ("llama", "gemma2", "gpt_oss"):
        batch = packed_batch(DOC_IDS)
        with torch.no_grad():
            ours = tiny_model(architecture)(**batch).logits
            with reference_flash.importable() as implementation:
                model = tiny_model(architecture, "eager")
                model.config._attn_implementation = implementation
                flash = model(**batch).logits
        assert (flash - ours).abs().max() < 1e-5 * ours.abs().max()
    assert reference_flash.MODULE not in sys.modules


def test_the_reference_kernel_is_strict_about_offsets():
    heads = torch.randn(6, 2, 4)
    offsets = torch.tensor([0, 2, 5], dtype=torch.int32)
    out = reference_flash.flash_attn_varlen_func(heads, heads, heads, offsets, offsets, 3, 3, causal=True)
    assert out[:5].isfinite().all()
    assert out[5:].isnan().all()
    with pytest.raises(RuntimeError, match="int32"):
        reference_flash.flash_attn_varlen_func(heads, heads, heads, offsets.long(), offsets, 3, 3)
    with pytest.raises(RuntimeError, match="less than the longest"):
        reference_flash.flash_attn_varlen_func(heads, heads, heads, offsets, offsets, 2, 2)
