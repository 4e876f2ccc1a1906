"""JAX consumers: segment ids and positions for splash attention, MaxText, grain and TransformerEngine's JAX side.

Everything is NumPy `int32`, ready for `jax.device_put`; jax itself is needed only where an object of its is built. Equal ids
attend, and the causal mask is the kernel's own. Padding has id 0 and attends to padding, so no row of the mask is empty,
which splash attention demands.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from neatpack.convert.optional import attribute_of
from neatpack.convert.segments import document_numbers, position_ids
from neatpack.errors import MetadataError
from neatpack.packed_seq import PackedSeqParams


def to_segment_ids(params: PackedSeqParams) -> np.ndarray:
    """Convert to segment ids (form A, by row): `[B, S] int32`, documents 1, 2, ... in each row, 0 for padding.

    A well-formed `doc_ids` comes back unchanged. On an accelerator this copies to the host.

    Example:
        >>> from neatpack.packed_seq import packed_seq_params_from_doc_ids
        >>> to_segment_ids(packed_seq_params_from_doc_ids(torch.tensor([[7, 7, 9, 9, 9, 0], [1, 2, 2, 3, 3, 3]]))).tolist()
        [[1, 1, 2, 2, 2, 0], [1, 2, 2, 3, 3, 3]]
    """
    return document_numbers(params).cpu().numpy().astype(np.int32)


def to_splash(params: PackedSeqParams) -> Any:
    """Build the `SegmentIds` of splash attention for a batch (form A, by row): `q` and `kv` are `[B, S] int32`.

    The kernel takes one row: map it over the batch axis with `jax.vmap`.

    Raises:
        MissingDependencyError: jax is not installed; `to_segment_ids` works without it.

    Source: `jax.experimental.pallas.ops.tpu.splash_attention.SegmentIds`.
    """
    module = "jax.experimental.pallas.ops.tpu.splash_attention"
    theirs = attribute_of(module, "SegmentIds", feature="to_splash", install="jax")
    array = attribute_of("jax.numpy", "asarray", feature="to_splash", install="jax")(to_segment_ids(params))
    return theirs(q=array, kv=array)


def to_maxtext(params: PackedSeqParams) -> dict[str, np.ndarray]:
    """Convert to MaxText's batch keys (form A, by row), for `targets` shifted left by one: `[B, S] int32` each.

    `targets_segmentation` is boundary-safe: 0, so no loss, wherever the next token is another document's. MaxText's own shift
    leaves the next document's id there and trains the last token of a document to predict the first of the next.

    Returns:
        `inputs_segmentation`, `inputs_position`, `targets_segmentation`, `targets_position`. On the worked example the safe
        targets are `[[1, 0, 2, 2, 0, 0], [0, 2, 0, 3, 3, 0]]`. A target's position is that of the input that predicts it.

    Source: `src/maxtext/input_pipeline` of MaxText.
    """
    segment_ids, positions = to_segment_ids(params), _positions(params)
    return {
        "inputs_segmentation": segment_ids,
        "inputs_position": positions,
        "targets_segmentation": target_segmentation(segment_ids),
        "targets_position": positions,
    }


def to_grain(params: PackedSeqParams, feature: str = "inputs") -> dict[str, np.ndarray]:
    """Convert to the keys that grain's packers emit for one feature (form A, by row): `[B, S] int32` each.

    Args:
        params: the batch's metadata.
        feature: what the keys begin with.

    Returns:
        `<feature>_segment_ids` and `<feature>_positions`.

    Source: `grain/_src/python/dataset/transformations/packing.py` of grain.
    """
    return {f"{feature}_segment_ids": to_segment_ids(params), f"{feature}_positions": _positions(params)}


def to_te_jax(params: PackedSeqParams) -> dict[str, Any]:
    """Convert to the arguments of TransformerEngine's `SequenceDescriptor.from_segment_ids_and_pos` (form A, by row).

    For the layout THD_THD_THD; its `max_segments_per_seq` is static, and must cover the fullest row (padding is no segment).

    Returns:
        `segment_ids`, `segment_pos` (`[B, S] int32`), `is_thd=True`, `is_segment_ids_reordered=False`.
    """
    return {
        "segment_ids": to_segment_ids(params),
        "segment_pos": _positions(params),
        "is_thd": True,
        "is_segment_ids_reordered": False,
    }


def target_segmentation(segment_ids: np.ndarray) -> np.ndarray:
    """Segment ids of targets that are shifted left by one, 0 wherever the target is not the same document's.

    Args:
        segment_ids: `[B, S]` integer segment ids of the inputs, 0 for padding (`to_segment_ids`).

    Returns:
        `[B, S]` in the dtype of `segment_ids`.

    Example:
        >>> target_segmentation(np.array([[1, 1, 2, 2, 2, 0], [1, 2, 2, 3, 3, 3]])).tolist()
        [[1, 0, 2, 2, 0, 0], [0, 2, 0, 3, 3, 0]]
    """
    shifted = _shifted(segment_ids)
    return np.where(shifted == segment_ids, segment_ids, 0).astype(segment_ids.dtype)


def target_segmentation_kind(inputs: np.ndarray, targets: np.ndarray) -> Literal["safe", "shifted"]:
    """Tell which target segmentation a pipeline has: boundary-safe, or plainly shifted, which trains across boundaries.

    Args:
        inputs: `[B, S]` segment ids of the inputs.
        targets: `[B, S]` segment ids of the targets; the loss counts where they are not 0.

    Returns:
        "safe" if no target belongs to another document than its input (also where the two rules agree), else "shifted".

    Raises:
        MetadataError: targets of another shape, or that follow neither rule; names the first place.
    """
    safe, shifted = target_segmentation(inputs), _shifted(inputs)
    if targets.shape != inputs.shape:
        raise MetadataError(f"targets have shape {targets.shape}, inputs {inputs.shape}. Give both of one batch.")
    if np.array_equal(targets, safe):
        return "safe"
    if np.array_equal(targets, shifted):
        return "shifted"
    row, position = np.argwhere(targets != safe)[0].tolist()
    raise MetadataError(
        f"targets[{row}, {position}] is {targets[row, position]}; the boundary-safe shift has {safe[row, position]} there, the "
        f"plain shift {shifted[row, position]}. Build it with target_segmentation."
    )


def _shifted(segment_ids: np.ndarray) -> np.ndarray:
    shifted = np.zeros_like(segment_ids)
    shifted[:, :-1] = segment_ids[:, 1:]
    return shifted


def _positions(params: PackedSeqParams) -> np.ndarray:
    return position_ids(params).cpu().numpy().astype(np.int32)
