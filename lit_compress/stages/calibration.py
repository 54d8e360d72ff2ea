"""A statistic of a model in memory, over examples, as a compression asks for it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lit_compress.calibration.block_losses import least_missed
from lit_compress.calibration.moments import Moments, parts_within
from lit_compress.calibration.sliced_stream import sliced_axes
from lit_compress.calibration.statistics import Statistic, whole
from lit_compress.models.architectures import get_architecture
from lit_compress.models.residual_stream import residual_stream
from lit_compress.models.sites import find_sites
from lit_compress.tasks import TaskType, task_type
from lit_compress.utils.devices import place_within
from lit_compress.utils.progress import note, track
from lit_compress.utils.sharding import from_first

if TYPE_CHECKING:
    from torch.utils.data import DataLoader
    from transformers import PreTrainedModel

    from lit_compress.tasks.records import Task

MOST_BYTES = 768 * 2**20  # of sums of second moments in one pass; those of BERT-base take 673 MiB
Reduce = Callable[[Tensor], object] | None


class OfModel(ABC):
    """Asked of the whole model, in passes of its own; no matrix has sums of its own."""

    labels = None
    sites: tuple[str, ...] = ()

    @abstractmethod
    def answer(self, net: PreTrainedModel, batches: Any, kind: TaskType, reduce: Reduce) -> dict[Any, Any]:
        """Return the answer, the same on every rank.

        Args:
            net: with its task's head, where it runs; it is not changed.
            batches: of the examples.
            kind: of the task.
            reduce: in-place all-reduce (SUM) over ranks with other examples.
        """


@dataclass(frozen=True)
class Axes(OfModel):
    """Principal axes of the hidden states that every site of the residual stream reads, behind the slices before it.

    Attributes:
        widths: number of directions that every site keeps.
    """

    widths: Sequence[int]

    def answer(self, net: PreTrainedModel, batches: Any, kind: TaskType, reduce: Reduce) -> dict[Any, Any]:
        """Return the axes U [d, d] by number of the site."""
        stream, centred = residual_stream(net), not get_architecture(net).rms
        axes = sliced_axes(net, stream, self.widths, batches, kind, centred=centred, reduce=reduce, agree=from_first)
        return dict(enumerate(axes))


@dataclass(frozen=True)
class BlockLosses(OfModel):
    """The blocks whose removal, one after the other, changes the model's answers the least.

    Attributes:
        counts: name of each list of blocks -> how many are kept.
    """

    counts: Mapping[str, int]

    def answer(self, net: PreTrainedModel, batches: Any, kind: TaskType, reduce: Reduce) -> dict[Any, Any]:
        """Return the numbers of the kept blocks by list, and the ``loss`` of the model of them."""
        kept, loss = least_missed(net, self.counts, batches, kind, reduce)
        return kept | {"loss": loss}


@dataclass(frozen=True)
class Calibration:
    """A statistic, and the examples over which it is summed.

    Attributes:
        statistic: to sum.
        batches: of the examples, in the same order whenever they are iterated.
    """

    statistic: Statistic | OfModel
    batches: DataLoader


def collected(
    net: PreTrainedModel,
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
        device: of the passes.
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
            net, of_sites(statistic, part), track(batches, statistic.title, len(batches)), kind, device=place,
            reduce=reduce,
        )  # fmt: skip
        net.to("cpu")  # type: ignore[arg-type]
        yield part, sums
        del sums  # before those of the next pass


def of_sites(statistic: Statistic, names: Sequence[str]) -> Statistic:
    """Return the statistic of some of the matrices."""
    if not isinstance(statistic, Moments):
        return replace(statistic, sites=names)
    table = statistic.table if statistic.table in names else None
    return replace(statistic, sites=[name for name in names if name != table], table=table)
