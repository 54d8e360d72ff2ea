"""Second-order compression: all matrices factorized under the Kronecker-factored Fisher information, then retrained.

No single paper: its parts come from

    K-FAC     James Martens, Roger Grosse, "Optimizing Neural Networks with Kronecker-factored Approximate Curvature",
              ICML 2015, https://arxiv.org/abs/1503.05671: the Fisher information of a matrix as a product of two
    GFWSVD    https://arxiv.org/abs/2505.17974: the SVD of a matrix under both moments; OBD-LLM,
              https://arxiv.org/abs/2604.00821, IO-SVD, https://arxiv.org/abs/2605.15626, and KFAC-SVD with LEMS,
              ICML 2026, have it as well
    LLM Surgeon, https://arxiv.org/abs/2312.17244: rows, columns and single weights under both moments
    DRONE     Patrick Chen et al., NeurIPS 2021, and SVD-LLM, https://arxiv.org/abs/2403.07378: under inputs alone
    FWSVD     https://arxiv.org/abs/2207.00112: both with only sums of diagonals kept

With W [out, in], x the input of a token and d the gradient of an example's loss at y = W x + b,

    2 dL = T tr(G (W - X) A (W - X)^T),   A = E[x x^T],  G = E[d d^T]           estimate of the loss of X          (M)
    G^1/2 W A^1/2 = U S V^T;   X_k = G^-1/2 U_k S_k V_k^T A^-1/2                the best X of rank k under (M)
    sum over all matrices of the sigma_j^2 that are left out -> min, at one number of parameters                   (R)
    b' = b + (W - X) m,  m = E[x],  A replaced by A - m m^T                     the bias takes over the mean       (C)

Matrices that read the same input (query, key, value; gate, up) are stacked by rows and share one right factor. Heads
and neurons can go instead of components, by their costs under (M): numerics/structures.py.

The loss is the negative log-likelihood of labels drawn from the model itself, so that its gradients do not vanish where
the model fits its training data. The stages are dense -> retrain: 1,024 training examples calibrate, one threshold on
sigma_j^2 per parameter gives all ranks (R), and the factors are trained on labels, the teacher's logits and its hidden
states,

    L = (1 - alpha) L_task + alpha L_logits + alpha_layers sum_l MSE(H_student^l, H_teacher^l) / Var(H_teacher^l)

Other work under the same estimate compresses decoders, and ranks or structures alone. Here ranks, heads, neurons and
blocks are on one scale, factors are stacked, biases take over the mean, and fine-tuned encoders are compressed as well.

Choices where the sources differ or are silent:
    - Both moments are damped, by shares of the means of their diagonals; the report of ``factorize`` says by how much.
    - Hidden states are divided by their own variance, so that one weight serves all models.
    - Matrices without a bias are not centred.
    - For sentence models A and m are means over texts of a text's mean: each counts once (calibration/moments.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from lit_compress.methods.base import Distillation, Ranked
from lit_compress.stages.base import Stage
from lit_compress.stages.compression import CompressedStage
from lit_compress.stages.units import weighted
from lit_compress.stages.weighting import KRONECKER, Weighted, Weighting

# neurons of a feed-forward network under a budget of a speed-up: in OpenVINO, 160 take less time than 157, and 192 no
# more than 176 (benchmarks/second_order/findings.md); on a GPU multiples of 64 (benchmarks/device/findings.md)
FAST, FAST_ON_CUDA = 16, 64


@dataclass(frozen=True)
class KroneckerWeighted(Weighted):
    """How the factorization is weighted, and how the factorized model is trained.

    Args:
        learning_rate: peak learning rate of AdamW; factors of few ranks learn at larger ones than a whole model.
    """

    learning_rate: float = 3e-4
    weighting: Weighting = "kfac"


class SecondOrder(Ranked):
    """Factorize a fine-tuned model under the Kronecker-factored Fisher information, then train the factors."""

    allocation = "global"
    retrain: KroneckerWeighted = KroneckerWeighted()
    matters: ClassVar[dict[str, Any]] = {"allocation": {"retrain.removes": ("components", None)}}
    distillation = Distillation(alpha_layers=5.0, mask_padding=True, relative=True)

    def __post_init__(self) -> None:
        self.rule = rule = self.retrain.rule(self.rank_rule(self.allocation))
        if self.budget is None or self.budget.kind != "speedup":
            return
        if self.retrain.weighting in KRONECKER and self.retrain.removes is None:
            # in most runtimes the fastest
            self.retrain = self.given["retrain"] = replace(self.retrain, removes="structures")
        if self.round_to is None and self.retrain.removal != "components":
            self.rule = replace(rule, round_to=FAST_ON_CUDA if self.budget.runtime == "cuda" else FAST)

    def own_stages(self) -> list[Stage]:
        """Return retrain."""
        return [CompressedStage("retrain", self.retrain, weighted(self.retrain, self.rule))]
