"""Document maps in (`doc_map`, `foreign`), one consumer a file out."""

from neatpack.convert.doc_map import doc_ids_from_seq_lengths as doc_ids_from_seq_lengths
from neatpack.convert.doc_map import position_ids_from_doc_ids as position_ids_from_doc_ids
from neatpack.convert.foreign import doc_ids_from_cu_seqlens as doc_ids_from_cu_seqlens
from neatpack.convert.foreign import doc_ids_from_eos as doc_ids_from_eos
from neatpack.convert.foreign import doc_ids_from_indexed_mask as doc_ids_from_indexed_mask
from neatpack.convert.foreign import doc_ids_from_position_ids as doc_ids_from_position_ids
