"""The plan of a run and the facts of its data, shown before anything is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any

from lit_compress.models.sites import find_sites
from lit_compress.run.solve import Outline
from lit_compress.utils.tables import print, screen_table, show

if TYPE_CHECKING:
    from rich.table import Table

MOST_CLASSES = 8  # that are listed with their counts


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


def show_plan(task: str, facts: dict[str, Any], lines: Iterable[str], outline: Outline, layers: bool = False) -> None:
    """Print the facts of the data, the lines of the plan and the sizes, with ``layers`` also of every layer."""
    show(facts_table(task, facts))
    for line in (*facts_lines(facts), *lines):
        print(line)
    if layers:
        show(layers_table(outline))
        for line in layer_notes(outline):
            print(line)
    show(sizes_table(outline))
