"""ITP: iterative structured pruning by sensitivity, the baseline of LoSparse.

Molchanov, Mallya, Tyree, Frosio, Kautz, "Importance Estimation for Neural Network Pruning", CVPR 2019,
https://arxiv.org/abs/1906.10771, in the form LoSparse (https://arxiv.org/abs/2306.11222, sections 2.2 and 4) compares
with: its pruning with rank 0, of the rows of W themselves (Eqs. 2-4, 9; methods/row_pruning_stage.py).

What is left is exact in evaluation (cut.py):
    - a zero row of the first FFN matrix gives act(b), a constant: it goes into the next bias, the neuron is removed
    - a head whose value rows are all zero gives their bias: it goes into the next bias, the head is removed
    - other zero rows are not stored (layers/low_rank_rows.py)

Deviations: biases are never pruned. ``density`` counts kept rows, as the paper does; the columns that go with a removed
neuron or head make the export smaller than that. The paper does not give ITP's hyper-parameters.
"""

from __future__ import annotations

from lit_compress.methods.base import Distillation, Method
from lit_compress.methods.row_pruning_stage import RowPruning, RowSparsePruning
from lit_compress.methods.stage import Stage, Training


class ITP(Method):
    """Iterative structured pruning: the rows of every matrix, ranked together by sensitivity.

    Args:
        task: name of the task; the data is read for the same one.
        backbone: folder or hub name of the pre-trained model, or ``embedded`` for a small one built here.
        density: kept rows' parameters / original parameters of the transformer blocks' matrices, in (0, 1].
        teacher: folder of a net already fine-tuned on the task, e.g. ``runs/x/dense/net``; it takes the place
            of the dense stage.
        dense: fine-tuning of the backbone.
        prune: the pruning.
        distillation: how the dense net's logits enter the pruning; off by default.
    """

    def __init__(
        self,
        task: str = "sst2",
        backbone: str = "bert-base-uncased",
        density: float = 0.2,
        teacher: str | None = None,
        dense: Training = Training(),
        prune: RowPruning = RowPruning(),
        distillation: Distillation = Distillation(alpha=0.0),
    ) -> None:
        super().__init__(task, backbone, density, teacher, distillation)
        self.dense, self.prune = dense, prune

    def stages(self) -> list[Stage]:
        """Return dense (without a teacher), prune."""
        return [*self.first(self.dense), RowSparsePruning(self.prune, self.density)]
