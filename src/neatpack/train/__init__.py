"""From packed rows to training: the collator, labels, losses and per-document values."""

from neatpack.train.collate import PackedCollator as PackedCollator
from neatpack.train.cross_entropy import token_cross_entropy as token_cross_entropy
from neatpack.train.documents import DocumentSpans as DocumentSpans
from neatpack.train.documents import document_spans as document_spans
from neatpack.train.documents import pad_documents as pad_documents
from neatpack.train.documents import pool_documents as pool_documents
from neatpack.train.documents import repack_documents as repack_documents
from neatpack.train.documents import unpack_documents as unpack_documents
from neatpack.train.labels import IGNORE_INDEX as IGNORE_INDEX
from neatpack.train.labels import aligned_labels as aligned_labels
from neatpack.train.labels import check_labels as check_labels
from neatpack.train.labels import count_targets as count_targets
from neatpack.train.labels import mask_from_spans as mask_from_spans
from neatpack.train.labels import prediction_targets as prediction_targets
from neatpack.train.labels import shift_within_documents as shift_within_documents
from neatpack.train.linear_loss import linear_token_cross_entropy as linear_token_cross_entropy
from neatpack.train.linear_loss import packed_linear_cross_entropy as packed_linear_cross_entropy
from neatpack.train.loss import DocumentLogprobs as DocumentLogprobs
from neatpack.train.loss import count_items as count_items
from neatpack.train.loss import document_logprobs as document_logprobs
from neatpack.train.loss import packed_cross_entropy as packed_cross_entropy
from neatpack.train.loss import reduce_token_losses as reduce_token_losses
from neatpack.train.loss import target_weights as target_weights
from neatpack.train.metrics import BatchMetrics as BatchMetrics
from neatpack.train.metrics import batch_metrics as batch_metrics
from neatpack.train.metrics import gather_metrics as gather_metrics
from neatpack.train.pairs import group_documents as group_documents
from neatpack.train.pairs import split_pairs as split_pairs

__all__ = [
    "IGNORE_INDEX",
    "BatchMetrics",
    "DocumentLogprobs",
    "DocumentSpans",
    "PackedCollator",
    "aligned_labels",
    "batch_metrics",
    "check_labels",
    "count_items",
    "count_targets",
    "document_logprobs",
    "document_spans",
    "gather_metrics",
    "group_documents",
    "linear_token_cross_entropy",
    "mask_from_spans",
    "packed_cross_entropy",
    "packed_linear_cross_entropy",
    "pad_documents",
    "pool_documents",
    "prediction_targets",
    "reduce_token_losses",
    "repack_documents",
    "shift_within_documents",
    "split_pairs",
    "target_weights",
    "token_cross_entropy",
    "unpack_documents",
]
