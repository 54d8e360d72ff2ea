"""What truncation does to a fine-tuned net, without training: FWSVD's Figures 1, 5, 6, 8 and Table 4.

Every function returns rows: dicts of one table, written as CSV and drawn by ``plots.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import mean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lit_compress.decompose import component_groups, rank_of
from lit_compress.families import find_sites
from lit_compress.progress import track
from lit_compress.ranks import rank_for_ratio, stored

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lit_compress.methods.low_rank_stage import WeightedDecomposer

Rows = list[dict[str, Any]]


def site_weights(net: PreTrainedModel) -> dict[str, Tensor]:
    """Return the weight [out, in] of every site; one that serves several layers comes once."""
    return {site.name: net.get_submodule(site.name).weight.detach() for site in find_sites(net)}


@torch.no_grad()
def as_matrix(layer: nn.Module) -> Tensor:
    """Return the matrix [out, in] that any layer in a Linear's place applies."""
    if isinstance(layer, nn.Linear):
        return layer.weight.detach()
    unit = torch.eye(layer.in_features)  # type: ignore[arg-type]
    return (layer(unit) - layer(torch.zeros_like(unit))).T


@contextmanager
def replaced(net: PreTrainedModel, weights: dict[str, Tensor]) -> Iterator[None]:
    """Give ``net`` other weights at some sites for a while; afterwards it has its own again, bit for bit."""
    kept = {name: weight.clone() for name, weight in site_weights(net).items() if name in weights}
    try:
        for name, weight in weights.items():
            net.get_submodule(name).weight.data.copy_(weight)
        yield
    finally:
        for name, weight in kept.items():
            net.get_submodule(name).weight.data.copy_(weight)


def grouped_truncation(
    net: PreTrainedModel,
    decomposers: dict[str, WeightedDecomposer],
    metric: Callable[[PreTrainedModel], float],
    groups: int = 10,
) -> Rows:
    """Remove one tenth of the components of all matrices at once, group by group (Figures 1, 6, 8, Table 4).

    Args:
        net: fine-tuned; as it was afterwards.
        decomposers: by label.
        metric: of a net, larger is better.
        groups: of components, from the largest singular values to the smallest.

    Returns:
        Per label and group: metric, drop (full - truncated), relative drop, error = mean over the matrices of the
        Frobenius norm of what is gone, sigma = mean singular value of the group.
    """
    weights, full = site_weights(net), metric(net)
    rows: Rows = []
    for label, decomposer in decomposers.items():
        found = {n: decomposer.svd(n, w) for n, w in track(weights.items(), f"{label}: SVD", len(weights))}
        bounds = {n: component_groups(len(svd.sigma), groups) for n, svd in found.items()}
        for group in track(range(groups), f"{label}: groups", groups):
            left = {n: svd.without(*bounds[n][group]) for n, svd in found.items()}
            with replaced(net, left):
                value = metric(net)
            sigma = [float(svd.sigma[slice(*bounds[n][group])].mean()) for n, svd in found.items()]
            error = [float(torch.linalg.matrix_norm(weights[n].double() - left[n].double())) for n in found]
            rows.append(
                {
                    "weighting": label, "group": group + 1, "metric": value, "drop": full - value,
                    "relative_drop": (full - value) / full if full else 0.0, "error": mean(error), "sigma": mean(sigma),
                }
            )  # fmt: skip
    return rows


def rank_ratio_sweep(
    net: PreTrainedModel,
    decomposers: dict[str, WeightedDecomposer],
    metric: Callable[[PreTrainedModel], float],
    ratios: Sequence[float],
) -> Rows:
    """Keep the first components of all matrices, at every ratio, without training (Figure 5).

    Args:
        net: fine-tuned; as it was afterwards.
        decomposers: by label.
        metric: of a net, larger is better.
        ratios: of the ranks, in (0, 1]; 1.0 is the dense net.

    Returns:
        Per label and ratio: density (a matrix that factors would not make smaller counts as dense, but is truncated
        all the same), metric, error = mean over the matrices of the Frobenius norm of what is gone.
    """
    weights = site_weights(net)
    rows: Rows = []
    for label, decomposer in decomposers.items():
        nested = decomposer.axis != "element"
        found = {n: decomposer.svd(n, w) for n, w in weights.items()} if nested else {}
        for ratio in ratios:
            low = {}
            for name, weight in track(weights.items(), f"{label}: ratio {ratio}", len(weights)):
                rank = rank_for_ratio(ratio, *weight.shape)
                factors = found[name].factors(rank) if nested else decomposer.factors(name, weight, rank)
                low[name] = factors[0] @ factors[1]
            with replaced(net, low):
                value = metric(net)
            kept = sum(stored(*w.shape, rank_for_ratio(ratio, *w.shape)) for w in weights.values())
            error = [float(torch.linalg.matrix_norm(weights[n].double() - low[n].double())) for n in weights]
            rows.append(
                {
                    "weighting": label, "rank_ratio": ratio, "density": kept / sum(w.numel() for w in weights.values()),
                    "metric": value, "error": mean(error),
                }
            )  # fmt: skip
    return rows


def spectra(net: PreTrainedModel, decomposers: dict[str, WeightedDecomposer]) -> Rows:
    """Return every singular value of every site, and the share of their squares up to it."""
    rows: Rows = []
    for label, decomposer in decomposers.items():
        for name, weight in track(site_weights(net).items(), f"{label}: SVD"):
            sigma = decomposer.sigma(name, weight)
            energy = (sigma**2).cumsum(0) / (sigma**2).sum()
            rows += [
                {"weighting": label, "site": name, "index": i + 1, "sigma": s, "energy": e}
                for i, (s, e) in enumerate(zip(sigma.tolist(), energy.tolist(), strict=True))
            ]
    return rows


def ranks(net: PreTrainedModel, model: str = "", method: str = "") -> Rows:
    """Return per site, factorized or not, numerical rank, rows and columns with a nonzero weight, and density.

    Args:
        net: what is looked at.
        model: its label.
        method: what made it.
    """
    rows: Rows = []
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
