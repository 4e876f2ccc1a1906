"""Names that a further column cannot have in a batch, since `model(**batch)` would take it for something else.

Both wings ask: `neatpack pack` before it says how to go on, and the collator when it is built.
"""

from __future__ import annotations

BATCH_KEYS = frozenset(
    {
        "position_ids",
        "attention_mask",
        "cu_seq_lens_q",
        "cu_seq_lens_k",
        "max_length_q",
        "max_length_k",
        "use_cache",
        "doc_ids",
        "packed_seq_params",
        "shift_labels",
    }
)
"""Keys of a batch that the collator makes itself."""

_FORWARD = """
inputs_embeds hidden_states position_embeddings position_bias head_mask layer_idx layer_past alibi mask causal_mask
cache cache_params cache_position past_key_value past_key_values encoder_hidden_states encoder_attention_mask encoder_outputs
decoder_input_ids decoder_attention_mask decoder_inputs_embeds output_attentions output_hidden_states output_router_logits
return_dict return_loss logits_to_keep num_logits_to_keep seq_idx cu_seqlens max_seqlen
"""
_ATTENTION = """
module query key value query_states key_states value_states query_length key_length q k v is_causal causal training
scaling attention_scaling softmax_scale dropout dropout_p sliding_window softcap s_aux sinks indices block_indices block_table
cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k cache_seqlens k_cache v_cache deterministic
use_top_left_mask target_dtype attn_implementation supports_mapping context_shard context_group
"""
_LOSS = "source target logits pooled_logits vocab_size config ignore_index num_items_in_batch reduction"

MODEL_ARGUMENTS = frozenset(f"{_FORWARD} {_ATTENTION} {_LOSS}".split())
"""Arguments of transformers' models, attention and losses, which get whatever a model is called with.

Inputs that a model may well be meant to get, one a token (`token_type_ids`), are none of them.
"""
