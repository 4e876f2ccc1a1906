"""One row of the isolation matrix: a model type, its contract on every attention implementation, and the measurement.

Run as a module this is a worker: names in on stdin, one JSON object a line out on stdout, so that a model which crashes its
process takes no other model with it.
"""

from __future__ import annotations

import inspect
import json
import math
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch

from neatpack.audit import reference_flash
from neatpack.audit.zoo_models import refuse_by_config, small_model, weightless_model
from neatpack.errors import ContractError
from neatpack.hf import contract_for, register
from neatpack.hf.layers.base import PackedLayer
from neatpack.isolation import IsolationReport, check_isolation
from neatpack.packed_seq import packed_seq_params_from_doc_ids
from neatpack.train import PackedCollator, packed_cross_entropy

IMPLEMENTATIONS = ("packed_varlen", "sdpa", "eager", "flex_attention", "flash_attention")
ROW_LENGTH = 32
DOCUMENTS = ((7, 12, 9), (10, 6, 16))
"""Lengths of the documents in the two rows; the first row ends in four pads. Windows and chunks are 8 tokens."""
_LOSS_TOLERANCE = 1e-4


def measure_entry(name: str) -> dict[str, Any]:
    """The contract and the measurement of one model type on every implementation, as plain values."""
    began = time.perf_counter()
    refusals: dict[str, dict[str, Any]] = {}  # what holds on every implementation is measured on the first
    cells = {attention: _cell(name, attention, refusals) for attention in IMPLEMENTATIONS}
    return {"name": name, "cells": cells, "seconds": round(time.perf_counter() - began, 2)}


def _cell(name: str, attention: str, refusals: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Verdict of one cell: `isolated`, `refused`, `unavailable`, `unbuildable`, or `wrong`: the contract was broken."""
    with _implementation(attention) as (build_as, run_as):
        try:
            model = small_model(name, build_as, ROW_LENGTH)
            _switch(model, build_as, run_as)
        except Exception as error:
            return _without_model(name, build_as, error)
        try:
            contract = contract_for(model)
        except ContractError as refusal:
            why = str(refusal)
            measured = refusals[why] if why in refusals else _measured(model, PackedCollator(), 6)
            refusals[why] = measured
            return {"verdict": "refused", "why": why, "measured": measured}
        except Exception as error:
            return {"verdict": "wrong", "why": f"the contract itself raised {type(error).__name__}: {error}"}
        collator = PackedCollator(mask_builder=contract.mask_builder, position_start=contract.position_start)
        # uncompiled flex_attention is slow, and its masks are those of sdpa: two documents there, all of them elsewhere
        found = _measured(model, collator, 2 if attention == "flex_attention" else 6)
        if "error" in found and (broken := _plain_call_fails(model)):
            # a small model that cannot even be called says nothing about boundaries
            lacking = "cannot be run on CPU" in broken
            return {"verdict": "unavailable" if lacking else "unbuildable", "why": broken}
        verdict = "isolated" if found.get("verdict") == "isolated" else "wrong"
        if attention == "packed_varlen" and (passed := _lost_and_passed_over(model, collator)):
            found, verdict = {"error": f"documents mix, and nothing says so, when boundaries are lost to {passed}"}, "wrong"
        ours = any(isinstance(part, PackedLayer) for part in model.modules())
        return {"verdict": verdict, "payload": contract.payload, "standing_in": ours, "measured": found}


def _without_model(name: str, attention: str, error: Exception) -> dict[str, Any]:
    """No small model: transformers lacks the implementation, or the contract is asked without weights, or of the config."""
    reasons = [_reason(error)]
    if _lacks(error, attention):
        return {"verdict": "unavailable", "why": reasons[0].split(" Please request")[0]}
    for ask in (lambda: contract_for(weightless_model(name, attention)), lambda: refuse_by_config(name)):
        try:
            ask()
        except ContractError as refusal:
            return {"verdict": "refused", "why": str(refusal), "measured": {"error": f"not run: {reasons[0]}"}}
        except Exception as again:
            if _lacks(again, attention):
                return {"verdict": "unavailable", "why": _reason(again).split(" Please request")[0]}
            reasons.append(_reason(again))
    return {"verdict": "unbuildable", "why": "; ".join(dict.fromkeys(reasons))}


def _lacks(error: Exception, attention: str) -> bool:
    """Does transformers say that the model does not have the implementation?"""
    no_entry = isinstance(error, KeyError) and attention in str(error)  # a table of attention classes of the model's own
    return no_entry or (isinstance(error, ValueError) and "not support" in str(error))


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0]}"


def _measured(model: torch.nn.Module, collator: PackedCollator, most: int) -> dict[str, Any]:
    """What the probe measured with the collator's batch, or what the model raised."""
    rows = _rows(model)
    batch = collator(rows)
    labels = batch.pop("labels")
    doc_ids = torch.tensor(
        [
            [i + 1 for i, length in enumerate(lengths) for _ in range(length)] + [0] * (ROW_LENGTH - sum(lengths))
            for lengths in DOCUMENTS
        ]
    )
    try:
        report = check_isolation(model, batch, doc_ids=doc_ids, max_documents=most, position_start=collator.position_start)
        plain = _difference_from_plain_call(model, batch, rows)
        loss = _difference_of_loss(model, batch, labels, doc_ids)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0]}"[:300]}
    return {
        "verdict": _verdict(report, plain, loss),
        **_numbers(report),
        "difference_from_plain_call": plain if math.isfinite(plain) else str(plain),
        "difference_of_loss": loss if math.isfinite(loss) else str(loss),
    }


def _verdict(report: IsolationReport, plain: float, loss: float) -> str:
    as_alone = plain <= report.tolerance and loss <= _LOSS_TOLERANCE
    return "differing" if report.isolated and not as_alone else report.verdict


def _numbers(report: IsolationReport) -> dict[str, Any]:
    values = report.to_dict()
    return {name: values[name] for name in ("max_influence", "max_difference", "control", "tolerance")}


def _difference_from_plain_call(model: torch.nn.Module, batch: dict[str, Any], rows: list[dict[str, Any]]) -> float:
    """The second document of the first row, packed, against the call everyone would make with it alone."""
    start, length = DOCUMENTS[0][0], DOCUMENTS[0][1]
    tokens = torch.tensor([rows[0]["input_ids"][start : start + length]])
    with torch.no_grad():
        packed = model(**batch).logits[0, start : start + length]
        return float((model(input_ids=tokens, **_no_cache(model)).logits[0] - packed).abs().max())


def _lost_and_passed_over(model: torch.nn.Module, collator: PackedCollator) -> str:
    """What makes positions that restart go unread without a refusal, or nothing."""
    batch = replace(collator, row_length=ROW_LENGTH, mask_builder=None, return_doc_ids=True)(_rows(model))
    bare = {name: batch[name] for name in ("input_ids", "position_ids")}
    ones = {"attention_mask": torch.ones_like(batch["input_ids"]), **_no_cache(model)}
    ways: dict[str, dict[str, Any]] = {"nothing": _no_cache(model), "a mask of ones": ones, "a cache": {}}
    for what, further in ways.items():
        with suppress(ContractError):
            report = check_isolation(model, {**bare, **further}, doc_ids=batch["doc_ids"], max_documents=2)
            if report.max_influence > report.tolerance:
                return what
    return ""


def _difference_of_loss(model: torch.nn.Module, batch: dict[str, Any], labels: torch.Tensor, doc_ids: torch.Tensor) -> float:
    """The model's own loss against that of its logits, each asked for its document's next token; relative."""
    if "labels" not in inspect.signature(model.forward).parameters:
        return 0.0
    with torch.no_grad():
        result = model(**batch, labels=labels)
        expected = packed_cross_entropy(result.logits.float(), labels, packed_seq_params_from_doc_ids(doc_ids))
    return float((result.loss - expected).abs() / expected)


def _plain_call_fails(model: torch.nn.Module) -> str:
    """What a call without any packing raises, or nothing."""
    try:
        with torch.no_grad():
            model(input_ids=torch.arange(3, 11)[None], **_no_cache(model))
    except Exception as error:
        return _reason(error)
    return ""


def _no_cache(model: torch.nn.Module) -> dict[str, bool]:
    return {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}


def _rows(model: Any) -> list[dict[str, Any]]:
    vocabulary = min(int(model.config.get_text_config().vocab_size), 128)
    generator = torch.Generator().manual_seed(0)
    draw = [torch.randint(3, vocabulary, (sum(lengths),), generator=generator).tolist() for lengths in DOCUMENTS]
    return [{"input_ids": ids, "seq_lengths": list(lengths)} for ids, lengths in zip(draw, DOCUMENTS, strict=True)]


@contextmanager
def _implementation(attention: str) -> Iterator[tuple[str, str]]:
    """Names to build and to run with: the flash path runs over the reference kernel, flex uncompiled."""
    if attention == "flash_attention":
        with reference_flash.importable() as run_as:
            yield "eager", run_as
    elif attention == "flex_attention":
        torch.compiler.set_stance("force_eager")
        try:
            yield attention, attention
        finally:
            torch.compiler.set_stance("default")
    else:
        yield attention, attention


def _switch(model: Any, build_as: str, run_as: str) -> None:
    if build_as != run_as:
        if not model._supports_flash_attn:
            raise ValueError(f"{type(model).__name__} does not support flash attention")
        for config in {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values():
            config._attn_implementation = run_as


def main() -> None:
    """Answer names on stdin until it closes."""
    import transformers

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    register()
    out, sys.stdout = sys.stdout, sys.stderr  # models print, and this line is for answers
    for line in sys.stdin:
        print(json.dumps(measure_entry(line.strip())), file=out, flush=True)


if __name__ == "__main__":
    main()
