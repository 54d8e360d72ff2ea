"""The density that meets a budget, found before training over the shapes of the model that would be exported.

Every method has one knob, its density. :func:`solve` searches it by bisection: at each density the stages give the
shapes that would remain (``Stage.outline``), and the accounting counts them. A speed-up is measured:
:func:`solve_speed` writes and times programs of the remaining shapes at a few densities.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from lit_compress.export.choices import AS_IS, Choices
from lit_compress.export.fuse import outline_export
from lit_compress.export.speed_asked import Programs, slowest
from lit_compress.export.table import gain_words
from lit_compress.models.accounting import Params, count_params, dense_site_params, flops
from lit_compress.models.budget import Budget, shown
from lit_compress.models.outline import estimated_bytes, file_bytes, weight_bytes
from lit_compress.models.sites import embedding_params
from lit_compress.numerics.search import HALVINGS, within_limit
from lit_compress.utils.errors import UserError
from lit_compress.utils.progress import note

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lit_compress.methods.base import Method

GRAPH = {"onnx": 2300, "openvino": 10500}  # bytes of a program next to its weights, per matrix, about
WRITES, NEAR = 3, 0.02  # programs that are written at most, until the density moves by no more than this share
CLOSE = 1e-3  # share of the budget at which the search ends
MARGIN = 5e-3  # share of the budget that is left if data decide on shapes: exports were up to 0.47 % above the estimate


@dataclass(frozen=True)
class Outline:
    """The sizes of the model that a method will export.

    Attributes:
        net: fused, without values.
        dense: the dense model, without values.
        length: tokens of a text, for FLOPs.
        about: whether data decide on shapes, which are then spread evenly here.
        choices: for the export; if it writes a program, the size counts that.
    """

    net: PreTrainedModel
    dense: PreTrainedModel
    length: int
    about: bool
    choices: Choices = AS_IS

    @cached_property
    def params(self) -> Params:
        """Numbers of stored parameters."""
        return count_params(self.net)

    @cached_property
    def bytes(self) -> int:
        """Size of ``model.safetensors``; if the export has a program, about the size of this."""
        if self.choices.format != "hf":
            return estimated_bytes(self.net, self.choices.bits, GRAPH[self.choices.format])
        return file_bytes(self.net)

    @cached_property
    def flops(self) -> int:
        """Of one forward; if the outline cannot be run, the dense model's less the savings of its sites."""
        try:
            return flops(self.net, self.length)
        except (RuntimeError, ValueError, NotImplementedError):
            whole = dense_site_params(self.dense)
            return flops(self.dense, self.length) - 2 * self.length * (whole - self.params.sites)


@dataclass(frozen=True)
class Storage:
    """Options that make the file of an export smaller, besides the method.

    Attributes:
        choices: for the export.
        tokens: that ``vocabulary data`` leaves; None: all, or it is not known yet.
    """

    choices: Choices = AS_IS
    tokens: int | None = None


def check_choices(choices: Choices, method: Method, net: PreTrainedModel) -> None:
    """Refuse an export that the compressed ``net`` of ``method`` cannot have; only shapes are read.

    Raises:
        UserError: a choice is not valid, does not go with another or with the method.
    """
    choices.check()
    if choices.embeddings and method.rule is not None and method.rule.scope == "all":
        raise UserError(
            f"--embeddings: '{choices.embeddings}' and scope all both make the table of embeddings smaller; leave "
            "--embeddings out, or give --scope blocks"
        )
    choices.check_net(net)


def outline(method: Method, dense: PreTrainedModel, length: int, storage: Storage = Storage()) -> Outline:
    """Return the sizes of the model that ``method`` will export.

    Args:
        method: with its density.
        dense: the backbone, without values; it is not changed.
        length: tokens of a text.
        storage: how it will be exported.

    Raises:
        UserError: its settings cannot work for this model.
    """
    net, about = copy.deepcopy(dense), False
    for stage in method.stages():
        stage.check(dense)
        net, about = stage.outline(net), about or stage.decided_by_data
    merge = method.budget is not None and method.budget.merges
    return Outline(outline_export(net, storage.choices, storage.tokens, merge), dense, length, about, storage.choices)


def cost(budget: Budget, outline: Outline) -> float:
    """Return the value of ``outline`` in the unit of ``budget``, which is no speed-up."""
    if budget.kind == "params":
        return outline.params.total
    return outline.bytes if budget.kind == "size" else outline.flops


def solve(
    budget: Budget, build: Callable[[float], Method], dense: PreTrainedModel, length: int,
    storage: Storage = Storage(), written: Callable[[PreTrainedModel], int] | None = None,
) -> float:  # fmt: skip
    """Return the largest density at which the export is expected to be within ``budget``.

    Args:
        budget: any kind except a speed-up.
        build: function of a density that returns the method.
        dense: the backbone, without values.
        length: tokens of a text.
        storage: how the model will be exported.
        written: function of an exported model without values that writes its program and returns the bytes; None: the
            size of a program is estimated.

    Raises:
        UserError: the method cannot get there, or its settings cannot work at any density.
    """
    if budget.kind == "density":
        return budget.value
    whole, half = Outline(dense, dense, length, False), storage.choices.half
    stored = Choices(dtype=storage.choices.dtype) if half else AS_IS  # a file of 16 bits has half of the bytes
    before = cost(budget, replace(whole, net=outline_export(dense, stored)))
    limit = budget.value * before if budget.kind == "flops" else budget.value
    if limit > before and budget.kind in ("params", "size"):
        raise UserError(
            f"model.budget: '{budget.asked}' is more than the dense model has, {shown(budget.kind, before)}"
            f"{f' in {stored.dtype}' if half else ''}; nearest: a smaller one"
        )
    kept, choices = whole, storage.choices
    if storage != Storage():
        kept = Outline(outline_export(dense, choices, storage.tokens), dense, length, False, choices)

    def search(more: int = 0) -> float:
        tried, errors = [kept], list[UserError]()

        def value(density: float) -> float | None:
            try:
                tried.append(outline(build(density), dense, length, storage))
            except UserError as error:
                errors.append(error)
                return None
            return (cost(budget, tried[-1]) + more) / (1 - MARGIN if tried[-1].about else 1)

        best = within_limit(value, limit, {1.0: cost(budget, kept) + more}, 0.5, CLOSE, HALVINGS)
        if best is None and errors and len(tried) == 1:
            raise errors[0]
        if best is None:
            least = min(tried, key=partial(cost, budget))
            raise _impossible(budget, type(build(0.5)).__name__, least, more, before)
        return best

    best = search()
    if budget.kind == "size" and storage.choices.format != "hf" and written is not None:
        for _ in range(WRITES):
            made = outline(build(best), dense, length, storage) if best < 1 else kept
            last, best = best, search(written(made.net) - made.bytes + round(CLOSE * limit))
            if abs(best - last) <= NEAR * last:
                break
    return best


Gains = list[dict[str, Any]]


def search_speed(
    budget: Budget, shape: Callable[[float], PreTrainedModel], timed: Programs, storage: Storage,
    first: float | None = None,
) -> tuple[float | None, dict[float, Gains]]:  # fmt: skip
    """Search the largest density at which programs are so much faster than the dense model's as a budget asks for.

    Args:
        budget: of a speed-up.
        shape: function of a density that returns the compressed shapes, without values; raises UserError below the
            smallest density.
        timed: times programs.
        storage: how the model will be exported.
        first: density to begin with.

    Returns:
        The density; None: it is not reached. And by density :meth:`Programs.gains` at all that were tried.
    """
    gains: dict[float, Gains] = {}

    def cost(density: float) -> float | None:
        try:
            net = outline_export(shape(density), storage.choices, storage.tokens, merge=True)
        except UserError:
            return None
        gains[density] = timed.gains(net)
        note(f"density {density:.4g} in {timed.place.runtime}: {gain_words(gains[density])}")
        return 1 / slowest(gains[density])

    if budget.value <= 1:
        return 1.0, gains
    return within_limit(cost, 1 / budget.value, {1.0: 1.0}, first), gains


def solve_speed(
    budget: Budget, build: Callable[[float], Method], dense: PreTrainedModel, timed: Programs, storage: Storage
) -> float:
    """Return about the largest density at which the export is expected to have a speed-up.

    Args:
        budget: of a speed-up.
        build: function of a density that returns the method.
        dense: the backbone, without values.
        timed: times programs in the budget's runtime, in turns with the program of ``dense``.
        storage: how the model will be exported.

    Raises:
        UserError: the method cannot get there, or its settings cannot work.
    """

    def shape(density: float) -> PreTrainedModel:
        net = copy.deepcopy(dense)
        for stage in build(density).stages():
            stage.check(dense)
            net = stage.outline(net)
        return net

    density, gains = search_speed(budget, shape, timed, storage)
    if density is None and not gains:
        shape(0.25)  # says what cannot work
    if density is None:
        raise too_fast(budget, type(build(0.5)).__name__, gains)
    return density


def too_fast(budget: Budget, name: str, gains: Mapping[float, Gains]) -> UserError:
    """Return the line for a speed-up that no density reaches.

    Args:
        budget: of a speed-up.
        name: of the method.
        gains: that were measured, by density.
    """
    most = max(map(slowest, gains.values()), default=1.0)
    _, at, place = budget.asked.partition("@")
    near = f"speedup={0.97 * most:.3g}x{at}{place}" if most > 1.05 else "flops=0.5"
    return UserError(
        f"model.budget: '{budget.asked}' cannot be met by {name}, which reaches {most:.3g}x; nearest: {near}"
    )


def _impossible(budget: Budget, name: str, made: Outline, more: int, before: float) -> UserError:
    """Return the line for a budget that no density meets: the smallest reachable value, and a way to reach the budget.

    Args:
        budget: the request.
        name: of the method.
        made: the smallest that the method gets to.
        more: bytes of its program that are not estimated.
        before: cost of the dense model.
    """
    kind, choices = budget.kind, made.choices
    least = (cost(budget, made) + more) / (1 - MARGIN if made.about else 1) / (before if kind == "flops" else 1)
    text = f"model.budget: '{budget.asked}' cannot be met by {name}, which leaves at least {shown(kind, least)}"
    if kind == "flops":
        return UserError(f"{text} of the FLOPs; nearest: flops={1.005 * least:.3g}")
    tables, bits = embedding_params(made.net), max(8, choices.bits)
    if kind == "size" and choices.format != "hf":
        size = sum(weight_bytes(table, bits) for table in tables)
    else:
        size = sum(table.numel() * (table.element_size() if kind == "size" else 1) for table in tables)
    advice = "--model SecondOrder --model.scope all, --export.vocabulary data and 16 bits a value make them smaller"
    return UserError(f"{text}, {shown(kind, size)} of them embeddings; nearest: a larger one; {advice}")
