"""The density that meets a budget, found before training over the shapes of the model that would be exported.

Every method has one knob, its density. :func:`solve` searches it: at each density the stages give the shapes that would
remain (``Stage.outline``), and the accounting counts them. A speed-up is measured: programs of these shapes are timed.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from lit_compress.export.choices import AS_IS, Choices
from lit_compress.export.fuse import outline_export
from lit_compress.export.speed_asked import Programs, bytes_of_shapes, find_place, slowest
from lit_compress.export.table import gain_words
from lit_compress.models.accounting import Params, count_params, flops
from lit_compress.models.budget import Budget, shown
from lit_compress.models.outline import estimated_bytes, file_bytes
from lit_compress.models.sites import Model
from lit_compress.numerics.search import HALVINGS, within_limit
from lit_compress.run.job import Job
from lit_compress.utils.errors import UserError
from lit_compress.utils.progress import note

GRAPH = {"onnx": 2300, "openvino": 10500}  # bytes of a program next to its weights, per matrix, about
WRITES, NEAR = 3, 0.02  # programs that are written at most, until the density moves by no more than this share
CLOSE = 1e-3  # share of the budget at which the search ends
MARGIN = 5e-3  # share of the budget that is left if data decide on shapes: exports were up to 0.47 % above the estimate


@dataclass(frozen=True)
class Outline:
    """The sizes of ``net``, the fused model that a method will export, and of ``dense``; neither has values.

    Attributes:
        length: tokens of a text, for FLOPs.
        about: whether data decide on shapes, which are then spread evenly here.
        choices: for the export; if it writes a program, the size counts that.
    """

    net: Model
    dense: Model
    length: int
    about: bool
    choices: Choices = AS_IS

    @cached_property
    def whole(self) -> Outline:
        """The sizes of the dense model."""
        return Outline(self.dense, self.dense, self.length, False)

    @cached_property
    def params(self) -> Params:
        """Numbers of stored parameters."""
        return count_params(self.net)

    @cached_property
    def bytes(self) -> int:
        """Size of ``model.safetensors``; if the export has a program, about the size of this."""
        if self.choices.format != "hf":
            bits = {"int8": 8, "int4": 4}.get(self.choices.dtype, 32)
            return estimated_bytes(self.net, bits, GRAPH[self.choices.format])
        return file_bytes(self.net)

    @cached_property
    def flops(self) -> int:
        """Of one forward."""
        return flops(self.net, self.length)


def outline(job: Job, density: float | None = None) -> Outline:
    """Return the sizes of the model that a job will export, at a ``density`` in place of the method's.

    Raises:
        UserError: its settings cannot work for this model.
    """
    method = job.method if density is None else job.at(density).method
    net, about = copy.deepcopy(job.dense), False
    for stage in method.stages():
        stage.check(job.dense)
        net, about = stage.outline(net), about or stage.decided_by_data
    return Outline(outline_export(net, job.choices, job.tokens), job.dense, job.length, about, job.choices)


def cost(budget: Budget, outline: Outline) -> float:
    """Return the value of ``outline`` in the unit of ``budget``, which is no speed-up."""
    if budget.kind == "params":
        return outline.params.total
    return outline.bytes if budget.kind == "size" else outline.flops


def solve(job: Job) -> float:
    """Return the largest density at which the export is expected to be within the budget of the method.

    Raises:
        UserError: the method cannot get there, or its settings cannot work at any density.
    """
    budget, choices = job.method.budget, job.choices
    assert budget is not None
    choices.check(job.dense)
    if budget.kind == "density":
        return budget.value
    if budget.kind == "speedup":
        return _solve_speed(job, budget)
    whole = Outline(job.dense, job.dense, job.length, False)
    stored = Choices(dtype=choices.dtype) if choices.half else AS_IS  # a file of 16 bits has half of the bytes
    before = cost(budget, replace(whole, net=outline_export(job.dense, stored)))
    limit = budget.value * before if budget.kind == "flops" else budget.value
    if limit > before and budget.kind in ("params", "size"):
        has = shown(budget.kind, before) + (f" in {stored.dtype}" if choices.half else "")
        raise UserError(
            f"model.budget: '{budget.asked}' is more than the dense model has, {has}; nearest: a smaller one"
        )
    kept = replace(whole, net=outline_export(job.dense, choices, job.tokens), choices=choices)

    def search(more: int = 0) -> float:
        tried, errors = [kept], list[UserError]()

        def value(density: float) -> float | None:
            try:
                tried.append(outline(job, density))
            except UserError as error:
                errors.append(error)
                return None
            return (cost(budget, tried[-1]) + more) / (1 - MARGIN if tried[-1].about else 1)

        best = within_limit(value, limit, {1.0: cost(budget, kept) + more}, 0.5, CLOSE, HALVINGS)
        if best is None and errors and len(tried) == 1:
            raise errors[0]
        if best is None:
            raise _impossible(job, budget, min(tried, key=partial(cost, budget)), more, before)
        return best

    best = search()
    if budget.kind == "size" and choices.format != "hf":
        for _ in range(WRITES):
            made = outline(job, best) if best < 1 else kept
            written = bytes_of_shapes(made.net, job.data.tokenizer, choices)
            last, best = best, search(written - made.bytes + round(CLOSE * limit))
            if abs(best - last) <= NEAR * last:
                break
    return best


def programs_of(job: Job, budget: Budget) -> Programs:
    """Return the programs whose speed-up the budget of a job asks for."""
    return Programs(job.dense, job.data.tokenizer, find_place(budget, job.choices, job.dense, job.length))


def _solve_speed(job: Job, budget: Budget) -> float:
    """Return the largest density at which programs are so much faster than the dense model's as ``budget`` asks for."""
    timed, gains = programs_of(job, budget), dict[float, list[dict[str, Any]]]()

    def cost(density: float) -> float | None:
        try:
            made = outline(job, density)
        except UserError:
            return None
        gains[density] = timed.gains(made.net)
        note(f"density {density:.4g} in {timed.place.runtime}: {gain_words(gains[density])}")
        return 1 / slowest(gains[density]) / (1 - MARGIN if made.about else 1)

    density = 1.0 if budget.value <= 1 else within_limit(cost, 1 / budget.value, {1.0: 1.0})
    if density is not None:
        return density
    if not gains:
        outline(job, 0.25)  # says what cannot work
    most, (_, at, place) = max(map(slowest, gains.values()), default=1.0), budget.asked.partition("@")
    near = f"speedup={0.97 * most:.3g}x{at}{place}" if most > 1.05 else "flops=0.5"
    name = type(job.method).__name__
    raise UserError(
        f"model.budget: '{budget.asked}' cannot be met by {name}, which reaches {most:.3g}x; nearest: {near}"
    )


def _impossible(job: Job, budget: Budget, made: Outline, more: int, before: float) -> UserError:
    """Return the line for a budget that no density meets, not even the smallest shapes that were ``made``."""
    kind, name = budget.kind, type(job.method).__name__
    least = (cost(budget, made) + more) / (1 - MARGIN if made.about else 1) / (before if kind == "flops" else 1)
    what = " of the FLOPs" if kind == "flops" else ""
    near = {"flops": f"{1.005 * least:.3g}", "params": f"{1.005 * least:.0f}", "size": f"{1.005 * least / 1e6:.4g}MB"}
    size, choices = kind == "size", job.choices
    less = {
        "--export.vocabulary data": kind != "flops" and choices.vocabulary == "all",
        "--export.embeddings int8": size and not choices.embeddings and not choices.integers,
        "--export.dtype bfloat16": size and choices.format == "hf" and not choices.half,
    }
    advice = " or ".join(option for option, helps in less.items() if helps)
    return UserError(
        f"model.budget: '{budget.asked}' cannot be met by {name}, which leaves at least {shown(kind, least)}{what}; "
        f"nearest: {kind}={near[kind]}{advice and f'; less with {advice}'}"
    )
