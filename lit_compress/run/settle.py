"""Checks before a run starts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_compress.methods.base import Method
from lit_compress.models.backbones import load_config, load_tokenizer, resolve
from lit_compress.models.checks import refuse_compressed
from lit_compress.models.foreign import check_weights
from lit_compress.models.sites import find_sites
from lit_compress.run.job import Job
from lit_compress.run.plan import show_plan
from lit_compress.run.solve import check_choices, outline
from lit_compress.run.trainer import check_trainer, processes, stage_steps
from lit_compress.utils.errors import UserError
from lit_compress.utils.fields import check_effects

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def check_sizes(method: Method) -> None:
    """Refuse ``round_to`` for methods that choose no sizes, and invalid numbers; one shape for all layers likewise.

    Raises:
        UserError: see above, and of :func:`check_effects`.
    """
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
        job: all of it.
        layers: also print the sizes of every layer.

    Returns:
        The facts of the data.

    Raises:
        UserError: the first setting that cannot work.
    """
    method, data, trainer, net = job.method, job.data, job.trainer, job.dense
    find_sites(net)
    check_choices(job.choices, method, net)
    if method.teacher:
        _check_given_teacher(method, net.config)
    check_trainer(trainer, {stage.name: stage.settings.epochs for stage in method.stages()})
    data.devices = processes(trainer)
    data.prepare_data()
    steps = {}
    check_sizes(method)
    for stage in method.stages():
        stage.check(net)
        stage.check_data(net, data)
        steps[stage.name] = stage_steps(stage, data, trainer)
        stage.set_total_steps(steps[stage.name])
    stages = (f"{stage.name} {stage.settings.epochs} epochs = {steps[stage.name]:,} steps" for stage in method.stages())
    lines = [f"{type(method).__name__}: {', '.join(stages)}"]
    if method.budget:
        lines.append(f"budget {method.budget.asked}: density {method.density:.4g}")
    if method.stores_zeros:
        lines.append("the removed weights are stored as zeros: they take as much of the file as before")
    show_plan(data.record.name, facts := data.facts(), lines, outline(job), layers)
    return facts


def _check_given_teacher(method: Method, config: PreTrainedConfig) -> None:
    """Refuse a teacher that is compressed, that reads other tokens, or whose hidden states have another width."""
    refuse_compressed(f"model.teacher: '{method.teacher}'", Path(str(method.teacher)).expanduser())
    place = resolve(str(method.teacher), method.task, "model.teacher")
    check_weights(f"model.teacher: '{method.teacher}'", Path(place))
    teacher = load_config(str(method.teacher), method.task, "model.teacher")
    vectors = method.kind.loss == "vectors"
    if (vectors or method.distillation.alpha_layers > 0) and teacher.hidden_size != config.hidden_size:
        raise UserError(
            f"model.teacher: '{method.teacher}' is {teacher.hidden_size} wide, the backbone {config.hidden_size}; give "
            f"a teacher of the same width{'' if vectors else ', or distillation.alpha_layers 0'}"
        )
    named = {"model.teacher": str(method.teacher), "model.backbone": method.backbone}
    vocabularies = [load_tokenizer(name, method.task, option).get_vocab() for option, name in named.items()]
    if vocabularies[0] != vocabularies[1]:
        raise UserError(
            f"model.teacher: '{method.teacher}' has another tokenizer than the backbone ({len(vocabularies[0])} and "
            f"{len(vocabularies[1])} tokens); give a teacher made from model.backbone"
        )
