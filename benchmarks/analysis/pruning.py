"""Tables of pruned matrices: importance of neurons, patterns of zeros, and metrics by the share of the factors.

LoSparse's Figures 1 and 4 (histograms of neuron importance) and 6 (allocation), LPAF's Figure 3 (sparsity patterns).
Tables are lists of rows (dicts), which ``plots.py`` writes as CSV and draws.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d

from benchmarks.analysis.truncation import TableRows, as_matrix
from lit_compress import methods
from lit_compress.methods.losparse import usual_low_rank
from lit_compress.models.sites import find_sites, module_at
from lit_compress.numerics.importance import row_sensitivity
from lit_compress.numerics.losses import task_loss
from lit_compress.tasks import TaskType, task_type
from lit_compress.utils.errors import UserError, nearest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CELL = 4  # weights along a side of a cell of a pattern


def calibrated_sensitivity(
    net: PreTrainedModel, batches: Iterable[dict[str, Tensor]], kind: TaskType | str
) -> dict[str, Tensor]:
    """Return {site: mean over the batches of the row means of |w dL/dw|}, float32 [out] (LoSparse Eqs. 2 and 4).

    Args:
        net: fine-tuned; in evaluation mode, without dropout.
        batches: examples of the task, with labels.
        kind: of the task.
    """
    weights = {site.name: module_at(net, site.name, nn.Linear).weight for site in find_sites(net)}
    total = [torch.zeros(len(weight)) for weight in weights.values()]
    count, task = 0, task_type(kind)
    for batch in batches:
        logits = task.logits(task.run(net, batch), batch)
        loss = task_loss(logits, batch["labels"], task.loss)
        grads = torch.autograd.grad(loss, list(weights.values()))
        total = [a + b for a, b in zip(total, row_sensitivity(list(weights.values()), grads), strict=True)]
        count += 1
    return {name: value / count for name, value in zip(weights, total, strict=True)}


def stored_sensitivity(folder: Path) -> dict[str, Tensor]:
    """Return {site: scores Gamma of its rows}, which a LoSparse or ITP stage wrote; {} if none did."""
    from safetensors.torch import load_file

    path = folder / "importance.safetensors"
    tensors = load_file(path) if path.is_file() else {}
    return {key.rpartition("/")[0]: value for key, value in tensors.items() if key.endswith("/sensitivity")}


def neurons(scores: dict[str, dict[str, Tensor]], net: PreTrainedModel) -> TableRows:
    """Return the importance of every output neuron, by model and site.

    Args:
        scores: label of a model -> site -> importance [out].
        net: any of the models, for the names of the sites.
    """
    return [
        {"model": label, "site": s.name, "role": s.role, "layer": s.layer, "row": i, "importance": value}
        for label, sites in scores.items()
        for s in find_sites(net)
        for i, value in enumerate(sites[s.name].tolist())
    ]


def pattern(nets: dict[str, PreTrainedModel], site: str | None = None) -> TableRows:
    """Return the share of nonzero weights in every cell of 4 x 4 weights of one site (LPAF Figure 3).

    Args:
        nets: models by label; a replaced layer is shown as the matrix that it applies.
        site: name of the site; None for the first attention output.

    Raises:
        UserError: there is no such site.
    """
    rows: TableRows = []
    for label, net in nets.items():
        names = [s.name for s in find_sites(net)]
        name = site or next((s.name for s in find_sites(net) if s.role == "o"), names[0])
        if name not in names:
            raise UserError(f"site: no '{name}' in {label}; {nearest(name, names)}")
        kept = (as_matrix(net.get_submodule(name)) != 0).float()
        cells = avg_pool2d(kept[None], CELL, ceil_mode=True)[0]
        alive = int(kept.any(1).sum())
        rows += [
            {"model": label, "site": name, "row": i, "column": j, "kept": value, "rows_alive": alive, "out": len(kept)}
            for i, line in enumerate(cells.tolist())
            for j, value in enumerate(line)
        ]
    return rows


def _density(report: dict[str, Any]) -> float:
    """Return the density of a run: that of its config, of its budget, or the usual one of its method."""
    given = report["config"]["model"]["init_args"].get("density") or (report.get("budget") or {}).get("density")
    return given or getattr(getattr(methods, report["method"], None), "usual_density", None) or 1.0


def allocation(reports: Sequence[dict[str, Any]]) -> TableRows:
    """Return the share of the factors and the dev metric of every finished run (LoSparse Figure 6).

    Args:
        reports: of LoSparse (share ``prune.low_rank``), LowRankI and LowRankII (the density), ITP (0).

    Raises:
        UserError: a run is of another method.
    """
    rows: TableRows = []
    for report in reports:
        init, method = report["config"]["model"]["init_args"], report["method"]
        density = _density(report)
        shares = {"LowRankI": density, "LowRankII": density, "ITP": 0.0}
        if method == "LoSparse":
            share = min(init["prune"]["low_rank"] or usual_low_rank(density), density)
        elif method in shares:
            share = shares[method]
        else:
            raise UserError(f"allocation: a run of {method} has no share of factors; give runs of LoSparse")
        rows.append(
            {
                "task": report["task"], "method": method, "density": density, "low_rank": share,
                "metric": report["compressed"]["metric"], "measured_density": report["compressed"]["density"],
                "dense_metric": report["dense"]["metric"],
            }
        )  # fmt: skip
    return sorted(rows, key=lambda row: (row["task"], row["density"], row["low_rank"]))
