"""The stage that calibrates, removes heads, neurons and sub-layers, factorizes, and trains what is left."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lit_compress.calibration.fisher import Fisher
from lit_compress.models.outline import cut_evenly, cut_uniformly
from lit_compress.models.storage import load_net
from lit_compress.models.surgery import multiply_out
from lit_compress.models.uniform_shape import even_counts
from lit_compress.stages.base import StageContext
from lit_compress.stages.kronecker import KroneckerDecomposer, biased_sites
from lit_compress.stages.low_rank import Decomposer, LowRankRetraining
from lit_compress.stages.rank_rule import RankRule
from lit_compress.stages.units import choose_uniform, choose_units, find_units, least_density, remove_units
from lit_compress.stages.weighting import (
    KRONECKER,
    Weighted,
    fisher_of,
    kronecker_decomposer,
    kronecker_of,
    of_weighting,
    refit,
    weigh,
)
from lit_compress.utils.errors import UserError
from lit_compress.utils.sharding import from_first, send_from_first

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lit_compress.data.datamodule import DataModule
    from lit_compress.tasks.records import Task


def check_removal(settings: Weighted, rule: RankRule, net: PreTrainedModel) -> None:
    """Refuse ranks, a scope and a removal that the weighting, ``net`` or the density does not allow.

    Only shapes are read.

    Raises:
        UserError: of :meth:`RankRule.check`, where matrices are factorized.
        UserError: the table of embeddings cannot be factorized under this weighting or with this removal; sub-layers
            cannot be cut; or, as at least one unit stays, the density cannot be reached.
    """
    if settings.removes != "structures":
        rule.check(net)
    if rule.scope == "all" and settings.weighting not in KRONECKER:
        raise UserError(
            f"model.scope: 'all' needs whole second moments, which weighting '{settings.weighting}' has not; nearest: "
            "blocks"
        )
    if rule.uniform and settings.removes != "structures":
        raise UserError(
            f"model.shape: 'uniform' is for heads and neurons, and retrain.removes '{settings.removes}' makes factors; "
            "nearest: structures"
        )
    if settings.removes == "components":
        return
    if rule.scope == "all":
        raise UserError(f"retrain.removes: '{settings.removes}' counts the blocks' matrices; nearest with scope all: "
                        "components")  # fmt: skip
    if not rule.by_density:
        raise UserError(f"retrain.removes: '{settings.removes}' needs a density; give model.density")
    if rule.uniform:
        even_counts(net, rule.density, rule.round_to)
        return
    try:
        least = least_density(net)
    except UserError as error:  # its sub-layers cannot go whole
        near = "model.shape uniform" if settings.removes == "structures" else "retrain.removes components"
        raise UserError(f"{error}; nearest here: {near}") from error
    if settings.removes == "structures" and rule.density < least:
        raise UserError(
            f"model.density: {rule.density} cannot be reached with retrain.removes structures, which leaves at least "
            f"one head or neuron; the smallest is {least + 5e-4:.3f}"
        )


def remove_structures(
    settings: Weighted, rule: RankRule, net: PreTrainedModel, task: Task, data: DataModule, shared: bool = False
) -> tuple[RankRule, float]:
    """Remove heads, neurons and sub-layers of ``net`` in place, if ``settings`` ask for it.

    Args:
        settings: the weighting, and what is removed.
        rule: has the density.
        net: dense; on the device of the calibration.
        task: the task whose loss is differentiated.
        data: gives the examples.
        shared: True if every process of the default group has batches of its own.

    Returns:
        The rule for what is left, and the estimate of what the removal adds to an example's loss.

    Raises:
        UserError: so many weights cannot be removed, or the moments are not usable.
    """
    if settings.removes == "components":
        return rule, 0.0
    moments, device = kronecker_of(net, task, data, [settings], shared), net.device
    net.to("cpu")  # type: ignore[arg-type]
    whole = from_first(lambda: rule.total(net))  # milliseconds differ between processes
    biased = biased_sites(net) if settings.centred else frozenset()
    damping = (settings.input_damping, settings.gradient_damping)

    def choose() -> tuple[dict[str, Tensor], float]:
        price, gradients = partial(rule.unit_price, net), settings.weighting == "kfac"
        units = find_units(net, moments, biased, damping, price, gradients, rule.round_to, rule.uniform)
        if rule.uniform:
            return choose_uniform(net, units, whole * (1 - rule.density), rule.round_to)
        sigma: dict[str, Tensor] = {}
        if settings.removes == "both":
            sigma = rule.sigmas(net, weigh(settings, net, {}, moments, Path(), rule.stacks(net)).sigma)
        return choose_units(units, whole * (1 - rule.density), sigma, rule.prices(net))

    removed, loss = from_first(choose)
    remove_units(net, moments, removed, biased, settings.input_damping, rule.uniform)
    net.to(device)  # type: ignore[arg-type]
    if settings.removes == "structures":
        return replace(rule, density=1.0), loss
    return replace(rule, density=from_first(lambda: min(1.0, rule.density * whole / rule.total(net)))), loss


def calibration_of(settings: Weighted, data: DataModule, loss: float) -> dict[str, Any] | None:
    """Return what the report says of the calibration for ``inputs`` and ``kfac``; None for other weightings.

    ``estimated_loss`` is the estimate of what the compression adds to an example's loss; None for ``inputs``, which
    measures no loss.
    """
    if settings.weighting not in KRONECKER:
        return None
    gradients = settings.weighting == "kfac"
    return {
        "weighting": settings.weighting,
        "labels": settings.labels_of(data.record) if gradients else None,
        "examples": settings.examples(data.train_size()),
        "centred": settings.centred,
        "damping": {"inputs": settings.input_damping, "gradients": settings.gradient_damping},
        "stacked": settings.stacked,
        "removes": settings.removes,
        "refit": settings.refit,
        "estimated_loss": loss if gradients else None,
    }


def add_estimate(calibration: dict[str, Any] | None, decomposer: Decomposer, ranks: dict[str, int]) -> None:
    """Add what factors of these ranks add to an example's loss to ``estimated_loss`` of :func:`calibration_of`."""
    if calibration and isinstance(decomposer, KroneckerDecomposer) and decomposer.gradients:
        calibration["estimated_loss"] += decomposer.estimate(ranks)


class WeightedRetraining(LowRankRetraining):
    """Estimate what the weighting needs, factorize, fine-tune again."""

    settings: Weighted
    uniform = True

    def check(self, net: PreTrainedModel) -> None:
        """Also refuse weightings that would fail only after the dense stage."""
        settings = self.settings
        if settings.weighting == "importance":
            raise UserError(
                "retrain.weighting: importance needs a pruning stage's net, give it to factorize; nearest: fisher"
            )
        if self.ranks.allocation == "global" and settings.weighting == "fisher" and settings.axis == "element":
            raise UserError("retrain.axis: 'element' has no singular values for allocation global; nearest: both")
        check_removal(settings, self.ranks, net)

    def outline(self, net: PreTrainedModel) -> PreTrainedModel:
        """Return ``net`` with factors, or with fewer heads and neurons."""
        if self.settings.removes == "structures" and not self.ranks.keeps_all:
            if self.ranks.uniform:
                return cut_uniformly(net, self.ranks.density, self.ranks.round_to)
            return cut_evenly(net, self.ranks.density, whole=True)
        return super().outline(net)

    def narrow(self, method: StageContext, net: PreTrainedModel) -> RankRule:
        """Remove heads, neurons and sub-layers, if the settings ask for it."""
        trainer = method.trainer
        net.to(trainer.strategy.root_device)
        shared = trainer.world_size > 1
        rule, loss = remove_structures(self.settings, self.ranks, net, method.task, trainer.datamodule, shared)
        net.to("cpu")
        if calibration := calibration_of(self.settings, trainer.datamodule, loss):
            self.notes = {"calibration": calibration}
        return rule

    def factorized(self, decomposer: Decomposer, ranks: dict[str, int]) -> None:
        """Add the estimate of what the factors cost to the record of the calibration."""
        add_estimate(self.notes.get("calibration"), decomposer, ranks)

    def check_data(self, examples: int) -> None:
        """Refuse a Fisher pass or a calibration over more examples than there are."""
        settings = self.settings
        name = "calibration_examples" if settings.weighting in KRONECKER else "fisher_examples"
        asked = getattr(settings, name)
        if asked is not None and asked > examples:
            raise UserError(f"retrain.{name}: {asked} is more than there are; the largest is {examples}")

    def decomposer(self, method: StageContext, net: PreTrainedModel, previous: Path | None) -> Decomposer:
        """Return the decomposer with the stage's weighting, after a pass over training data where it needs one."""
        assert previous is not None
        settings, trainer = self.settings, method.trainer
        if settings.weighting in KRONECKER:
            return kronecker_decomposer(method, net, settings, self.ranks.stacks(net), self.ranks.table(net))
        fisher: dict[str, Fisher] = {}
        if settings.weighting == "fisher":
            net.to(trainer.strategy.root_device)
            batches = of_weighting(settings, trainer.datamodule)
            fisher = fisher_of(net, method.task, batches, [settings], trainer.world_size > 1)
            net.to("cpu")
        return weigh(settings, net, fisher, {}, previous)

    def refine(self, method: StageContext, net: PreTrainedModel, previous: Path | None) -> None:
        """Refit the factors block by block, if the settings ask for it."""
        settings, trainer = self.settings, method.trainer
        if not settings.refit or settings.weighting not in KRONECKER:
            return
        assert previous is not None
        device, shared = trainer.strategy.root_device, trainer.world_size > 1
        if shared:
            send_from_first(net, device)
        dense = multiply_out(load_net(previous)).to(device)  # type: ignore[arg-type]
        refit(settings, dense, net.to(device), method.task, trainer.datamodule, shared)  # type: ignore[arg-type]
        net.to("cpu")
