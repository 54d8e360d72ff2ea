"""Layers: keep some of the transformer blocks, then distil; the most common way to make a model smaller.

Evenly spaced blocks of the fine-tuned model are the student of DistilBERT (Sanh, Debut, Chaumond, Wolf 2019,
https://arxiv.org/abs/1910.01108) and of the layer reduction in sentence-transformers. Blocks removed one after the
other by a measured loss are ShortGPT's kind of pruning (Men et al. 2024, https://arxiv.org/abs/2403.03853).

    even        of n blocks, numbers floor((j + 1/2) n / k), j = 0 .. k - 1
    measured    remove the block without which KL(model || model without it) on training rows is smallest, until k are
                left (:class:`~lit_compress.stages.blocks.BlockLosses`)
    training    as in every method: labels, logits and hidden states of the dense model; state j of the k + 1 hidden
                states learns from the teacher's state round(j n / k)

The stages are dense -> prune. The export of fewer blocks is an ordinary model: its configuration says how many.

Deviations:
    - ShortGPT ranks blocks once, by the cosine of their inputs and outputs. Here the loss of the whole model decides,
      again after every removal.
    - The first block stays if it alone has something that the others need: T5's table of positions, ModernBERT's
      missing norm.
    - An encoder and a decoder keep the same share of their blocks.
"""

from __future__ import annotations

from lit_compress.methods.base import Method
from lit_compress.stages.base import Stage
from lit_compress.stages.blocks import BlockRemoval, KeptBlocks
from lit_compress.stages.compression import CompressedStage


class Layers(Method):
    """Keep some of the transformer blocks, evenly spaced or by measured loss, then distil; an ordinary model is left.

    Args:
        density: fraction of the blocks that is kept; the largest number of blocks that fits, by default half of them.
        prune: the choice of the blocks, and training afterwards.
    """

    usual_density = 0.5
    prune: KeptBlocks = KeptBlocks()

    def own_stages(self) -> list[Stage]:
        """Return prune."""
        removal = BlockRemoval(self.prune, self.density, exact=self.budget is not None)
        return [CompressedStage("prune", self.prune, removal)]
