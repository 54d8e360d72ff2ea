"""Distillation of a compressed model without labels, and ``factorize``'s training after a compression.

All parameters of the compressed model learn the dense model's logits and hidden states on texts. The loss is the same
as in a stage of ``fit`` with weight 0 of the labels,

    L = L_logits + 10 sum over l of MSE(H^l, H_dense^l) / Var(H_dense^l)

with the same ratio of both terms as the stages of SecondOrder; hidden states are left out if they have other axes.
AdamW, its groups, its schedule, the clipping of gradients and the texts of a step (``data.batch_size``) are also as in
``fit``. Nothing is dropped out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lit_compress.calibration.statistics import TOKENS
from lit_compress.calibration.uses import Batch, frozen, real_rows, row_parts
from lit_compress.numerics.chunked_logits import ChunkedLogits
from lit_compress.numerics.losses import distillation_loss, logits_losses
from lit_compress.stages.base import Stage, Training, build_optimizer, build_schedule
from lit_compress.stages.distillation import Distillation, distillation_terms, hidden_states
from lit_compress.tasks import TaskType
from lit_compress.utils.devices import move
from lit_compress.utils.errors import UserError
from lit_compress.utils.progress import track

if TYPE_CHECKING:
    from torch.utils.data import DataLoader
    from transformers import PreTrainedModel

LayerLoss = Callable[[Sequence[Tensor], Sequence[Tensor], Tensor | None, Distillation], Tensor]
LOSSES = Distillation(alpha=1.0, alpha_layers=10.0, mask_padding=True, relative=True)
RATE = 3e-4  # for 32 texts a step
_SINGLE, _MIXED = ("None", "32", "32-true"), ("bf16", "bf16-mixed")  # as users write them


@dataclass(frozen=True)
class Recovery:
    """How a compressed model is trained without labels.

    Args:
        refine: steps for every block, each by itself (stages/refinement.py); None: none.
        distil: steps for the whole model; None: none.
        texts: file of the texts of ``distil``; None: the training texts.
        rate: learning rate of ``distil``; None: :data:`RATE`.
        precision: of ``distil``, as the Trainer's: ``32-true`` or ``bf16-mixed``; None: ``32-true``.
    """

    refine: int | None = None
    distil: int | None = None
    texts: str | None = None
    rate: float | None = None
    precision: str | None = None

    def __post_init__(self) -> None:
        for option, steps in (("refine", self.refine), ("distil", self.distil)):
            if steps is not None and steps < 1:
                raise UserError(f"--{option}: {steps} is below 1, the smallest valid value; usual: 100")
        for option, value in (("texts", self.texts), ("rate", self.rate)):
            if value is not None and self.distil is None:
                raise UserError(f"--distil_{option}: '{value}' is read by --distil only; add --distil 100")
        if self.distil is not None and str(self.precision) not in (*_SINGLE, *_MIXED):
            raise UserError(
                f"trainer.precision: '{self.precision}' is not known to --distil; valid: 32-true, bf16-mixed"
            )
        if self.rate is not None and not 0 < self.rate < 1:
            raise UserError(f"--distil_rate: {self.rate:g} is not between 0 and 1; usual: {RATE:g}")
        if self.texts is not None and not Path(self.texts).expanduser().is_file():
            raise UserError(f"--distil_texts: '{self.texts}' is no file; give one, e.g. texts.txt with a text a line")

    @property
    def training(self) -> Training:
        """Settings of the stage that ``distil`` is."""
        return Training(learning_rate=RATE if self.rate is None else self.rate)

    @property
    def mixed(self) -> bool:
        """Whether ``distil`` computes in bfloat16 where that is exact enough; parameters stay in float32."""
        return str(self.precision) in _MIXED


NO_RECOVERY = Recovery()


def part_losses(
    kind: TaskType, dense: PreTrainedModel, net: PreTrainedModel, rows: Batch, settings: Distillation,
    layer_loss: LayerLoss,
) -> dict[str, Tensor]:  # fmt: skip
    """Return the terms of the loss on some examples by name; no gradient reaches the ``dense`` model."""
    hidden = settings.alpha_layers > 0
    with torch.no_grad():
        theirs = kind.run(dense, rows, output_hidden_states=hidden)
    ours = kind.run(net, rows, output_hidden_states=hidden)
    logits, targets, counted = kind.logits(ours, rows), kind.logits(theirs, rows), kind.counted(rows)
    if isinstance(logits, ChunkedLogits):  # their labels are the texts themselves
        both = logits_losses(logits, rows["labels"], teacher=targets, temperature=settings.temperature)
        distance = both["distillation"]
    else:
        distance = distillation_loss(logits, targets, kind.loss, settings.temperature, counted)
    losses = {"task": torch.zeros_like(distance), "distillation": distance}
    states = [hidden_states(each) for each in (ours, theirs)] if hidden else [[], []]
    return distillation_terms(
        settings, kind.loss, losses, [states[0]] if hidden else None, states[1], kind.masks(rows),
        layer_loss,
    )  # fmt: skip


def distil(
    dense: PreTrainedModel, net: PreTrainedModel, kind: TaskType, texts: DataLoader, recovery: Recovery,
    device: torch.device, layer_loss: LayerLoss | None,
) -> dict[str, Any]:  # fmt: skip
    """Train all parameters of ``net``, in place, to give the outputs of ``dense``; return the report's entry.

    Args:
        dense: the model that was compressed; both are on the CPU, before and afterwards.
        net: the compressed one.
        kind: of the task.
        texts: batches, in a new order whenever they are iterated; labels in them are not read. Texts of a language
            model go through it in parts of 512 tokens.
        recovery: steps of AdamW, their learning rate and precision.
        device: of the passes.
        layer_loss: distance between the hidden states of both models (Stage.layer_loss); None: they have other axes.

    Raises:
        UserError: the model reads labels, and the texts have none.
    """
    start, read, settings, steps = time.perf_counter(), 0, LOSSES, recovery.distil
    assert steps is not None, "no steps"
    stage, losses = Stage("distil", recovery.training), list[Tensor]()
    if layer_loss is None:
        settings, layer_loss = replace(settings, alpha_layers=0.0), stage.layer_loss
    move(dense, device).eval()
    move(net, device).eval()
    kind.freeze(net)
    stage.set_total_steps(steps)
    precision = "bf16-mixed" if recovery.mixed else "32-true"
    optimizer = build_optimizer(stage, net, precision)
    schedule: Any = build_schedule(stage, optimizer)["scheduler"]
    with frozen(dense), torch.enable_grad():
        for batch in track(islice(_endless(texts), steps), "distil", steps):
            rows = real_rows(kind, batch, device, None, "give --distil texts with them")
            count = len(rows["index"])
            read += count
            loss = torch.zeros((), device=device)
            for part in row_parts(kind, rows, TOKENS) if kind.over_vocabulary else [rows]:
                share = len(part["index"]) / count
                with torch.autocast(device.type, torch.bfloat16, enabled=recovery.mixed):
                    terms = part_losses(kind, dense, net, part, settings, layer_loss)
                one = share * torch.stack([*terms.values()]).sum()
                one.backward()
                loss += one.detach()
            losses.append(loss)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    move(dense, "cpu")
    move(net, "cpu")
    return {
        "steps": steps, "texts": read, "learning_rate": stage.settings.learning_rate, "precision": precision,
        "seconds": round(time.perf_counter() - start, 2), "loss": [float(losses[0]), float(losses[-1])],
    }  # fmt: skip


def _endless(texts: DataLoader) -> Iterator[Batch]:
    while True:
        yield from texts
