"""A statistic of a model in memory, over examples, as a compression asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch.utils.data import DataLoader

from lit_compress.calibration.moments import Moments, parts_within
from lit_compress.calibration.statistics import OfModel, Reduce, Statistic, whole
from lit_compress.models.sites import Model, find_sites
from lit_compress.tasks import task_type
from lit_compress.tasks.records import Task
from lit_compress.utils.devices import place_within
from lit_compress.utils.progress import note, track

CALIBRATION_SEED = 42  # of the choice of examples, and of tokens
MOST_BYTES = 768 * 2**20  # of sums of second moments in one pass; those of BERT-base take 673 MiB


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
            net, statistic, track(batches, statistic.title, len(batches)), kind, names=part, device=place,
            reduce=reduce,
        )  # fmt: skip
        net.to("cpu")  # type: ignore[arg-type]
        yield part, sums
        del sums  # before those of the next pass
