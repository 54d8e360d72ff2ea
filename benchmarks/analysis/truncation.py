"""Tables of a fine-tuned model under truncation, without training: FWSVD's Figures 1, 5, 6, 8 and Table 4.

Tables are lists of rows (dicts), which ``plots.py`` writes as CSV and draws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from statistics import mean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lit_compress.models.sites import find_sites, module_at
from lit_compress.numerics.kronecker import change_of_bias
from lit_compress.numerics.ranks import rank_for_ratio, stored
from lit_compress.utils.progress import track

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lit_compress.numerics.decompose import Factorization

TableRows = list[dict[str, Any]]
Decomposer = Callable[[str, Tensor], "Factorization"]  # of name and weight [out, in] of a site


def site_weights(net: PreTrainedModel) -> dict[str, Tensor]:
    """Return the weight [out, in] of every site; a weight that several layers share comes once."""
    return {site.name: module_at(net, site.name, nn.Linear).weight.detach() for site in find_sites(net)}


@torch.no_grad()
def as_matrix(layer: Any) -> Tensor:
    """Return the matrix [out, in] that a Linear or its replacement applies."""
    if isinstance(layer, nn.Linear):
        return layer.weight.detach()
    unit = torch.eye(layer.in_features)
    return (layer(unit) - layer(torch.zeros_like(unit))).T


@contextmanager
def replaced(
    net: PreTrainedModel, weights: dict[str, Tensor], svds: dict[str, Factorization] | None = None
) -> Iterator[None]:
    """Give ``net`` other weights at some sites inside the context; afterwards it has its own again, bit for bit.

    Args:
        net: changed inside the context.
        weights: by site.
        svds: have the means of inputs, whose outputs the biases keep; None: they stay.
    """
    modules = {name: module_at(net, name, nn.Linear) for name in site_weights(net) if name in weights}
    kept = {name: (m.weight.clone(), None if m.bias is None else m.bias.clone()) for name, m in modules.items()}
    try:
        for name, module in modules.items():
            module.weight.data.copy_(weights[name])
            if svds and (mean := svds[name].mean) is not None:
                net.get_parameter(f"{name}.bias").data += change_of_bias(kept[name][0].detach(), weights[name], mean)
        yield
    finally:
        for name, (weight, bias) in kept.items():
            modules[name].weight.data.copy_(weight)
            if bias is not None:
                net.get_parameter(f"{name}.bias").data.copy_(bias)


def without(weight: Tensor, svd: Factorization, components: Tensor) -> Tensor:
    """Return a weight [out, in] less some of its components: W - U_g U_g^T W for columns, W - W V_g V_g^T for rows."""
    left, right = svd.factors(len(svd.sigma))
    removed = left[:, components].double() @ right[components].double()
    return (weight.double() - removed).to(weight.dtype)


def grouped_truncation(
    net: PreTrainedModel,
    decomposers: dict[str, Decomposer],
    metric: Callable[[PreTrainedModel], float],
    groups: int = 10,
) -> TableRows:
    """Remove one tenth of the components of all matrices at once, group by group (Figures 1, 6, 8, Table 4).

    Args:
        net: fine-tuned; unchanged afterwards.
        decomposers: by label.
        metric: function that returns the dev metric of a model, larger is better.
        groups: number of groups of components, from the largest singular values to the smallest.

    Returns:
        By label and group: metric, drop (full - truncated), relative drop, error = mean over the matrices of the
        Frobenius norm of the removed part, sigma = mean singular value of the group.
    """
    weights, full = site_weights(net), metric(net)
    rows: TableRows = []
    for label, decomposer in decomposers.items():
        decomposed = {n: decomposer(n, w) for n, w in track(weights.items(), f"{label}: SVD", len(weights))}
        parts = {n: torch.arange(len(svd.sigma)).tensor_split(groups) for n, svd in decomposed.items()}
        for group in track(range(groups), f"{label}: groups", groups):
            left = {n: without(weights[n], svd, parts[n][group]) for n, svd in decomposed.items()}
            with replaced(net, left, decomposed):
                value = metric(net)
            sigma = [float(svd.sigma[parts[n][group]].mean()) for n, svd in decomposed.items()]
            error = [float(torch.linalg.matrix_norm(weights[n].double() - left[n].double())) for n in decomposed]
            rows.append(
                {
                    "weighting": label, "group": group + 1, "metric": value, "drop": full - value,
                    "relative_drop": (full - value) / full if full else 0.0, "error": mean(error), "sigma": mean(sigma),
                }
            )  # fmt: skip
    return rows


def rank_ratio_sweep(
    net: PreTrainedModel,
    decomposers: dict[str, Decomposer],
    metric: Callable[[PreTrainedModel], float],
    ratios: Sequence[float],
) -> TableRows:
    """Truncate all matrices to each ratio of their ranks, without training (Figure 5).

    Args:
        net: fine-tuned; unchanged afterwards.
        decomposers: by label.
        metric: function that returns the dev metric of a model, larger is better.
        ratios: fractions of the ranks that are kept, in (0, 1]; 1.0 is the dense model.

    Returns:
        By label and ratio: density (a matrix that factors would not make smaller counts as dense, although it is
        truncated), metric, error = mean over the matrices of the Frobenius norm of the removed part.
    """
    weights = site_weights(net)
    rows: TableRows = []
    shapes = [weight.shape for weight in weights.values()]
    for label, decomposer in decomposers.items():
        decomposed = {n: decomposer(n, w) for n, w in weights.items()}
        for ratio in ratios:
            low = {}
            for name, weight in track(weights.items(), f"{label}: ratio {ratio}", len(weights)):
                left, right = decomposed[name].factors(rank_for_ratio(ratio, *weight.shape))
                low[name] = left @ right
            with replaced(net, low, decomposed):
                value = metric(net)
            kept = sum(stored(out, inner, rank_for_ratio(ratio, out, inner)) for out, inner in shapes)
            error = [float(torch.linalg.matrix_norm(weights[n].double() - low[n].double())) for n in weights]
            rows.append(
                {
                    "weighting": label, "rank_ratio": ratio, "density": kept / sum(map(prod, shapes)),
                    "metric": value, "error": mean(error),
                }
            )  # fmt: skip
    return rows


def spectra(net: PreTrainedModel, decomposers: dict[str, Decomposer]) -> TableRows:
    """Return all singular values of every site, with the share of squared singular values up to each."""
    rows: TableRows = []
    for label, decomposer in decomposers.items():
        roles = {site.name: site.role for site in find_sites(net)}
        for name, weight in track(site_weights(net).items(), f"{label}: SVD"):
            sigma = decomposer(name, weight).sigma
            energy = (sigma**2).cumsum(0) / (sigma**2).sum()
            rows += [
                {"weighting": label, "site": name, "role": roles[name], "index": i + 1, "sigma": s, "energy": e}
                for i, (s, e) in enumerate(zip(sigma.tolist(), energy.tolist(), strict=True))
            ]
    return rows


def rank_of(weight: Tensor) -> int:
    """Return the number of singular values above sigma_max * max(out, in) * eps(float32), of an SVD in float64.

    With float64's own tolerance, rounding in a float32 product of rank 300 counts as rank 768.
    """
    sigma = torch.linalg.svdvals(weight.cpu().double())
    return int((sigma > sigma.max() * max(weight.shape) * torch.finfo(torch.float32).eps).sum())


def ranks(net: PreTrainedModel, model: str = "", method: str = "") -> TableRows:
    """Return for every site, factorized or not, its numerical rank, rows and columns with nonzero weights, and density.

    Args:
        net: a model, compressed or not.
        model: its label.
        method: name of the method that compressed it.
    """
    rows: TableRows = []
    for site in track(find_sites(net), "rank"):
        weight = as_matrix(net.get_submodule(site.name))
        kept = weight != 0
        rows.append(
            {
                "model": model, "method": method, "site": site.name, "role": site.role, "layer": site.layer,
                "out": weight.shape[0], "in": weight.shape[1], "rank": rank_of(weight), "rows": int(kept.any(1).sum()),
                "columns": int(kept.any(0).sum()), "density": float(kept.double().mean()),
            }
        )  # fmt: skip
    return rows
