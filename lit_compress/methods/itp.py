"""ITP: iterative structured pruning by sensitivity, the baseline of LoSparse.

Molchanov, Mallya, Tyree, Frosio, Kautz, "Importance Estimation for Neural Network Pruning", CVPR 2019,
https://arxiv.org/abs/1906.10771, in the form LoSparse (https://arxiv.org/abs/2306.11222, sections 2.2 and 4) compares
with: its pruning with rank 0, of the rows of W themselves (Eqs. 2-4, 9; stages/rows.py).

The export computes the same as the pruned model in evaluation mode (models/cut.py):
    - a zero row of the first FFN matrix gives act(b), a constant: it goes into the next bias, the neuron is removed
    - a head whose value rows are all zero gives their bias: it goes into the next bias, the head is removed
    - other zero rows are not stored (layers/deployed/low_rank.py)

Deviations: biases are never pruned. ``density`` counts the weights that the export stores, so without the columns that
are removed with a neuron or a head; the paper counts the kept rows. The paper does not give ITP's hyper-parameters.
"""

from __future__ import annotations

from lit_compress.methods.base import Untaught
from lit_compress.stages.base import Stage
from lit_compress.stages.rows import RowPruning, RowSparsePruning


class ITP(Untaught):
    """Iterative structured pruning: the rows of every matrix, ranked together by sensitivity.

    Args:
        density: stored / original parameters of the transformer blocks' matrices, in (0, 1].
        prune: schedule and score of the pruning, and its training.
    """

    usual_density = 0.2
    prune: RowPruning = RowPruning()

    def own_stages(self) -> list[Stage]:
        """Return prune."""
        return [RowSparsePruning(self.prune, self.density)]
