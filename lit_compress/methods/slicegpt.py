"""SliceGPT: hidden states keep their first principal directions, the same number of them everywhere; no training.

Saleh Ashkboos, Maximilian L. Croci, Marcelo Gennari do Nascimento, Torsten Hoefler, James Hensman, "SliceGPT: Compress
Large Language Models by Deleting Rows and Columns", ICLR 2024, https://arxiv.org/abs/2401.15024; program:
https://github.com/microsoft/TransformerCompression.

    invariance    rms(Q^T x) = Q^T rms(x) for every orthogonal Q, so the stream may have any basis: its writers are
                  multiplied by Q^T, its readers by Q; LayerNorm first becomes R, gamma and beta in the weights
                  around it and an rms norm (section 3.1, 3.2)                          models/projected/
    axes          C_l = sum over tokens of x x^T = Q_l diag(e) Q_l^T, e falling, x the input of norm l after the
                  slices before it; float64, without padding (section 3.3)                       :class:`Axes`
    slices        the first k columns of every Q_l; on the residual path Q_l[:, :k]^T Q_l+1[:, :k], a k x k matrix;
                  the norm divides by the original width (section 3.4)                    models/projected/

The stages are dense -> prune; ``prune.epochs`` 0, the default, is the paper's. More train the rest, as its recovery
fine-tuning does.

Deviations, and where paper and program differ:
    - The paper takes the second moments of the norms' outputs, the program of their inputs. Here: inputs.
    - The program adds 1 % of the mean of C's diagonal to it. That raises all e alike and turns no axis; it is left out.
    - The last feed-forward network writes to the basis that it reads, which is also the last norm's. Its axes are of
      both norms' inputs, and the output layer is sliced with it. The program leaves the output layer whole.
    - ``density`` decides on k: it counts the matrices on the residual path, which the paper's "slicing" does not. The
      first sites keep one direction more, as far as it allows.
    - BERT, RoBERTa, ELECTRA, DistilBERT and BART are not in the paper. Their norms are after the residual
      sum, where a site is one norm (SP3, Eqs. 6-9): the same axes and slices, in that form.
    - Recovery fine-tuning trains all weights; the paper's trains low-rank updates (LoRA).
    - The hidden states before a block are on disk. Forwards are of that block.
      With norms after the residual sum every site has forwards of its own, up to it. The program keeps all states.
    - With the residual matrices a block keeps k / d + (k / d)^2 / 6 of its weights (d_ff = 4 d). That is 0.84 at a
      slice of 25 %, and more than all at slices below 13 %.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from math import floor
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lit_compress.calibration.moments import Gram
from lit_compress.calibration.statistics import (
    Batch,
    OfModel,
    Reduce,
    Stop,
    frozen,
    hooked,
    real_rows,
    token_places,
    tokens_at,
)
from lit_compress.calibration.walk import Walk
from lit_compress.data.datamodule import DataModule
from lit_compress.layers import StreamBlock
from lit_compress.methods.base import OneShot
from lit_compress.models.architectures import get_architecture
from lit_compress.models.block_net import one_by_one
from lit_compress.models.projected.gates import gated_size, possible_gates
from lit_compress.models.projected.projections import identity_bases, narrowed
from lit_compress.models.residual_stream import ResidualStream, residual_stream
from lit_compress.models.sites import Model
from lit_compress.numerics.pca import centred_axes, principal_axes
from lit_compress.numerics.search import largest
from lit_compress.stages.base import Limits, Training
from lit_compress.stages.compression import CALIBRATION_SEED, Calibration, Items, Measured
from lit_compress.stages.distillation import Distillation
from lit_compress.tasks.base import TaskType
from lit_compress.utils.devices import double, place_of_sums
from lit_compress.utils.errors import UserError
from lit_compress.utils.progress import note, track
from lit_compress.utils.sharding import from_first

Passes = Iterable[tuple[Tensor, Callable[[], Any]]]  # places of the tokens that count, int64, and what does a forward
SLICED = ("hidden",)  # bases of hidden states alone, one for every sub-layer


@dataclass(frozen=True)
class Slicing(Training):
    """How hidden states are calibrated, and how the sliced model is trained.

    Args:
        examples: number of training examples for calibration; None = 512, or all if there are fewer.
    """

    epochs: int = 0
    examples: int | None = None
    limits: ClassVar[Limits] = {"prune.examples": {"low": 1}}


class SliceGPT(OneShot):
    """Slice hidden states: keep their first principal directions, the same number everywhere, without training.

    Args:
        density: remaining / original parameters of the transformer blocks' matrices, in (0, 1]; new matrices on the
            residual path count as remaining.
        prune: calibration, and training afterwards.
    """

    dense_states = False  # they have other axes, and fewer
    by_block = False  # the directions of a site depend on the slices of all sites before it
    usual_density = 0.75
    prune: Slicing = Slicing()
    distillation = Distillation(alpha=0.0)

    def __post_init__(self) -> None:
        if self.distillation.alpha_layers > 0:
            raise UserError(
                f"distillation.alpha_layers: {self.distillation.alpha_layers} compares hidden states, which SliceGPT "
                "makes narrower than the teacher's; valid: 0"
            )

    def check(self, net: Model) -> None:
        """Refuse architectures whose hidden states keep their basis, and sizes that cannot be reached."""
        if "hidden" not in possible_gates(net):
            why = residual_stream(net).fixed
            raise UserError(f"model.backbone: hidden states of '{net.config.model_type}' cannot be sliced: {why}")
        self.widths(net)

    def widths(self, net: Model) -> list[int]:
        """Return how many directions every site keeps; a UserError if less than a step of the width is left."""
        size, d, step = gated_size(net, SLICED), net.config.hidden_size, self.round_to or 1
        sites = size.shapes["hidden"][0]

        def left(steps: Tensor) -> int:
            return size.count({"hidden": (steps * step).clamp_max(d)})

        budget, steps = floor(self.density * size.total), torch.ones(sites, dtype=torch.int64)
        if left(steps) > budget:
            raise UserError(
                f"model.density: {self.density:.4g} cannot be reached by slices of hidden states; the smallest is "
                f"{left(steps) / size.total + 5e-5:.4f}"
            )
        steps *= largest(lambda width: left(steps * width) <= budget, 1, max(1, d // step))
        for site in range(sites):  # the rest of the budget
            steps[site] += 1
            if left(steps) > budget or steps[site] * step > d:
                steps[site] -= 1
        return (steps * step).tolist()

    def reads_labels(self, kind: TaskType) -> bool:
        """Return whether forwards need the labels."""
        return kind.reads_labels

    def calibration(self, net: Model, data: DataModule) -> Calibration:
        """Return the axes of every site."""
        count = self.prune.examples or min(512, data.train_size())
        batches = data.calibration_dataloader(count, CALIBRATION_SEED, "prune.examples")
        return Calibration(Axes(self.widths(net)), batches)

    def measure(self, net: Model, names: Collection[str], statistics: dict[Any, Any]) -> Items:
        """Yield the axes of a site that stay, U[:, :k] [d, k]."""
        widths = self.widths(net)
        for site, axes in statistics.items():
            yield (), {str(site): axes[:, : widths[site]].contiguous()}

    def plan(self, net: Model, measured: Measured | None = None) -> dict[str, list[int]]:
        """Return the width of hidden states at every site."""
        return {"widths": self.widths(net)}

    def fill(self, net: Model, plan: dict[str, list[int]], measured: Measured | None) -> None:
        """Slice a model; without axes along the dense model's, and without values only its shapes."""
        widths, bases = plan["widths"], identity_bases(net)
        if measured is not None:  # the directions that go are 0
            parts = [measured[str(i)] for i in range(len(widths))]
            axes = [nn.functional.pad(part, (0, len(part) - part.shape[1])) for part in parts]
            bases = replace(bases, sites=axes)
        narrowed(net, SLICED, {"hidden": torch.tensor(widths)}, bases)


@dataclass(frozen=True)
class Axes(OfModel):
    """The axes U [d, d] of every site, by falling energy behind the slices before; by number, float64, on the CPU.

    A site keeps its first k axes, Q = U[:, :k]. Every reader gets Q Q^T x in place of x: its norms, and with norms
    before the sub-layers the residual path. A slice is a hook in the coordinates of the dense model, where nothing is
    turned before all axes are known.

    Attributes:
        widths: number of directions k that every site keeps.
    """

    widths: Sequence[int]

    def answer(self, net: Model, batches: Any, kind: TaskType, reduce: Reduce) -> dict[Any, Any]:
        """Return the axes; a model with norms before the sub-layers is on the CPU afterwards.

        Raises:
            UserError: there are no examples, or a hidden state is inf or NaN.
        """
        stream, device = residual_stream(net), net.device
        find = principal_axes if get_architecture(net).rms else centred_axes  # other norms subtract a mean
        axes: list[Tensor] = []
        with ExitStack() as undo, torch.no_grad(), torch.autocast(device.type, enabled=False):
            undo.enter_context(frozen(net))
            passes: Callable[[int], Passes] = partial(_of_model, net, stream, batches, kind)
            blocks: dict[str, nn.Module] = {}
            if stream.pre_norm:
                folder = Path(undo.enter_context(tempfile.TemporaryDirectory()))
                rows = (real_rows(kind, batch, torch.device("cpu"), None) for batch in batches)
                parts = [part for part in rows if len(part["index"])]
                walk = Walk(undo.enter_context(one_by_one(net, device)), kind, parts, folder)
                blocks = dict(zip(walk.net.names, walk.net.blocks, strict=True))
                passes = partial(_of_block, walk, stream)
                for block in blocks.values():
                    undo.callback(setattr, block, "__class__", type(block))
                    StreamBlock.adopt(block)
            modules = dict(net.named_modules()) | {
                f"{name}.{path}": module for name, block in blocks.items() for path, module in block.named_modules()
            }
            for i, site in track(list(enumerate(stream.sites)), "principal axes", len(stream.sites)):
                names = [name for name in site.norms if not blocks or name.startswith(f"{stream.sublayers[i].block}.")]
                own = {name: modules[name] for name in names}
                ends = len(own) < len(site.norms)  # the last norm of the model reads what the block gives
                gram = _gram(own, net.config.hidden_size, device, passes(i), not ends, reduce)
                axes.append(from_first(lambda gram=gram: find(gram.whole())[0]))  # type: ignore[misc]
                if self.widths[i] < len(axes[i]):
                    kept = axes[i][:, : self.widths[i]]
                    part = partial(torch.matmul, other=(kept @ kept.mT).to(device, net.dtype))
                    for name in site.norms:
                        hook = lambda _, args, part=part: (part(args[0]),)  # noqa: E731
                        undo.callback(modules[name].register_forward_pre_hook(hook).remove)
                    for sublayer in (sublayer for sublayer in stream.turns if sublayer.reads == i):
                        turn = sublayer.junction.removeprefix(f"{sublayer.block}.")
                        setattr(blocks[sublayer.block], turn, part)
                        undo.callback(delattr, blocks[sublayer.block], turn)
        return dict(enumerate(axes))


def _of_model(net: Model, stream: ResidualStream, batches: Iterable[Batch], task: TaskType, site: int) -> Passes:
    """Yield the forwards of the whole model."""
    stack = list(dict.fromkeys(place.stack for place in stream.sites)).index(stream.sites[site].stack)
    for batch in batches:
        rows = real_rows(task, batch, net.device, None)
        if len(rows["index"]):
            yield token_places(task.masks(rows)[stack]), partial(task.run, net, rows)


def _of_block(walk: Walk, stream: ResidualStream, site: int) -> Passes:
    """Yield the forwards of the block of a site, behind the slices before it."""
    number = walk.net.names.index(stream.sublayers[site].block)
    walk.reach(number)
    with walk.net.block(number):
        for rows, hidden in walk.pairs(number):
            yield token_places(walk.task.masks(rows)[0]), partial(walk.step, number, rows, hidden)


def _gram(
    norms: Mapping[str, nn.Module], size: int, device: torch.device, passes: Passes, stop: bool, reduce: Reduce
) -> Gram:
    """Return the sum of x x^T over the tokens that reach some norms; a note says if they are fewer than dimensions.

    ``norms`` are in the order of a forward. It stops at the last one if ``stop``; else its output is also read.
    """
    gram, count = Gram(size, torch.float64, place_of_sums(device)), torch.zeros(1, dtype=torch.int64, device=device)
    places, last = torch.zeros(0), next(reversed([*norms]), "")

    def read(name: str, x: Tensor, _: Tensor | None = None) -> None:
        taken = double(tokens_at(x, places))
        gram.add(taken)
        count.add_(len(taken))
        if stop and name == last:
            raise Stop

    with hooked(norms, read):
        for where, forward in passes:
            places = where
            with suppress(Stop):
                read("", forward())
    for total in (gram.flat, count) if reduce is not None else ():
        reduce(total)  # type: ignore[misc]
    if not count:
        raise UserError("calibration: there are no examples; give at least 1")
    if count < size:
        note(
            f"calibration: {int(count)} tokens are fewer than the {size} dimensions of hidden states; the axes of "
            "those without any are chosen at random"
        )
    return gram
