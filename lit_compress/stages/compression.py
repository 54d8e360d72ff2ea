"""Compression of a dense model in one shot, in memory or block by block: statistics, measurements, a choice, a change.

A method's one-shot step is a :class:`Compression`. :func:`compress` applies it to a model in memory, for the stage of a
fit and for ``factorize``; ``cli/by_block.py`` to one with a block at a time in memory. Ranks, or heads and neurons,
under one budget need all matrices, and the statistics of a matrix are gone before the last one is known. So of every
matrix only the input of the choice and the change is kept (:meth:`Compression.measure`), together no more than the
model.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from lit_compress.models.accounting import stored_density
from lit_compress.models.surgery import Structure, rebuild
from lit_compress.stages.base import Stage, StageContext
from lit_compress.stages.calibration import Calibration, collected
from lit_compress.utils.memory import trim
from lit_compress.utils.sharding import from_first, is_first

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lit_compress.data.batching import ResumableLoader
    from lit_compress.data.datamodule import DataModule
    from lit_compress.tasks.base import TaskType
    from lit_compress.tasks.records import Task

CPU = torch.device("cpu")
EXAMPLES = 1024  # that are read if the settings name no number
Measured = Mapping[str, Tensor]
Chosen = dict[str, Any]  # by site


class Compression(ABC):
    """The one-shot step of a method on a dense model."""

    name: ClassVar[str]  # of what it keeps of a block

    def check_by_block(self, net: PreTrainedModel) -> None:  # noqa: B027
        """Refuse settings that cannot work block by block.

        Args:
            net: dense; only shapes are read.

        Raises:
            UserError: names the setting that needs the whole model.
        """

    @abstractmethod
    def calibration(self, net: PreTrainedModel, data: Any) -> Calibration | None:
        """Return the statistic and the number of its examples; None if weights are enough.

        Args:
            net: dense; only shapes are read.
            data: gives the examples.
        """

    @abstractmethod
    def bytes(self, net: PreTrainedModel) -> int:
        """Return the maximum bytes of the measurements; only shapes of the dense ``net`` are read."""

    @abstractmethod
    def measure(
        self, net: PreTrainedModel, names: Collection[str], statistics: dict[Any, Any]
    ) -> Iterator[tuple[tuple[str, ...], dict[str, Tensor]]]:
        """Yield the measurements of some matrices, one after the other.

        Args:
            net: dense; the matrices ``names`` have values, on the CPU.
            names: of the sites.
            statistics: by site, which are released.

        Returns:
            Names of sites that are not read again, and tensors by names that begin with one of theirs.
        """

    @abstractmethod
    def plan(self, net: PreTrainedModel) -> Chosen:
        """Return the choice if all parts of ``net`` mattered alike; only its shapes are read."""

    @abstractmethod
    def choose(self, net: PreTrainedModel, measured: Measured) -> tuple[Chosen, float]:
        """Return by site the removed or kept parts, and the estimated addition to an example's loss.

        Args:
            net: dense; only shapes are read.
            measured: of all matrices.
        """

    @abstractmethod
    def apply(self, net: PreTrainedModel, chosen: Chosen, measured: Measured | None) -> None:
        """Change the sites in ``chosen``, in place.

        Args:
            net: dense, in other sites maybe changed.
            chosen: by :meth:`choose` or :meth:`plan`, or a part of it.
            measured: of these sites; None: shapes only, values come later.
        """

    @abstractmethod
    def told(self, net: PreTrainedModel, chosen: Chosen) -> dict[str, Any]:
        """Return the report's field on the choice; only shapes of the dense ``net`` are read."""


def compress(
    net: PreTrainedModel,
    compression: Compression | None,
    task: Task,
    data: DataModule | None,
    device: torch.device,
    *,
    shared: bool = False,
    keep: bool = False,
    measured: Measured | None = None,
) -> tuple[PreTrainedModel, float]:
    """Compress ``net`` in memory; return it, and the estimated addition to an example's loss.

    Args:
        net: dense, on the CPU, before and afterwards.
        compression: what is done; None for nothing.
        task: the task whose loss is differentiated.
        data: gives the examples; None if weights are enough.
        device: of the passes over examples.
        shared: True if every process of the default group has batches of its own. Only the model of the first has the
            right values afterwards.
        keep: leave ``net`` unchanged, and compress a copy, which is made when the statistics are gone.
        measured: the result of :func:`measure` for ``compression``; None: it is measured here.
    """
    if compression is None:
        return copy.deepcopy(net) if keep else net, 0.0
    measured = measure(net, compression, task, data, device, shared) if measured is None else measured
    chosen, loss = from_first(partial(compression.choose, net, measured))
    net = copy.deepcopy(net) if keep else net
    compression.apply(net, chosen, measured if is_first() else None)
    del measured
    trim()
    return net, loss


def measure(
    net: PreTrainedModel, compression: Compression, task: Task, data: DataModule | None, device: torch.device,
    shared: bool = False,
) -> dict[str, Tensor]:  # fmt: skip
    """Return the measurements of all matrices of ``net`` for a compression; arguments as :func:`compress`."""
    measured: dict[str, Tensor] = {}
    for names, statistics in collected(net, compression.calibration(net, data), task, device, shared):
        from_first(partial(_keep, compression, net, names, statistics, measured))
        del statistics
    trim()
    return measured


def shape(net: PreTrainedModel, compression: Compression | None, measured: Measured | None = None) -> PreTrainedModel:
    """Return ``net``, which has no values, after a compression, in place.

    Args:
        net: as before the compression.
        compression: what is done; None for nothing.
        measured: of all matrices; None: they matter alike.
    """
    if compression is not None:
        chosen = compression.plan(net) if measured is None else compression.choose(net, measured)[0]
        compression.apply(net, chosen, None)
    return net


def _keep(
    compression: Compression, net: PreTrainedModel, names: Collection[str], statistics: dict[Any, Any],
    measured: dict[str, Tensor],
) -> None:  # fmt: skip
    """Measure some matrices."""
    for _, tensors in compression.measure(net, names, statistics):
        measured |= tensors


class CompressedStage(Stage):
    """A stage that compresses the model of the stage before in one shot, and then trains it.

    Attributes:
        dense_states: whether the states behind the blocks are to equal the dense model's.
        behind: behind how many dense blocks those of each block are, in forward order; None: no block is missing.
    """

    dense_states: ClassVar[bool] = True
    behind: Sequence[int] | None = None
    shrinks_first = repeatable = True

    def plain(self) -> Stage:
        """Return the stage that compresses nothing."""
        return CompressedStage(self.name, self.settings, self.distil)

    @property
    def reads_examples(self) -> bool:
        """Whether statistics over training examples decide."""
        return True

    def compression(self, previous: Path | None) -> Compression | None:
        """Return the compression of the model of the folder ``previous``; None: none.

        Args:
            previous: None for the backbone, or if only shapes are wanted.
        """
        return None

    def reads_labels(self, kind: TaskType) -> bool:
        """Return whether :meth:`compress` needs the labels of the data."""
        return True

    def record(self, data: Any, loss: float) -> dict[str, Any] | None:
        """Return the report's entry on the calibration, with the estimated ``loss``; None for nothing."""
        return None

    def prepared(self, net: PreTrainedModel) -> PreTrainedModel:
        """Return the model that is compressed, in place of the previous stage's."""
        return net

    def check_shapes(self, net: PreTrainedModel) -> None:
        """Refuse settings that cannot work on ``net`` in one shot; only shapes are read."""
        self.check(net)

    def texts(self, data: DataModule) -> Iterable[dict[str, Tensor]]:
        """Return the batches of the examples that calibrate, or of 1,024 training examples without a calibration."""
        return data.calibration_dataloader(min(EXAMPLES, data.train_size()))

    def other_texts(self, data: DataModule, rows: int) -> ResumableLoader:
        """Return the batches of ``rows`` training examples that :meth:`texts` leaves out."""
        return data.rest_dataloader(min(EXAMPLES, data.train_size()), rows)

    def density_left(self, net: PreTrainedModel) -> float:
        """Return the density of the compressed ``net``."""
        return stored_density(net)

    def compress(
        self, net: PreTrainedModel, previous: Path | None, task: Task, data: DataModule | None = None,
        device: torch.device = CPU, shared: bool = False, keep: bool = False,
    ) -> tuple[PreTrainedModel, dict[str, Any] | None]:  # fmt: skip
        """Return ``net`` compressed, and the report's entry on the calibration.

        Args:
            net: of the folder ``previous``, on the CPU, before and afterwards.
            previous: folder of the model; None: the backbone itself.
            task: the task whose loss is differentiated.
            data: gives the examples; None if :attr:`reads_examples` is False.
            device: of the passes over examples.
            shared: True if every process of the default group has batches of its own.
            keep: compress a copy.
        """
        net, loss = compress(net, self.compression(previous), task, data, device, shared=shared, keep=keep)
        return net, self.record(data, loss)

    def outline(self, net: PreTrainedModel) -> PreTrainedModel:
        """Return ``net`` after the steps that need no statistics."""
        return shape(self.prepared(net), self.compression(None))

    def begin(self, net: PreTrainedModel, method: StageContext, previous: Path | None, values: bool) -> PreTrainedModel:
        """Compress ``net``."""
        place = _of_trainer(method) if self.reads_examples and not self.keeps_all else ()
        net, notes = self.compress(self.prepared(net), previous, method.task, *place)
        self.notes = {} if notes is None else {"calibration": notes}
        return net

    def resume(self, net: PreTrainedModel, method: StageContext, structure: Structure) -> PreTrainedModel:
        """Give ``net`` the modules of a checkpoint."""
        return rebuild(self.prepared(net), structure)

    def build(self, method: StageContext, previous: Path | None, structure: Structure | None) -> PreTrainedModel:
        """Compress the model of the stage before, or give it the modules of a checkpoint."""
        net = super().build(method, previous, structure)
        self.achieved = self.density_left(net)
        return net


def _of_trainer(method: StageContext) -> tuple[DataModule, torch.device, bool]:
    """Return the data, the device, and whether every process has batches of its own."""
    trainer = method.trainer
    return trainer.datamodule, trainer.strategy.root_device, trainer.world_size > 1
