"""SP3: structured pruning, by gates, of directions that PCA found.

Yuxuan Hu, Jing Zhang, Zhe Zhao, Chen Zhao, Xiaodong Chen, Cuiping Li, Hong Chen, "SP3: Enhancing Structured Pruning via
PCA Projection", Findings of ACL 2024, https://arxiv.org/abs/2308.16475; program: https://github.com/hyx1999/SP3.

    Eqs. 6-9    LN(x) = P_out norm(P_in x) + beta, P_in = U^T R, P_out = diag(gamma) U  numerics/pca.py
    Eqs. 10-12  P_V, P_O; P_Q, P_K of every head                                      numerics/pca.py, stage.py
    Eqs. 13-14  z on directions of hidden states, Q/K, V/O, FFN; on heads and layers  layers/training/projected.py
    Eqs. 4, 5   min over weights and z, max over lambda: L + l1 (s - t) + l2 (s - t)^2  stages/gated.py
    Eq. 30      s, the expected density, with W_R                                     models/projected/gates.py
    Eqs. 15-18  everything multiplied into smaller matrices; W_R on the residual path  models/projected/
    section 3.5 pre-norm: groups of sub-layers share a basis of the residual stream   models/residual_stream.py
    phases      teacher only; then gates of dimensions, target falls; then of heads and layers  stage.py

The loss is from the authors' program: 0.3 KL(T = 2) + 0.7 sum_i MSE(A h_i, teacher_m(i)), without labels.

Deviations, and where the paper is silent:
    - Printing errors of the paper: see numerics/pca.py and models/projected/ (norm, V_Z, P_O, superscripts, W_R's
      sum).
    - The norm is exact, a root mean square over the original width; the program's LayerNorm in the projected space is
      not the original model, which is why it leaves out three sites.
    - Gates are hard concrete, as in the program (the paper only says real numbers); Q and K share one, V and O do, and
      all heads of a layer (Appendix C). Open gates keep their soft value, which is folded into the weights.
    - Projections of heads are trained as one matrix, in which heads mix, as in the program; the paper writes one per
      head.
    - Original matrices and embeddings are frozen, as in the program: projections, norms and the head are trained.
    - The density is exact: the gates decide on heads and layers, then one threshold over all dimensions meets the
      budget in every validation; the program accepts any epoch within 0.02.
    - Calibration draws 4,096 tokens among all real ones (the paper), not 8 of every example; a ridge replaces the
      program's bare inverse. The density at the start is computed, not 1.16.
    - Regression has the MSE of the logits in place of the program's KL of one logit, which is 0.
    - All hidden states are matched; the program's sum leaves out the last one.
    - OPT, Llama and Qwen3 have no public program. There the bases are in the matrices, which are trained; hidden states
      are compared before the last norm, without their mean where norms take it away. A density counts the blocks'
      matrices and those between bases, not the embeddings.
    - DeBERTa is not in the paper. Its relative positions go through queries and keys: every attention stores its own
      projection of them, which counts.
    - ALBERT is not in the paper. Its blocks read the embeddings first, then their own output: hidden states keep their
      basis, without gates; heads are calibrated over all uses of a block, whose gates and weights are one and count
      once. So it is where embeddings have another width (ELECTRA-small, OPT-350m), a convolution reads the stream, or
      the first attention has no norm (ModernBERT).
"""

from __future__ import annotations

from dataclasses import dataclass

from lit_compress.methods.base import Method
from lit_compress.methods.sp3.stage import ProjectedPruning, ProjectedStage
from lit_compress.numerics.losses import LossKind
from lit_compress.stages.base import Stage
from lit_compress.stages.distillation import MappedDistillation


@dataclass(frozen=True)
class SP3Distillation(MappedDistillation):
    """The distillation loss of SP3's program (Hu et al. 2024):

        L = alpha_labels L_task + alpha KL + alpha_layers sum_i MSE(A H_student^i, H_teacher^m(i))

    m(i) is the nearest teacher hidden state at or above layer i; A is learned. KL has no factor temperature^2.

    Args:
        alpha: weight of the teacher's logits.
        temperature: temperature of both distributions.
    """

    alpha: float = 0.3
    alpha_layers: float = 0.7
    mask_padding: bool = True

    def logits_weight(self, kind: LossKind) -> float:
        """Return the factor on the logits' term, which takes out the square of the temperature."""
        return self.alpha / (self.temperature**2 if kind == "classification" else 1)


class SP3(Method):
    """Prune principal directions of hidden states, queries, keys and values; neurons, heads and layers; by gates.

    Args:
        density: remaining / original parameters of the transformer blocks' matrices, in (0, 1]; new matrices on the
            residual path (W_R) count as remaining.
        prune: calibration, gates, and their training.
        distillation: weights of the labels, the teacher's logits and its hidden states.
    """

    usual_density = 0.06
    prune: ProjectedPruning = ProjectedPruning()
    distillation: SP3Distillation = SP3Distillation()

    def own_stages(self) -> list[Stage]:
        """Return prune."""
        stage = ProjectedStage(self.prune, self.density)
        stage.round_to = self.round_to or 1
        return [stage]
