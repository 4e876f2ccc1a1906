"""From packed rows to training: the collator."""

from neatpack.train.collate import IGNORE_INDEX as IGNORE_INDEX
from neatpack.train.collate import PackedCollator as PackedCollator

__all__ = ["IGNORE_INDEX", "PackedCollator"]
