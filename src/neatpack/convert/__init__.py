"""Document maps in, one consumer a file out. See `doc_map` for the way in."""

from neatpack.convert.doc_map import doc_ids_from_seq_lengths as doc_ids_from_seq_lengths
from neatpack.convert.doc_map import position_ids_from_doc_ids as position_ids_from_doc_ids
