"""Documents in, packed rows out: NumPy and Arrow, no torch.

sources   which files, in which order and pieces        columns   Arrow columns to flat arrays, checked
readers   text, Parquet and Arrow; jsonl   JSON Lines    tokenize  text to ids
tokens    token files between the two steps             rows      the gather
work      the units of work                             store     shards, manifest, the atomic finish
pack      the pipeline: start reading here
"""

from neatpack.data.options import PackOptions as PackOptions
from neatpack.data.pack import PackSummary as PackSummary
from neatpack.data.pack import pack as pack

__all__ = ["PackOptions", "PackSummary", "pack"]
