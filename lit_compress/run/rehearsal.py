"""How long the stages of a run will take, from a few measured steps on a model of the backbone's shapes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from statistics import median
from typing import TYPE_CHECKING

import torch

from lit_compress.models.accounting import dense_site_params
from lit_compress.models.backbones import empty_net, load_config
from lit_compress.numerics.losses import task_loss
from lit_compress.run.runner import Components, make_trainer
from lit_compress.run.threads import use_threads
from lit_compress.tasks import task_type
from lit_compress.utils.devices import synchronize, to_device
from lit_compress.utils.progress import track

if TYPE_CHECKING:
    from lit_compress.run.plan import RunPlan

BATCHES = 4  # the first warms caches up
ENOUGH = 30.0  # seconds after which no further batch is measured


@dataclass(frozen=True)
class Pace:
    """Seconds of one batch of training examples in the dense model.

    Attributes:
        step: forward, backward and AdamW.
        forward: a forward without gradients, as in the teacher and in validation.
    """

    step: float
    forward: float


def measure_pace(parts: Components) -> Pace:
    """Time a few training batches of a model with random weights and the backbone's shapes, on the Trainer's device."""
    method, data = parts.method, parts.data
    device = make_trainer(**parts.trainer | {"logger": False, "enable_checkpointing": False}).strategy.root_device
    net = empty_net(load_config(method.backbone, method.task, sites=method.sites))
    use_threads(dense_site_params(net))
    net, kind = net.to(device).train(), task_type(method.task)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.0)

    def forward() -> torch.Tensor:
        return task_loss(kind.logits(kind.run(net, batch), batch), batch["labels"], kind.loss)

    def step() -> None:
        forward().backward()
        optimizer.step()
        optimizer.zero_grad()

    steps, forwards, start = [], [], time.perf_counter()
    for loaded in track(islice(data.train_dataloader(), BATCHES), "measure steps", BATCHES):
        batch = to_device(loaded, device)
        steps.append(_seconds(step, device))
        with torch.no_grad():
            forwards.append(_seconds(forward, device))
        if time.perf_counter() - start > ENOUGH:
            break
    warm = slice(1 if len(steps) > 1 else 0, None)
    return Pace(median(steps[warm]), median(forwards[warm]))


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


def stage_seconds(parts: Components, plan: RunPlan, pace: Pace) -> Iterator[float]:
    """Yield about how many seconds each stage of ``plan`` will take: steps, the teacher's forwards, validation.

    All steps are assumed to be as long as the dense model's; factorizations and calibrations do not count.
    """
    method, data = parts.method, parts.data
    share = data.eval_rows / data.batch_size
    validation = sum(len(loader) for loader in data.val_dataloader()) * share * pace.forward
    for stage, planned in zip(method.stages(), plan.stages, strict=True):
        taught = stage.distil and method.distillation.on and stage.name != "dense"
        batch = stage.forwards * pace.step + (pace.forward if taught else 0.0)
        yield planned.steps * data.accumulate * batch + (planned.epochs + 1) * validation
