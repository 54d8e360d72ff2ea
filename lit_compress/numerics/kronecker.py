"""Low-rank approximation under the Kronecker-factored Fisher information: the mathematics of one matrix, or of a stack.

The second-order estimate of the loss that replacing W [out, in] by X adds to one example of T tokens is, with x the
input of a token and d the gradient of the example's loss at that token's output y = W x (second-order compression,
equation (M)),

    2 dL / T = tr(G (W - X) A (W - X)^T),    A = E[x x^T] [in, in],    G = E[d d^T] [out, out]                  (M)

The factorization F ~ T (G kron A) of the Fisher information is from K-FAC (Martens & Grosse 2015, arXiv 1503.05671). It
ignores that x and d of the same token depend on each other, terms between two tokens, and terms between two matrices.
The first and the last make the estimate too small; those between tokens hardly change it. G = I and A diagonal is FWSVD
(arXiv 2207.00112), G = I and A whole is DRONE (Chen et al., NeurIPS 2021) and SVD-LLM (arXiv 2403.07378), both whole is
GFWSVD (arXiv 2505.17974). With the Cholesky factors A = L L^T, G = K K^T and K^T W L = U S V^T, the best X of rank k is

    left = W L V_k  [out, k],    right = V_k^T L^-1  [k, in]

and leaving out component j adds sigma_j^2 to (M). Only L is inverted. Everything is float64 on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lit_compress.numerics.decompose import Factorization, all_finite, gram_eigenvectors
from lit_compress.utils.errors import UserError

DAMPING = {"inputs": 1e-3, "gradients": 1e-2}  # of the means of the diagonals of A (or C) and G


@torch.no_grad()
def damped_root(moment: Tensor, name: str = "weight", what: str = "inputs") -> Tensor:
    """Return the Cholesky factor L of ``moment + DAMPING[what] * mean(diagonal) I``, lower triangular float64 [n, n].

    Args:
        moment: second moment of ``what``, inputs or gradients: [n, n] symmetric, finite. A float64 one on the CPU
            becomes its factor, which takes no memory of its own.

    Raises:
        UserError: it is all zero, or not positive definite after the damping.
    """
    wide = moment.detach().to("cpu", torch.float64)
    mean = float(wide.diagonal().mean())
    if mean <= 0:
        raise UserError(f"{name}: all its {what} are zero, no approximation of it is better than another; leave it out")
    wide.diagonal().add_(DAMPING[what] * mean)
    factor, failed = wide.mT, torch.empty((), dtype=torch.int32)  # LAPACK's order: it is symmetric
    torch.linalg.cholesky_ex(factor, out=(factor, failed))
    if failed:
        raise UserError(
            f"{name}: the second moments of its {what} are singular with damping {DAMPING[what]}; give more examples"
        )
    return factor


def centred(moment: Tensor, mean: Tensor | None) -> Tensor:
    """Return the covariance C = A - m m^T of inputs with mean m [in]; A [in, in] itself without a mean."""
    if mean is None:
        return moment
    m = mean.double()
    return moment.double().addr_(m, m, alpha=-1)


@torch.no_grad()
def kronecker_svd(
    weight: Tensor,
    inputs: Tensor,
    gradients: Iterable[Tensor] | None = None,
    *,
    sizes: Sequence[int] | None = None,
    mean: Tensor | None = None,
    name: str = "weight",
    components: int | None = None,
) -> Factorization:
    """Decompose W, or several matrices that read the same input, under (M).

    Several matrices are stacked by rows, [W_1; W_2; ...], and share the right factor; G is then block-diagonal. The
    singular vectors come from the Gram matrix of K^T W L, which is four times as fast as an SVD and exact to
    1e-8 sigma_1: smaller components are lost in rounding, the product of all components is W in any case. Column j of
    left is as long as row j of right.

    Args:
        weight: [out, in].
        inputs: A [in, in].
        gradients: G [out, out] of each matrix; None for identities. They are asked for one after the other, so that a
            generator needs the memory of one. Float64 moments on the CPU are overwritten.
        sizes: rows of each of several matrices that are stacked in ``weight``; None: it is one.
        mean: m [in], the mean of the inputs: decompose under C = A - m m^T, so that a constant part of the inputs,
            which the bias can carry, needs no rank.
        components: how many are kept; default: all.

    Raises:
        UserError: the weight holds inf or NaN, or a moment is not usable; see :func:`damped_root`.
    """
    sizes = tuple(sizes or (len(weight),))
    stack = weight.detach().to("cpu")
    if not all_finite(stack):
        raise UserError(f"{name}: holds inf or NaN and cannot be factorized; valid: finite weights")
    root = damped_root(centred(inputs, mean), name)
    basis, sigma = _gram_basis(stack, root, gradients, sizes, name, components)
    columns, right = root @ basis, torch.linalg.solve_triangular(root, basis.T, upper=False, left=False)
    del basis, root
    left = torch.empty(len(stack), columns.shape[1], dtype=torch.float64)
    for rows, there in zip(stack.split(sizes), left.split(sizes), strict=True):
        torch.mm(rows.double(), columns, out=there)
    a, b = torch.linalg.vector_norm(left, dim=0), torch.linalg.vector_norm(right, dim=1)
    scale = torch.where((a > 0) & (b > 0), (b / a).sqrt(), 1.0)  # half of a component's length to either side
    left *= scale
    right /= scale[:, None]
    return Factorization(sigma, left, right, weight.dtype, weight.device, name, mean)


def _gram_basis(
    stack: Tensor, inner: Tensor, gradients: Iterable[Tensor] | None, sizes: Sequence[int], name: str,
    components: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the right singular vectors of K^T W L as columns, and its singular values.

    Every tensor as large as a wide stack counts. Of a tall one only the Gram matrix is summed, part by part.
    """
    tall, parts = stack.shape[0] >= stack.shape[1], []
    gram = torch.zeros(stack.shape[1] if tall else 0, stack.shape[1] if tall else 0, dtype=torch.float64)
    moments = None if gradients is None else iter(gradients)  # zip would keep one while it asks for the next
    for rows in stack.split(list(sizes)):
        part = (rows.double() @ inner).T  # [in, rows]
        if moments is not None:
            part = part @ damped_root(next(moments), name, "gradients")
        if tall:
            gram.addmm_(part, part.T)
        else:
            parts.append(part)
        del part
    if tall:
        return gram_eigenvectors(gram, components or len(gram))
    whole = parts.pop() if len(parts) == 1 else torch.cat(parts, 1)
    basis, sigma = gram_eigenvectors(whole.T @ whole, components or whole.shape[1])
    vectors = whole @ basis  # times sigma; QR keeps their order and makes them orthonormal
    del whole
    return torch.linalg.qr(vectors).Q, sigma


def change_of_bias(weight: Tensor, approx: Tensor, mean: Tensor) -> Tensor:
    """Return (W - X) m [out], which keeps the mean of the outputs, in the weight's dtype."""
    return ((weight.cpu().double() - approx.cpu().double()) @ mean.cpu()).to(weight)
