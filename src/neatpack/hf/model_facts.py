"""What a built transformers model's own modules and source say about how it treats boundaries; nothing is run.

A contract is decided on facts that hold for the model in hand, of whatever family: which layers mix tokens and through
which code, whether every module on the way passes keyword arguments on, whether the mask builder is told positions, and
how positions are counted. Source is read as a syntax tree, class by class, for the classes the model is made of.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from neatpack.hf.label_facts import shifts_labels
from neatpack.hf.layers import stand_in_for

_MASK_BUILDER = re.compile(r"^create_(?!bidirectional)(?!recurrent)(?!band)\w*mask\w*$")
_INTERFACE = "ALL_ATTENTION_FUNCTIONS"

# Attention layers of these kinds see the keys that positions and a window allow, and nothing else.
ATTENTION_KINDS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
# What `layer_types` calls layers that mix no tokens.
_TOKENWISE_KINDS = frozenset({"dense", "sparse", "moe", "mlp"})
# Classes that carry a state from token to token, by the parts of their names that their families share; the other signs
# (a convolution over tokens, a decay parameter, `_is_stateful`) catch what these miss.
_RECURRENT_CLASS = re.compile(
    r"Mamba|SSM|Rwkv|[ms]LSTM|Recurrent|RgLru|DeltaNet|DeltaAttention|LinearAttention|LightningAttention|ShortConv|CausalConv"
)
_DECAY_PARAMETERS = frozenset({"A_log", "dt_bias", "time_decay", "slope_rate"})
# How families without position embeddings bias their scores by distance instead.
_DISTANCE_BIAS = re.compile(r"alibi", re.IGNORECASE)
# Code that is an encoder or a decoder as its config says; examples in docstrings aside.
_ASKS_WHETHER_DECODER = re.compile(r"^(?!\s*>>>).*\b(?:self|config)\.is_decoder\b", re.MULTILINE)
_OTHER_INPUT = re.compile(r"pixel|image|video|audio|input_features")
_BIAS_FROM_MASK = re.compile(r"alibi\w*\(\s*attention_mask", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Facts about a built model.

    Attributes:
        name: its class.
        attention: the attention implementation that its text layers use.
        masks_see_positions: every causal mask that its code builds is built from `position_ids` too; None where its code
            builds none through transformers' mask builders.
        takes_mask_dict: its code takes masks by layer type as `attention_mask`.
        takes_positions: its `forward` names `position_ids`, or hands its keyword arguments to a part that does.
        position_start: the number of a document's first token; where its code numbers them from the padding id on, one past
            that; None where it numbers them from somewhere else.
        biased_by_distance: its scores carry a bias by distance (ALiBi) and it needs no position ids.
        reads_mask_as_padding: its distance bias is computed from a 2-D `attention_mask`, so that it takes no 4-D one.
        through_interface: names of attention classes that run the registered function.
        by_themselves: names of attention classes that compute attention in code of their own.
        standing_in: every attention layer is one of `neatpack.hf.layers`, and its own forward reads boundaries for them.
        takes_starts: a map of segment starts, put in the mask's place, reaches its layers; no code on the way wants a 2-D mask.
        replaceable: `neatpack.hf.layers` has classes that can stand in for some of its layers.
        loses_kwargs: names of modules between the model and its attention whose `forward` takes no keyword arguments, or
            does not pass them on, so that offsets cannot reach it.
        asks_attention_for: keyword names that its attention classes hand to the registered function.
        selects_by_itself: names of attention classes that keep the best few keys of a row, inside their own code.
        rewrites_mask: names of attention classes that compute a mask of their own from the one they are given.
        recurrent: names of layers that carry a state or convolve over tokens.
        layer_kinds: what `config.layer_types` names, sorted.
        blocks: the kind of attention in blocks that its config asks for, None for none.
        window: sliding window of its attention in tokens, None for unlimited.
        all_sliding: every attention layer slides.
        made_causal_by: the setting without which its tokens see later ones; None where they see none.
        flash_finds_dtype: every attention layer holds an `nn.Linear`, whose dtype transformers' flash path casts float32 to.
        stock: which of `sdpa` and `eager` transformers offers for it.
        shifts_labels: its own loss compares the logits of a place with the label of the next one.
        other_inputs: arguments of its `forward` for inputs other than text.
    """

    name: str
    attention: str
    masks_see_positions: bool | None
    takes_mask_dict: bool
    takes_positions: bool
    position_start: int | None
    biased_by_distance: bool
    reads_mask_as_padding: bool
    through_interface: tuple[str, ...]
    by_themselves: tuple[str, ...]
    standing_in: bool
    takes_starts: bool
    replaceable: bool
    loses_kwargs: tuple[str, ...]
    asks_attention_for: frozenset[str]
    selects_by_itself: tuple[str, ...]
    rewrites_mask: tuple[str, ...]
    recurrent: tuple[str, ...]
    layer_kinds: tuple[str, ...]
    blocks: str | None
    window: int | None
    all_sliding: bool
    made_causal_by: str | None
    flash_finds_dtype: bool
    stock: tuple[str, ...]
    shifts_labels: bool
    other_inputs: tuple[str, ...]


def model_facts(model: torch.nn.Module) -> ModelFacts:
    """Read the facts off a built model: its config, modules, signatures and source."""
    config: Any = model.config
    text = config.get_text_config()
    sources = sources_of(model)
    whole = "\n".join(sources.values())
    attention = [(name, module) for name, module in model.named_modules() if _INTERFACE in _source_of(module, sources)]
    kinds = tuple(sorted(set(getattr(text, "layer_types", None) or ()) - _TOKENWISE_KINDS))
    return ModelFacts(
        name=type(model).__name__,
        attention=str(text._attn_implementation),
        masks_see_positions=_masks_see_positions(sources),
        takes_mask_dict="attention_mask, dict)" in whole,
        takes_positions=_takes_positions(model, sources),
        position_start=_position_start(model),
        biased_by_distance=bool(_DISTANCE_BIAS.search(whole)),
        reads_mask_as_padding=bool(_BIAS_FROM_MASK.search(whole)),
        through_interface=_names(module for _, module in attention),
        by_themselves=_names(_own_attention(model, attention)),
        standing_in=_reads_boundaries(model) and all(_stands_in(type(module)) for _, module in attention),
        takes_starts="get_extended_attention_mask(" not in whole,  # older BERTs compute on a 2-D mask, and hand that on
        replaceable=any(stand_in_for(module) is not None for module in model.modules()),
        loses_kwargs=_names(_modules_that_lose_kwargs(model, attention, sources)),
        asks_attention_for=_asked(sources),
        selects_by_itself=_names(module for _, module in attention if "topk(" in _source_of(module, sources)),
        rewrites_mask=rewrites_masks(model, sources),
        recurrent=tuple(_recurrent(model)),
        layer_kinds=kinds,
        blocks=_blocks(text),
        window=_window(text, whole),
        all_sliding="full_attention" not in kinds,
        made_causal_by=_made_causal_by(text, whole),
        flash_finds_dtype=all(any(isinstance(part, torch.nn.Linear) for part in module.modules()) for _, module in attention),
        stock=("sdpa", "eager") if getattr(model, "_supports_sdpa", False) else ("eager",),
        shifts_labels=shifts_labels(model, sources),
        other_inputs=other_inputs(model),
    )


def other_inputs(model: torch.nn.Module) -> tuple[str, ...]:
    """Arguments of a model's `forward` for images, sound and the like."""
    return tuple(name for name in inspect.signature(model.forward).parameters if _OTHER_INPUT.search(name))


def sources_of(model: torch.nn.Module) -> dict[type, str]:
    """The source of every class the model is made of, and of their own base classes; torch's layers aside."""
    classes = {kind for module in model.modules() for kind in type(module).__mro__ if not _foundation(kind)}
    modules = {name: _classes_in(sys.modules.get(name)) for name in {kind.__module__ for kind in classes}}
    ordered = sorted(classes, key=lambda kind: (kind.__module__, kind.__qualname__))
    return {kind: modules[kind.__module__].get(kind.__qualname__, "") for kind in ordered}


def _classes_in(module: Any) -> dict[str, str]:
    """The source of every class at the top of a module, by name: one reading for all of them."""
    try:
        lines = inspect.getsource(module).splitlines(keepends=True)
    except (OSError, TypeError):  # made at run time: no source to read
        return {}
    tree = ast.parse("".join(lines))
    found = (node for node in tree.body if isinstance(node, ast.ClassDef))
    return {node.name: "".join(lines[node.lineno - 1 : node.end_lineno]) for node in found}


def _foundation(kind: type) -> bool:
    """Classes that every model shares and that mix no tokens."""
    module = kind.__module__
    return kind is object or module.startswith("torch.") or bool(re.match(r"transformers\.(?!models\.)", module))


def _source_of(module: torch.nn.Module, sources: dict[type, str]) -> str:
    """The source that decides what a module's forward does: its own class and those it inherits from.

    Of a stand-in, whose forward replaces that of the layer it stands in for, its own part.
    """
    kinds = [kind for kind in type(module).__mro__ if kind in sources]
    return "\n".join(sources[kind] for kind in [*filter(_stands_in, kinds)] or kinds)


def _reads_boundaries(model: torch.nn.Module) -> bool:
    from neatpack.hf.layers.models import ReadsBoundaries

    return isinstance(model, ReadsBoundaries)


def _stands_in(kind: type) -> bool:
    from neatpack.hf.layers.base import PackedLayer

    return issubclass(kind, PackedLayer)


def _names(modules: Any) -> tuple[str, ...]:
    return tuple(sorted({type(module).__name__ for module in modules}))


# --- masks ------------------------------------------------------------------------------------------------------------


def _masks_see_positions(sources: dict[type, str]) -> bool | None:
    calls = [sees for source in sources.values() for sees in _mask_calls(source)]
    return all(calls) if calls else None


def _mask_calls(source: str) -> Iterator[bool]:
    """For every causal mask that a class builds: is its builder given `position_ids`?"""
    if "_mask" not in source:
        return
    tree = ast.parse(source)
    builders = _mask_builders(tree)
    with_positions = _dicts_with_positions(tree)
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        # masks that generation prepares in advance are not the ones that training runs on
        if function.name.startswith(("create_masks", "prepare_inputs")):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in builders:
                yield any(_gives_positions(keyword, with_positions) for keyword in node.keywords)


def _mask_builders(tree: ast.AST) -> set[str]:
    """Names that a mask builder is called by: its own, and those it is assigned to."""
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and _MASK_BUILDER.match(node.id)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.IfExp | ast.Name):
            assigned = {part.id for part in ast.walk(node.value) if isinstance(part, ast.Name)}
            if assigned & names:
                names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def _dicts_with_positions(tree: ast.AST) -> set[str]:
    """Names of dictionaries of arguments that hold `position_ids`, copies of them included."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and any(_holds_positions(part, names) for part in ast.walk(node.value)):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def _holds_positions(node: ast.AST, names: set[str]) -> bool:
    if not isinstance(node, ast.Dict):
        return isinstance(node, ast.Name) and node.id in names
    return any(
        isinstance(key, ast.Constant) and key.value == "position_ids" and not _is_none(value)
        for key, value in zip(node.keys, node.values, strict=True)
    )


def _gives_positions(keyword: ast.keyword, dicts: set[str]) -> bool:
    if keyword.arg == "position_ids":
        return not _is_none(keyword.value)
    return keyword.arg is None and isinstance(keyword.value, ast.Name) and keyword.value.id in dicts


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


# --- positions --------------------------------------------------------------------------------------------------------


def _takes_positions(module: torch.nn.Module, sources: dict[type, str]) -> bool:
    """Does `forward` name `position_ids`, or hand all its keyword arguments to a part of it that does?"""
    parameters = inspect.signature(module.forward).parameters
    if "position_ids" in parameters:
        return True
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return False
    return any(_takes_positions(part, sources) for part in _parts_given_kwargs(module, sources))


def _parts_given_kwargs(module: torch.nn.Module, sources: dict[type, str]) -> Iterator[torch.nn.Module]:
    """Parts that a module's own `forward` calls by name (`self.model.decoder(...)`) with `**kwargs`."""
    own = (sources.get(kind, "") for kind in type(module).__mro__)
    tree = ast.parse(next((source for source in own if "def forward(" in source), ""))
    forwards = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "forward")
    modules = dict(module.named_modules())
    for node in (inner for forward in forwards for inner in ast.walk(forward)):
        if isinstance(node, ast.Call) and any(keyword.arg is None for keyword in node.keywords):
            called = ast.unparse(node.func)
            if called.startswith("self.") and called.removeprefix("self.") in modules:
                yield modules[called.removeprefix("self.")]


def _position_start(model: torch.nn.Module) -> int | None:
    """One past the padding id for modules that number tokens from there on (the RoBERTa family), 0 for everyone else."""
    numbering = [module for module in model.modules() if hasattr(type(module), "create_position_ids_from_input_ids")]
    padding = {getattr(module, "padding_idx", None) for module in numbering}
    if not padding:
        return 0
    first = padding.pop()
    return first + 1 if isinstance(first, int) and not padding else None


# --- layers -----------------------------------------------------------------------------------------------------------


def _own_attention(model: torch.nn.Module, attention: list[tuple[str, torch.nn.Module]]) -> Iterator[torch.nn.Module]:
    """Attention layers outside the interface; not wrappers around one that is inside it."""
    inside = {id(module) for _, module in attention}
    for module in model.modules():
        named = "Attention" in type(module).__name__ and any(True for _ in module.parameters())
        if named and not any(id(part) in inside for part in module.modules()):
            yield module


def _modules_that_lose_kwargs(
    model: torch.nn.Module, attention: list[tuple[str, torch.nn.Module]], sources: dict[type, str]
) -> Iterator[torch.nn.Module]:
    """Modules on the way to an attention layer that take no keyword arguments, or call the next one without them."""
    modules = dict(model.named_modules())
    judged: dict[tuple[type, str], bool] = {}
    for name, _ in attention:
        parts = name.split(".") if name else []
        for depth in range(len(parts) + 1):
            module, child = modules[".".join(parts[:depth])], parts[depth] if depth < len(parts) else ""
            key = (type(module), child)
            if _foundation(key[0]):
                continue
            if key not in judged:
                judged[key] = not _takes_kwargs(module) or _calls_without_kwargs(_source_of(module, sources), child)
            if judged[key]:
                yield module


def rewrites_masks(model: torch.nn.Module, sources: dict[type, str]) -> tuple[str, ...]:
    """Names of attention classes that compute a mask of their own from the one they are given."""
    texts = ((module, _source_of(module, sources)) for module in model.modules())
    return _names(module for module, source in texts if _INTERFACE in source and _rewrites_mask(source))


def selects_by_indices(sources: dict[type, str]) -> bool:
    """Do its attention layers tell the registered function which keys they selected?"""
    return "indices" in _asked(sources)


def loses_positions(model: torch.nn.Module, sources: dict[type, str]) -> bool:
    """Is there an attention layer that the model does not tell its `position_ids`, so that it cannot see them restart?"""
    modules = dict(model.named_modules())
    for name in (name for name, module in modules.items() if _INTERFACE in _source_of(module, sources)):
        parts = name.split(".")
        for depth in range(len(parts) + 1):
            module, child = modules[".".join(parts[:depth])], parts[depth] if depth < len(parts) else ""
            named = "position_ids" in inspect.signature(module.forward).parameters
            if named and not _hands_positions(_source_of(module, sources), child):
                return True
    return False


def _hands_positions(source: str, child: str) -> bool:
    """Does a class give `position_ids` to its part `child`, or to members of that list; an attention layer, to the function?"""
    calls = _calls_of(source, child) if child else _calls_of_attention(source)
    return any(
        any(keyword.arg == "position_ids" for keyword in call.keywords)
        or any(isinstance(argument, ast.Name) and argument.id == "position_ids" for argument in call.args)
        for call in calls
    )


def _takes_kwargs(module: torch.nn.Module) -> bool:
    parameters = inspect.signature(module.forward).parameters
    return "cu_seq_lens_q" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _calls_without_kwargs(source: str, child: str) -> bool:
    """Does a class call its part `child` (or the members of that list) without passing `**` on?"""
    return any(
        all(keyword.arg not in (None, "cu_seq_lens_q") for keyword in call.keywords) for call in _calls_of(source, child)
    )


def _calls_of(source: str, child: str) -> list[ast.Call]:
    """Where a class calls its part `child`, or the members of that list."""
    tree = ast.parse(source)
    names = {f"self.{child}"}
    for node in ast.walk(tree):
        if isinstance(node, ast.For) and f"self.{child}" in ast.unparse(node.iter):
            names |= {part.id for part in ast.walk(node.target) if isinstance(part, ast.Name)}
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) in names]


def _asked(sources: dict[type, str]) -> frozenset[str]:
    """Keyword names in calls of the registered function."""
    calls = (call for source in sources.values() if _INTERFACE in source for call in _calls_of_attention(source))
    return frozenset(keyword.arg for call in calls for keyword in call.keywords if keyword.arg and not _is_none(keyword.value))


def _calls_of_attention(source: str) -> list[ast.Call]:
    """Where a class calls the registered function, under the name that attention classes give it."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return [call for call in calls if isinstance(call.func, ast.Name) and "attention" in call.func.id]


def _rewrites_mask(source: str) -> bool:
    """Does a class look into its mask, or hand it to a method of its own that makes another?"""
    nodes = list(ast.walk(ast.parse(source)))
    looked_into = any(isinstance(node, ast.Attribute | ast.Subscript) and _is_mask(node.value) for node in nodes)
    calls = [node for node in nodes if isinstance(node, ast.Call) and re.match(r"self\.\w*mask", ast.unparse(node.func))]
    return looked_into or any(
        _is_mask(argument) for call in calls for argument in (*call.args, *(keyword.value for keyword in call.keywords))
    )


def _is_mask(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "attention_mask"


def _recurrent(model: torch.nn.Module) -> Iterator[str]:
    """Names of classes that carry something from token to token other than attention: the innermost of each."""
    found: dict[str, None] = {}
    for module in model.modules():
        kind = type(module)
        if _carries_state(module) or (_RECURRENT_CLASS.search(kind.__name__) and not _foundation(kind) and _is_layer(module)):
            found[kind.__name__] = None
    if getattr(model, "_is_stateful", False) and not found:
        found[type(model).__name__] = None
    yield from found


def _carries_state(module: torch.nn.Module) -> bool:
    """A layer with a convolution over tokens or with decay parameters of its own."""
    convolves = any(isinstance(part, torch.nn.Conv1d) and part.kernel_size[0] > 1 for part in module.children())
    own = {name for name, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))}
    return convolves or bool(own & _DECAY_PARAMETERS)


def _is_layer(module: torch.nn.Module) -> bool:
    """Neither a norm nor something that holds the layers in question: it projects by itself."""
    return any(isinstance(part, torch.nn.Linear) for part in module.children()) and not hasattr(module, "get_output_embeddings")


def _made_causal_by(text: Any, source: str) -> str | None:
    """The setting that an encoder lacks: of its own family, of transformers' mask builders, or of Gemma's."""
    if _ASKS_WHETHER_DECODER.search(source) and getattr(text, "is_decoder", True) is False:
        return "is_decoder=True"
    if getattr(text, "is_causal", True) is False:
        return "is_causal=True"
    # "vision" says that the tokens of an image see each other; rows carry none
    if getattr(text, "use_bidirectional_attention", None) in (True, "all"):
        return "use_bidirectional_attention=None"
    return None


def _blocks(text: Any) -> str | None:
    """What BigBird's config calls `attention_type`, where that is not attention in full."""
    kind = getattr(text, "attention_type", None)
    return kind if isinstance(kind, str) and kind.startswith("block") else None


def _window(text: Any, source: str) -> int | None:
    """The sliding window that the model's masks apply, None where there is none."""
    kinds = getattr(text, "layer_types", None)
    if kinds and "sliding_attention" not in kinds:
        return None
    window = getattr(text, "sliding_window", None)
    return window if isinstance(window, int) and "create_sliding_window_causal_mask" in source else None
