"""Movement pruning of neurons: the baseline "Movement" of LoSparse's tables.

Victor Sanh et al., "Movement Pruning: Adaptive Sparsity by Fine-Tuning", 2020, https://arxiv.org/abs/2005.07683;
whole rows as in Lagunas et al., "Block Pruning For Faster Transformers", 2021, https://arxiv.org/abs/2109.04838, and
its program nn_pruning (a block is one output row of torch's weight [out, in]). LoSparse says of its baseline: "a
trainable mask to each neuron [...] When the mask is smaller than a threshold, the corresponding neuron is pruned".

    W' = m[:, None] * W, b' = m * b, m = binarise(s), dL/ds = dL/dm; stages/movement.py

Choices:
    - Rows of all matrices are ranked together (nn_pruning ranks every matrix by itself), and v(t) is the share of the
      weights that the export stores for them, so that the density is met: the columns that read a removed neuron or
      head do not count, nor do the other rows of a head without values (models/row_sizes.py). A head that does not fit
      any more is passed over for the next rows. LoSparse does not say which form it ran; its ratios are exact.
    - nn_pruning evaluates with the final ratio, we with the present one.
    - No distillation unless asked for (nn_pruning: 0.9, temperature 2).

The export computes the same as the pruned model in evaluation mode: removed rows are not stored, and a neuron or a head
whose rows are all removed is removed with the columns that read it, as in ITP (models/cut.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from lit_compress.layers.training.masked import MaskedLinear
from lit_compress.methods.base import Untaught
from lit_compress.models.accounting import dense_site_params
from lit_compress.models.outline import keep_rows_evenly
from lit_compress.models.row_sizes import RowSizes
from lit_compress.models.sites import Model, find_sites, module_at
from lit_compress.models.surgery import Structure, replace
from lit_compress.numerics.foreach import joined
from lit_compress.numerics.masks import keep_count, select_rows
from lit_compress.stages.base import Stage
from lit_compress.stages.micro_batches import MicroBatches
from lit_compress.stages.movement import MaskedUnits, MovementStage
from lit_compress.stages.unstructured import CubicSchedule


class MovementPruning(MovementStage):
    """Train weights and row scores; mask rows by their scores. The density counts stored weights."""

    def begin(self, net: Model, method: MicroBatches, structure: Structure | None) -> Model:
        """Put a masked layer at every site."""
        for site in find_sites(net):
            replace(net, site.name, MaskedLinear(module_at(net, site.name, nn.Linear)))
        return net

    def outline(self, net: Model) -> Model:
        """Return ``net`` with some rows of every matrix; which rows is decided by training."""
        return keep_rows_evenly(net, {}, keep_count(self.density, dense_site_params(net)))

    def find_units(self, net: Model) -> list[MaskedUnits]:
        """Return the rows of every site."""
        layers = [module_at(net, site.name, MaskedLinear) for site in find_sites(net)]
        return [MaskedUnits((layer,), layer.in_features) for layer in layers]

    def attach(self, net: Model) -> None:
        """Also find out what the rows cost."""
        super().attach(net)
        self._sizes = RowSizes(net, biases_go=True)

    def best(self, scores: Sequence[Tensor], budget: int) -> list[Tensor]:
        """Return the masks of the rows with the largest scores, for which at most ``budget`` weights are stored."""
        return select_rows(scores, self._sizes.choose, budget)

    def achieved(self) -> float:
        """Return the share of the sites' weights that would be stored."""
        return int(self._sizes.stored(joined([units.layers[0].mask for units in self.units]))) / self._total


class Movement(Untaught):
    """Prune neurons by scores that are trained with the weights.

    Args:
        density: stored fraction of the weights of the transformer blocks' matrices, in (0, 1].
        prune: schedule and masks of the pruning, and its training.
    """

    usual_density = 0.2
    prune: CubicSchedule = CubicSchedule()

    def own_stages(self) -> list[Stage]:
        """Return prune."""
        return [MovementPruning(self.prune, self.density)]
