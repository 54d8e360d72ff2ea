"""Before a run starts: checks of everything, and the plan, with the facts of the data and the sizes of the export."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from lit_compress.methods.base import Method
from lit_compress.models.backbones import empty_net, load_config, load_tokenizer, resolve
from lit_compress.models.files import check_form
from lit_compress.models.sites import Model, find_sites
from lit_compress.models.surgery import without_values
from lit_compress.run.job import Job
from lit_compress.run.solve import Outline, outline
from lit_compress.run.trainer import check_trainer, processes
from lit_compress.stages.base import count_steps
from lit_compress.utils.errors import UserError
from lit_compress.utils.fields import check_effects
from lit_compress.utils.tables import print, show

MOST_CLASSES = 8  # that are listed with their counts
_COLUMNS = ("rows", "inputs", "longest", "cut", "empty", "repeated", "in_train")


def check_sizes(method: Method) -> None:
    """Refuse ``round_to`` for methods that choose no sizes, and invalid numbers; one shape for all layers likewise."""
    check_effects(method)
    name, step = type(method).__name__, method.round_to
    if step is not None and step < 1:
        raise UserError(f"model.round_to: {step} is below 1, the smallest valid value; usual: 8")
    if step is not None and all(stage.round_to is None for stage in method.stages()):
        raise UserError(f"model.round_to: {name} chooses no ranks or widths, only weights or rows; leave it out")
    if method.shape == "uniform" and not any(stage.uniform for stage in method.stages()):
        raise UserError(
            f"model.shape: 'uniform' is for heads and neurons that go at once, which {name} does not; "
            "nearest: LLMPruner, or SecondOrder with model.retrain.removes structures"
        )


def check_stages(job: Job, layers: bool = False) -> dict[str, Any]:
    """Check data, architecture, ranks and schedules of all stages before the first one starts; print the plan.

    Args:
        job: what is checked.
        layers: also print the sizes of every layer.

    Returns:
        The facts of the data.

    Raises:
        UserError: the first setting that cannot work.
    """
    method, data, trainer, net = job.method, job.data, job.trainer, job.dense
    find_sites(net)
    job.choices.check(net)
    if method.teacher:
        _check_given_teacher(method, net)
    check_trainer(trainer)
    data.devices = processes(trainer)
    data.prepare_data()
    check_sizes(method)
    sizes, stages, limits = outline(job), [], (trainer.get("limit_train_batches"), trainer.get("max_steps"))
    for stage in method.stages():
        stage.check_data(net, data)
        steps = count_steps(data.steps_per_epoch(), stage.settings.epochs, *limits)
        stage.set_total_steps(steps)
        stages.append(f"{stage.name} {stage.settings.epochs} epochs = {steps:,} steps")
    show(*facts_table(data.record.name, facts := data.facts()))
    for line in facts_lines(facts):
        print(line)
    print(f"{type(method).__name__}: {', '.join(stages)}")
    if method.budget:
        print(f"budget {method.budget.asked}: density {method.density:.4g}")
    if method.stores_zeros:
        print("the removed weights are stored as zeros: they take as much of the file as before")
    if layers:
        show(*_layers_table(sizes))
        print("out x in of every matrix; r: rank of its factors; +: rows next to them")
        if sizes.about:
            print("ranks, rows and widths are decided by data; here every layer gets the same share")
    show(*_sizes_table(sizes))
    return facts


def _check_given_teacher(method: Method, net: Model) -> None:
    """Refuse a teacher that is compressed, that reads other tokens, or whose hidden states have another width.

    Also one with other sizes than ``net``, the backbone, if the method compresses the teacher: plans and budgets count
    the backbone.
    """
    what = f"model.teacher: '{method.teacher}'"
    check_form(what, Path(resolve(str(method.teacher), "model.teacher")), whole=True)
    teacher = load_config(str(method.teacher), method.task, "model.teacher", trained=True)
    vectors = method.kind.loss == "vectors"
    if (vectors or method.distillation.alpha_layers > 0) and teacher.hidden_size != net.config.hidden_size:
        raise UserError(
            f"{what} is {teacher.hidden_size} wide, the backbone {net.config.hidden_size}; give a teacher of the same "
            f"width{'' if vectors else ', or distillation.alpha_layers 0'}"
        )
    given, wanted = ([p.shape for p in m.parameters()] for m in (without_values(lambda: empty_net(teacher)), net))
    if given != wanted and not any(stage.from_backbone for stage in method.stages()):
        raise UserError(
            f"{what} has other sizes than model.backbone '{method.backbone}', and {type(method).__name__} compresses "
            "the teacher; give it as model.backbone as well"
        )
    theirs = load_tokenizer(str(method.teacher), method.task, "model.teacher").get_vocab()
    own = load_tokenizer(method.backbone, method.task, "model.backbone").get_vocab()
    if theirs != own:
        raise UserError(
            f"{what} has another tokenizer than the backbone ({len(theirs)} and {len(own)} tokens); give a teacher "
            "made from model.backbone"
        )


def _sizes_table(outline: Outline) -> tuple[list[str], list[list[str]]]:
    """Return a table of the sizes of the dense model and of the export."""
    rows = [(o.params.sites, o.params.total, o.bytes, o.flops / 1e6) for o in (outline.whole, outline)]
    labels = "parameters of the sites", "total parameters", "bytes on disk", f"MFLOPs, 1 x {outline.length} tokens"
    body = []
    for label, before, after in zip(labels, *rows, strict=True):
        form = ",.1f" if label.startswith("MFLOPs") else ","
        body.append([label, f"{before:{form}}", f"{after:{form}}", f"{after / before:.3f}"])
    return ["", "dense", "about" if outline.about else "export", "ratio"], body


def _layers_table(outline: Outline) -> tuple[list[str], list[list[str]]]:
    """Return a table of widths (out x in), ranks and rows of the matrices; like layers share a row."""
    dense, left = find_sites(outline.dense), {site.name for site in find_sites(outline.net)}
    columns = list(dict.fromkeys((site.cross, site.role) for site in dense))
    stacks = len({site.stack for site in dense}) > 1
    layers: dict[tuple[str, int], list[str]] = {}
    for site in dense:
        cells, shape = layers.setdefault((site.stack, site.layer), [""] * len(columns)), "removed"
        if site.name in left:
            layer: Any = outline.net.get_submodule(site.name)
            more = [f" {sign}{n}" for name, sign in (("rank", "r"), ("rows", "+")) if (n := getattr(layer, name, 0))]
            shape = "".join([f"{layer.out_features}x{layer.in_features}", *more])
        cells[columns.index((site.cross, site.role))] = shape
    body = []
    for (stack, cells), group in groupby(layers.items(), key=lambda item: (item[0][0], item[1])):
        numbers = [layer for (_, layer), _ in group]
        ends = f"{numbers[0]} - {numbers[-1]}" if len(numbers) > 1 else f"{numbers[0]}"
        body.append([f"{stack} {ends}" if stacks else ends, *cells])
    return ["layers", *(f"cross {role}" if cross else role for cross, role in columns)], body


def facts_table(task: str, facts: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
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
    return [f"data of {task}", *(name.replace("_", " ") for name in names)], body


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
