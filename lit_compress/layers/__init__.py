"""What takes a Linear's place. Each layer knows its spec (JSON) and how to stand empty from it."""

from lit_compress.layers.low_rank import LowRankLinear
from lit_compress.layers.mixed_rank import MixedRankLinear

__all__ = ["LowRankLinear", "MixedRankLinear"]
