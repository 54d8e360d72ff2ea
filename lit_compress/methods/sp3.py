"""SP3: structured pruning of directions, found by PCA, that gates choose.

Yuxuan Hu, Jing Zhang, Zhe Zhao, Chen Zhao, Xiaodong Chen, Cuiping Li, Hong Chen, "SP3: Enhancing Structured Pruning via
PCA Projection", Findings of ACL 2024, https://arxiv.org/abs/2308.16475; program: https://github.com/hyx1999/SP3.

    Eqs. 6-9    LN(x) = P_out norm(P_in x) + beta, P_in = U^T R, P_out = diag(gamma) U  projections.py
    Eqs. 10-12  P_V, P_O; P_Q, P_K of every head                                      projections.py, calibration.py
    Eqs. 13-14  z on directions of hidden states, Q/K, V/O, FFN; on heads and layers  layers/projected.py, gates.py
    Eqs. 4, 5   min over weights and z, max over lambda: L + l1 (s - t) + l2 (s - t)^2  methods/gated_stage.py
    Eq. 30      s, the expected density, with W_R                                     projected.py
    Eqs. 15-18  everything multiplied into smaller matrices; W_R on the residual path  condense.py, layers/narrow.py
    section 3.5 norms before the blocks: groups of blocks share a basis of the stream  streams.py, layers/stream.py
    stages      teacher only; gates of dimensions, target falls; of heads and layers  methods/projected_stage.py

The loss is that of the authors' program: 0.3 KL(T = 2) + 0.7 sum_i MSE(A h_i, teacher_m(i)), without labels.

Deviations, and where the paper is silent (`official` gives the program's way where there are two):
    - Printing errors of the paper: see projections.py and projected.py (norm, V_Z, P_O, superscripts, W_R's sum).
    - The norm is exact, a root mean square over the original width; the program's LayerNorm in the projected space is
      not the original net (`official`), which is why it leaves out three sites.
    - Gates are hard concrete, as in the program (the paper only says real numbers); Q and K share one, V and O do, and
      all heads of a layer (Appendix C). Kept ones have their soft value, which is multiplied in.
    - Projections of heads are trained as one matrix, in which heads mix, as in the program; the paper writes one per
      head (`prune.head_projections: block`).
    - Original matrices and embeddings are frozen, as in the program: projections, norms and the head are trained.
    - The density is exact: after the heads and layers that the gates keep, one threshold over all dimensions meets the
      budget in every validation; the program takes any epoch within 0.02 (`official`).
    - Calibration draws 4,096 tokens among all real ones (the paper), not 8 of every example; a ridge replaces the
      program's bare inverse, also in `official`; the density at the start is computed, not 1.16.
    - Regression has the MSE of the logits in place of the program's KL of one logit, which is 0.
    - All hidden states are matched; the program's sum leaves out the last one (`official`).
    - OPT and Llama have no public program. There the bases are in the matrices, which are trained; hidden states are
      compared before the last norm, without their mean where norms take it away. A density counts the blocks' matrices
      and those between bases, not the embeddings.
    - ALBERT is not in the paper. Its blocks read the embeddings first, then what they wrote: hidden states keep their
      basis, without gates; heads are calibrated over all uses of a block, whose gates and weights are one and count
      once. So it is where embeddings have another width (ELECTRA-small, OPT-350m) or a convolution reads the stream.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from lit_compress.errors import UserError
from lit_compress.methods.base import Method
from lit_compress.methods.distillation import LaterDistillation
from lit_compress.methods.projected_stage import ProjectedPruning, ProjectedStage
from lit_compress.methods.stage import Stage, Training

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}


class SP3(Method):
    """Structured pruning of the principal directions of hidden states, heads and neurons.

    Args:
        task: name of the task; the data is read for the same one.
        backbone: folder or hub name of the pre-trained model, or ``embedded`` for a small one built here.
        density: remaining / original parameters of the transformer blocks' matrices, residual ones counted too, in
            (0, 1].
        params: the same as a number of weights, e.g. 5M, instead of ``density``.
        fidelity: ``paper``; ``official`` sets norm, skipped sites, hidden states and budget as the authors' program.
        teacher: folder of a net already fine-tuned on the task, e.g. ``runs/x/dense/net``; it takes the place
            of the dense stage.
        dense: fine-tuning of the backbone.
        prune: calibration, gates, and their training.
        distillation: weights of labels, the teacher's logits, and its hidden states.
    """

    def __init__(
        self,
        task: str = "sst2",
        backbone: str = "bert-base-uncased",
        density: float | None = None,
        params: str | None = None,
        fidelity: Literal["paper", "official"] = "paper",
        teacher: str | None = None,
        dense: Training = Training(),
        prune: ProjectedPruning = ProjectedPruning(),
        distillation: LaterDistillation = LaterDistillation(),
    ) -> None:
        if density is not None and params is not None:
            raise UserError(
                f"model.density {density}, model.params {params}: only one can decide the size, set the other to null"
            )
        self.params = None if params is None else parse_count(params)
        if density is None:
            density = 0.06 if params is None else 1.0  # the stage knows the net, and so the density of ``params``
        super().__init__(task, backbone, density, teacher, distillation)
        if fidelity == "official":
            prune = replace(
                prune, norm="padded_layernorm", skip_sites=3, match_last=False, exact_target=False, tolerance=0.02
            )
        self.dense, self.prune = dense, prune

    def stages(self) -> list[Stage]:
        """Return dense (without a teacher), prune."""
        return [*self.first(self.dense), ProjectedStage(self.prune, self.density, self.params)]


def parse_count(text: str) -> int:
    """Return a number of weights: 5M, 2.5M, 800K or 5000000.

    Raises:
        UserError: it is none.
    """
    unit = text[-1:].upper() if text[-1:].isalpha() else ""
    try:
        count = round(float(text[: len(text) - len(unit)]) * _UNITS[unit])
    except (ValueError, KeyError):
        count = 0
    if count < 1:
        raise UserError(f"model.params: '{text}' is no number of parameters; e.g. 5M, 800K, 5000000")
    return count
