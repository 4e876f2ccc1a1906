"""The probe: does any document of a packed batch move another one's logits?

Boundaries are read from the batch's own document map, never from its position ids, and three things are measured on the
model as it is, in eval mode and without gradients:

- **influence**: change one document's tokens and run again; every other document's logits must stay where they were;
- **difference**: run each document alone, from its first position on; its logits must be those it had in the pack;
- **control**: run the same rows with every boundary removed; there a change must show, or the probe has shown nothing.

The cost is two passes over the batch, two over its rows one by one, and for each document one more pass over the batch
and one over the document alone.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from neatpack.errors import ContractError, MetadataError
from neatpack.packed_seq import PackedSeqParams, packed_seq_params_from_doc_ids, to_flash_attention_kwargs

__all__ = ["Document", "IsolationReport", "Leak", "check_isolation"]

# What rounding may do to a logit, in parts of the largest logit: a few units in the last place of each dtype.
_ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


# What a packed batch holds besides tokens; a model whose forward has no name for it is called without.
_METADATA = frozenset({"doc_ids", "packed_seq_params", "position_ids", "use_cache", "labels", "shift_labels"}) | frozenset(
    {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
)


@dataclass(frozen=True)
class Document:
    """Where a document lies: tokens `[start, start + length)` of `row`.

    Attributes:
        row: number of its row in the batch.
        start: its first position within the row.
        length: its tokens.
    """

    row: int
    start: int
    length: int

    @property
    def end(self) -> int:
        """One past the last token."""
        return self.start + self.length

    def __str__(self) -> str:
        return f"row {self.row}, tokens {self.start} to {self.end - 1}"


@dataclass(frozen=True)
class Leak:
    """A document whose logits moved: because `source` changed, or (None) against the document run alone.

    Attributes:
        source: index of a document in `IsolationReport.documents`, or None.
        target: index of the document that moved.
        size: its largest change of a logit.
    """

    source: int | None
    target: int
    size: float


@dataclass(frozen=True, eq=False)
class IsolationReport:
    """What the probe measured; print it for a verdict in words.

    Attributes:
        documents: every document of the batch, in order.
        probed: indices of the documents that were changed and run alone; all of them unless there were too many.
        influence: `[len(probed), len(documents)]` float64: largest change of a logit of document `j` when document
            `probed[i]` changed; 0 where `j` is that document.
        difference: `[len(probed)]` float64: largest difference of a logit from the document run alone.
        control: smallest, over the rows with two documents or more, of the largest influence with the boundaries
            removed; None where no row holds two.
        noise: largest change of a logit between two runs of the very same batch.
        tolerance: what counts as rounding.
    """

    documents: tuple[Document, ...]
    probed: tuple[int, ...]
    influence: np.ndarray
    difference: np.ndarray
    control: float | None
    noise: float
    tolerance: float

    @property
    def max_influence(self) -> float:
        """The largest change of any document's logits when another one changed."""
        return float(self.influence.max(initial=0.0))

    @property
    def max_difference(self) -> float:
        """The largest difference of any document's logits from those of the document alone."""
        return float(self.difference.max(initial=0.0))

    @property
    def verdict(self) -> str:
        """`isolated`, `leaking` (one document moves another), `differing` (none does, yet one is not what it is alone).

        Or `inconclusive`: the model does not repeat itself, or the boundaries make no difference that could be seen.
        """
        if self.noise > self.tolerance:
            return "inconclusive"
        if self.max_influence > self.tolerance:
            return "leaking"
        if self.max_difference > self.tolerance:
            return "differing"
        return "isolated" if self.control is not None and self.control > self.tolerance else "inconclusive"

    @property
    def isolated(self) -> bool:
        """Shown to keep documents apart: nothing moved, and with the boundaries removed something would have."""
        return self.verdict == "isolated"

    @property
    def leaks(self) -> list[Leak]:
        """Everything above the tolerance, largest first."""
        pairs = np.argwhere(self.influence > self.tolerance).tolist()
        moved = [Leak(self.probed[i], j, float(self.influence[i, j])) for i, j in pairs]
        off = [
            Leak(None, document, float(size))
            for document, size in zip(self.probed, self.difference, strict=True)
            if size > self.tolerance
        ]
        return sorted(moved + off, key=lambda leak: -leak.size)

    def raise_if_leaking(self) -> None:
        """Stop unless the documents were shown to be isolated; an inconclusive probe stops too.

        Raises:
            ContractError: with the report as its message.
        """
        if not self.isolated:
            raise ContractError(str(self))

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values for JSON; a number that is not finite becomes a string."""
        return {
            "verdict": self.verdict,
            "isolated": self.isolated,
            "max_influence": _plain(self.max_influence),
            "max_difference": _plain(self.max_difference),
            "control": None if self.control is None else _plain(self.control),
            "noise": _plain(self.noise),
            "tolerance": _plain(self.tolerance),
            "documents": [asdict(document) for document in self.documents],
            "probed": list(self.probed),
            "influence": [[_plain(value) for value in row] for row in self.influence.tolist()],
            "difference": [_plain(value) for value in self.difference.tolist()],
            "leaks": [{**asdict(leak), "size": _plain(leak.size)} for leak in self.leaks],
        }

    def __str__(self) -> str:
        return "\n".join([self.measured, *self._advice()])

    @property
    def measured(self) -> str:
        """The verdict and the numbers in words, without advice: for a model that is refused anyway."""
        rows = len({document.row for document in self.documents})
        sampled = "" if len(self.probed) == len(self.documents) else f", {len(self.probed)} of them probed"
        control = "no row holds two documents" if self.control is None else f"{self.control:.2g} with the boundaries removed"
        # a document that another one moves is off by itself too: tell causes where there are any
        told = [leak for leak in self.leaks if leak.source is not None] or self.leaks
        lines = [
            f"{self.verdict}: {len(self.documents)} documents in {rows} rows{sampled}",
            f"  largest influence of one document on another: {self.max_influence:.2g} ({control})",
            f"  largest difference from the document alone:   {self.max_difference:.2g}",
            f"  tolerance {self.tolerance:.2g}, two runs of the same batch differ by {self.noise:.2g}",
            *(f"  {self._describe(leak)}" for leak in told[:5]),
        ]
        if len(told) > 5:
            lines.append(f"  ... and {len(told) - 5} more")
        return "\n".join(lines)

    def _describe(self, leak: Leak) -> str:
        target = f"document {leak.target} ({self.documents[leak.target]})"
        if leak.source is None:
            return f"{target} is off by {leak.size:.2g} from itself alone"
        return f"document {leak.source} ({self.documents[leak.source]}) moves {target} by {leak.size:.2g}"

    def _advice(self) -> list[str]:
        if self.verdict == "inconclusive" and math.isinf(self.noise):
            return [
                "  logits are not finite (NaN): look for a fully masked row, an overflow in half precision or broken weights"
            ]
        if self.verdict == "inconclusive" and self.noise > self.tolerance:
            return ["  the model does not repeat itself: turn off what is random in eval mode"]
        if self.verdict == "inconclusive":
            return ["  nothing was shown: use a batch with two documents in a row, on a model whose attention matters"]
        if self.verdict == "leaking":
            return ["  use PackedCollator's batch with attn_implementation='packed_varlen' (see neatpack.hf.register)"]
        if self.verdict == "differing":
            return ["  check position_ids: they must restart in every document, at the position that the model counts from"]
        return []


def check_isolation(
    model: torch.nn.Module,
    batch: Mapping[str, Any],
    *,
    doc_ids: torch.Tensor | None = None,
    tolerance: float | None = None,
    max_documents: int = 64,
    position_start: int = 0,
) -> IsolationReport:
    """Measure whether the documents of a packed batch influence each other in a model.

    Args:
        model: called as `model(**batch)`; returns logits `[B, S, V]`, as a tensor or as `.logits`. It runs in eval mode
            without gradients, on its own device; every submodule's training flag is put back.
        batch: holds `input_ids [B, S]` and whatever else the model takes; passed through unchanged but for the tokens.
        doc_ids: `[B, S]` document map, 1-based, 0 is padding. By default the batch's own `doc_ids` (or those of a
            `PackedSeqParams` in it), else its `cu_seq_lens_q` (form A; a padding run then counts as a document).
        tolerance: what counts as rounding, in logits. By default a part of the largest logit of the batch (at least of
            1), by the narrowest dtype among weights and logits: 1e-10 for float64, 1e-5 for float32, 5e-3 for float16,
            4e-2 for bfloat16. In dense models an isolated document does not move by a single bit; in mixtures of experts
            the size of an expert's batch changes the rounding, far below these.
        max_documents: probe at most so many, spread evenly and those with a successor in their row first; `probed` on
            the report says which.
        position_start: the position of a document's first token, alone as in the pack: 0, or `padding_idx + 1` for models that
            count from there (the RoBERTa family; `neatpack.hf.contract_for(model).position_start` says so).

    Returns:
        The report: `print(report)`, `report.isolated`, `report.raise_if_leaking()`.

    Raises:
        MetadataError: no `input_ids [B, S]` or all the same token, no document map or one that does not fit, `max_documents`
            below 1, or no logits came back.
        MetadataTypeError: a document map that holds no integers.

    Example:
        >>> report = check_isolation(model, collator(rows))  # doctest: +SKIP
        >>> report.raise_if_leaking()                        # doctest: +SKIP
    """
    inputs = on_model_device(model, batch)
    documents = _documents(inputs, doc_ids)
    probed = _sample(documents, max_documents)
    swap = _TokenSwap(model, inputs["input_ids"])
    with evaluating(model):
        call = accepted(model, inputs)
        before = _logits(model, call)
        noise = _per_document(_moved(_logits(model, call), before), documents).max(initial=0.0)
        influence = np.zeros((len(probed), len(documents)))
        for place, index in enumerate(probed):
            changed = {**call, "input_ids": swap.inside(documents[index])}
            influence[place] = _per_document(_moved(_logits(model, changed), before), documents)
            influence[place, index] = 0.0
        difference = np.array([_difference_alone(model, inputs, documents[index], before, position_start) for index in probed])
        control = _control(model, inputs, documents, swap, position_start)
    limit = _default_tolerance(model, before, documents) if tolerance is None else tolerance
    return IsolationReport(tuple(documents), tuple(probed), influence, difference, control, float(noise), limit)


# --- documents --------------------------------------------------------------------------------------------------------


def _documents(inputs: Mapping[str, Any], doc_ids: torch.Tensor | None) -> list[Document]:
    """The documents of a batch, from the map it carries."""
    batch, length = inputs["input_ids"].shape
    carried = [value.doc_ids for value in inputs.values() if isinstance(value, PackedSeqParams)]
    candidates = [doc_ids, inputs.get("doc_ids"), *carried]
    ids = next((candidate for candidate in candidates if candidate is not None), None)
    if ids is None:
        return _documents_from_offsets(inputs.get("cu_seq_lens_q"), batch, length)
    if tuple(ids.shape) != (batch, length):
        raise MetadataError(f"doc_ids has shape {tuple(ids.shape)}, input_ids {(batch, length)}: they must be the same.")
    offsets = packed_seq_params_from_doc_ids(ids.cpu()).cu_seqlens.tolist()
    index = ids.flatten().tolist()
    return [_located(start, end, length) for start, end in itertools.pairwise(offsets) if index[start] != 0]


def _documents_from_offsets(offsets: torch.Tensor | None, batch: int, length: int) -> list[Document]:
    if offsets is None:
        raise MetadataError(
            "the batch carries no document map: pass doc_ids=, or a batch with doc_ids or cu_seq_lens_q. "
            "Position ids are no map: where they are wrong, a check that believes them sees nothing."
        )
    bounds = offsets.tolist()
    if not bounds or bounds[0] != 0 or bounds[-1] != batch * length:
        raise MetadataError(
            f"cu_seq_lens_q runs from {bounds[:1]} to {bounds[-1:]}, the batch has {batch} x {length} tokens: "
            "form A covers them all."
        )
    documents = [_located(start, end, length) for start, end in itertools.pairwise(bounds) if end > start]
    for document in documents:
        if document.end > length:
            raise MetadataError(f"a segment of cu_seq_lens_q crosses the end of row {document.row} at token {length}.")
    return documents


def _located(start: int, end: int, length: int) -> Document:
    row, position = divmod(start, length)
    return Document(row, position, end - start)


def _sample(documents: list[Document], most: int) -> list[int]:
    """At most `most` indices, spread evenly; those that a later document of their row follows come first."""
    if most < 1:
        raise MetadataError(f"max_documents must be at least 1, got {most}.")
    if len(documents) <= most:
        return list(range(len(documents)))
    followed = [i for i in range(len(documents) - 1) if documents[i].row == documents[i + 1].row]
    others = sorted(set(range(len(documents))) - set(followed))
    chosen = _spread(followed, most)
    return sorted(chosen + _spread(others, most - len(chosen)))


def _spread(items: list[int], count: int) -> list[int]:
    if len(items) <= count:
        return items
    return [items[index * len(items) // count] for index in range(count)]


# --- runs -------------------------------------------------------------------------------------------------------------


class _TokenSwap:
    """Other valid tokens for a document's, the same on every run: drawn from the tokens that the batch itself holds."""

    def __init__(self, model: torch.nn.Module, input_ids: torch.Tensor) -> None:
        self._ids = input_ids
        present = torch.unique(input_ids.cpu())
        padding = getattr(getattr(model, "config", None), "pad_token_id", None)
        usable = present[present != padding] if isinstance(padding, int) else present
        choices = usable if len(usable) > 1 else present
        if len(choices) < 2:
            raise MetadataError(
                "every token of the batch is the same: nothing can be changed. Use a batch of real or random tokens."
            )
        draws = torch.randint(1, len(choices), input_ids.shape, generator=torch.Generator().manual_seed(0))
        rank = torch.searchsorted(choices, input_ids.cpu()).clamp(max=len(choices) - 1)
        self._others = choices[(rank + draws) % len(choices)].to(input_ids)

    def inside(self, document: Document) -> torch.Tensor:
        """`[B, S]`: the batch's tokens, with every token of `document` another one."""
        changed = self._ids.clone()
        changed[document.row, document.start : document.end] = self._others[document.row, document.start : document.end]
        return changed


def _difference_alone(
    model: torch.nn.Module, inputs: Mapping[str, Any], document: Document, packed: torch.Tensor, start: int
) -> float:
    tokens = inputs["input_ids"][document.row : document.row + 1, document.start : document.end]
    alone = _logits(model, _one_document(model, tokens, start))
    return float(_moved(alone[0], packed[document.row, document.start : document.end]).max())


def _control(
    model: torch.nn.Module, inputs: Mapping[str, Any], documents: list[Document], swap: _TokenSwap, position_start: int
) -> float | None:
    """With boundaries removed, how far the first document of a row moves those behind it; the smallest over the rows."""
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    shown = []
    for _, group in itertools.groupby(documents, key=lambda document: document.row):
        first, *later = group
        if not later:
            continue
        begin, boundary, end = first.start, later[0].start, later[-1].end
        if isinstance(limit, int) and end - begin > limit - position_start:  # one sequence now: it must fit the positions
            half = (limit - position_start) // 2
            begin, end = max(begin, boundary - half), min(end, boundary + half)
        rows = [ids[first.row : first.row + 1, begin:end] for ids in (inputs["input_ids"], swap.inside(first))]
        before, after = (_logits(model, _one_document(model, row, position_start)) for row in rows)
        shown.append(float(_moved(after, before)[0, boundary - begin :].max()))
    return min(shown, default=None)


def _one_document(model: torch.nn.Module, tokens: torch.Tensor, position_start: int) -> dict[str, Any]:
    """Arguments for `tokens [1, n]` as one document: its positions, no cache; offsets only where forward names them."""
    one_segment = packed_seq_params_from_doc_ids(torch.ones(tokens.shape, dtype=torch.int64)).to(tokens.device)
    named = inspect.signature(model.forward).parameters
    boundaries = {**to_flash_attention_kwargs(one_segment), "doc_ids": one_segment.doc_ids, "packed_seq_params": one_segment}
    offsets = {name: value for name, value in boundaries.items() if name in named}
    positions = position_start + torch.arange(tokens.shape[1], device=tokens.device)[None]
    return {"input_ids": tokens, **accepted(model, {"position_ids": positions, "use_cache": False}), **offsets}


def accepted(model: torch.nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The batch as the model is called with it: a forward that cannot take boundaries or labels is called without them.

    What such a model does with packed documents is what the probe then measures.
    """
    parameters = inspect.signature(model.forward).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(inputs)
    optional = _METADATA - set(parameters)
    return {name: value for name, value in inputs.items() if name not in optional}


def _logits(model: torch.nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
    output = model(**inputs)
    logits = output if isinstance(output, torch.Tensor) else getattr(output, "logits", None)
    if logits is None and isinstance(output, Mapping):
        logits = output.get("logits")
    if isinstance(output, tuple) and not hasattr(output, "logits"):
        logits = next((part for part in output if isinstance(part, torch.Tensor) and part.dim() == 3), None)
    batch, length = inputs["input_ids"].shape
    if not isinstance(logits, torch.Tensor) or logits.numel() == 0 or logits.shape[:2] != (batch, length):
        got = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(output).__name__
        raise MetadataError(f"the model must return logits [{batch}, {length}, V] (a tensor, or as .logits), got {got}.")
    return logits


def _moved(after: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """`[..., V]` twice to `[...]`: the largest change of a logit; a number that is not finite on one side is infinite."""
    wide = torch.promote_types(after.dtype, torch.float32)
    change = torch.where(after == before, 0.0, (after.to(wide) - before.to(wide)).abs())
    return change.nan_to_num(nan=math.inf, posinf=math.inf).amax(-1)


def _per_document(moved: torch.Tensor, documents: list[Document]) -> np.ndarray:
    values = moved.double().cpu().numpy()
    return np.array([values[document.row, document.start : document.end].max() for document in documents])


def _default_tolerance(model: torch.nn.Module, logits: torch.Tensor, documents: list[Document]) -> float:
    """Rounding of the narrowest dtype in play, in parts of the largest finite logit of a document."""
    dtypes = {logits.dtype} | {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    rounding = max(_ROUNDING.get(dtype, max(_ROUNDING.values())) for dtype in dtypes)
    # masked vocabulary entries are huge or infinite by design and say nothing about rounding
    sizes = logits.double().abs().where(logits.abs() < 1e4, 0.0).amax(-1)
    return rounding * max(1.0, float(_per_document(sizes, documents).max(initial=0.0)))


def on_model_device(model: torch.nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch, its tensors where the model's parameters are."""
    tokens = batch.get("input_ids")
    if not isinstance(tokens, torch.Tensor) or tokens.dim() != 2:
        raise MetadataError("the batch must hold input_ids [B, S]; the probe changes tokens, so embeddings will not do.")
    device = next((parameter.device for parameter in model.parameters()), tokens.device)
    movable = (torch.Tensor, PackedSeqParams)
    return {name: value.to(device) if isinstance(value, movable) else value for name, value in batch.items()}


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Eval mode and no gradients inside; every submodule's own flag afterwards."""
    training = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, flag in training:
            module.training = flag


def _plain(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
