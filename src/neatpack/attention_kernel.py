"""Torch's own varlen kernel (`torch.nn.attention.varlen`), whose arguments differ from version to version.

It runs on CUDA in half precision only. What decides whether it applies, and how it is called, is plain Python over its
signature, so that it can be tested on any machine against a function with the same signature.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch

__all__ = ["INSTALLED_KERNEL", "VarlenKernel", "runs_on"]


@dataclass(frozen=True)
class VarlenKernel:
    """A varlen function and the names of its parameters.

    Attributes:
        function: called as `(query, key, value, cu_q, cu_k, max_q, max_k, **options)`.
        parameters: what it takes; `window_size` or, in older versions, `is_causal` among them.
    """

    function: Callable[..., Any]
    parameters: frozenset[str]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> VarlenKernel:
        """Read the parameters off the function's signature."""
        return cls(function, frozenset(inspect.signature(function).parameters))

    def computes(self, *, window: int | None, scale: float | None, causal: bool, grouped: bool) -> bool:
        """Say whether it has a parameter for everything that a call asks of it; the rest is for another path."""
        needed = {"enable_gqa"} if grouped else set()
        needed |= {"window_size"} if window is not None else set()
        needed |= {"scale"} if scale is not None else set()
        return bool(self.parameters & {"window_size", "is_causal"}) and needed <= self.parameters

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
        *,
        cu_seqlens_k: torch.Tensor | None = None,
        max_seqlen_k: int | None = None,
        scale: float | None = None,
        window: int | None = None,
        causal: bool = True,
    ) -> torch.Tensor:
        """Call the kernel.

        Args:
            query: `[T, H, D]`.
            key: `[Tk, Hkv, D]`.
            value: `[Tk, Hkv, D]`.
            cu_seqlens: `[N+1] int32`, form A, on the queries' device.
            max_seqlen: at least the length of the longest segment.
            cu_seqlens_k: `[N+1] int32`, where keys have segments of their own: the last query of a segment then stands at
                its last key. The queries' offsets by default.
            max_seqlen_k: the same for the keys.
            scale: factor on the scores.
            window: sliding-window size in tokens, the query's own included.
            causal: a query sees no later key.

        Returns:
            `[T, H, D]`.
        """
        options: dict[str, Any] = {}
        if "window_size" in self.parameters:
            # left and right reach in tokens, -1 for unlimited; the newer kernels know causality by (-1, 0) alone
            left = -1 if window is None else window - 1
            options["window_size"] = (left, 0 if causal else left)
        if "is_causal" in self.parameters:
            options["is_causal"] = causal
        if scale is not None:
            options["scale"] = scale
        if query.shape[1] != key.shape[1]:
            options["enable_gqa"] = True
        keys = cu_seqlens if cu_seqlens_k is None else cu_seqlens_k
        longest = max_seqlen if max_seqlen_k is None else max_seqlen_k
        return cast(torch.Tensor, self.function(query, key, value, cu_seqlens, keys, max_seqlen, longest, **options))


def _read() -> VarlenKernel | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return VarlenKernel.of(varlen_attn)


INSTALLED_KERNEL = _read()
"""Torch's varlen kernel, or None where this torch has none. Read once, here: a compiler cannot trace how."""


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def runs_on(device: torch.device) -> bool:
    """Say whether the kernel runs on this device; to a compiler a constant."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
