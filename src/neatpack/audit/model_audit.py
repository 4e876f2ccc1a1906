"""Audit a model: does it keep packed documents apart, on each attention implementation?"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from neatpack.audit.influence import InfluenceMap, influence_without_boundaries
from neatpack.audit.models import build_small, has_weights, load_checkpoint, load_config, longest_rows
from neatpack.errors import ContractError, SourceError
from neatpack.hf import contract_for, register
from neatpack.isolation import IsolationReport, check_isolation
from neatpack.packed_seq import packed_seq_params_from_doc_ids, to_flash_attention_kwargs

DEFAULT_ATTENTION = ("packed_varlen", "sdpa", "eager")


@dataclass(frozen=True)
class AttentionAudit:
    """One attention implementation's result: a report, or the reason why there is none.

    Attributes:
        attention: the implementation's name.
        report: what the probe measured; None where the model could not be built or refused to run.
        reason: why there is no report.
        requested: the caller named this implementation, so that not being isolated is a failure whatever the reason.
        payload: what the contract has the collator send (see `neatpack.hf.Contract`); None where it refuses.
        refusal: why the contract refuses. The report then shows what the batch for everyone else would have done.
        bare: where the contract asks for a mask, what the same batch does without it.
        removed: where it was asked for, how documents move each other with every boundary removed.
        row_limit: the longest rows that the contract accepts, None for any.
    """

    attention: str
    report: IsolationReport | None
    reason: str | None
    requested: bool
    payload: str | None = None
    refusal: str | None = None
    bare: IsolationReport | None = None
    removed: InfluenceMap | None = None
    row_limit: int | None = None

    @property
    def verdict(self) -> str:
        """`refused` by the contract, `unsupported` without a report, else the report's verdict."""
        if self.refusal is not None:
            return "refused"
        return "unsupported" if self.report is None else self.report.verdict

    @property
    def isolated(self) -> bool:
        """The contract accepts, and the probe agrees."""
        return self.verdict == "isolated"

    @property
    def passed(self) -> bool:
        """Isolated; or refused or not available, and not asked for by name."""
        return self.isolated or (self.verdict in ("refused", "unsupported") and not self.requested)


@dataclass(frozen=True)
class ModelAudit:
    """The results of one model on every implementation tried.

    Attributes:
        model: where it came from.
        model_type: the config's.
        weights: `checkpoint`, or `random` for a small model built from the config.
        rows: B of the packed batch.
        row_length: S of the packed batch.
        seed: of the batch, and of random weights.
        results: one an implementation, in the order asked for.
    """

    model: str
    model_type: str
    weights: str
    rows: int
    row_length: int
    seed: int
    results: tuple[AttentionAudit, ...]

    @property
    def passed(self) -> bool:
        """Every implementation asked for is isolated, at least one is, and none that the contract accepts is not."""
        return any(result.isolated for result in self.results) and all(result.passed for result in self.results)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values for JSON."""
        return {
            "model": self.model,
            "model_type": self.model_type,
            "weights": self.weights,
            "batch": {"rows": self.rows, "row_length": self.row_length, "seed": self.seed},
            "passed": self.passed,
            "results": {
                result.attention: {
                    "verdict": result.verdict,
                    "payload": result.payload,
                    "row_limit": result.row_limit,
                    "refusal": result.refusal,
                    "reason": result.reason,
                    "report": None if result.report is None else result.report.to_dict(),
                    "bare": None if result.bare is None else result.bare.to_dict(),
                }
                for result in self.results
            },
        }


def audit_model(
    source: str | Path,
    *,
    attention: Sequence[str] = (),
    row_length: int = 64,
    rows: int = 2,
    seed: int = 0,
    control: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> ModelAudit:
    """Run the isolation probe on a model, once for each attention implementation.

    The batch is random tokens packed into rows, with what the model's contract has `PackedCollator` send: positions that
    restart in every document, all four FlashAttentionKwargs and no cache, and a mask only where nothing else is honoured.

    Args:
        source: a checkpoint folder (its weights are used), a config folder, or a `config.json` (a small random model
            with the config's traits is built). Nothing is downloaded and no remote code runs.
        attention: implementations to try; by default `packed_varlen`, `sdpa` and `eager`, where the model has them.
        row_length: S, tokens a row.
        rows: B.
        seed: for the packing, the tokens and random weights.
        control: measure the map of the batch without its boundaries too, to read the other one against.
        progress: told how many of the implementations are done.

    Returns:
        A result for each implementation.

    Raises:
        SourceError: no config there, one that transformers does not know, rows shorter than 8 tokens, or an attention
            implementation that nobody has registered.
        MissingDependencyError: transformers is not installed.
    """
    if row_length < 8 or rows < 1:
        raise SourceError(f"an audit needs rows of at least 8 tokens, and one row; got {rows} x {row_length}.")
    path = Path(source)
    config = load_config(path)
    register()
    weights = "checkpoint" if has_weights(path) else "random"
    names = tuple(dict.fromkeys(attention)) or DEFAULT_ATTENTION
    _refuse_unknown(names)
    results = []
    for done, name in enumerate(names):
        if progress:
            progress("audit", done, len(names))
        try:
            model = load_checkpoint(path, name) if weights == "checkpoint" else _small(config, name, row_length, seed)
        except Exception as error:  # whatever transformers raises is the answer, not a failure of the audit
            results.append(AttentionAudit(name, None, _reason(error), bool(attention)))
            continue
        result = _audit_one(model, name, bool(attention), rows, row_length, seed, control)
        if result.row_limit is not None and weights == "random":  # the small model's own; the one it stands for has longer rows
            result = replace(result, row_limit=longest_rows(config))
        results.append(result)
    return ModelAudit(str(source), config.model_type, weights, rows, row_length, seed, tuple(results))


def _refuse_unknown(names: Sequence[str]) -> None:
    """Refuse attention that nobody has registered, before any model is built."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    known = ["eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()]
    for name in names:
        if name not in known:
            raise SourceError(f"no attention implementation is called {name!r}. There are {', '.join(sorted(known))}.")


def _audit_one(
    model: torch.nn.Module, attention: str, requested: bool, rows: int, row_length: int, seed: int, control: bool
) -> AttentionAudit:
    """Ask for the contract, and measure: with what it sends, or with the plain batch where it refuses."""
    payload = refusal = bare = removed = limit = None
    start = 0
    batch, doc_ids = packed_batch(_vocabulary(model), rows, row_length, seed)
    try:
        contract = contract_for(model)
        payload, start = contract.payload, contract.position_start
        limit = None if contract.row_limit is None else contract.row_limit.tokens
        contract.refuse_longer_rows(row_length)
        batch["position_ids"] += start
        if contract.mask_builder is not None:
            bare = check_isolation(model, batch, doc_ids=doc_ids, position_start=start)
            batch["attention_mask"] = contract.mask_builder(packed_seq_params_from_doc_ids(doc_ids))
    except ContractError as error:
        refusal = str(error)
    try:
        report, reason = check_isolation(model, batch, doc_ids=doc_ids, position_start=start), None
    except Exception as error:  # whatever the model's own code raises is the answer
        report, reason = None, _reason(error)
    if control and report is not None:
        removed = influence_without_boundaries(model, batch, doc_ids, position_start=start)
    return AttentionAudit(attention, report, reason, requested, payload, refusal, bare, removed, limit)


def packed_batch(vocabulary: int, rows: int, row_length: int, seed: int) -> tuple[dict[str, Any], torch.Tensor]:
    """Random documents packed into rows, the last row padded: the batch `[B, S]`, and its document map."""
    generator = np.random.default_rng(seed)
    doc_ids = np.zeros((rows, row_length), np.int64)
    for row in range(rows):
        filled = row_length if row < rows - 1 else row_length - row_length // 8
        cuts = np.sort(generator.choice(np.arange(1, filled), size=min(4, filled - 1), replace=False))
        doc_ids[row, :filled] = 1 + np.searchsorted(cuts, np.arange(filled), side="right")
    starts = np.diff(doc_ids, axis=1, prepend=-1) != 0
    index = np.arange(row_length)
    positions = index - np.maximum.accumulate(np.where(starts, index, 0), axis=1)
    ids = torch.from_numpy(doc_ids)
    batch = {
        "input_ids": torch.from_numpy(generator.integers(0, vocabulary, doc_ids.shape)),
        "position_ids": torch.from_numpy(positions),
        **to_flash_attention_kwargs(packed_seq_params_from_doc_ids(ids)),
        "use_cache": False,
    }
    return batch, ids


def _small(config: Any, attention: str, row_length: int, seed: int) -> torch.nn.Module:
    return build_small(copy.deepcopy(config), attention, row_length=row_length, seed=seed)


def _vocabulary(model: torch.nn.Module) -> int:
    config: Any = model.config
    return int(config.get_text_config().vocab_size)


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}".removesuffix(": ")
