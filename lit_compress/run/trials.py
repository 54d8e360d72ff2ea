"""Choosing the kind of removal for SecondOrder by trials: heads and neurons, components, or whole blocks.

The estimate of the loss does not compare the kinds of removal: it is a fifth of the loss for heads and neurons, and a
seventh to a twenty-fourth for components. So each is done to the dense model, in memory and without training, at the
density of the method or at that at which its program has the speed-up that is asked for. The kind after which the
answers on held-out training rows diverge least from the dense model's is chosen. A report lists the trials
(docs/reference/files.md).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from lit_compress.evaluation.evaluate import ROWS, divergence
from lit_compress.export.fuse import outline_export
from lit_compress.export.speed_asked import Programs, slowest
from lit_compress.export.table import gain_words
from lit_compress.models.sites import Model
from lit_compress.run.first import of_first
from lit_compress.run.folder import Run
from lit_compress.run.job import Job
from lit_compress.run.solve import Gains, programs_of, search_speed, too_fast
from lit_compress.stages.compression import CompressedStage, compress, measure
from lit_compress.stages.weighting import Removes
from lit_compress.utils.devices import current_device
from lit_compress.utils.errors import UserError
from lit_compress.utils.memory import trim
from lit_compress.utils.progress import note
from lit_compress.utils.sharding import alone

POSITIONS = 2**16  # of all held-out rows; of long texts there are fewer than :data:`ROWS`
LARGE = 0.9  # density at which every kind of removal is possible that is possible at all


def choose_removal(dense: Model, job: Job) -> tuple[dict[str, Any], Programs | None]:
    """Try the kinds of removal of a job on the fine-tuned model, and choose one.

    Returns:
        The chosen ``density`` and ``removes``, and all trials, ``tried``; the programs that were timed for a speed-up.

    Raises:
        UserError: no kind can be done, or none is fast enough.
    """
    budget, first, reached = job.method.budget, job.method.given["density"], dict[float, Gains]()
    timed, tried = programs_of(job) if budget is not None and budget.kind == "speedup" else None, list[dict[str, Any]]()
    for removes in job.kinds:
        nothing = dict.fromkeys(("density", "divergence", "speed"))
        tried.append({"removes": removes, **nothing, "round_to": 1, "why": None, "chosen": False})
        try:
            tried[-1] |= _try(removes, dense, job, timed, first, reached)
            first = first if tried[-1]["why"] else tried[-1]["density"]
        except UserError as error:
            tried[-1]["why"] = str(error)
        note(trial_line(tried[-1]))
        trim()
    able = [trial for trial in tried if trial["why"] is None]
    if not able:
        raise too_fast(job, reached) if reached else UserError(tried[-1]["why"])
    best = min(able, key=lambda trial: trial["divergence"])
    best["chosen"] = True
    return {"density": best["density"], "removes": best["removes"], "tried": tried}, timed


def decide(job: Job, run: Run) -> tuple[Job, Programs | None]:
    """Choose the kind of removal by trials on the dense model of a run, as :func:`choose_removal`; the run keeps it.

    Returns:
        The job with its kind and its density; the programs that were timed for a speed-up, if they were now.
    """
    if not job.kinds:
        return job, None
    budget, timed = job.method.budget, list[Programs | None]()
    asked = [budget.asked if budget else f"density={job.method.density:g}", *job.kinds]

    def choose() -> dict[str, Any]:
        if (known := run.removal(asked)) is not None:
            return known
        with alone():
            chosen, programs = choose_removal(run.dense, job)
        timed.append(programs)
        run.keep("removal.json", {"asked": asked, **chosen})
        return chosen

    chosen = of_first("removal", choose, job.trainer)
    return job.at(chosen["density"], chosen["removes"], kinds=()), timed[0] if timed else None


def _try(
    removes: Removes, dense: Model, job: Job, timed: Programs | None, first: float | None,
    reached: dict[float, Gains],
) -> dict[str, Any]:  # fmt: skip
    """Remove one kind, measure, and return fields; ``reached`` gets the speed of all programs that are timed."""
    job = job.at(removes=removes)
    method, data, device = job.method, job.data, current_device()
    density, gains, measured, why = method.density, dict[float, Gains](), None, None
    if timed is not None and method.budget is not None:
        if removes != "blocks":  # whose choice is of one density, and which are equally fast
            measured = measure(dense, _stage(job.at(LARGE), dense).compression, method.task, data, device)

        def left(density: float) -> Model:
            shapes = _stage(job.at(density), dense).outline(copy.deepcopy(job.dense), measured)
            return outline_export(shapes, job.choices, job.tokens)

        fast, gains = search_speed(job, left, timed, first)
        reached |= gains
        if fast is None:
            why = f"reaches {max(map(slowest, gains.values()), default=1.0):.3g}x of {method.budget.value:g}x"
        if fast is None and not gains:
            return {"why": why}
        density = min(gains) if fast is None else fast
        if method.rule is not None and method.rule.allocation == "uniform":
            measured = None  # has the ranks of another density
    stage = _stage(job.at(density), dense)
    net, _ = compress(dense, stage.compression, method.task, data, device, keep=True, measured=measured)
    count, seed = stage.compression.drawn(data)
    texts = data.rest_dataloader(count, min(ROWS, max(32, POSITIONS // data.max_length)), seed)
    made = {"density": density, "divergence": divergence(net, dense, data, texts), "speed": gains.get(density)}
    return made | {"round_to": stage.round_to or 1, "why": why}


def possible_kind(job: Job, kinds: Sequence[Removes]) -> Removes:
    """Return the first of some kinds of removal that the shapes of the dense model allow; raise UserError for none."""
    errors, net, density = list[UserError](), job.dense, LARGE if job.method.budget else None
    for removes in kinds:
        try:
            _stage(job.at(density, removes), net)
        except UserError as error:
            errors.append(error)
            continue
        if errors:
            note(f"retrain.removes: {removes}; {str(errors[0]).partition(': ')[2]}")
        return removes
    raise errors[0]


def _stage(job: Job, net: Model) -> CompressedStage:
    """Return the last stage of a job; raise UserError if it cannot compress the dense ``net``."""
    (*_, stage) = job.method.stages()
    assert isinstance(stage, CompressedStage)
    stage.compression.check(net)
    return stage


def trial_line(trial: Mapping[str, Any]) -> str:
    """Return a trial as a report stores it.

    >>> trial_line({"removes": "components", "density": 0.25, "divergence": 0.03, "speed": None, "why": None,
    ...             "chosen": True})
    'removes components: density 0.25, divergence 0.03, chosen'
    """
    if trial["density"] is None:
        return f"removes {trial['removes']}: {trial['why']}"
    parts = [trial["why"]] if trial["why"] else []
    parts += [f"density {trial['density']:.4g}", f"divergence {trial['divergence']:.3g}"]
    parts += [gain_words(trial["speed"])] if trial["speed"] else []
    return f"removes {trial['removes']}: {', '.join(parts + ['chosen'] * trial['chosen'])}"
