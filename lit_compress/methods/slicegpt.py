"""SliceGPT: hidden states keep their first principal directions, the same number of them everywhere; no training.

Saleh Ashkboos, Maximilian L. Croci, Marcelo Gennari do Nascimento, Torsten Hoefler, James Hensman, "SliceGPT: Compress
Large Language Models by Deleting Rows and Columns", ICLR 2024, https://arxiv.org/abs/2401.15024; program:
https://github.com/microsoft/TransformerCompression.

    invariance    rms(Q^T x) = Q^T rms(x) for every orthogonal Q, so the stream may have any basis: what writes to it
                  is multiplied by Q^T, what reads it by Q; LayerNorm first becomes R, gamma and beta in the weights
                  around it and an rms norm (section 3.1, 3.2)                          models/projected/insert.py
    axes          C_l = sum over tokens of x x^T = Q_l diag(e) Q_l^T, e falling, x what reaches norm l behind the
                  slices before it; float64, without padding (section 3.3)            calibration/sliced_stream.py
    slices        the first k columns of every Q_l; on the residual path Q_l[:, :k]^T Q_l+1[:, :k], a k x k matrix;
                  the norm divides by the original width (section 3.4)                    models/projected/fold.py

The stages are dense -> prune; ``prune.epochs`` 0, the default, is the paper's. More train what is left, as its recovery
fine-tuning does.

Deviations, and where paper and program differ:
    - The paper takes the second moments of the norms' outputs, the program of their inputs. Here: inputs.
    - The program adds 1 % of the mean of C's diagonal to it. That raises all e alike and turns no axis; it is left out.
    - The last feed-forward network writes to the basis that it reads, which is also that of the last norm: its axes are
      of both norms' inputs, and the output layer is sliced with it. The program leaves the output layer whole.
    - ``density`` decides on k: it counts the matrices on the residual path, which the paper's "slicing" does not. Where
      it is given, the first sites keep one direction more, as far as it allows. ``slicing`` is the paper's number.
    - BERT, RoBERTa, ELECTRA, DistilBERT, DeBERTa and BART are not in the paper. Their norms stand after the residual
      sum, where a site is one norm (SP3, Eqs. 6-9): the same axes and slices, in that form.
    - Recovery fine-tuning trains all weights by default; the paper's trains adapters: ``prune.parameters lora``.
    - Every site has forwards of its own, up to it, where the program keeps all hidden states. ``factorize --by_block``
      keeps those before a block, and forwards are of that block (calibration/sliced_by_block.py).
    - With the residual matrices a block keeps k / d + (k / d)^2 / 6 of its weights (d_ff = 4 d): 0.84 at a slice of
      25 %, and more than all at slices below 13 %.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cached_property
from math import floor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lit_compress.calibration.sliced_stream import sliced_axes
from lit_compress.methods.base import Method
from lit_compress.models.accounting import stored_density
from lit_compress.models.architectures import get_architecture
from lit_compress.models.block_net import BlockNet
from lit_compress.models.projected.bases import identity_bases
from lit_compress.models.projected.gates import gated_size
from lit_compress.models.projected.insert import insert_projections
from lit_compress.models.projected.outline import outline_projected
from lit_compress.models.projected.sliced import SLICED, slice_stream, sliced_block
from lit_compress.models.residual_stream import residual_stream
from lit_compress.models.surgery import Structure, rebuild
from lit_compress.stages.base import Stage, StageContext
from lit_compress.stages.by_block import Kept, stored_tensors
from lit_compress.stages.distillation import Distillation
from lit_compress.stages.lora import Retraining
from lit_compress.tasks import task_type
from lit_compress.utils.errors import UserError, require
from lit_compress.utils.files import atomic_file
from lit_compress.utils.progress import note
from lit_compress.utils.sharding import from_first

if TYPE_CHECKING:
    from torch.utils.data import DataLoader
    from transformers import PreTrainedModel

    from lit_compress.data.datamodule import DataModule
    from lit_compress.tasks.records import Task


@dataclass(frozen=True)
class Slicing(Retraining):
    """How hidden states are calibrated, and how the sliced net is trained.

    Args:
        epochs: passes over the training data with the sliced net; 0 for none.
        examples: number of training examples for calibration; None = 512, or all if there are fewer.
        calibration_seed: seed of the choice of examples.
    """

    epochs: int = 0
    examples: int | None = None
    calibration_seed: int = 42

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "prune.examples", low=1)


class SlicingStage(Stage):
    """The stage ``prune``: calibrate and slice; train, if asked to.

    Args:
        settings: of calibration and training.
        density: fraction of the sites' weights that stays, matrices on the residual path included; at 1 nothing is
            sliced.
        slicing: fraction of every hidden state's dimensions that goes, in place of the density.
        round_to: widths are multiples of it.
    """

    settings: Slicing
    shrinks_first = repeatable = True

    def __init__(self, settings: Slicing, density: float, slicing: float | None, round_to: int | None) -> None:
        super().__init__("prune", settings)
        self.density, self.slicing, self.step = density, slicing, round_to or 1
        self.round_to = round_to

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is sliced."""
        return self.density >= 1 if self.slicing is None else self.slicing == 0

    def check(self, net: PreTrainedModel) -> None:
        """Refuse architectures whose hidden states keep their basis, and sizes that cannot be reached."""
        if why := residual_stream(net).fixed:
            raise UserError(f"model.backbone: hidden states of '{net.config.model_type}' cannot be sliced: {why}")
        if self.keeps_all:
            return
        widths = self.widths(net)
        if self.slicing is not None:
            size = gated_size(net, SLICED)
            self.density = size.count({"hidden": torch.tensor(widths)}) / size.total
            if self.density > 1:
                note(
                    f"model.slicing: {self.slicing} leaves {self.density:.4f} of the weights, as the residual path "
                    "gets matrices; slices above about 0.13 leave fewer than there were"
                )

    def check_data(self, examples: int) -> None:
        """Refuse a calibration over more examples than there are."""
        if (asked := self.settings.examples) is not None and asked > examples:
            raise UserError(f"prune.examples: {asked} is more than there are; the largest is {examples}")

    def widths(self, net: PreTrainedModel) -> list[int]:
        """Return how many directions every site keeps; only shapes are read.

        Raises:
            UserError: a step of the width is more than the density or the slice leaves.
        """
        size, d, step = gated_size(net, SLICED), net.config.hidden_size, self.step
        sites = size.shapes["hidden"][0]
        if self.slicing is not None:
            width = floor((1 - self.slicing) * d + 1e-9) // step * step
            if not width:
                raise UserError(
                    f"model.slicing: {self.slicing} leaves less than {step} of {d} dimensions; the largest valid value "
                    f"is {1 - step / d:.4g}"
                )
            return [width] * sites

        def left(steps: Tensor) -> int:
            return size.count({"hidden": (steps * step).clamp_max(d)})

        budget, steps = floor(self.density * size.total), torch.ones(sites, dtype=torch.int64)
        if left(steps) > budget:
            raise UserError(
                f"model.density: {self.density:.4g} cannot be reached by slices of hidden states; the smallest is "
                f"{left(steps) / size.total + 5e-5:.4f}"
            )
        low, high = 1, d // step + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if left(steps * middle) <= budget else (low, middle)
        steps *= low
        for site in range(sites):  # the rest of the budget
            steps[site] += 1
            if left(steps) > budget or steps[site] * step > d:
                steps[site] -= 1
        return (steps * step).tolist()

    def outline(self, net: PreTrainedModel) -> PreTrainedModel:
        """Return ``net`` with narrow hidden states."""
        return net if self.keeps_all else outline_projected(net, SLICED, {"hidden": torch.tensor(self.widths(net))})

    def build(self, method: StageContext, previous: Path | None, structure: Structure | None) -> PreTrainedModel:
        """Calibrate the dense net and slice it; at density 1 return it unchanged."""
        net = super().build(method, previous, structure)
        if structure is not None:
            rebuild(net, structure)
        elif not self.keeps_all:
            trainer = method.trainer
            device, shared = trainer.strategy.root_device, trainer.world_size > 1
            self.prune(net, method.task, trainer.datamodule, device, shared)
        self.achieved = stored_density(net)
        return net

    def prune(
        self, net: PreTrainedModel, task: Task, data: DataModule, device: torch.device, shared: bool = False
    ) -> None:
        """Calibrate the dense ``net`` and slice it in place; at density 1 leave it as it is.

        Args:
            net: on the CPU, as it is afterwards.
            task: of the examples.
            data: gives them.
            device: of the passes.
            shared: True if every process of the default group has batches of its own.
        """
        if not self.keeps_all:
            widths = self.widths(net)
            slice_stream(net, self._axes(net, widths, task, data, device, shared), widths)

    def examples(self, data: DataModule) -> DataLoader:
        """Return the batches of the calibration examples."""
        count = self.settings.examples or min(512, data.train_size())
        return data.calibration_dataloader(count, self.settings.calibration_seed, "prune.examples")

    def _axes(
        self, net: PreTrainedModel, widths: list[int], task: Task, data: DataModule, device: torch.device, shared: bool
    ) -> list[Tensor]:
        """Return the axes of every site, on every rank those of the first."""
        hooked = net
        if residual_stream(net).pre_norm:
            hooked = insert_projections(copy.deepcopy(net), identity_bases(net), SLICED)
        axes = sliced_axes(
            hooked.to(device), residual_stream(hooked), widths,  # type: ignore[arg-type]
            lambda: self.examples(data),
            task_type(task),
            centred=not get_architecture(net).rms,
            reduce=torch.distributed.all_reduce if shared else None,
            agree=from_first,
        )  # fmt: skip
        net.to("cpu")  # type: ignore[arg-type]
        return axes

    def status(self, net: PreTrainedModel, step: int) -> dict[str, float]:
        """Log the density, which does not change in this stage."""
        return {"density": self.achieved, "target": self.achieved if self.slicing is not None else self.density}


@dataclass(frozen=True)
class BlockSlices(Kept):
    """The same with one block in memory: of every block one file with the axes that its two sites keep.

    Attributes:
        stage: has settings and widths.
    """

    name = "axes"

    stage: SlicingStage

    @cached_property
    def widths(self) -> list[int]:
        """How many directions every site keeps."""
        return self.stage.widths(self.shapes)

    @property
    def sites(self) -> list[str]:
        """No matrix has moments of its own."""
        return []

    def bytes(self) -> int:
        """Return the size of the axes."""
        return 8 * self.shapes.config.hidden_size * sum(self.widths)

    def write(self, number: int, block: nn.Module, found: dict[int, Tensor]) -> None:
        """Write the axes of a block's sites that stay."""
        from safetensors.torch import save_file

        kept = {str(site): axes[:, : self.widths[site]].contiguous() for site, axes in found.items()}
        with atomic_file(self.path(number)) as temporary:
            save_file(kept, temporary)

    def read(self, number: int) -> dict[int, Tensor]:
        """Return U [d, d] of a block's sites; the directions that go are 0."""
        size = self.shapes.config.hidden_size
        found = stored_tensors(self.path(number)).items()
        return {int(site): nn.functional.pad(axes, (0, size - axes.shape[1])) for site, axes in found}

    def choose(self) -> tuple[dict[str, Any], float]:
        """Choose nothing: the widths are known before."""
        return {}, 0.0

    def told(self, chosen: dict[str, Any]) -> dict[str, Any]:
        """Return the width of hidden states at every site."""
        return {"widths": self.widths}

    def part(self, net: BlockNet, number: int) -> tuple[dict[str, Tensor], Structure]:
        """Return the tensors of a sliced block, by their names in the net, and the specs of its modules."""
        axes = self.read(number)
        if number + 1 < len(self.blocks):
            axes |= self.read(number + 1)
        sites = sorted(axes)
        return sliced_block(net, self.shapes, number, [axes[i] for i in sites], [self.widths[i] for i in sites])


class SliceGPT(Method):
    """Slice hidden states: keep their first principal directions, the same number everywhere, without training.

    Args:
        density: remaining / original parameters of the transformer blocks' matrices, in (0, 1]; new matrices on the
            residual path count as remaining. Default 0.75.
        slicing: fraction of the dimensions of hidden states that goes, in [0, 1), in place of ``density``; the paper's
            are 0.2, 0.25 and 0.3.
        prune: calibration, and training afterwards.
        distillation: weights of the loss terms with the dense net as teacher; off (alpha 0), as in the paper.
    """

    usual_density = 0.75

    def __init__(
        self,
        *,
        density: float | None = None,
        slicing: float | None = None,
        prune: Slicing = Slicing(),
        distillation: Distillation = Distillation(alpha=0.0),
        **common: Any,
    ) -> None:
        if slicing is not None:
            if not 0 <= slicing < 1:
                raise UserError(f"model.slicing: {slicing} is not in [0, 1); usual: 0.25")
            other = "density" if density is not None else "budget" if common.get("budget") is not None else None
            if other:
                given = density if density is not None else common["budget"]
                raise UserError(
                    f"model.slicing {slicing}, model.{other} {given}: only one can decide the size, set the other to "
                    "null"
                )
        if distillation.alpha_layers > 0:
            raise UserError(
                f"distillation.alpha_layers: {distillation.alpha_layers} compares hidden states, which SliceGPT makes "
                "narrower than the teacher's; valid: 0"
            )
        usual = self.usual_density if slicing is None else 1.0
        super().__init__(density=usual if density is None else density, distillation=distillation, **common)
        self.slicing, self.prune = slicing, prune

    def stages(self) -> list[Stage]:
        """Return dense (without a teacher), prune."""
        return [*self.dense_stage(), self.pruning()]

    def pruning(self) -> SlicingStage:
        """Return the stage ``prune``."""
        return SlicingStage(self.prune, self.density, self.slicing, self.round_to)
