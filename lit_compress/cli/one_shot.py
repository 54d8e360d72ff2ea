"""The commands without training: factorize and export a fine-tuned model, or analyze models."""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from lit_compress.analysis import pruning, truncation
from lit_compress.analysis.plots import write_rows
from lit_compress.analysis.truncation import TableRows
from lit_compress.calibration.by_block import calibration_parts
from lit_compress.evaluation.divergence import divergence
from lit_compress.evaluation.evaluate import constant_answer, evaluate, interval_of
from lit_compress.export.card import license_of
from lit_compress.export.choices import AS_IS, Choices
from lit_compress.export.folder import Export, write_export
from lit_compress.export.report import Measured, of_all
from lit_compress.export.speed_asked import Programs
from lit_compress.methods import Method
from lit_compress.methods.fwsvd import FWSVD
from lit_compress.models.backbones import empty_net, finetuned_config, given_bytes, load_finetuned
from lit_compress.models.checks import is_compressed
from lit_compress.models.gguf import as_folder
from lit_compress.models.shapes import without_values
from lit_compress.models.storage import load_net
from lit_compress.numerics.decompose import Axis
from lit_compress.run.expected_memory import check_factorize
from lit_compress.run.expected_time import factorize_line
from lit_compress.run.folder import Run
from lit_compress.run.runner import check_sizes
from lit_compress.run.solve import check_choices
from lit_compress.stages.calibration import collected
from lit_compress.stages.compression import CompressedStage
from lit_compress.stages.distil import NO_RECOVERY, Recovery, distil
from lit_compress.stages.low_rank import Decomposer
from lit_compress.stages.refinement import check_refinement, refine_net
from lit_compress.stages.weighting import KRONECKER, Weighted, calibration_for, weigh
from lit_compress.tasks import task_type
from lit_compress.utils.devices import current_device
from lit_compress.utils.errors import UserError, nearest
from lit_compress.utils.files import check_folder, read_json
from lit_compress.utils.hub import is_name, model_snapshot
from lit_compress.utils.manifest import check_manifest
from lit_compress.utils.memory import freed_memory_returned, trim
from lit_compress.utils.progress import note

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lit_compress.data.datamodule import DataModule


def load_model(name: str, method: Method) -> PreTrainedModel:
    """Load a model that was fine-tuned on the method's task.

    Raises:
        UserError: ``name`` is a run, or the model is compressed already or not fine-tuned on the task.
    """
    return load_finetuned(name, method.task, "model", method.sites)


def one_shot_stage(method: Method) -> CompressedStage:
    """Return the stage of a method that compresses in one shot.

    Raises:
        UserError: the method has none.
    """
    stage = method.stages()[-1]
    if not isinstance(stage, CompressedStage) or not stage.shrinks_first:
        raise UserError(
            f"factorize: {type(method).__name__} has to train: fit --model {type(method).__name__}; nearest here: "
            "SecondOrder"
        )
    return stage


def decomposers(
    method: FWSVD, net: PreTrainedModel, data: DataModule, settings: Sequence[Weighted]
) -> list[Decomposer]:
    """Return a decomposer of ``net`` for each of ``settings``, after one pass over training data for all of a kind.

    Raises:
        UserError: there are no scores, or no usable gradients.
    """
    statistics: dict[str, Any] = {}
    kinds = [[s for s in settings if s.weighting == "fisher"], [s for s in settings if s.weighting in KRONECKER]]
    for same in filter(None, kinds):
        ((_, sums),) = collected(net, calibration_for(same, data), method.task, current_device(), most=inf)
        statistics |= dict.fromkeys((s.weighting for s in same), sums)
    trim()
    folder = Path(method.backbone).expanduser()
    return [weigh(s, net, statistics.get(s.weighting, {}), folder, s.rule(method.rule).stacks(net)) for s in settings]


def factorize_model(
    out: Path, method: Method, data: DataModule, config: dict[str, Any], choices: Choices = AS_IS,
    recovery: Recovery = NO_RECOVERY,
    tried: list[dict[str, Any]] | None = None, timed: Programs | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Compress the method's backbone in one shot, export it to ``out`` and return the report.

    Args:
        out: folder to write.
        method: has the model (``backbone``), the task, and how the model is compressed.
        data: training data for a method or weighting that needs them, validation data for the report.
        config: of the command.
        choices: as :func:`write_export`.
        recovery: how the compressed model is trained.
        tried: the field of the report, if trials chose the kind of removal.
        timed: as :class:`Export`.

    Raises:
        UserError: the model, the data or ``out`` cannot be used; nothing would be factorized for ``pivot``.
    """
    check_sizes(method)
    stage, name = one_shot_stage(method), type(method).__name__
    if choices.pivot and stage.rule is None:
        raise UserError(f"factorize: --pivot is for factors, and {name} makes none; leave it out")
    data.reads_labels = stage.reads_labels(method.kind)
    shapes = finetuned_config(method.backbone, method.task, "model")
    outline = without_values(lambda: empty_net(shapes))
    note(check_factorize(method, stage, outline, data, recovery.distil is not None))
    note(factorize_line(method, stage, [outline, stage.outline(copy.deepcopy(outline))], data, recovery=recovery))
    with freed_memory_returned():
        dense = load_model(method.backbone, method)
    check_choices(choices, method, dense)
    if recovery.refine is not None:
        check_refinement(dense, stage.dense_states, name)
    texts = None if recovery.distil is None else data.texts_dataloader(recovery.texts)
    scores, key, constant = evaluate(dense, data, sure=True), f"val/{data.record.metrics[0]}", constant_answer(data)
    if finding := constant.near(data.record.metrics[0], scores[key]):
        warnings.warn(f"model: '{method.backbone}' knows hardly anything of this task: {finding}", stacklevel=2)
    with freed_memory_returned():  # in a training, a call to the system for every tensor would take half of the time
        net, made = compressed(stage, method, dense, data)
    trim()
    recovered: dict[str, Any] = {"refined": None, "distilled": None}
    if recovery.refine is not None:
        recovered["refined"] = _refined(dense, net, stage, data, recovery.refine)
    if texts is not None:
        layer_loss = stage.layer_loss if stage.dense_states else None
        told = distil(dense, net, method.kind, texts, recovery, current_device(), layer_loss)
        recovered["distilled"] = told | {"file": recovery.texts and Path(recovery.texts).name}
        trim()
    if made is not None:
        made["measured_loss"] = divergence(net, dense, data)
    trim()
    size = given_bytes(method.backbone, method.task)
    before = {"dense": Measured(dense, size, scores[key], interval=interval_of(scores, key))}
    budget = (method.budget, method.density) if method.budget else None
    more: dict[str, Any] = {"calibration": made, "license": license_of(method.backbone), **recovered}
    more |= {"constant": constant.score, "constant_error": constant.error}
    more |= {"tried": tried} if tried else {}
    source = Export(net, before, name, data, config, more=more, budget=budget, timed=timed)
    return write_export(out, source, choices)


def _refined(
    dense: PreTrainedModel, net: PreTrainedModel, stage: CompressedStage, data: DataModule, steps: int
) -> dict[str, Any]:
    """Refine the blocks of the compressed ``net`` in place; return what the report says."""
    kind = task_type(data.record)
    parts = calibration_parts(kind, stage.texts(data), None)
    with tempfile.TemporaryDirectory() as states:
        told = refine_net(dense, net, kind, parts, steps, Path(states), current_device(), stage.behind)
    trim()
    return told


def compressed(
    stage: CompressedStage, method: Method, dense: PreTrainedModel, data: DataModule
) -> tuple[PreTrainedModel, dict[str, Any] | None]:
    """Return a copy of ``dense``, compressed by ``stage``, and the report's entry on the calibration."""
    stage.check_shapes(dense)
    stage.check_data(data.train_size())
    folder = Path(method.backbone).expanduser()
    return stage.compress(dense, folder, method.task, data, current_device(), keep=True)


SEVERAL = ("ranks", "neurons", "pattern")  # analyses that take more than one model
ANALYSES = ("truncation", "sweep", "spectra", *SEVERAL, "allocation")
RATIOS = tuple(i / 10 for i in range(1, 11))
WEIGHTINGS = ("none", *(f"fisher-{axis}" for axis in get_args(Axis)), "importance-out", *KRONECKER)


def weighting_of(label: str, like: Weighted) -> Weighted:
    """Return the settings for ``label``: ``none``, or weighting and axis, e.g. ``fisher-in``.

    Raises:
        UserError: there is no such weighting.
    """
    if label not in WEIGHTINGS:
        raise UserError(f"weightings: unknown '{label}'; {nearest(label, WEIGHTINGS)}")
    weighting, _, axis = label.partition("-")
    named: dict[str, Any] = {"weighting": weighting, "axis": axis or "in"}
    return replace(like, **named, stacked=False)


def check_analysis(out: Path) -> None:
    """Refuse a folder that cannot be written, or that holds something else than an analysis.

    Raises:
        UserError: it does.
    """
    check_folder("analyze", out)
    if out.exists() and any(out.iterdir()) and not any((out / f"{k}.csv").is_file() for k in ANALYSES):
        raise UserError(f"analyze: '{out}' holds something that is not an analysis; give an empty or new folder")


def analyze_runs(out: Path, folders: Sequence[str]) -> TableRows:
    """Read the reports of finished LoSparse runs and write LoSparse's Figure 6 to ``out``.

    Raises:
        UserError: a folder is no finished run of a method with a low-rank share; ``out`` cannot be used.
    """
    check_analysis(out)
    paths = [Path(folder).expanduser() / "report.json" for folder in folders]
    for path in paths:
        if not path.is_file():
            raise UserError(f"analyze: no finished run (report.json) at '{path.parent}'; continue it with fit")
        check_manifest(f"analyze: '{path.parent}'", path.parent, path.name)
    rows = pruning.allocation([read_json("analyze", path, dict) for path in paths])
    write_rows("allocation", rows, out)
    return rows


def _named(models: Sequence[str]) -> dict[str, tuple[str, Path, str]]:
    """Return {label: (name as given, folder, method)}; the label of a model of a run has the run's name."""
    named: dict[str, tuple[str, Path, str]] = {}
    for name in models:
        folder = model_snapshot("model", name).folder if is_name(name) else Path(name).expanduser()
        folder = as_folder(f"model: '{name}'", folder)
        run = next((p for p in list(folder.resolve().parents)[:2] if (p / "config.yaml").is_file()), None)
        label = Path(name.partition("@")[0]).name
        if run is not None:
            label = str(folder.resolve().relative_to(run.parent)).removesuffix("/net")
        method = "" if run is None else Run(run).config()["model"]["class_path"].rpartition(".")[2]
        if label in named:
            label = name
        named[label] = (name, folder, method)
    return named


def _several(kind: str, models: Sequence[str], method: FWSVD, data: DataModule, site: str | None) -> TableRows:
    """Return the rows of an analysis of several models."""
    named = _named(models)

    def load(name: str, folder: Path) -> PreTrainedModel:
        return load_net(folder) if is_compressed(folder) else load_model(name, method)

    if kind == "ranks":
        nets = ((label, load(name, folder), made) for label, (name, folder, made) in named.items())
        return [row for label, net, made in nets for row in truncation.ranks(net, label, made)]
    if kind == "pattern":
        return pruning.pattern({label: load(name, folder) for label, (name, folder, _) in named.items()}, site)
    scores = {}
    for label, (name, folder, _) in named.items():
        scores[label] = pruning.stored_sensitivity(folder)
        net = load_net(folder) if scores[label] else load_model(name, method)
        if not scores[label]:
            batches = data.calibration_dataloader(method.retrain.fisher_examples)
            scores[label] = pruning.calibrated_sensitivity(net, batches, method.kind)
    return pruning.neurons(scores, net)


def analyze_model(
    kind: str,
    out: Path,
    models: Sequence[str],
    method: FWSVD,
    data: DataModule,
    weightings: Sequence[str] = ("none", "fisher-in"),
    ratios: Sequence[float] = RATIOS,
    site: str | None = None,
) -> TableRows:
    """Measure the effect of truncation or pruning on models, and write table and figure to ``out``.

    Args:
        kind: one of :data:`ANALYSES` except ``allocation``.
        out: folder to write.
        models: folders or names; several only for :data:`SEVERAL`. The first is the method's backbone.
        method: has the task and the Fisher settings.
        data: training data for Fisher weightings and sensitivities, validation data for the dev metric.
        weightings: labels as :func:`weighting_of` takes them.
        ratios: fractions of ranks kept, for ``sweep``.
        site: name of the matrix, for ``pattern``; None for the first attention output.

    Raises:
        UserError: a model, the data or a weighting cannot be used.
    """
    check_analysis(out)
    if len(models) > 1 and kind not in SEVERAL:
        raise UserError(f"analyze: {kind} takes one model, {len(models)} were given; several: {', '.join(SEVERAL)}")
    settings = [weighting_of(label, method.retrain) for label in weightings]
    if kind in SEVERAL:
        rows = _several(kind, models, method, data, site)
    else:
        net = load_model(method.backbone, method)
        by_label = dict(zip(weightings, decomposers(method, net, data, settings), strict=True))
        key = f"val/{data.record.metrics[0]}"

        if kind != "spectra":
            number = of_all(data.validation_size(), data.available()[0])
            note(f"analyze: dev {data.record.metrics[0]} is measured on {number} rows")

        def metric(net: PreTrainedModel) -> float:
            return evaluate(net, data)[key]

        if kind == "truncation":
            rows = truncation.grouped_truncation(net, by_label, metric)
        elif kind == "sweep":
            rows = truncation.rank_ratio_sweep(net, by_label, metric, ratios)
        else:
            rows = truncation.spectra(net, by_label)
    write_rows(kind, rows, out)
    return rows
