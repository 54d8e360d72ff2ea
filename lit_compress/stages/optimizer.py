"""AdamW of a stage, and the schedule of its learning rates."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

import torch

from lit_compress.numerics.schedules import linear_warmup_decay
from lit_compress.stages.base import Stage

if TYPE_CHECKING:
    from lightning.pytorch.utilities.types import LRSchedulerConfigType
    from transformers import PreTrainedModel


def build_adamw(stage: Stage, net: PreTrainedModel, precision: str) -> torch.optim.AdamW:
    """Return AdamW for the trained parameters of ``net``: the stage's own groups, and matrices apart from the rest.

    Args:
        stage: its settings hold for all parameters that are not in :meth:`Stage.param_groups`.
        net: the model that is trained, already sharded.
        precision: the Trainer's, e.g. ``bf16-mixed``.
    """
    settings = stage.settings
    own = stage.param_groups(net)
    named = {id(parameter) for group in own for parameter in group["params"]}
    decay, plain = list[torch.nn.Parameter](), list[torch.nn.Parameter]()
    for parameter in net.parameters():
        if parameter.requires_grad and id(parameter) not in named:
            (decay if parameter.ndim > 1 else plain).append(parameter)
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": settings.weight_decay}, {"params": plain, "weight_decay": 0.0}, *own],
        lr=settings.learning_rate,
        # A fused optimizer unscales float16 gradients itself, so that scores would be read scaled.
        fused=None if precision == "16-mixed" else True,
    )
    if precision == "bf16-mixed":
        optimizer._step_supports_amp_scaling = False  # nothing is scaled: Lightning may clip
    return optimizer


def build_schedule(stage: Stage, optimizer: torch.optim.Optimizer) -> LRSchedulerConfigType:
    """Return linear warm-up and decay of the learning rates, as Lightning takes it, for every step.

    Groups with ``constant`` True keep their rate.
    """
    total, warmup = stage.total_steps, ceil(stage.settings.warmup * stage.total_steps)

    def scheduled(step: int) -> float:
        return linear_warmup_decay(step, total, warmup)

    factors = [(lambda step: 1.0) if group.get("constant") else scheduled for group in optimizer.param_groups]
    return {"scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, factors), "interval": "step"}
