"""The command without training: factorize and export a fine-tuned model."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_compress.calibration.walk import calibration_parts
from lit_compress.evaluation.divergence import divergence
from lit_compress.evaluation.evaluate import constant_answer, evaluate, interval_of
from lit_compress.export.card import license_of
from lit_compress.export.choices import AS_IS, Choices
from lit_compress.export.folder import Export, write_export
from lit_compress.export.report import Measured
from lit_compress.export.speed_asked import Programs
from lit_compress.methods import Method
from lit_compress.models.backbones import empty_net, finetuned_config, given_bytes, load_finetuned
from lit_compress.models.shapes import without_values
from lit_compress.run.guard import check_factorize
from lit_compress.run.settle import check_sizes
from lit_compress.run.solve import check_choices
from lit_compress.stages.compression import CompressedStage
from lit_compress.stages.distil import NO_RECOVERY, Recovery, distil
from lit_compress.stages.refinement import check_refinement, refine_net
from lit_compress.tasks import task_type
from lit_compress.utils.devices import current_device
from lit_compress.utils.errors import UserError
from lit_compress.utils.memory import freed_memory_returned, trim

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
        UserError: the model, the data or ``out`` cannot be used.
    """
    check_sizes(method)
    stage, name = one_shot_stage(method), type(method).__name__
    data.reads_labels = stage.compression.reads_labels(method.kind)
    shapes = finetuned_config(method.backbone, method.task, "model")
    outline = without_values(lambda: empty_net(shapes))
    check_factorize(method, stage, outline, data, recovery.distil is not None)
    with freed_memory_returned():
        dense = load_model(method.backbone, method)
    check_choices(choices, method, dense)
    if recovery.refine is not None:
        check_refinement(dense, stage.compression.dense_states, name)
    texts = None if recovery.distil is None else data.texts_dataloader(recovery.texts)
    scores, key = evaluate(dense, data, sure=True), f"val/{data.record.metrics[0]}"
    chance = compared_with_chance(method.backbone, data, scores)
    with freed_memory_returned():  # in a training, a call to the system for every tensor would take half of the time
        net, made = compressed(stage, method, dense, data)
    trim()
    recovered: dict[str, Any] = {"refined": None, "distilled": None}
    if recovery.refine is not None:
        recovered["refined"] = _refined(dense, net, stage, data, recovery.refine)
    if texts is not None:
        layer_loss = stage.layer_loss if stage.compression.dense_states else None
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
    more |= chance
    more |= {"tried": tried} if tried else {}
    source = Export(net, before, name, data, config, more=more, budget=budget, timed=timed)
    return write_export(out, source, choices)


def _refined(
    dense: PreTrainedModel, net: PreTrainedModel, stage: CompressedStage, data: DataModule, steps: int
) -> dict[str, Any]:
    """Refine the blocks of the compressed ``net`` in place; return the report's entry."""
    kind = task_type(data.record)
    parts = calibration_parts(kind, stage.texts(data), None)
    with tempfile.TemporaryDirectory() as states:
        told = refine_net(dense, net, kind, parts, steps, Path(states), current_device(), stage.compression.behind)
    trim()
    return told


def compressed(
    stage: CompressedStage, method: Method, dense: PreTrainedModel, data: DataModule
) -> tuple[PreTrainedModel, dict[str, Any] | None]:
    """Return a copy of ``dense``, compressed by ``stage``, and the report's entry on the calibration."""
    stage.compression.check(dense)
    stage.check_data(data.train_size())
    folder = Path(method.backbone).expanduser()
    return stage.compress(dense, folder, method.task, data, current_device(), keep=True)


def compared_with_chance(model: str, data: DataModule, scores: dict[str, float]) -> dict[str, float]:
    """Return the report's entries on the best constant answer; warn if the dense model is not clearly better."""
    name, constant = data.record.metrics[0], constant_answer(data)
    if finding := constant.near(name, scores[f"val/{name}"]):
        warnings.warn(f"model: '{model}' knows hardly anything of this task: {finding}", stacklevel=2)
    return {"constant": constant.score, "constant_error": constant.error}
