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

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

import torch
from torch import nn
from torch.nn.utils import parametrize

from lit_compress.layers.training.low_rank_update import LowRankUpdate
from lit_compress.models.record import parts_of
from lit_compress.models.sites import find_sites
from lit_compress.stages.base import Training
from lit_compress.utils.errors import UserError, require

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Net = TypeVar("Net", bound=nn.Module)

ROLES = ("q", "k", "v", "o", "gate", "up", "down")


@dataclass(frozen=True)
class LoRA:
    """Which matrices get low-rank updates, and how large these are.

    Args:
        rank: of an update, r.
        alpha: an update is scaled by alpha / rank.
        targets: the matrices that get one: q, k, v, o, gate, up, down; None: all of them. One that holds several, as
            the single Linear of q, k and v, gets one if any of them is named.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: list[str] | None = None

    def __post_init__(self) -> None:
        require(self, "lora.rank", low=1)
        require(self, "lora.alpha", above=0)
        for role in self.targets or ():
            if role not in ROLES:
                raise UserError(f"lora.targets: there is no '{role}'; valid: {', '.join(ROLES)}")


@dataclass(frozen=True)
class Retraining(Training):
    """How a compressed model is trained again.

    Args:
        parameters: trained ones: ``all`` of the model; or ``lora``, low-rank updates of its matrices, which are merged
            at the end: gradients and moments need a fraction of the memory.
        lora: the updates.
    """

    offers_lora: ClassVar[bool] = True
    parameters: Literal["all", "lora"] = "all"
    lora: LoRA = LoRA()

    @property
    def updates(self) -> LoRA | None:
        """The low-rank updates that are trained in place of the parameters; None: these are trained."""
        return self.lora if self.parameters == "lora" else None


def add_updates(net: PreTrainedModel, settings: Training, seed: int) -> PreTrainedModel:
    """Freeze ``net`` and add low-rank updates to the matrices of its sites, if the stage trains these only.

    Args:
        net: the model that a stage has built; changed in place.
        settings: of the stage.
        seed: of the random factors.

    Raises:
        UserError: no matrix of the model has one of the roles that are asked for.
    """
    if (lora := settings.updates) is None:
        return net
    inside = {id(parameter) for parameter in net.base_model.parameters()}
    output = net.get_output_embeddings()
    inside |= {id(parameter) for parameter in output.parameters()} if output is not None else set()
    for parameter in net.parameters():
        parameter.requires_grad_(id(parameter) not in inside)
    sites = [site for site in find_sites(net) if not lora.targets or {*parts_of(site.role)} & {*lora.targets}]
    if not sites:
        raise UserError(f"lora.targets: {net.config.model_type} has no {', '.join(lora.targets or ())}")
    random = torch.Generator().manual_seed(seed)
    for site in sites:
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
