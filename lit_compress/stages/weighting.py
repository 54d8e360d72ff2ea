"""The weightings of a compression's error: settings, and statistics on examples.

Weightings are ``none`` (plain SVD), ``fisher`` (diagonal Fisher information, FWSVD), ``inputs`` (second moments of the
inputs: DRONE, SVD-LLM) and ``kfac`` (Kronecker-factored Fisher information).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from lit_compress.calibration.gradients import DiagonalFisher
from lit_compress.calibration.moments import Moments
from lit_compress.data.datamodule import DataModule
from lit_compress.numerics.sampled_labels import Labels
from lit_compress.stages.base import Training
from lit_compress.stages.compression import EXAMPLES, Calibration
from lit_compress.stages.rank_rule import RankRule
from lit_compress.tasks import task_type
from lit_compress.tasks.records import Task
from lit_compress.utils.errors import UserError, require

Removes = Literal["structures", "components"]
Weighting = Literal["none", "fisher", "inputs", "kfac"]
KRONECKER = ("inputs", "kfac")  # weightings by whole moments


@dataclass(frozen=True)
class Weighted(Training):
    """How the factorization is weighted, and how the factorized model is fine-tuned.

    Args:
        weighting: ``fisher`` = Fisher information; ``none`` = plain SVD; ``inputs`` = second moments of the inputs;
            ``kfac`` = Kronecker-factored Fisher information, moments of inputs and of gradients.
        fisher_examples: number of training examples for the Fisher information; None = all.
        calibration_examples: number of training examples for ``inputs`` and ``kfac``; None = 1,024, or all if there
            are fewer.
        removes: ``inputs`` and ``kfac``: ``components`` of matrices (low rank); or ``structures``, heads, neurons and
            sub-layers without any, which leaves ordinary narrower matrices. None = structures for SecondOrder with a
            budget of a speed-up, else components.
    """

    weighting: Weighting = "fisher"
    fisher_examples: int | None = None
    calibration_examples: int | None = None
    removes: Removes | None = None
    matters: ClassVar[dict[str, Any]] = {
        "fisher_examples": {"weighting": ("fisher",)},
        "calibration_examples": {"weighting": KRONECKER},
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "retrain.fisher_examples", low=1)
        require(self, "retrain.calibration_examples", low=1)
        if self.removal != "components" and self.weighting not in KRONECKER:
            raise UserError(
                f"retrain.removes: '{self.removes}' needs whole second moments, which weighting '{self.weighting}' has "
                "not; nearest: weighting kfac"
            )

    @property
    def removal(self) -> Removes:
        """The kind of removal."""
        return self.removes or "components"

    def rule(self, ranks: RankRule) -> RankRule:
        """Return the rule with stacks, if this weighting has them: matrices that read the same input."""
        return replace(ranks, stacked=self.weighting in KRONECKER)

    def drawn(self, data: DataModule) -> int:
        """Return the number of the calibration examples."""
        return self.calibration_examples or min(EXAMPLES, data.train_size())


def labels_of(task: Task) -> Labels:
    """Return the labels of K-FAC on a task: exact for one distribution of two classes, where they cost no more."""
    kind = task_type(task)
    return "exact" if kind.loss == "classification" and kind.one_label and task.num_labels == 2 else "drawn"


def calibration_for(settings: Weighted, data: DataModule, sites: Sequence[str] | None = None) -> Calibration | None:
    """Return the statistic of a weighting, of some ``sites``, by default all, and its examples; None without one.

    Raises:
        UserError: there are too few examples.
    """
    if settings.weighting == "fisher":
        batches = data.calibration_dataloader(settings.fisher_examples, option="retrain.fisher_examples")
        return Calibration(DiagonalFisher(sites=sites), batches)
    if settings.weighting not in KRONECKER:
        return None
    labels = labels_of(data.record) if settings.weighting == "kfac" else None
    batches = data.calibration_dataloader(settings.drawn(data), option="retrain.calibration_examples")
    return Calibration(Moments(labels, data.seed, sites, by_text=task_type(data.record).pools), batches)
