"""LoRA: training of low-rank updates of a model's matrices, in place of the model's own parameters.

Hu, Shen, Wallis, Allen-Zhu, Li, Wang, Wang, Chen 2021, "LoRA: Low-Rank Adaptation of Large Language Models",
https://arxiv.org/abs/2106.09685:

    h = W x + (alpha / r) B A x,  B [out, r] = 0 and A [r, in] random at first        (Eq. 3 and section 4.1)

W has neither gradient nor moments; A and B have. When the stage is finished, W + (alpha / r) B A takes the place of W.

Deviations:
- A compressed model has factors where PEFT expects Linears, so the updates are here: each factor has one of its own,
and the model keeps the compression's ranks.
- A matrix that is not larger than its update is trained itself.
- No dropout of its own.
- A head that is new (classes, numbers, spans) is trained, as PEFT's ``modules_to_save`` does. Norms, biases, embeddings
  and the output layer of a language model are not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_map

from lit_compress.models.sites import Model, find_sites
from lit_compress.stages.base import Training
from lit_compress.utils.errors import require

Net = TypeVar("Net", bound=nn.Module)


@dataclass(frozen=True)
class LoRA:
    """How large the low-rank updates of the matrices are.

    Args:
        rank: of an update, r.
        alpha: an update is scaled by alpha / rank.
    """

    rank: int = 16
    alpha: float = 32.0

    def __post_init__(self) -> None:
        require(self, "lora.rank", low=1)
        require(self, "lora.alpha", above=0)


@dataclass(frozen=True)
class Retraining(Training):
    """How a compressed model is trained again.

    Args:
        parameters: trained ones: ``all`` of the model; or ``lora``, low-rank updates of its matrices, which are merged
            at the end: gradients and moments need a fraction of the memory.
        lora: the updates.
    """

    parameters: Literal["all", "lora"] = "all"
    lora: LoRA = LoRA()
    matters: ClassVar[dict[str, Any]] = {"lora": {"parameters": ("lora",)}}


def updates_of(settings: Training) -> LoRA | None:
    """Return the low-rank updates that are trained in place of the parameters; None: these are trained."""
    return settings.lora if isinstance(settings, Retraining) and settings.parameters == "lora" else None


def add_updates(net: Model, settings: Training, seed: int) -> Model:
    """Freeze ``net`` and add low-rank updates to the matrices of its sites, in place, if the stage trains these only.

    The seed is of the random factors.
    """
    if (lora := updates_of(settings)) is None:
        return net
    inside = {id(parameter) for parameter in net.base_model.parameters()}
    output = net.get_output_embeddings()
    inside |= {id(parameter) for parameter in output.parameters()} if output is not None else set()
    for parameter in net.parameters():
        parameter.requires_grad_(id(parameter) not in inside)
    random = torch.Generator().manual_seed(seed)
    for site in find_sites(net):
        module = net.get_submodule(site.name)
        for name, matrix in list(module.named_parameters(recurse=False)):
            if matrix.ndim != 2:
                continue
            rows, columns = matrix.shape
            if lora.rank * (rows + columns) >= rows * columns:
                matrix.requires_grad_(True)
            else:
                update = LowRankUpdate(rows, columns, lora.rank, lora.alpha / lora.rank, random)
                parametrize.register_parametrization(module, name, update.to(matrix.dtype))
    return net


def merge_updates(net: Net) -> Net:
    """Put the updated matrices of ``net`` in the place of matrices and updates; a model without updates stays."""
    for module in list(net.modules()):
        if parametrize.is_parametrized(module):
            for name, updates in list(module.parametrizations.items()):  # type: ignore[union-attr, operator]
                merged = updates[0].merged(updates.original).detach()
                parametrize.remove_parametrizations(module, name, leave_parametrized=False)
                getattr(module, name).data = merged
    return net


class LowRankUpdate(nn.Module):
    """W + scale * up @ down, a parametrization of the matrix W [out, in] of any layer (Hu et al. 2021, Eq. 3).

    A layer need not know of it. ``F.linear(x, W)`` becomes W x + scale * up (down x), so that no gradient of the size
    of W is ever computed; any other function gets the sum.

    Attributes:
        down: [rank, in], random at first.
        up: [out, rank], zeros at first: the layer begins as it is.
    """

    def __init__(self, out_features: int, in_features: int, rank: int, scale: float, random: torch.Generator) -> None:
        super().__init__()
        self.scale = scale
        self.down = nn.Parameter(torch.empty(rank, in_features))
        self.up = nn.Parameter(torch.zeros(out_features, rank))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5), generator=random)

    def forward(self, weight: Tensor) -> Tensor:
        """Return the updated matrix [out, in], which is summed only where it is not used by ``F.linear``."""
        return _Updated(weight, self)

    def merged(self, weight: Tensor) -> Tensor:
        """Return the sum [out, in] of W and its update."""
        return weight + self.scale * (self.up @ self.down)


class _Updated(Tensor):
    """The matrix W of a layer, which functions see with its update; it has no values of its own."""

    weight: Tensor
    update: LowRankUpdate

    @staticmethod
    def __new__(cls, weight: Tensor, update: LowRankUpdate) -> _Updated:
        return torch.Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype, device=weight.device)

    def __init__(self, weight: Tensor, update: LowRankUpdate) -> None:
        self.weight, self.update = weight, update

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def whole(value: Any) -> Any:
            return value.update.merged(value.weight) if isinstance(value, cls) else value

        with torch._C.DisableTorchFunctionSubclass():
            if func is F.linear and [isinstance(value, cls) for value in args[:2]] == [False, True]:
                x, weight, update = args[0], args[1].weight, args[1].update
                low_rank = F.linear(update.scale * F.linear(x, update.down), update.up)
                return func(x, weight, *args[2:], **(kwargs or {})) + low_rank
            return func(*tree_map(whole, args), **tree_map(whole, kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:  # type: ignore[override]
        """Refuse to compute with no values; functions of torch get the sum."""
        raise NotImplementedError(f"{func} of a matrix with an update")
