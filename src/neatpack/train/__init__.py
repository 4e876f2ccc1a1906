"""From packed rows to training: the collator, labels, losses and per-document values."""

from neatpack.train.collate import PackedCollator as PackedCollator
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

__all__ = [
    "IGNORE_INDEX",
    "DocumentSpans",
    "PackedCollator",
    "aligned_labels",
    "check_labels",
    "count_targets",
    "document_spans",
    "mask_from_spans",
    "pad_documents",
    "pool_documents",
    "prediction_targets",
    "repack_documents",
    "shift_within_documents",
    "unpack_documents",
]
