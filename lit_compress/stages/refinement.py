"""Refinement of a compressed model without labels: block by block, each learns to give the dense block's outputs.

Behind compressed blocks a block f' reads x' where the dense model's block f reads x. From the first block to the last,
the parameters of f' are trained so that

    E(f') = sum over tokens t of |f'(x')_t - f(x)_t|^2 / |f(x)_t|^2     ->  min

over all tokens of some texts, without padding. So a block also repairs the losses of the blocks before it. That is the
idea of AA-SVD (https://arxiv.org/abs/2604.02119), which trains compressed blocks against dense outputs. The rest is
chosen here:

    - Where the dense blocks behind f were removed, f(x) is what the last of them gives, so f' also learns their work.
    - A token's error is divided by the length of its own target. The norm that reads a hidden state also divides by
      that length; without it a decoder's few tokens with huge states would dominate the loss.
    - In a decoder the error of a text's first token counts :data:`FIRST` times. Its huge state is where all heads look
      that look for nothing (Xiao et al. 2023, https://arxiv.org/abs/2309.17453). It follows from the token alone, and
      few texts have few first tokens. By hand, on SmolLM2-135M at 0.8: 4 % of 300 tokens had no such state as the first
      before refinement, 5 % after four blocks with equal weights, 0 with 16 or 64. Texts that began so lost a nat.
    - AdamW without weight decay. A parameter's rate is :data:`RATE` times the root mean square of its values: factors
      of one matrix can differ in scale by orders of magnitude, and one rate for all is too large for some of them.
      0.003, 0.01, 0.03 and 0.1 were tried (MiniLM on SST-2, K-FAC components at 0.10, 100 steps): the divergence from
      the dense model on 1,024 held-out training rows is 0.0588, 0.0532, 0.0540 and 0.0795, and 0.0841 without.
    - The rate rises over the first tenth of the steps and then falls linearly to 0. A step has one part of the texts,
      up to 512 tokens, as the calibration has. All parts are taken before one is taken again, in an order of its own
      for every block. Nothing is dropped out.
    - A block whose error over all texts is not smaller afterwards stays as it was.
    - ``factorize`` keeps the model before if its dev metric is better (cli/factorizing.py).

One dense and one compressed block are in memory, the hidden states before and behind them are on disk. The same
function walks over a model in memory (:func:`refine_net`) and over one whose blocks are read one by one
(cli/by_block.py). A killed process continues with the block it was at.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lit_compress.calibration.statistics import Batch, frozen
from lit_compress.calibration.walk import Walk
from lit_compress.models.architectures import get_architecture
from lit_compress.models.block_net import check_by_block, one_by_one
from lit_compress.models.sites import Model
from lit_compress.numerics.schedules import linear_warmup_decay
from lit_compress.tasks import TaskType
from lit_compress.utils.errors import UserError
from lit_compress.utils.files import read_json, remove, write_json
from lit_compress.utils.progress import track

RATE = 1e-2  # share of a parameter's root mean square that a step changes at most, about
WARMUP = 0.1  # share of the steps
FIRST = 16  # tokens as which a text's first one counts in a decoder
OF_TRAINING = 4  # times the bytes of a block: gradients, two moments, and the values before


def token_errors(outputs: Tensor, targets: Tensor, mask: Tensor, first: int = 1) -> Tensor:
    """Return the mean over tokens of |output - target|^2 / |target|^2, 0-dim.

    Args:
        outputs: [b, length, width].
        targets: same shape; no gradient reaches them.
        mask: [b, length], 0 at padding, which does not count.
        first: tokens as which the first one of a text counts.
    """
    counts = counted(mask, first)
    targets = targets.detach().float()
    sizes = targets.square().sum(-1).clamp_min(torch.finfo(torch.float32).tiny)
    errors = (outputs.float() - targets).square().sum(-1) / sizes
    return (errors.masked_fill(counts == 0, 0) * counts).sum() / counts.sum()


def counted(mask: Tensor, first: int) -> Tensor:
    """Return as how many tokens each counts, int64 [b, length]: padding not, the first one of a text as ``first``."""
    real = (mask != 0).long()
    return real * torch.where(real.cumsum(1) == 1, first, 1)


def rates(parameters: Sequence[nn.Parameter], rate: float) -> list[dict[str, Any]]:
    """Return a group of AdamW for every parameter, whose learning rate is ``rate`` times its root mean square.

    A parameter of zeros has the smallest of the others.
    """
    sizes = [float(value.detach().square().mean().sqrt()) for value in parameters]
    least = min(filter(None, sizes), default=1.0)
    return [{"params": [value], "lr": rate * (size or least)} for value, size in zip(parameters, sizes, strict=True)]


class Refinement:
    """Trains the blocks of a compressed model, one after the other from the first.

    Args:
        dense: over the examples in the dense model, with a folder of its own.
        own: the same in the compressed model. Its model gives inputs, masks and positions, and may be the dense one if
            both are alike outside the blocks.
        steps: of AdamW, for every block.
        behind: behind how many dense blocks the states are that each block learns; None: as many as own ones.
    """

    def __init__(self, dense: Walk, own: Walk, steps: int, behind: Sequence[int] | None = None) -> None:
        self.dense, self.own, self.steps = dense, own, steps
        self.behind = behind or range(1, len(own.net) + 1)
        self.first = FIRST if get_architecture(own.net.net).cached else 1

    def __call__(self, number: int, block: nn.Module) -> None:
        """Train a compressed block, on the CPU before and afterwards, and write the next one's input."""
        start = time.perf_counter()
        remove(self.own.path("states", number - 1))
        self.dense.reach(self.behind[number])
        block.to(self.own.net.device)
        with torch.no_grad():
            before = self._mean([error for _, error in self._outputs(number, block)])
        values = {name: value.detach().clone() for name, value in block.named_parameters()}
        self._train(number, block)
        after = self._write(number, block)
        if not after < before:
            block.load_state_dict(values, strict=False)
            after = self._write(number, block)
        write_json(self._told(number), {"before": before, "after": after, "seconds": time.perf_counter() - start})
        block.to("cpu")

    def told(self) -> dict[str, Any]:
        """Return the report's entry: steps, texts, tokens, seconds, and every block's error, in forward order."""
        errors = [read_json("--refine", self._told(i), dict) for i in range(len(self.own.net))]
        tokens = int(self._tokens().sum())
        return {
            "steps": self.steps, "texts": sum(len(rows["index"]) for rows in self.own.parts), "tokens": tokens,
            "seconds": round(sum(each["seconds"] for each in errors), 2),
            "before": [each["before"] for each in errors], "after": [each["after"] for each in errors],
        }  # fmt: skip

    def _told(self, number: int) -> Path:
        return self.own.folder / f"refined-{number:05}.json"

    def _outputs(
        self, number: int, block: nn.Module, order: Sequence[int] | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the block's outputs for some parts of the examples, by default all, and their errors."""
        targets = self.dense.states(self.behind[number], order)
        for (rows, hidden), target in zip(self.own.pairs(number, order), targets, strict=True):
            assert target is not None
            output = self.own.step(number, rows, hidden, block)
            yield output, token_errors(output, target.to(output.device), self.own.task.masks(rows)[0], self.first)

    def _write(self, number: int, block: nn.Module) -> float:
        """Write the block's outputs; return their error."""
        errors = list[Tensor]()

        def outputs() -> Iterator[Tensor]:
            for output, error in self._outputs(number, block):
                errors.append(error)
                yield output

        self.own.forward(number, outputs())
        return self._mean(errors)

    def _mean(self, errors: Sequence[Tensor]) -> float:
        """Return the mean over all tokens of parts, from the means over the tokens of each."""
        tokens = self._tokens(self.first)
        return float((torch.stack(list(errors)).cpu().double() * tokens).sum() / tokens.sum())

    def _tokens(self, first: int = 1) -> Tensor:
        return torch.stack([counted(self.own.task.masks(rows)[0], first).sum() for rows in self.own.parts]).double()

    def _train(self, number: int, block: nn.Module) -> None:
        parameters = [value for value in block.parameters() if value.is_floating_point()]
        if not parameters:  # both of its sub-layers were removed
            return
        optimizer = torch.optim.AdamW(rates(parameters, RATE), weight_decay=0.0)
        warmup, generator = math.ceil(WARMUP * self.steps), torch.Generator().manual_seed(number)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: linear_warmup_decay(step + 1, self.steps + 1, warmup)
        )
        order = list[int]()
        while len(order) < self.steps:
            order += torch.randperm(len(self.own.parts), generator=generator).tolist()
        block.requires_grad_(True)
        with torch.enable_grad():
            for _, error in self._outputs(number, block, order[: self.steps]):
                optimizer.zero_grad()
                error.backward()
                optimizer.step()
                schedule.step()
        block.requires_grad_(False)


def check_refinement(net: Model, dense_states: bool, method: str) -> None:
    """Refuse a refinement that cannot work for the dense ``net``, and for a method; only shapes are read."""
    if not dense_states:
        raise UserError(f"--refine: {method} leaves no dense hidden states behind its blocks; nearest: SecondOrder")
    check_by_block(net, "--refine")


def refine_net(
    dense: Model, net: Model, kind: TaskType, parts: Sequence[Batch], steps: int, folder: Path,
    device: torch.device, behind: Sequence[int] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Refine the compressed ``net`` in place, and return the report's entry.

    Args:
        dense: the model that was compressed; both are on the CPU, before and afterwards.
        parts: of the examples, as :func:`~lit_compress.calibration.walk.calibration_parts` returns them.

    Raises:
        UserError: the states do not fit on the disk.
    """
    with frozen(dense), frozen(net), one_by_one(dense, device) as theirs, one_by_one(net, device) as ours:
        before, own = Walk(theirs, kind, parts, folder / "dense"), Walk(ours, kind, parts, folder / "refined")
        refinement = Refinement(before, own, steps, behind)
        for i in track(range(len(ours)), "refine", len(ours)):
            refinement(i, ours.blocks[i])
        return refinement.told()
