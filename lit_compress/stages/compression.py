"""Compression of a dense model in one shot, in memory or block by block: statistics, measurements, a plan, new values.

A method's one-shot step is a :class:`Compression`. :func:`compress` applies it to a model in memory, for the stage of a
fit and for ``factorize``; ``cli/by_block.py`` to one with a block at a time in memory. Ranks, or heads and neurons,
under one budget need all matrices, and the statistics of a matrix are gone before the last one is known. So of every
matrix only the input of the plan and of the new values is kept (:meth:`Compression.measure`), together no more than the
model.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lit_compress.calibration.moments import Moments, parts_within
from lit_compress.calibration.statistics import OfModel, Reduce, Statistic, whole
from lit_compress.data.datamodule import DataModule
from lit_compress.models.accounting import stored_density
from lit_compress.models.sites import Model, find_sites
from lit_compress.models.surgery import Structure, rebuild
from lit_compress.stages.base import Stage, Training
from lit_compress.stages.micro_batches import MicroBatches
from lit_compress.tasks import task_type
from lit_compress.tasks.base import TaskType
from lit_compress.tasks.records import Task
from lit_compress.utils.devices import place_within
from lit_compress.utils.memory import trim
from lit_compress.utils.progress import note, track
from lit_compress.utils.sharding import from_first, is_first

CPU = torch.device("cpu")
CALIBRATION_SEED = 42  # of the choice of examples, and of tokens
MOST_BYTES = 768 * 2**20  # of sums of second moments in one pass; those of BERT-base take 673 MiB
EXAMPLES = 1024  # that are read if the settings name no number
Measured = Mapping[str, Tensor]
Plan = dict[str, Any]  # by site
Items = Iterator[tuple[tuple[str, ...], dict[str, Tensor]]]  # of measurements


@dataclass(frozen=True)
class Calibration:
    """A statistic, and the examples over which it is summed.

    Attributes:
        batches: of the examples, in the same order whenever they are iterated.
    """

    statistic: Statistic | OfModel
    batches: DataLoader


class Compression:
    """The one-shot step of a method on a dense model: three functions, and a fourth if it reads examples.

    This base class keeps the model as it is.

    Attributes:
        name: of what a plan says of a site, the field of a report by block.
        folder: of the model, once it is known; None for the backbone.
        density: fraction that is to be left.
        round_to: numbers of units are multiples of it; None: 1.
        uniform: True if all layers can keep the same numbers of heads and of neurons.
        dense_states: whether the states behind the blocks are to equal the dense model's.
        by_block: False if the whole model must be in memory.
        decided_by_data: True if measurements decide which shapes are left.
        moments: the weighting whose second moments of training examples are summed; None for no such.
        behind: behind how many dense blocks those of each block are, in forward order; None: no block is missing.
    """

    name = "units"
    folder: Path | None = None
    density = 1.0
    round_to: int | None = None
    uniform = decided_by_data = False
    dense_states = by_block = True
    moments: str | None = None
    behind: Sequence[int] | None = None

    def calibration(self, net: Model, data: Any) -> Calibration | None:
        """Return the statistic and its examples, of ``data``; None if weights are enough. Only shapes are read."""
        return None

    def measure(self, net: Model, names: Collection[str], statistics: dict[Any, Any]) -> Items:
        """Yield the measurements of the matrices ``names``, one after the other.

        The dense ``net`` has their values, on the CPU; ``statistics`` by site are released. An item has names of sites
        that are not read again, and tensors by names that begin with one of theirs.
        """
        return iter(())

    def plan(self, net: Model, measured: Measured | None = None) -> Plan:
        """Return by site the removed or kept parts; of the dense ``net`` only shapes are read.

        ``measured`` is of all matrices; None: they matter alike.
        """
        return {}

    def fill(self, net: Model, plan: Plan, measured: Measured | None) -> None:
        """Change the sites in ``plan``, or in a part of a plan, in place.

        ``net`` is dense, in other sites maybe changed. Without ``measured`` only the shapes change, values come later.
        """

    def check(self, net: Model) -> None:
        """Refuse by a UserError settings that cannot work; only shapes of the dense ``net`` are read."""

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is to be removed."""
        return self.density >= 1

    def density_left(self, net: Model) -> float:
        """Return the density of the compressed ``net``."""
        return stored_density(net)

    def told(self, net: Model, plan: Plan) -> dict[str, Any]:
        """Return the report's field on the plan; only shapes of the dense ``net`` are read."""
        return {self.name: {key: int(value.sum()) if isinstance(value, Tensor) else value
                            for key, value in plan.items()}}  # fmt: skip

    def reads_labels(self, kind: TaskType) -> bool:
        """Return whether the statistic needs the labels of the data."""
        return True

    def drawn(self, data: DataModule) -> int:
        """Return the number of the examples that calibrate, or 1,024 without a calibration."""
        return min(EXAMPLES, data.train_size())

    def record(self, data: Any) -> dict[str, Any] | None:
        """Return the report's entry on the calibration; None for nothing."""
        return None

    def rebuilt(self, net: Model, structure: Structure, notes: dict[str, Any]) -> Model:
        """Return the dense ``net`` in the form of a checkpoint, with its ``structure`` and the stage's ``notes``."""
        return rebuild(net, structure)


def compress(
    net: Model,
    compression: Compression,
    task: Task,
    data: DataModule | None,
    device: torch.device,
    *,
    shared: bool = False,
    keep: bool = False,
    measured: Measured | None = None,
) -> Model:
    """Compress ``net`` in memory, and return it.

    Args:
        net: dense, on the CPU, before and afterwards.
        task: the task whose loss is differentiated.
        data: gives the examples; None if weights are enough.
        shared: every process of the default group has batches of its own; only the model of the first is right then.
        keep: leave ``net`` unchanged, and compress a copy, which is made when the statistics are gone.
        measured: the result of :func:`measure` for ``compression``; None: it is measured here.
    """
    known = measure(net, compression, task, data, device, shared) if measured is None else measured
    plan = from_first(partial(compression.plan, net, known))
    net = copy.deepcopy(net) if keep else net
    compression.fill(net, plan, known if is_first() else None)
    del known, measured
    trim()
    return net


def measure(
    net: Model, compression: Compression, task: Task, data: DataModule | None, device: torch.device,
    shared: bool = False,
) -> dict[str, Tensor]:  # fmt: skip
    """Return the measurements of all matrices of ``net`` for a compression; arguments as :func:`compress`."""
    measured: dict[str, Tensor] = {}

    def keep(names: Collection[str], statistics: dict[Any, Any]) -> None:
        for _, tensors in compression.measure(net, names, statistics):
            measured.update(tensors)

    for names, statistics in collected(net, compression.calibration(net, data), task, device, shared):
        from_first(partial(keep, names, statistics))
        del statistics
    trim()
    return measured


def collected(
    net: Model,
    calibration: Calibration | None,
    task: Task,
    device: torch.device,
    shared: bool = False,
    most: float | None = None,
) -> Iterator[tuple[list[str], dict[Any, Any]]]:
    """Yield names of matrices and their statistics by site, in forward order, in passes whose sums fit.

    Args:
        net: with its task's head, on the CPU, as it is between the passes; it must not change before the last.
        calibration: the sums; None: only the names are yielded.
        task: the task whose loss is differentiated.
        shared: True if every process of the default group has batches of its own; then there is one pass.
        most: bytes of the sums of one pass over Kronecker moments; None: :data:`MOST_BYTES`.

    Raises:
        UserError: the sums are not usable, or there are too few examples.
    """
    if calibration is None:
        yield [site.name for site in find_sites(net)], {}
        return
    statistic, batches, kind = calibration.statistic, calibration.batches, task_type(task)
    reduce: Reduce = torch.distributed.all_reduce if shared else None
    if isinstance(statistic, OfModel):
        net.to(device)  # type: ignore[arg-type]
        answer = statistic.answer(net, batches, kind, reduce)
        net.to("cpu")  # type: ignore[arg-type]
        yield [], answer
        return
    parts = [statistic.names(net)]
    if isinstance(statistic, Moments):
        parts = parts_within(net, statistic, inf if shared else MOST_BYTES if most is None else most)
        if len(parts) > 1:
            note(f"calibration: {len(parts)} passes over the examples, the sums of all matrices are too large for one")
    for part in parts:
        place = place_within(device, statistic.bytes(net, part), "calibration: sums of all matrices")
        net.to(device)  # type: ignore[arg-type]
        sums = whole(
            net, statistic, track(batches, statistic.title, len(batches)), kind, names=part, device=place,
            reduce=reduce,
        )  # fmt: skip
        net.to("cpu")  # type: ignore[arg-type]
        yield part, sums
        del sums  # before those of the next pass


class CompressedStage(Stage):
    """A stage that compresses the model of the stage before by its ``compression``, in one shot, and then trains it."""

    compression: Compression
    shrinks_first = repeatable = True

    def __init__(self, name: str, settings: Training, compression: Compression, distil: bool = True) -> None:
        super().__init__(name, settings, distil)
        vars(self)["compression"] = compression  # a method is no module of its stage
        self.round_to, self.uniform = compression.round_to, compression.uniform
        self.decided_by_data = compression.decided_by_data

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is to be removed."""
        return self.compression.keeps_all

    def plain(self) -> Stage:
        """Return the stage that compresses nothing."""
        return CompressedStage(self.name, self.settings, Compression(), self.distil)

    def check(self, net: Model) -> None:
        """Refuse settings that cannot work."""
        self.compression.check(net)

    def check_data(self, net: Model, data: DataModule) -> None:
        """Refuse more examples than there are."""
        self.compression.calibration(net, data)

    def texts(self, data: DataModule) -> Iterable[dict[str, Tensor]]:
        """Return the batches of the examples that calibrate, or of 1,024 training examples without a calibration."""
        return data.calibration_dataloader(self.compression.drawn(data), option="calibration_examples")

    def outline(self, net: Model, measured: Measured | None = None) -> Model:
        """Return ``net`` in the shapes of its plan, with the measurements of all matrices if they are there."""
        self.compression.fill(net, self.compression.plan(net, measured), None)
        return net

    def begin(self, net: Model, method: MicroBatches, structure: Structure | None) -> Model:
        """Compress ``net``, or give it the modules of a checkpoint."""
        if structure is not None:
            net = self.compression.rebuilt(net, structure, self.notes)
        else:
            trainer: Any = getattr(method, "_trainer", None)
            data, device = (trainer.datamodule, trainer.strategy.root_device) if trainer else (None, CPU)
            shared, self.compression.folder = bool(trainer) and trainer.world_size > 1, self.previous
            net = compress(net, self.compression, method.task, data, device, shared=shared)
            notes = self.compression.record(data)
            self.notes = {} if notes is None else {"calibration": notes}
        self.achieved = self.compression.density_left(net)
        return net

    def status(self, net: Model, step: int) -> dict[str, float]:
        """Log the density, which does not change in this stage."""
        return {} if self.keeps_all else {"density": self.achieved}
