"""Which models packing is for: causal language models, whatever they are wrapped in; everything else refused by name."""

from __future__ import annotations

import inspect
from typing import Any, cast

import torch

from neatpack.errors import ContractError, MissingDependencyError
from neatpack.hf.model_facts import other_inputs

# Heads that transformers registers, by its mapping: what each would make of a packed row, and the way out.
_HEADS = {
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES": (
        "a sequence-classification head: it scores one position a row, not one a document",
        "Use a causal language model and pool per document (neatpack.train.pool_documents), or one document a row",
    ),
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES": (
        "a token-classification head: its labels are not next tokens, and the first of every document would be left out",
        "Use one document a row",
    ),
    "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES": (
        "a question-answering head: it finds one span a row, not one a document",
        "Use one document a row",
    ),
    "MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES": ("a multiple-choice head: it scores one choice a row", "Use one choice a row"),
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES": (
        "an encoder and a decoder: documents of a row have two lengths each, and rows carry one",
        "Use one pair a row",
    ),
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES": (
        "a masked-language-model head on an encoder: its tokens see later ones",
        "Use one document a row",
    ),
    "MODEL_MAPPING_NAMES": ("no language-modelling head", "Load it with AutoModelForCausalLM"),
}
_TEXT_ONLY = "Pack for a causal language model of text."
# PEFT's adapters whose change of a token depends on that token (or, in attention, on what it sees) alone: all measured.
_TOKENWISE_ADAPTERS = frozenset(
    {"ADALORA", "ADAPTION_PROMPT", "BEFT", "BOFT", "C3A", "DEFT", "DELORA", "FOURIERFT", "FROD", "GLORA", "GRALORA", "HIRA",
     "HRA", "IA3", "LN_TUNING", "LOHA", "LOKR", "LORA", "MISS", "OFT", "OSF", "PEANUT", "PSOFT", "PVERA", "RANDLORA", "ROAD",
     "SHIRA", "SUPERTUNING", "TINYLORA", "TRAINABLE_TOKENS", "UNILORA", "VBLORA", "VERA", "WAVEFT"}
)  # fmt: skip
_WRAPPERS = ("module", "_orig_mod")


def refuse_wrappers_and_heads(model: torch.nn.Module) -> torch.nn.Module:
    """The causal language model inside `model`.

    Raises:
        ContractError: a wrapper that adds tokens, a head that is no causal language model, or no transformers model.
        MissingDependencyError: transformers is not installed.
    """
    try:
        from transformers import PreTrainedModel
    except ImportError as error:
        raise MissingDependencyError("transformers", "neatpack.hf.contract_for", "neatpack[hf]") from error
    inner = _unwrap(model)
    if not isinstance(inner, PreTrainedModel):
        raise ContractError(
            f"{type(inner).__name__} is no transformers model: what it does with boundaries cannot be read off it. "
            "Convert the params yourself (neatpack.convert) and prove it with check_isolation(model, batch)."
        )
    _refuse_head(inner)
    return cast(torch.nn.Module, inner)


def _unwrap(model: torch.nn.Module) -> torch.nn.Module:
    for name in _WRAPPERS:
        inner = getattr(model, name, None)
        if isinstance(inner, torch.nn.Module) and type(model).__module__.startswith("torch."):
            return _unwrap(inner)
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        _refuse_adapters_of_rows(model)
        return _unwrap(cast(Any, model).get_base_model())
    return model


def _refuse_adapters_of_rows(model: Any) -> None:
    """Refuse adapters that look at a row, or at the batch, where a document alone would be looked at."""
    for name, config in model.peft_config.items():
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if getattr(config, "is_prompt_learning", False):
            raise ContractError(
                f"adapter {name!r} is {kind}: it puts learned tokens in front "
                "of every row, so offsets and positions no longer fit, and only a row's first document would see them. "
                "Use LoRA, or train on one document a row."
            )
        if getattr(config, "alora_invocation_tokens", None):
            raise ContractError(
                f"adapter {name!r} is an activated LoRA (alora_invocation_tokens): it switches on at the last invocation in "
                "the row, whichever document that lies in. Use LoRA without it, or train on one document a row."
            )
        if kind not in _TOKENWISE_ADAPTERS:
            raise ContractError(
                f"adapter {name!r} is {kind}, which is not known to treat every token by itself: one that averages or routes "
                "over the batch mixes its documents. Use LoRA, or train on one document a row."
            )


def _refuse_head(model: Any) -> None:
    from transformers.models.auto import modeling_auto

    name, config = type(model).__name__, model.config
    refuse_several_models(name, config, model)
    if "shared_kv_states" in inspect.signature(model.forward).parameters:
        raise ContractError(
            f"{name} reads the keys and values of another model (shared_kv_states), which rows do not carry. {_TEXT_ONLY}"
        )
    if name in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        return
    modal = other_inputs(model)
    if modal:
        raise ContractError(f"{name} takes other inputs than text ({', '.join(modal)}), which rows do not carry. {_TEXT_ONLY}")
    for mapping, (what, way_out) in _HEADS.items():
        if name in _class_names(getattr(modeling_auto, mapping, {})):
            raise ContractError(f"{name} is {what}. {way_out}.")
    if config.is_encoder_decoder or model.get_output_embeddings() is None:
        raise ContractError(f"{name} has no head that predicts next tokens. Load it with AutoModelForCausalLM.")


def refuse_several_models(name: str, config: Any, model: torch.nn.Module | None = None) -> None:
    """Refuse a model that is made of several.

    Args:
        name: the model's class.
        config: its config.
        model: the model; what its config declares and it does not hold is no part of it (an image model that was left out).
            None where it could not even be built without weights: then what the config declares counts.

    Raises:
        ContractError: there are other models than the text model.
    """
    text, sections = config.get_text_config(), getattr(type(config), "sub_configs", {})
    declared = {key: getattr(config, key, None) for key, kind in sections.items() if key != "text_config" and _is_model(kind)}
    others = {key: type(part) for key, part in declared.items() if part is not None and type(part) is not type(text)}
    if model is not None:
        held = {type(getattr(module, "config", None)) for module in model.modules()}
        others = {key: kind for key, kind in others.items() if kind in held}
    if others:
        raise ContractError(
            f"{name} is made of several models ({', '.join(others)}): rows carry documents of one text model, and nothing "
            "tells the others where those end. Pack for its text model, where it has one (the *ForCausalLM of "
            "config.get_text_config())."
        )


def _is_model(section: Any) -> bool:
    """Is a declared section of a config that of a model of its own (rather than options of one)?"""
    return section.__name__ == "AutoConfig" or bool(getattr(section, "model_type", ""))


def _class_names(mapping: Any) -> set[str]:
    """Class names of a mapping, whose values are names or tuples of names."""
    return {name for value in mapping.values() for name in ((value,) if isinstance(value, str) else value)}
