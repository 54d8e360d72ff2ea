"""The stage that calibrates, removes heads, neurons and sub-layers, factorizes, and trains the rest."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_compress.models.uniform_shape import even_counts
from lit_compress.stages.compression import Compression
from lit_compress.stages.low_rank import LowRankRetraining
from lit_compress.stages.rank_rule import RankRule
from lit_compress.stages.unit_removal import UnitRemoval
from lit_compress.stages.units import least_density
from lit_compress.stages.weighting import KRONECKER, Weighted, WeightedFactors, calibration_batches, seed_of
from lit_compress.utils.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from lit_compress.data.batching import ResumableLoader
    from lit_compress.data.datamodule import DataModule
    from lit_compress.tasks.base import TaskType


def check_removal(settings: Weighted, rule: RankRule, net: PreTrainedModel) -> None:
    """Refuse ranks, a scope and a removal that the weighting, ``net`` or the density does not allow.

    Only shapes are read.

    Raises:
        UserError: of :meth:`RankRule.check`, where matrices are factorized.
        UserError: the table of embeddings cannot be factorized under this weighting or with this removal; sub-layers
            cannot be cut; or, as at least one unit stays, the density cannot be reached.
    """
    if settings.removal == "components":
        rule.check(net)
    if rule.scope == "all" and settings.weighting not in KRONECKER:
        raise UserError(
            f"model.scope: 'all' needs whole second moments, which weighting '{settings.weighting}' has not; nearest: "
            "blocks"
        )
    if settings.removal == "components":
        if rule.uniform:
            raise UserError(
                "model.shape: 'uniform' is for heads and neurons, and retrain.removes 'components' makes factors; "
                "nearest: structures"
            )
        return
    if rule.scope == "all":
        raise UserError("retrain.removes: 'structures' counts the blocks' matrices; nearest with scope all: components")
    if not rule.by_density:
        raise UserError("retrain.removes: 'structures' needs a density; give model.density")
    if rule.uniform:
        even_counts(net, rule.density, rule.round_to)
        return
    if rule.density < (least := least_density(net)):
        raise UserError(
            f"model.density: {rule.density} cannot be reached with retrain.removes structures, which leaves at least "
            f"one head or neuron; the smallest is {least + 5e-4:.3f}"
        )


def calibration_of(settings: Weighted, data: DataModule, loss: float) -> dict[str, Any] | None:
    """Return the report's entry on the calibration for ``inputs`` and ``kfac``; None for other weightings.

    ``estimated_loss`` estimates the compression's addition to an example's loss; None for ``inputs``, which measures no
    loss.
    """
    if settings.weighting not in KRONECKER:
        return None
    gradients = settings.weighting == "kfac"
    return {
        "weighting": settings.weighting,
        "labels": settings.labels_of(data.record) if gradients else None,
        "examples": settings.examples(data.train_size()),
        "removes": settings.removal,
        "estimated_loss": loss if gradients else None,
    }


class WeightedRetraining(LowRankRetraining):
    """Estimate the weighting, factorize, fine-tune again."""

    settings: Weighted
    uniform = True

    def check(self, net: PreTrainedModel) -> None:
        """Also refuse weightings that would fail only after the dense stage."""
        settings = self.settings
        if settings.weighting == "importance":
            raise UserError(
                "retrain.weighting: importance needs a pruning stage's model, give it to factorize; nearest: fisher"
            )
        self.check_shapes(net)

    def check_shapes(self, net: PreTrainedModel) -> None:
        """Check as :func:`check_removal`."""
        check_removal(self.settings, self.rule, net)

    @property
    def moments(self) -> str | None:
        """The weighting, if it takes second moments."""
        return self.settings.weighting if self.settings.weighting in KRONECKER else None

    @property
    def reads_examples(self) -> bool:
        """Whether the weighting needs statistics."""
        return super().reads_examples or self.settings.weighting == "fisher"

    def compression(self, previous: Path | None) -> Compression:
        """Return the factorization, or the removal of heads and neurons."""
        folder = previous or Path()
        if self.settings.removal == "components":
            return WeightedFactors(self.settings, self.rule, folder)
        return UnitRemoval(self.settings, self.rule)

    def reads_labels(self, kind: TaskType) -> bool:
        """Return whether the weighting needs the labels of the data."""
        return self.settings.reads_labels(kind)

    def record(self, data: DataModule, loss: float) -> dict[str, Any] | None:
        """Return the entry of :func:`calibration_of`."""
        return calibration_of(self.settings, data, loss)

    def check_data(self, examples: int) -> None:
        """Refuse a Fisher pass or a calibration over more examples than there are."""
        settings = self.settings
        name = "calibration_examples" if settings.weighting in KRONECKER else "fisher_examples"
        asked = getattr(settings, name)
        if asked is not None and asked > examples:
            raise UserError(f"retrain.{name}: {asked} is more than there are; the largest is {examples}")

    def texts(self, data: DataModule) -> Iterable[dict[str, Tensor]]:
        """Return the batches of the calibration examples."""
        return calibration_batches(self.settings, data)

    def other_texts(self, data: DataModule, rows: int) -> ResumableLoader:
        """Return the batches of training examples that do not calibrate."""
        return data.rest_dataloader(self.settings.examples(data.train_size()), rows, seed_of(self.settings, data))
