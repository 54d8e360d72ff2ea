"""Sequential refit: the best left factor for inputs that compressed blocks below have changed.

Where the dense model's matrix W reads x, the compressed model's reads x'. With A' = E[x' x'^T] and B = E[x x'^T], the X
that minimises E ||G^1/2 (W x - X x')||^2 among all X = left R of a given right factor R [k, in] has, whatever G is
(second-order compression, section 6; for x' = x and G = I the update of SVD-LLM, arXiv 2403.07378),

    left' = W B R^T (R A' R^T)^-1                                                                               (R)

Damping draws it to the left factor it starts from, not to zero: left' = left + (W B R^T - left P) (P + added I)^-1 with
P = R A' R^T. With centred moments, A' - m' m'^T and B - m m'^T, the bias is ``kronecker.corrected_bias``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lit_compress.numerics.kronecker import damped_root

REFIT_DAMPING = 1e-4  # of the mean of P's diagonal


@torch.no_grad()
def refit_left(
    weight: Tensor,
    left: Tensor,
    right: Tensor,
    moment: Tensor,
    cross: Tensor,
    damping: float = REFIT_DAMPING,
    name: str = "weight",
) -> Tensor:
    """Return the left factor [out, k] that fits the dense matrix best on the inputs as they are now, equation (R).

    Args:
        weight: W [out, in].
        left: [out, k], the target of the damping.
        right: R [k, in].
        moment: A' = E[x' x'^T] [in, in].
        cross: B = E[x x'^T] [in, in], x of the dense model.
        damping: share of the mean of the diagonal of R A' R^T.
        name: of the matrix, for messages.

    Raises:
        UserError: the moments are not finite, or singular after the damping.
    """
    wide, r = weight.cpu().double(), right.cpu().double()
    a, b = moment.cpu().double(), cross.cpu().double()
    return _solved(wide @ (b @ r.T), r @ a @ r.T, left, damping, name)


def _solved(target: Tensor, gram: Tensor, start: Tensor, damping: float, name: str) -> Tensor:
    """Return start + (target - start @ gram) (gram + added I)^-1, in the dtype and on the device of ``start``."""
    root = damped_root((gram + gram.T) / 2, damping, name, "inputs")
    assert root.factor is not None
    wide = start.cpu().double()
    step = torch.cholesky_solve((target - wide @ gram).T, root.factor).T
    return (wide + step).to(start.device, start.dtype).contiguous()
