"""The memory that a command is expected to take at its peak, by formulas, and its check against the machine's.

A command prints the expectation before its work. If it is more than the machine has, the command ends there and names
the option that needs less. docs/explanation/memory.md has the formulas, and how far measured peaks were off.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, prod
from typing import TYPE_CHECKING

import torch

from lit_compress.calibration.kronecker import sums_bytes
from lit_compress.calibration.statistics import TOKENS
from lit_compress.models.accounting import counted_weights
from lit_compress.models.activations import forward_bytes
from lit_compress.models.sites import blocks
from lit_compress.models.storage import tied
from lit_compress.numerics.chunked_logits import chunk_size
from lit_compress.run.trainer import make_trainer
from lit_compress.stages.base import Stage
from lit_compress.stages.calibration import MOST_BYTES
from lit_compress.stages.distil import NO_RECOVERY
from lit_compress.stages.recompute import activations, most_kept, states_bytes
from lit_compress.utils.devices import current_device, free_bytes
from lit_compress.utils.errors import UserError
from lit_compress.utils.memory import free_memory, resident
from lit_compress.utils.progress import note

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lit_compress.data.batching import ResumableLoader
    from lit_compress.data.datamodule import DataModule
    from lit_compress.methods.base import Method
    from lit_compress.run.runner import Components
    from lit_compress.tasks.base import TaskType

LIBRARIES = 620 * 2**20  # bytes of a command whose model is tiny, on a CPU
EXPORTED, LOADED = 2, 3  # times that a compressed model is in memory while its export is measured, and is loaded
EVALUATION = "evaluation"
MARGIN = 0.15  # share by which a measured peak was at most below its expectation; less than that is only warned of
TENSORS = {False: 3, True: 5}  # as large as a chunk of logits, that a loss over a vocabulary makes; with a backward


@dataclass(frozen=True)
class Need:
    """The expected peak of a phase.

    Attributes:
        phase: its name, e.g. of a stage.
        parts: bytes by purpose.
        sure: False if something is not known, e.g. what a method of another package keeps.
    """

    phase: str
    parts: Mapping[str, float]
    sure: bool = True

    def times(self, copies: int) -> Need:
        """Return the need of so many processes."""
        return replace(self, parts={name: copies * value for name, value in self.parts.items()})

    @property
    def total(self) -> float:
        """Bytes of all parts."""
        return sum(self.parts.values())

    def on(self, device: torch.device | None) -> Need:
        """Return the need of a device's own memory: an accelerator's has no libraries."""
        if device is None or device.type == "cpu":
            return self
        return replace(self, parts={name: value for name, value in self.parts.items() if name != "libraries"})

    def line(self) -> str:
        """Return the line for the user."""
        parts = ", ".join(f"{name} {shown(value)}" for name, value in self.parts.items() if value >= 0.05e9)
        return f"memory: about {shown(self.total)} at the peak, in {self.phase} ({parts})"


def shown(size: float) -> str:
    """Return a size as text.

    >>> shown(3.14e9), shown(2.1e11)
    ('3.1 GB', '210 GB')
    """
    return f"{size / 1e9:.1f} GB" if size < 1e11 else f"{size / 1e9:.0f} GB"


def check_need(need: Need, less: Callable[[], str], device: torch.device | None = None) -> None:
    """Refuse work that needs more memory than there is; only warn if the expectation could be too high.

    Args:
        need: of the work.
        less: function that returns which option needs less.
        device: of the work; None for the CPU.

    Raises:
        UserError: see above.
    """
    if _fits(need, device):
        return
    size, free = _wanted(need, device)
    text = f"memory: {need.phase} needs about {shown(size)} more, and {shown(free)} are free; {less()}"
    if need.sure and size * (1 - MARGIN) > free:
        raise UserError(text)
    note(text)


def _fits(need: Need, device: torch.device | None) -> bool:
    size, free = _wanted(need, device)
    return size <= free


def _wanted(need: Need, device: torch.device | None) -> tuple[float, float]:
    """Return the bytes needed besides this process's own, and the bytes that the device has left."""
    if device is None or device.type == "cpu":
        free = free_memory()
        return need.total - resident(), inf if free is None else free
    return need.on(device).total, free_bytes(device)


# ------------------------------------------------------------------------------------------------- fit


def check_fit(parts: Components, dense: PreTrainedModel, finished: Collection[str] = ()) -> str:
    """Return the line on the expected memory of the stages that are left.

    Args:
        parts: checked.
        dense: the dense model, without values.
        finished: names of finished stages.

    Raises:
        UserError: the machine has less.
    """
    made = make_trainer(**parts.trainer | {"logger": False, "enable_checkpointing": False})
    device, texts = made.strategy.root_device, parts.data.batch_size
    copies = made.num_devices if device.type == "cpu" else 1

    most = most_kept(device, parts.method.kind.over_vocabulary)

    def needed(texts: int) -> Need:
        return largest_of(need.times(copies) for need in fit_needs(parts, dense, finished, texts, most))

    need = needed(texts)

    def less() -> str:
        for fewer in _halves(texts):
            smaller = needed(fewer)
            if _fits(smaller, device):
                steps = parts.data.accumulate * -(-texts // fewer)
                return (
                    f"--data.batch_size {fewer} --trainer.accumulate_grad_batches {steps} makes the same steps with "
                    f"about {shown(smaller.total)}"
                )
        settings = {stage.name: stage.settings for stage in parts.method.stages()}.get(need.phase)
        if settings is not None and settings.offers_lora and settings.updates is None:
            return f"--model.{need.phase}.parameters lora needs less"
        return "give a smaller model" + (", or --model.distillation.alpha 0" if need.parts.get("teacher") else "")

    check_need(need, less, device)
    return need.on(device).line()


def fit_needs(
    parts: Components, dense: PreTrainedModel, finished: Collection[str], texts: int, most: float
) -> Iterator[Need]:
    """Yield the expected peaks of the stages of ``fit``, of one process.

    Args:
        parts: checked.
        dense: the dense model, without values.
        finished: names of finished stages.
        texts: of a training batch.
        most: bytes of activations above which blocks recompute theirs.
    """
    method, net = parts.method, copy.deepcopy(dense)
    rows, length = parts.data.train_dataloader().largest
    half = "16" in str(parts.trainer.get("precision") or "")
    for stage in method.stages():
        after = stage.outline(copy.deepcopy(net))
        if stage.name not in finished:
            if stage.moments:
                yield _calibration(method, net, stage.moments, length, stage.name)
            trained, shape = after if stage.shrinks_first else net, (min(texts, rows), length)
            if stage.settings.epochs:
                yield _training(method, stage, trained, dense, shape, half, most)
            else:
                models = {"model": _bytes(trained), "dense model": _bytes(dense)}
                loaders = parts.data.val_dataloader()
                yield largest_of(evaluation_need([trained], method.kind, loader, models) for loader in loaders)
        net = after


def _training(
    method: Method, stage: Stage, net: PreTrainedModel, dense: PreTrainedModel, shape: tuple[int, int], half: bool,
    most: float,
) -> Need:  # fmt: skip
    """Return the need of the steps of a stage that trains ``net`` with batches of ``shape`` [texts, tokens]."""
    taught = stage.distil and method.distillation.on and stage.name != "dense"
    size, own = _bytes(net), stage.own_bytes(net)
    kept, again = activations(stage, net, shape, half, method.recompute, most)
    teacher = forward_bytes(dense, *shape, "none", half) if taught else 0
    compared = 0  # the teacher's hidden states, and their differences from the model's
    if taught and method.distillation.alpha_layers > 0:
        compared = 2 * 4 * prod(shape) * dense.config.hidden_size * (1 + sum(1 for _ in blocks(dense)))
    trains_all = stage.settings.updates is None
    at_loss = states_bytes(net, shape) if again else kept or 0
    logits = logits_bytes(method.kind, [net] * stage.forwards + [dense] * taught, prod(shape), graph=True)
    work = _largest_work(
        (stage.forwards * (kept or 0) + (teacher or 0) + compared, 0),
        (stage.forwards * at_loss + compared, logits),
        (0, _second_gradients(net) if trains_all else 0),
    )
    known = stage.repeatable or stage.rule is not None
    return Need(
        stage.name,
        {
            "model": size + own, "teacher": _bytes(dense) if taught else 0,
            "gradients and moments": 3 * size if trains_all else 0,
            **work, "libraries": LIBRARIES,
        },
        known and kept is not None and teacher is not None,
    )  # fmt: skip


def _calibration(
    method: Method, net: PreTrainedModel, moments: str, length: int, phase: str, most: float = inf
) -> Need:
    """Return the need of second moments and of the factors made of them.

    Args:
        method: has the task.
        net: dense, without values.
        moments: ``inputs``, or ``kfac`` for also the gradients' moments.
        length: tokens of the longest text; a batch has at most :data:`TOKENS`, but one text.
        phase: its name.
        most: bytes of sums that are there at once.
    """
    gradients = moments == "kfac"
    texts = max(1, TOKENS // length)
    kept = forward_bytes(net, texts, length, "sites" if gradients else "none")
    sums = min(most, sums_bytes(net, gradients))
    factors = 4 * sum(weight.numel() for weight in counted_weights(net))
    logits = logits_bytes(method.kind, [net], texts * length, graph=True) if gradients else 0
    return Need(
        f"the calibration of {phase}",
        {
            "model": _bytes(net), "second moments and factors": max(sums, factors), "activations": kept or 0,
            "logits": logits, "libraries": LIBRARIES,
        },
        kept is not None,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------- without training


def check_factorize(
    method: Method, stage: Stage, dense: PreTrainedModel, data: DataModule, distils: bool = False
) -> str:
    """Return the line on the expected memory of ``factorize``.

    Args:
        method: has the task.
        stage: of it, which is done without training.
        dense: the dense model, without values.
        data: gives the batches.
        distils: whether the compressed model is trained afterwards (stages/distil.py).

    Raises:
        UserError: the machine has less.
    """
    net = stage.outline(copy.deepcopy(dense))
    models, size = {"model": _bytes(dense)}, _bytes(net)
    needs = [Need("the export", {**models, "compressed": LOADED * size, "libraries": LIBRARIES})]
    models["compressed"] = EXPORTED * size
    needs += [evaluation_need([dense, net], method.kind, loader, models) for loader in data.val_dataloader()]
    if stage.moments:
        _, length = data.train_dataloader().largest
        needs.append(_calibration(method, dense, stage.moments, length, "factorize", MOST_BYTES))
    if distils:
        _, length = data.train_dataloader().largest
        texts = max(1, TOKENS // length) if method.kind.over_vocabulary else data.batch_size
        needs.append(_training(method, Stage("distil", NO_RECOVERY.training), net, dense, (texts, length), False, inf))
    fewer = "" if method.kind.over_vocabulary else "a smaller --data.batch_size needs less, "
    advice = {"distil": f"{fewer}no --distil and --by_block float32 the least"}
    return _check_evaluation(needs, "--by_block float32 has one block in memory", advice)


def check_loading(size: int) -> None:
    """Refuse to load a model of so many bytes for an evaluation, if they are more than the machine has.

    Raises:
        UserError: see above.
    """
    check_need(Need(EVALUATION, {"model": size}), lambda: "give a smaller model, or a machine with more")


def check_evaluation(net: PreTrainedModel, kind: TaskType, loaders: Sequence[ResumableLoader]) -> str:
    """Return the line on the expected memory of an evaluation.

    Args:
        net: as it is loaded.
        kind: of the task.
        loaders: of the batches.

    Raises:
        UserError: the machine has less.
    """
    needs = [evaluation_need([net], kind, loader, {"model": _bytes(net)}) for loader in loaders]
    return _check_evaluation(needs, "give a machine with more", {})


def _check_evaluation(needs: Sequence[Need], otherwise: str, advice: Mapping[str, str]) -> str:
    """Refuse the largest of ``needs``, with the ``advice`` for its phase or what fits the others; return its line."""
    need = largest_of(needs)
    few = need.parts.get("activations", 0) < need.total / 4

    def less() -> str:
        if need.phase in advice:
            return advice[need.phase]
        return otherwise if few or need.phase != EVALUATION else "--data.eval_batch_size 1, or a few more, needs less"

    device = current_device()
    check_need(need, less, device)
    return need.on(device).line()


def evaluation_need(
    nets: Sequence[PreTrainedModel], kind: TaskType, loader: ResumableLoader, models: Mapping[str, float]
) -> Need:
    """Return the need of forwards without a graph.

    Args:
        nets: without values; the logits of all are compared.
        kind: of the task.
        loader: of the batches.
        models: bytes of the models in memory.
    """
    texts, length = loader.largest
    kept = forward_bytes(nets[0], texts, length, "none")
    states = 4 * len(nets) * texts * length * nets[0].config.hidden_size
    work = _largest_work((kept or 0, 0), (states, logits_bytes(kind, nets, texts * length, graph=False)))
    parts = {**models, **work, "libraries": LIBRARIES}
    return Need(EVALUATION, parts, kept is not None)


def largest_of(needs: Iterable[Need]) -> Need:
    """Return the need with the most bytes."""
    return max(needs, key=lambda need: need.total)


def _halves(number: int) -> Iterator[int]:
    while number > 1:
        number //= 2
        yield number


def _bytes(net: PreTrainedModel) -> int:
    return sum(value.numel() * value.element_size() for value in net.parameters())


def _largest_work(*moments: tuple[float, float]) -> dict[str, float]:
    """Return the bytes of activations and logits at the moment of a step at which they are most together."""
    return dict(zip(("activations", "logits"), max(moments, key=sum), strict=True))


def logits_bytes(kind: TaskType, nets: Sequence[PreTrainedModel], tokens: int, graph: bool) -> int:
    """Return the bytes that a loss over a vocabulary makes of a chunk; ``graph``: of a backward."""
    if not kind.over_vocabulary:
        return 0
    sizes = [net.config.vocab_size for net in nets]
    return 4 * TENSORS[graph] * min(tokens, chunk_size(sizes)) * sum(sizes)


def _second_gradients(net: PreTrainedModel) -> int:
    """Return the bytes of a gradient of every tensor that layers share, before it is added to the first one's."""
    return sum(4 * net.get_parameter(first).numel() for first in set(tied(net).values()))
