"""K-prune (arXiv 2308.03449): heads and neurons are removed sub-layer by sub-layer, without training.

Written from the paper, for BERT's layout. A unit i (a head or a neuron) of a sub-layer has a mask m_i = 1. Removing it
loses

    P_i = (g^2 / 2) sum over x and y of p(y | x) (d log p(y | x) / d m_i)^2     predictive knowledge
    R_i = sum over tokens of |W_i a_i|^2                                        representational knowledge

P_i is the second-order estimate of g^2 KL between the outputs at temperature g, for regression half the squared change
of the output; W_i are the columns of the sub-layer's last matrix that read the unit's values a_i. The score of a unit
is (P_i + lambda R_i) / (weights of the unit), that of a head times mu. From the first sub-layer to the last:

    1. Scores of the units of this sub-layer and of all above it, in the model as it is now.
    2. One threshold for all of them: as many units of the highest scores as fit in what is left of the budget.
    3. The units of this sub-layer below the threshold go. The last matrix and its bias are those with the least
       squared distance between this model's residual sum behind the sub-layer and the dense model's.

The paper's budget is of FLOPs; here it is of the blocks' matrix weights, as for all other rows.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lit_compress.calibration.statistics import frozen, hooked, real_rows, token_places, tokens_at
from lit_compress.models.cut import cut_units
from lit_compress.models.sites import sublayers
from lit_compress.stages.units import unit_inputs


@dataclass(frozen=True)
class Settings:
    """The factors of the scores.

    Attributes:
        representation: lambda, of the representational knowledge: the best of 1e-5, 2.5e-4 and 1 on STS-B, held out.
        heads: mu, of the scores of heads.
        temperature: g, of the outputs.
    """

    representation: float = 1e-5
    heads: float = 1.0
    temperature: float = 2.0


# ------------------------------------------------------------------------------------------- pure functions


def predictive(logits: Tensor, masks: Sequence[Tensor], temperature: float) -> list[Tensor]:
    """Return P_i of every unit, float64 [units] for each of ``masks``.

    Args:
        logits: [b, classes], of which one class is a regression.
        masks: [b, units] each: ones, a row of its own for every example, from which ``logits`` were computed.
        temperature: g.
    """
    if logits.shape[1] == 1:
        terms = [(logits[:, 0], torch.ones_like(logits[:, 0]))]
    else:
        log_p = (logits / temperature).log_softmax(1)
        weights = log_p.detach().exp() * temperature**2
        terms = [(log_p[:, y], weights[:, y]) for y in range(logits.shape[1])]
    found = [torch.zeros(mask.shape[1], dtype=torch.float64) for mask in masks]
    for number, (outputs, weights) in enumerate(terms):
        gradients = torch.autograd.grad(outputs.sum(), masks, retain_graph=number + 1 < len(terms))
        for total, gradient in zip(found, gradients, strict=True):
            total += (weights[:, None] * gradient.square()).sum(0).double().cpu() / 2
    return found


def representational(weight: Tensor, inputs: Tensor, width: int) -> Tensor:
    """Return R_i of every unit, [units].

    Args:
        weight: [n, units * width], the last matrix.
        inputs: [tokens, units * width], its inputs.
        width: inputs of a unit.
    """
    if width == 1:
        return weight.square().sum(0) * inputs.square().sum(0)
    columns, values = weight.unflatten(1, (-1, width)), inputs.unflatten(1, (-1, width))
    moments = torch.einsum("tui,tuj->uij", values, values)
    return torch.einsum("nui,uij,nuj->u", columns, moments, columns)


def highest_within(scores: Tensor, costs: Tensor, budget: float) -> Tensor:
    """Return which units are above the lowest threshold that meets the budget, bool [units].

    Args:
        scores: [units].
        costs: [units], of keeping a unit.
        budget: of all kept ones.
    """
    order = scores.argsort(descending=True, stable=True)
    kept = torch.zeros(len(scores), dtype=torch.bool)
    kept[order[costs.double()[order].cumsum(0) <= budget]] = True
    return kept


def fitted(gram: Tensor, cross: Tensor, columns: Tensor) -> Tensor:
    """Return the matrix with the least squared error that reads only some of its inputs, [columns, n].

    Args:
        gram: sum over tokens of a a^T, float64 [m, m].
        cross: sum over tokens of a y^T, float64 [m, n].
        columns: the inputs that are read, int64.
    """
    part = gram[columns][:, columns]
    part = part + 1e-8 * part.diagonal().mean() * torch.eye(len(part), dtype=part.dtype)
    return torch.linalg.solve(part, cross[columns])


# ------------------------------------------------------------------------------------------- the method


@contextmanager
def masked(net: Any, masks: dict[str, Tensor], widths: dict[str, int]) -> Iterator[None]:
    """Multiply the inputs of last matrices by the masks [b, units] of their units."""

    def hook(name: str) -> Any:
        return lambda _, args: (args[0] * masks[name].repeat_interleave(widths[name], 1)[:, None],)

    handles = [net.get_submodule(name).register_forward_pre_hook(hook(name)) for name in masks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def kprune(dense: Any, batches: Sequence[Any], kind: Any, density: float, settings: Settings) -> Any:
    """Return a smaller copy of ``dense``, which is on the CPU.

    Args:
        dense: an encoder of BERT's layout with a classifier or a regression.
        batches: of the calibration texts.
        kind: of the task.
        density: fraction of the blocks' matrix weights that is kept at most.
        settings: of the scores.
    """
    net, parts = copy.deepcopy(dense).eval(), sublayers(dense)
    prices = {part.last: part.price(dense) for part in parts}
    rows = [real_rows(kind, batch, dense.device, None) for batch in batches]
    places = [token_places(kind.masks(row)[0]) for row in rows]
    widths = {part.last: unit_inputs(dense, part).shape[1] for part in parts}
    budget = density * sum(part.weights(dense) for part in parts)
    with frozen(dense), frozen(net):
        targets = residual_sums(dense, kind, rows, places, [str(part.norm) for part in parts])
        for number, part in enumerate(parts):
            above = [other.last for other in parts[number:]]
            target = targets.pop(str(part.norm))
            scores, gram, cross = measured(net, kind, rows, places, target, part, above, widths, settings)
            heads = torch.cat([torch.full((len(scores[n]),), float(widths[n] > 1)) for n in above])
            costs = torch.cat([torch.full((len(scores[n]),), float(prices[n])) for n in above])
            values = torch.cat([scores[name] for name in above]) / costs * torch.where(heads > 0, settings.heads, 1.0)
            kept = highest_within(values, costs, budget)[: len(scores[part.last])]
            budget -= float(kept.sum()) * prices[part.last]
            columns = kept.repeat_interleave(widths[part.last]).nonzero()[:, 0]
            layer = net.get_submodule(part.last)
            solved = fitted(gram, cross, torch.cat([columns, torch.tensor([len(gram) - 1])]))
            layer.weight.zero_()
            layer.weight[:, columns] = solved[:-1].T.to(layer.weight)
            layer.bias.copy_(solved[-1])
            if not kept.all():
                cut_units(net, {part.last: kept}, whole=True)
    return net


@torch.no_grad()
def residual_sums(net: Any, kind: Any, rows: Any, places: Any, norms: Sequence[str]) -> dict[str, list[Tensor]]:
    """Return the inputs [tokens, d] of the norms behind the sub-layers, for every batch."""
    found: dict[str, list[Tensor]] = {name: [] for name in norms}
    for row, place in zip(rows, places, strict=True):

        def keep(name: str, x: Tensor, _: Tensor, place: Any = place) -> None:
            found[name].append(tokens_at(x, place))

        with hooked({name: net.get_submodule(name) for name in norms}, keep):
            kind.run(net, row)
    return found


def measured(
    net: Any, kind: Any, rows: Any, places: Any, targets: Sequence[Tensor], part: Any, above: Sequence[str],
    widths: dict[str, int], settings: Settings,
) -> tuple[dict[str, Tensor], Tensor, Tensor]:  # fmt: skip
    """Return the scores of units by last matrix, and both sums of :func:`fitted` for the sub-layer ``part``.

    The last input of the sums is 1 everywhere: its row is the bias.
    """
    scores: dict[str, Any] = {name: 0.0 for name in above}
    gram: Any = 0.0
    cross: Any = 0.0
    for row, place, target in zip(rows, places, targets, strict=True):
        seen: dict[str, tuple[Tensor, Tensor]] = {}
        units = {name: net.get_submodule(name).in_features // widths[name] for name in above}
        masks = {name: torch.ones(len(row["index"]), count, requires_grad=True) for name, count in units.items()}

        def keep(name: str, x: Tensor, output: Tensor, seen: Any = seen, place: Any = place) -> None:
            seen[name] = (tokens_at(x.detach(), place), tokens_at(output.detach(), place))

        watched = {name: net.get_submodule(name) for name in (*above, part.norm)}
        with torch.enable_grad(), masked(net, masks, widths), hooked(watched, keep):
            logits = kind.logits(kind.run(net, row), row)
            found = predictive(logits.view(len(logits), -1), list(masks.values()), settings.temperature)
        for name, knowledge in zip(above, found, strict=True):
            kept = representational(net.get_submodule(name).weight, seen[name][0], widths[name])
            scores[name] = scores[name] + knowledge + settings.representation * kept.double()
        inputs = torch.cat([seen[part.last][0], torch.ones(len(target), 1)], 1)
        stream = seen[part.norm][0] - seen[part.last][1]
        gram, cross = gram + (inputs.T @ inputs).double(), cross + (inputs.T @ (target - stream)).double()
    return scores, gram, cross
