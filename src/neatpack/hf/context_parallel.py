"""Context parallelism for transformers models: one more registered attention, and the group comes with the batch.

`context_parallel(model, group)` selects the attention `packed_varlen_cp` for that model. The attention itself knows no
group and keeps no state: the local batch carries its `context_shard` and `context_group` as keyword arguments through the
model's forward, as it carries offsets for `packed_varlen`. So two models in one process may use two groups, gradient
checkpointing recomputes with what it was called with, and a batch that was not sharded is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from neatpack.errors import ContractError, MissingDependencyError
from neatpack.hf.attention import refuse_unsupported
from neatpack.hf.mask import PackedMask, packed_mask
from neatpack.train.context_parallel import (
    ContextShard,
    Scheme,
    context_parallel_attention,
    gather_tensor,
    process_group,
    shard_batch,
    sum_gradients,
)
from neatpack.train.context_parallel.exchange import Group

ATTENTION_NAME = "packed_varlen_cp"

_WAY_OUT = "Call model(**parallel.shard(batch)) with the object that neatpack.hf.context_parallel(model, group) returned."

_ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention"})


class ContextParallel:
    """A model whose attention runs over a group of ranks; made by `context_parallel`, undone by `close`.

    Attributes:
        model: the transformers model.
        group: the ranks that share each batch.
        scheme: how batches are cut.
    """

    def __init__(self, model: Any, group: Group, scheme: Scheme) -> None:
        self.model = model
        self.group: dist.ProcessGroup = process_group(group)
        self.scheme = scheme
        self._previous = model.config._attn_implementation
        _select(model, ATTENTION_NAME)
        self._hooks = [
            model.register_forward_pre_hook(_refuse_whole_batch, with_kwargs=True),
            model.register_forward_hook(_refuse_unused_shard, with_kwargs=True),
        ]

    def shard(self, batch: Mapping[str, Any], *, check_equal: bool = True) -> dict[str, Any]:
        """This rank's share of a collated batch: the model's keyword arguments. See `shard_batch`."""
        return shard_batch(batch, self.group, scheme=self.scheme, check_equal=check_equal)

    def gather(self, local: torch.Tensor, shard: ContextShard) -> torch.Tensor:
        """Every rank's `[1, T / cp, ...]` (logits, say) as `[B, S, ...]`. See `gather_tensor`."""
        return gather_tensor(local, shard, self.group)

    def sum_gradients(self) -> None:
        """Add up the model's gradients over the group, after backward. See `neatpack.train.context_parallel.sum_gradients`."""
        sum_gradients(self.model.parameters(), self.group)

    def close(self) -> None:
        """Give the model its previous attention back."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        _select(self.model, self._previous)

    def __enter__(self) -> ContextParallel:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


def context_parallel(model: Any, group: Group, *, scheme: Scheme = "zigzag") -> ContextParallel:
    """Make a transformers model attend over a group of ranks that share each batch.

    Each rank runs the model on its own tokens, `[1, T / cp]`; attention fetches the keys of documents that began on other
    ranks. With `shard(batch)` the loss is this rank's share of the batch's loss: the ranks' losses add up to it, and
    `sum_gradients` adds up the gradients.

    Args:
        model: a model whose attention goes through transformers' interface, before DDP or another wrapper.
        group: a process group, or one dimension of a `DeviceMesh` (`mesh["cp"]`).
        scheme: "zigzag" (even work), "contiguous" (least communication) or "per_document_zigzag".

    Returns:
        An object with `shard`, `gather`, `sum_gradients` and `close`; as a context manager it closes itself.

    Raises:
        ContractError: layers that mix tokens by other means than full or sliding-window attention, or a model that cannot
            change its attention.
        MetadataError: a group that is none, or a mesh of several dimensions.
        MissingDependencyError: transformers is not installed.

    Example:
        >>> with context_parallel(model, mesh["cp"]) as parallel:      # doctest: +SKIP
        ...     local = parallel.shard(batch)
        ...     output = model(**local)
        ...     output.loss.backward()
        ...     parallel.sum_gradients()
        ...     logits = parallel.gather(output.logits, local["context_shard"])

    Source: `transformers.AttentionInterface`, `transformers.AttentionMaskInterface`.
    """
    if not hasattr(model, "set_attn_implementation"):
        raise ContractError(
            f"{type(model).__name__} has no set_attn_implementation: pass the transformers model itself, before it is wrapped "
            "(DDP, FSDP, compile)."
        )
    _refuse_other_mixers(model)
    _register()
    return ContextParallel(model, group, scheme)


def packed_varlen_cp(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | PackedMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    context_shard: ContextShard | None = None,
    context_group: dist.ProcessGroup | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as transformers' attention interface asks, over the ranks of the batch's group.

    Args:
        module: the attention layer; its `is_causal` counts where the call says nothing.
        query: `[1, H, T / cp, D]`.
        key: `[1, Hkv, T / cp, D]`, heads not repeated.
        value: `[1, Hkv, T / cp, Dv]`.
        attention_mask: what the registered mask function returned: this layer's window and causality.
        dropout: probability of dropping an attention weight; transformers passes 0 outside training.
        scaling: factor on the scores.
        sliding_window: this layer's window, the query's own token included.
        is_causal: overrides the module's.
        softcap: bound on the scores.
        s_aux: `[H]` attention sinks.
        context_shard: which tokens these are.
        context_group: the ranks that share the batch.
        options: whatever else the model and its caller pass.

    Returns:
        `[1, T / cp, H, Dv]`, and no weights.

    Raises:
        ContractError: a batch that was not sharded, a mask, or a feature that is not computed.
    """
    refuse_unsupported(options)
    if context_shard is None or context_group is None:
        raise ContractError(
            f"{type(module).__name__} was called without context_shard and context_group: the batch was not sharded, or the "
            f"model's forward does not pass keyword arguments on to its attention. {_WAY_OUT}"
        )
    if isinstance(attention_mask, torch.Tensor):
        raise ContractError(
            f"a mask {list(attention_mask.shape)} came along with a shard, whose boundaries say who sees whom. {_WAY_OUT}"
        )
    if query.shape[0] != 1:
        raise ContractError(f"a shard is one row [1, T / cp], got {query.shape[0]} rows. {_WAY_OUT}")
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    window = sliding_window
    if attention_mask is not None:
        causal, window = attention_mask.causal, attention_mask.window or sliding_window
    flat_query, flat_key, flat_value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    attended = context_parallel_attention(
        flat_query,
        flat_key,
        flat_value,
        context_shard,
        context_group,
        scale=scaling,
        window=window,
        causal=causal,
        softcap=softcap,
        sinks=s_aux,
        dropout=dropout,
    )
    return attended.unsqueeze(0), None


def context_mask(local_size: int | None = None, **options: Any) -> PackedMask:
    """Answer transformers' request for a mask: the layer's window and causality; the shard knows the rest.

    What transformers made of the local positions is left out: neighbours in a shard need not be neighbours in the batch.
    transformers passes everything by name, as to `packed_mask`.

    Raises:
        ContractError: padding in a mask, a cache, or overlays on the causal mask (bidirectional blocks, custom functions).
    """
    mask = packed_mask(local_size=local_size, **options)
    if not isinstance(mask, PackedMask):
        raise ContractError(
            "this call asks for more than causal attention in documents (a padding mask, a cache, bidirectional blocks or a "
            f"custom mask function), which attention over shards would lose. {_WAY_OUT}"
        )
    if mask.sees_later is not None:
        raise ContractError(
            "context parallelism cannot be compiled: what this call's mask says is known only when the program runs. Leave the "
            "model uncompiled."
        )
    return dataclasses.replace(mask, starts=None, from_positions=False, window=local_size)


def _register() -> None:
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise MissingDependencyError("transformers", "neatpack.hf.context_parallel", "neatpack[hf]") from error
    AttentionInterface.register(ATTENTION_NAME, packed_varlen_cp)
    AttentionMaskInterface.register(ATTENTION_NAME, context_mask)


def _select(model: Any, name: str) -> None:
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        raise ContractError(
            f"{type(model).__name__} cannot change its attention to {name!r} (it does not go through transformers' "
            "AttentionInterface), so it would attend within each shard only."
        )


def _refuse_other_mixers(model: Any) -> None:
    """Refuse layers in which tokens meet outside attention: a shard would cut their documents at the ranks."""
    config = model.config.get_text_config()
    others = sorted({str(kind) for kind in getattr(config, "layer_types", None) or ()} - _ATTENTION_LAYERS)
    stateful = sorted({type(part).__name__ for part in model.modules() if getattr(part, "_is_stateful", False)})
    chunked = getattr(config, "layer_types", None) is None and getattr(config, "attention_chunk_size", None) is not None
    if others or stateful or chunked:
        found = others or stateful or ["attention_chunk_size"]
        raise ContractError(
            f"{type(model).__name__} has layers of kind {', '.join(found)}; over shards neatpack computes full and "
            "sliding-window attention only. "
            "For recurrent layers pass recurrent_context(shard) of a contiguous shard to kernels that take it."
        )


def _refuse_whole_batch(model: torch.nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    if options.get("context_shard") is None:
        raise ContractError(f"{type(model).__name__} is context parallel, and the batch was not sharded. {_WAY_OUT}")


def _refuse_unused_shard(model: torch.nn.Module, arguments: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
    shard: ContextShard = options["context_shard"]
    if not shard.plans:
        raise ContractError(
            f"no attention layer of {type(model).__name__} looked at context_shard: its attention does not go "
            "through transformers' AttentionInterface, so each rank attended within its shard only."
        )
