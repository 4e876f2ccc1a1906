"""Boundaries in (`doc_map`, `foreign`), the three layout forms (`segments`, `align`), and one consumer a file out."""

from neatpack.convert.align import Aligned as Aligned
from neatpack.convert.align import align_documents as align_documents
from neatpack.convert.dense import to_additive_mask as to_additive_mask
from neatpack.convert.dense import to_dense_mask as to_dense_mask
from neatpack.convert.dense import to_mask_dict as to_mask_dict
from neatpack.convert.doc_map import doc_ids_from_seq_lengths as doc_ids_from_seq_lengths
from neatpack.convert.doc_map import position_ids_from_doc_ids as position_ids_from_doc_ids
from neatpack.convert.flash import pad as pad
from neatpack.convert.flash import to_attention_mask_in_length as to_attention_mask_in_length
from neatpack.convert.flash import to_fa2 as to_fa2
from neatpack.convert.flash import to_fa3 as to_fa3
from neatpack.convert.flash import to_fa4 as to_fa4
from neatpack.convert.flash import to_varlen as to_varlen
from neatpack.convert.flash import unpad as unpad
from neatpack.convert.flashinfer import to_flashinfer as to_flashinfer
from neatpack.convert.flex import to_block_mask as to_block_mask
from neatpack.convert.flex import to_mask_mod as to_mask_mod
from neatpack.convert.foreign import doc_ids_from_cu_seqlens as doc_ids_from_cu_seqlens
from neatpack.convert.foreign import doc_ids_from_eos as doc_ids_from_eos
from neatpack.convert.foreign import doc_ids_from_indexed_mask as doc_ids_from_indexed_mask
from neatpack.convert.foreign import doc_ids_from_position_ids as doc_ids_from_position_ids
from neatpack.convert.huggingface import to_hf_kwargs as to_hf_kwargs
from neatpack.convert.jax import target_segmentation as target_segmentation
from neatpack.convert.jax import target_segmentation_kind as target_segmentation_kind
from neatpack.convert.jax import to_grain as to_grain
from neatpack.convert.jax import to_maxtext as to_maxtext
from neatpack.convert.jax import to_segment_ids as to_segment_ids
from neatpack.convert.jax import to_splash as to_splash
from neatpack.convert.jax import to_te_jax as to_te_jax
from neatpack.convert.megatron import to_megatron as to_megatron
from neatpack.convert.megatron import to_megatron_fields as to_megatron_fields
from neatpack.convert.megatron import to_te as to_te
from neatpack.convert.nested import from_nested as from_nested
from neatpack.convert.nested import to_jagged as to_jagged
from neatpack.convert.nested import to_nested as to_nested
from neatpack.convert.recurrent import to_fla as to_fla
from neatpack.convert.recurrent import to_mamba2 as to_mamba2
from neatpack.convert.recurrent import to_seq_idx as to_seq_idx
from neatpack.convert.segments import Slots as Slots
from neatpack.convert.segments import Unpadded as Unpadded
from neatpack.convert.segments import check_params as check_params
from neatpack.convert.segments import document_numbers as document_numbers
from neatpack.convert.segments import first_keys as first_keys
from neatpack.convert.segments import flatten_params as flatten_params
from neatpack.convert.segments import position_ids as position_ids
from neatpack.convert.segments import segment_documents as segment_documents
from neatpack.convert.segments import segment_index as segment_index
from neatpack.convert.segments import segment_lengths as segment_lengths
from neatpack.convert.segments import slots as slots
from neatpack.convert.segments import unpad_params as unpad_params
from neatpack.convert.trainers import to_magi as to_magi
from neatpack.convert.trainers import to_olmo as to_olmo
from neatpack.convert.trainers import to_torchtitan as to_torchtitan
from neatpack.convert.xformers import to_xformers as to_xformers
from neatpack.convert.xformers import to_xformers_lengths as to_xformers_lengths

__all__ = [
    "Aligned",
    "Slots",
    "Unpadded",
    "align_documents",
    "check_params",
    "doc_ids_from_cu_seqlens",
    "doc_ids_from_eos",
    "doc_ids_from_indexed_mask",
    "doc_ids_from_position_ids",
    "doc_ids_from_seq_lengths",
    "document_numbers",
    "first_keys",
    "flatten_params",
    "from_nested",
    "pad",
    "position_ids",
    "position_ids_from_doc_ids",
    "segment_documents",
    "segment_index",
    "segment_lengths",
    "slots",
    "target_segmentation",
    "target_segmentation_kind",
    "to_additive_mask",
    "to_attention_mask_in_length",
    "to_block_mask",
    "to_dense_mask",
    "to_fa2",
    "to_fa3",
    "to_fa4",
    "to_fla",
    "to_flashinfer",
    "to_grain",
    "to_hf_kwargs",
    "to_jagged",
    "to_magi",
    "to_mamba2",
    "to_mask_dict",
    "to_mask_mod",
    "to_maxtext",
    "to_megatron",
    "to_megatron_fields",
    "to_nested",
    "to_olmo",
    "to_segment_ids",
    "to_seq_idx",
    "to_splash",
    "to_te",
    "to_te_jax",
    "to_torchtitan",
    "to_varlen",
    "to_xformers",
    "to_xformers_lengths",
    "unpad",
    "unpad_params",
]
