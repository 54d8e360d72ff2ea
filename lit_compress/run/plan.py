"""The plan of a run and the facts of its data, shown before anything is trained."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any

from lit_compress.methods.base import OneShot
from lit_compress.models.accounting import count_params, dense_site_params
from lit_compress.models.budget import Budget, shown
from lit_compress.models.sites import find_sites
from lit_compress.run.solve import Outline, cost
from lit_compress.utils.tables import print, screen_table, show

if TYPE_CHECKING:
    from rich.table import Table
    from transformers import PreTrainedModel

    from lit_compress.methods.base import Method

MOST_CLASSES = 8  # that are listed with their counts


def target_density(method: Method, net: PreTrainedModel) -> float:
    """Return the fraction of the weights of the sites of ``net`` that ``method`` is to leave.

    It is the density that was asked for, in the unit of the method's rule. Where a rank or a number of weights was
    asked for, or whole blocks or directions go at once, it follows from the shapes.
    """
    if method.density < 1 and (method.rule or not isinstance(method, OneShot)):
        return method.density
    left = copy.deepcopy(net)
    for stage in method.stages():
        left = stage.outline(left)
    return count_params(left).sites / dense_site_params(net)


def plan_lines(method: Method, net: PreTrainedModel, steps: Mapping[str, int]) -> Iterator[str]:
    """Yield the lines of the plan: stages, and the weights that are left.

    Args:
        method: its rule for ranks, if there is one, says which weights a density counts.
        net: dense, without values.
        steps: optimizer steps of every stage.
    """
    stages = (f"{stage.name} {stage.settings.epochs} epochs = {steps[stage.name]:,} steps" for stage in method.stages())
    yield f"{type(method).__name__}: {', '.join(stages)}"
    sites, total = dense_site_params(net), sum(weight.numel() for weight in net.parameters())
    density, of = target_density(method, net), method.rule.counted if method.rule else "sites"
    left = round(density * sites)
    if of == "model":
        left = round(density * total)
        yield f"weights of the model {total:,} -> about {left:,} (density {density:.4g}), embeddings included"
    else:
        yield (
            f"weights of the sites {sites:,} -> about {left:,} (density {density:.4g}), "
            f"of the model {total:,} -> about {total - sites + left:,}"
        )
    if method.stores_zeros:
        yield "the removed weights are stored as zeros: they take as much of the file as before"


def budget_plan(budget: Budget, density: float, outline: Outline) -> str:
    """Return the line on a budget: the density that meets it, and the expected value of the export."""
    if budget.kind == "density":
        return f"budget {budget.asked}"
    if budget.kind == "speedup":
        return f"budget {budget.asked}: density {density:.4g} reaches it, by times of programs of about these shapes"
    value = cost(budget, outline)
    if budget.kind == "flops":
        value /= outline.whole.flops
    about = "about " if outline.about else ""
    return f"budget {budget.asked}: density {density:.4g} leaves {about}{shown(budget.kind, value)}"


def sizes_table(outline: Outline) -> Table:
    """Return a table of the sizes of the dense model and of the export."""
    rows: tuple[tuple[str, str, Callable[[Outline], float]], ...] = (
        ("parameters of the sites", ",", lambda o: o.params.sites),
        ("total parameters", ",", lambda o: o.params.total),
        ("bytes on disk", ",", lambda o: o.bytes),
        (f"MFLOPs, 1 x {outline.length} tokens", ",.1f", lambda o: o.flops / 1e6),
    )
    body = []
    for label, form, value in rows:
        before, after = value(outline.whole), value(outline)
        body.append((label, f"{before:{form}}", f"{after:{form}}", f"{after / before:.3f}"))
    return screen_table(("", "dense", "about" if outline.about else "export", "ratio"), body)


def layers_table(outline: Outline) -> Table:
    """Return a table of widths (out x in), ranks and rows of the matrices; like layers share a row."""
    dense, left = find_sites(outline.dense), {site.name for site in find_sites(outline.net)}
    columns = list(dict.fromkeys((site.cross, site.role) for site in dense))
    stacks = len({site.stack for site in dense}) > 1
    layers: dict[tuple[str, int], list[str]] = {}
    for site in dense:
        cells = layers.setdefault((site.stack, site.layer), [""] * len(columns))
        shape = matrix_shape(outline.net.get_submodule(site.name)) if site.name in left else "removed"
        cells[columns.index((site.cross, site.role))] = shape
    body, groups = [], groupby(layers.items(), key=lambda item: (item[0][0], item[1]))
    for (stack, cells), group in groups:
        numbers = [layer for (_, layer), _ in group]
        ends = f"{numbers[0]} - {numbers[-1]}" if len(numbers) > 1 else f"{numbers[0]}"
        body.append([f"{stack} {ends}" if stacks else ends, *cells])
    return screen_table(["layers", *(f"cross {role}" if cross else role for cross, role in columns)], body)


def matrix_shape(layer: Any) -> str:
    """Return the size of a matrix, out x in, its rank r, and + the number of rows that are kept of it."""
    text = f"{layer.out_features}x{layer.in_features}"
    if rank := getattr(layer, "rank", 0):
        text += f" r{rank}"
    return f"{text} +{layer.rows}" if getattr(layer, "rows", 0) else text


def layer_notes(outline: Outline) -> Iterator[str]:
    """Yield lines on parts outside the table of layers: embeddings, and sizes that are known only later."""
    layers = list(outline.net.modules())
    if any(getattr(layer, "rank", 0) for layer in layers):
        more = "; +n: n of its rows next to them" if any(getattr(layer, "rows", 0) for layer in layers) else ""
        yield f"out x in of every matrix; r: rank of its factors{more}"
    table: Any = outline.net.get_input_embeddings()
    before = len(outline.dense.get_input_embeddings().get_parameter("weight"))
    rank, whole = getattr(table, "rank", 0), next(table.parameters()).is_floating_point()
    if rank or not whole or table.num_embeddings < before:
        form = f", rank {rank}" if rank else "" if whole else ", int8"
        kept = "" if table.num_embeddings == before else f" of {before:,}"
        yield f"token embeddings: {table.num_embeddings:,}{kept} x {table.embedding_dim}{form}"
    if outline.about:
        yield "ranks, rows and widths are decided by data; here every layer gets the same share"


_COLUMNS = ("rows", "inputs", "longest", "cut", "empty", "repeated", "in_train")


def facts_table(task: str, facts: dict[str, Any]) -> Table:
    """Return a table with a row per split; columns in which all is 0 are left out."""
    names = [n for n in _COLUMNS if n in ("rows", "longest", "cut") or any(s[n] for s in facts["splits"])]
    if all(split["inputs"] == split["rows"] for split in facts["splits"]):
        names.remove("inputs")
    body = []
    for split in facts["splits"]:
        cells = {name: f"{split[name]:,}" for name in names}
        if split["rows"] < split["available"] and split["inputs"] >= split["rows"]:
            cells["rows"] += f" of {split['available']:,}"
        body.append([split["split"], *cells.values()])
    return screen_table([f"data of {task}", *(name.replace("_", " ") for name in names)], body)


def facts_lines(facts: dict[str, Any]) -> Iterator[str]:
    """Yield the classes of every split with their counts, and the meaning of the table's columns."""
    for split in facts["splits"]:
        if split["classes"]:
            ordered = sorted(split["classes"], key=lambda c: -c["count"])
            shown = [f"{c['name']}: {c['count']:,}" for c in ordered]
            if len(shown) > MOST_CLASSES:
                shown[MOST_CLASSES - 1 : -1] = [f"{len(shown) - MOST_CLASSES} more"]
            yield f"rows of each class in {split['split']}: {', '.join(shown)}"
    yield f"longest: tokens of the longest input; cut: inputs of more than {facts['max_length']} tokens"


def show_plan(task: str, facts: dict[str, Any], lines: Iterable[str]) -> None:
    """Print the facts of the data and the lines of the plan."""
    show(facts_table(task, facts))
    for line in (*facts_lines(facts), *lines):
        print(line)
