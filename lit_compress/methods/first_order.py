"""First-order pruning on the cubic schedule ("UP_first" in LPAF's figures): LPAF's step 1 as a method of its own.

    S_ij = sum_t |g_ij(t) W_ij(t)|       (Ren & Zhu 2023, Eq. 4)

    Sanh et al. 2020, "Movement Pruning", https://arxiv.org/abs/2005.07683, without a learned mask: gradients come from
    the sparse model, and a zeroed weight's score is frozen.

Equations, schedule and deviations: stages/unstructured.py. Zeros are stored: density falls, bytes and FLOPs do not.
"""

from __future__ import annotations

from lit_compress.methods.base import Method
from lit_compress.stages.base import Stage
from lit_compress.stages.unstructured import FirstOrderScore, Unstructured, UnstructuredPruning


class FirstOrder(Method):
    """Prune single weights by the first-order estimate of the change of the loss without them.

    Args:
        prune: schedule of the pruning, and its training.
    """

    stores_zeros = True
    prune: Unstructured = Unstructured()

    def own_stages(self) -> list[Stage]:
        """Return prune."""
        return [UnstructuredPruning(self.prune, self.density, FirstOrderScore())]
