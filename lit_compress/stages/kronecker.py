"""Factorization of matrices under the Kronecker-factored Fisher information, or under the moments of their inputs."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lit_compress.calibration.kronecker import KroneckerFactors
from lit_compress.models.sites import find_sites
from lit_compress.numerics.kronecker import GRADIENT_DAMPING, INPUT_DAMPING, KroneckerSVD, kronecker_svd, row_costs
from lit_compress.utils.progress import note

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def biased_sites(net: PreTrainedModel, stacks: Mapping[str, tuple[str, ...]] | None = None) -> frozenset[str]:
    """Return the sites with a bias, which can carry the mean of their inputs; a note says if others have none.

    Of a stack all have one, or none counts.
    """
    modules: dict[str, Any] = {site.name: net.get_submodule(site.name) for site in find_sites(net)}
    biased = frozenset(name for name, module in modules.items() if module.bias is not None)
    for names in (stacks or {}).values():
        biased = biased if biased.issuperset(names) else biased.difference(names)
    if len(biased) < len(modules):
        note(f"centred: {len(modules) - len(biased)} of {len(modules)} matrices have no bias and are not centred")
    return biased


@dataclass(frozen=True)
class KroneckerDecomposer:
    """Factorizes the matrices of one model by their Kronecker factors, equation (M) of numerics/kronecker.py.

    Attributes:
        moments: Kronecker factors by site.
        gradients: True to weight by the moments of inputs and gradients (K-FAC), False by the inputs' only.
        centred: sites whose bias takes over the mean of the inputs.
        damping: of both moments, as shares of the means of their diagonals.
        stacks: first site -> names of all sites that get one right factor. A weight that comes with the first name is
            then the stack's: the rows of all its matrices.
        release: every matrix is decomposed once; the sums of its moments are released then.
    """

    moments: MutableMapping[str, KroneckerFactors]
    gradients: bool = True
    centred: frozenset[str] = frozenset()
    damping: tuple[float, float] = (INPUT_DAMPING, GRADIENT_DAMPING)
    stacks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    release: bool = False

    def factors(self, name: str, weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """Return left [out, rank] and right [rank, in] of the matrix of site ``name``."""
        return self.svd(name, weight, rank).factors(rank)

    def svd(self, name: str, weight: Tensor, components: int | None = None) -> KroneckerSVD:
        """Return the decomposition of the matrix of site ``name`` with all its ranks, or as many as ``components``.

        Raises:
            UserError: a moment is singular after the damping.
        """
        names = self.stacks.get(name, (name,))
        svd = kronecker_svd(
            weight, self.moments[name].inputs(), map(self._gradients, names) if self.gradients else None,
            sizes=[self.moments[site].outputs for site in names] if self.gradients else None,
            mean=self.mean(name), damping=self.damping, name=name, components=components, overwrite=True,
        )  # fmt: skip
        self._release(names)
        return svd

    def _gradients(self, name: str) -> Tensor:
        whole = self.moments[name].gradients()
        self._release((name,))
        return whole

    def _release(self, names: tuple[str, ...]) -> None:
        for site in names if self.release else ():
            self.moments[site] = self.moments[site].released()

    def sigma(self, name: str, weight: Tensor) -> Tensor:
        """Return the singular values of the weighted matrix, falling, float64."""
        return self.svd(name, weight, 1).sigma

    def row_costs(self, name: str, matrix: Tensor) -> Tensor:
        """Return the cost of leaving out each row of ``matrix``, a part of site ``name``'s; float64 [out]."""
        moment = self.moments[name]
        return row_costs(matrix, moment.inputs(), moment.gradients(), self.mean(name))

    def mean(self, name: str) -> Tensor | None:
        """Return the mean [in] of the inputs that the bias takes over; None if it stays."""
        return self.moments[name].mean if name in self.centred else None
