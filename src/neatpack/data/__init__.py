"""Documents in, packed rows out: NumPy and Arrow, no torch.

sources   which files, in which order and pieces        columns   Arrow columns to flat arrays, checked
readers   text, Parquet and Arrow; jsonl   JSON Lines    tokenize  text to ids
tokens    token files between the two steps             rows      the gather
work, job the units of work                             store     shards, manifest, the atomic finish
further   further columns, carried if asked for; further_file between the two steps; json_values their types in JSON
workplace the folder of an unfinished run               verify    is a packed folder right? by the hash in content
pack      the pipeline: start reading here

dataset   virtual rows over a source and a plan         opening   sources with random access, here and in workers
table     documents by number; flat their values        in_memory records as Python holds them
slices    the copy of slices that rows are made of      groups    pairs and other groups that stay together
stream    rows from a source read in order              lane      a share of it; feeds how sources are read
"""

from neatpack.data.dataset import PackedDataset as PackedDataset
from neatpack.data.dataset import lengths_of as lengths_of
from neatpack.data.groups import pack_pairs as pack_pairs
from neatpack.data.options import PackOptions as PackOptions
from neatpack.data.pack import PackSummary as PackSummary
from neatpack.data.pack import pack as pack
from neatpack.data.stream import RowStream as RowStream
from neatpack.data.verify import VerifyReport as VerifyReport
from neatpack.data.verify import verify as verify

__all__ = [
    "PackOptions",
    "PackSummary",
    "PackedDataset",
    "RowStream",
    "VerifyReport",
    "lengths_of",
    "pack",
    "pack_pairs",
    "verify",
]
