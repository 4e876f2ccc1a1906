"""Context parallelism for packed batches: one batch's tokens cut over several ranks, its documents whole.

batch [B, S] --index map--> shard [1, T / cp] on each rank --attention fetches the keys it lacks--> gather [B, S]
"""

from neatpack.train.context_parallel.attention import context_parallel_attention as context_parallel_attention
from neatpack.train.context_parallel.batch import gather_tensor as gather_tensor
from neatpack.train.context_parallel.batch import pad_batch as pad_batch
from neatpack.train.context_parallel.batch import shard_batch as shard_batch
from neatpack.train.context_parallel.batch import shard_tensor as shard_tensor
from neatpack.train.context_parallel.exchange import process_group as process_group
from neatpack.train.context_parallel.exchange import sum_gradients as sum_gradients
from neatpack.train.context_parallel.index_maps import Scheme as Scheme
from neatpack.train.context_parallel.index_maps import contiguous_indices as contiguous_indices
from neatpack.train.context_parallel.index_maps import inverse_indices as inverse_indices
from neatpack.train.context_parallel.index_maps import padding_to as padding_to
from neatpack.train.context_parallel.index_maps import per_document_zigzag_indices as per_document_zigzag_indices
from neatpack.train.context_parallel.index_maps import zigzag_indices as zigzag_indices
from neatpack.train.context_parallel.offsets import llama3_offsets as llama3_offsets
from neatpack.train.context_parallel.offsets import recurrent_context as recurrent_context
from neatpack.train.context_parallel.offsets import thd_offsets as thd_offsets
from neatpack.train.context_parallel.offsets import thd_position_ids as thd_position_ids
from neatpack.train.context_parallel.offsets import zigzag_ring_offsets as zigzag_ring_offsets
from neatpack.train.context_parallel.shard import ContextShard as ContextShard
from neatpack.train.context_parallel.shard import Pieces as Pieces
from neatpack.train.context_parallel.shard import shard_params as shard_params

__all__ = [
    "ContextShard",
    "Pieces",
    "Scheme",
    "context_parallel_attention",
    "contiguous_indices",
    "gather_tensor",
    "inverse_indices",
    "llama3_offsets",
    "pad_batch",
    "padding_to",
    "per_document_zigzag_indices",
    "process_group",
    "recurrent_context",
    "shard_batch",
    "shard_params",
    "shard_tensor",
    "sum_gradients",
    "thd_offsets",
    "thd_position_ids",
    "zigzag_indices",
    "zigzag_ring_offsets",
]
