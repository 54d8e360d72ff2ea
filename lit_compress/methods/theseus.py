"""BERT-of-Theseus: modules of several blocks are replaced by one block each, at random and more and more often.

Canwen Xu, Wangchunshu Zhou, Tao Ge, Furu Wei, Ming Zhou, "BERT-of-Theseus: Compressing BERT by Progressive Module
Replacing", EMNLP 2020, https://arxiv.org/abs/2002.02925; open points follow
https://github.com/JetRunner/BERT-of-Theseus. Predecessor prd_i: k blocks of the fine-tuned model; successor scc_i: one.

    replacing    r_i ~ Bernoulli(p) per module and forward;  y_i+1 = r_i scc_i(y_i) + (1 - r_i) prd_i(y_i)
    training     only the successors learn, from the task's loss alone; predecessors, embeddings and head are frozen
    curriculum   p_t = min(1, k t + b), linear in the steps; from p = 1 on the successors are fine-tuned together
    start        the successors are copies of the first blocks of the fine-tuned model

The result is an ordinary model of fewer blocks, with embeddings and head of the fine-tuned one.

Deviations and choices where the paper is silent:
    - The slope is given as the steps in which p rises to 1 (``replace.rise``): k = (1 - b) / rise.
    - A successor that has no part in a step gets a zero gradient, which AdamW's averages count, on one device as on
      several. All micro-batches of a step have the same coins.
    - The evaluated model has the successors, at every p, as in their program. Each epoch may be the best.
    - Any family whose blocks are alike; a decoder that reads an encoder is divided as the encoder is.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from lit_compress.methods.base import Distillation, Untaught
from lit_compress.models.shorten import blocks_left, check_blocks, shorten, stack_lengths
from lit_compress.models.sites import Model, module_at
from lit_compress.models.surgery import Structure, replace
from lit_compress.numerics.schedules import linear_to
from lit_compress.stages.base import Limits, Stage, Training, require_steps
from lit_compress.stages.micro_batches import MicroBatches
from lit_compress.utils.errors import UserError


class ReplacedBlock(nn.Module):
    """A block of a host model that gives way to its predecessors in some forwards; in evaluation mode it never does.

    Attributes:
        predecessors: frozen blocks, one after the other, whose place the block takes.
        replaces: the coin of this forward, True for the block itself.
    """

    predecessors: nn.ModuleList
    replaces: bool

    @classmethod
    def adopt(cls, block: nn.Module, predecessors: Sequence[nn.Module]) -> None:
        """Change the class of ``block``, a module of the host model, in place; its attributes stay."""
        block.__class__ = type(f"Replaced{type(block).__name__}", (cls, type(block)), {})
        block.predecessors = nn.ModuleList(predecessors).requires_grad_(False)
        block.replaces = True  # type: ignore[assignment]

    def release(self) -> None:
        """Give the block its own class back, without predecessors."""
        del self.predecessors, self.replaces
        self.__class__ = type(self).__mro__[2]

    def own_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the block, without its predecessors' parameters."""
        return [p for name, p in self.named_parameters() if not name.startswith("predecessors.")]

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Map hidden states as a block of the host model does."""
        if self.replaces or not self.training:
            return super().forward(hidden_states, *args, **kwargs)
        from transformers import Cache

        # a cache has no place for so many blocks, and training reads none
        args = tuple(None if isinstance(value, Cache) else value for value in args)
        kwargs = {name: None if isinstance(value, Cache) else value for name, value in kwargs.items()}
        for block in self.predecessors:
            output = block(hidden_states, *args, **kwargs)
            hidden_states = output[0] if isinstance(output, tuple) else output
        # The block's parameters must get a gradient (zero) in every step: DDP waits for it, and AdamW would otherwise
        # skip them on one device but not on two.
        zero = 0.0 * torch.stack([p.reshape(-1)[0] for p in self.own_parameters()]).sum()
        hidden_states = hidden_states + zero.to(hidden_states.dtype)
        return (hidden_states, *output[1:]) if isinstance(output, tuple) else hidden_states


@dataclass(frozen=True)
class Replacing(Training):
    """How often successors replace their predecessors, and how they are trained.

    Args:
        start: b, the first probability that a module is replaced.
        rise: steps in which the probability rises to 1, below 1 a fraction of all optimizer steps, else their number;
            in the others the successors are fine-tuned.
    """

    start: float = 0.3
    rise: float = 0.5
    limits: ClassVar[Limits] = {"replace.start": {"low": 0, "high": 1}}

    def __post_init__(self) -> None:
        super().__post_init__()
        require_steps("replace.rise", self.rise)


class BlockReplacing(Stage):
    """The stage ``replace``: train successors in the place of their predecessors, then alone.

    ``within``: take fewer blocks where no number of them has the density.
    """

    settings: Replacing
    density: float

    def __init__(self, settings: Replacing, density: float, distillation: Distillation, within: bool = False) -> None:
        super().__init__("replace", settings)
        self.density, self.distillation, self.within = density, distillation, within

    def left(self, net: Model) -> dict[str, int]:
        """Return name of each list of blocks of ``net`` -> number left; a UserError if none has the density."""
        lengths = stack_lengths(net).items()
        return {path: blocks_left(total, self.density, self.within) for path, (_, total) in lengths}

    def check(self, net: Model) -> None:
        """Refuse blocks that cannot stand in for each other, a number that does not divide them, and matched layers."""
        check_blocks(net)
        self.left(net)
        if self.distillation.alpha_layers > 0:
            raise UserError(
                f"distillation.alpha_layers: {self.distillation.alpha_layers:g} compares layers with the teacher's, "
                "which has more; valid: 0"
            )

    def outline(self, net: Model) -> Model:
        """Return ``net`` with fewer blocks."""
        shorten(net, {path: range(count) for path, count in self.left(net).items()})
        return net

    def begin(self, net: Model, method: MicroBatches, structure: Structure | None) -> Model:
        """Put copies of the first blocks of the fine-tuned model in the place of modules; freeze the rest."""
        left = self.left(net)
        shares = {left[path] / total for path, (_, total) in stack_lengths(net).items()}
        if len(shares) == 1:  # else lists differ in it
            self.density = shares.pop()
        predecessors = {path: list(module_at(net, path, nn.ModuleList)) for path in left}
        shorten(net, {path: range(count) for path, count in left.items()})
        net.requires_grad_(False)
        for path, blocks in predecessors.items():
            width = len(blocks) // left[path]
            for i, block in enumerate(blocks[: left[path]]):
                successor = copy.deepcopy(block, {id(net.config): net.config}).requires_grad_(True)
                ReplacedBlock.adopt(successor, blocks[i * width : (i + 1) * width])
                replace(net, f"{path}.{i}", successor)
        return net

    def attach(self, net: Model) -> None:
        """Find the blocks for which a coin is thrown in every forward."""
        self._blocks = [cast(Any, m) for m in net.modules() if isinstance(m, ReplacedBlock)]

    def set_total_steps(self, total_steps: int) -> None:
        """Turn the fraction of the rise into steps; a UserError if it does not end before the stage."""
        super().set_total_steps(total_steps)
        rise = self.settings.rise
        self._rise = round(rise * total_steps) if rise < 1 else round(rise)
        if self._rise >= total_steps > 0:
            raise UserError(
                f"replace.rise: {self._rise} steps leave none of the {total_steps} of the stage for fine-tuning; "
                f"nearest valid value {total_steps - 1}, usual: 0.5"
            )

    def p(self, step: int) -> float:
        """Return the probability of a replacement at ``step``."""
        return linear_to(step, 0, self._rise, self.settings.start, 1.0)

    def losses(self, method: MicroBatches, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Throw the coins of this forward, the same on every rank; return the loss terms."""
        generator = torch.Generator().manual_seed(method.step_seed)
        coins = torch.rand(len(self._blocks), generator=generator) < self.p(method.trainer.global_step)
        for block, coin in zip(self._blocks, coins.tolist(), strict=True):
            block.replaces = coin
        return super().losses(method, batch)

    def status(self, net: Model, step: int) -> dict[str, float]:
        """Log the density, which does not change in this stage, and p."""
        return {"density": self.density, "target": self.density, "p": self.p(step)}

    def deploy(self, net: Model) -> None:
        """Drop the predecessors."""
        for block in self._blocks:
            block.release()


class Theseus(Untaught):
    """Replace modules of several blocks by one block each, at random; the export is an ordinary model of fewer blocks.

    Args:
        density: fraction of the blocks that is left: their number must divide the number of all.
        replace: the schedule of the replacing, and the training of the successors.
    """

    usual_density = 0.5
    replace: Replacing = Replacing(epochs=15, warmup=0.0)

    def own_stages(self) -> list[Stage]:
        """Return replace."""
        return [BlockReplacing(self.replace, self.density, self.distillation, self.budget is not None)]
