"""A comparison: methods x budgets x seeds, and for each of these cells a ``fit`` per learning rate.

All runs of a seed have the same teacher, the same examples in the same order and the same number of steps after the
teacher. Every method that is trained tries the same learning rates. Training rows that are held out choose among them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import date
from itertools import groupby, product
from math import lcm
from pathlib import Path
from typing import Any

from lit_compress.models.budget import parse_budget
from lit_compress.run.fair import check_options
from lit_compress.run.results import COMPARISON, read_record, read_report
from lit_compress.run.workers import Fit
from lit_compress.utils.errors import UserError, nearest
from lit_compress.utils.files import check_folder, write_json

MOST_PIECES = 1000  # epochs into which the steps are divided


@dataclass(frozen=True)
class Entry:
    """A method of a comparison, with its options.

    Attributes:
        method: class, or its import path; by default the label up to a comma.
        train: False: nothing is trained after the teacher; the method's untrained result is measured.
        options: of ``fit``, by name.
        split: its stages' shares of the training steps; without it all stages get the same.
        without: beginnings of options in ``taught`` that this method does not take.
        budgets: of its runs, in place of the comparison's.
        stages: after the teacher, which the class has.
    """

    label: str
    method: str
    train: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    split: Mapping[str, int] = field(default_factory=dict)
    without: str | Sequence[str] = ()
    budgets: Sequence[Any] = ()
    stages: tuple[str, ...] = ()

    def shares(self) -> dict[str, int]:
        """Return each stage's share of the training steps after the teacher; raises UserError for another ``split``."""
        for stage in self.split:
            if stage not in self.stages:
                hint = nearest(stage, self.stages)
                raise UserError(f"config: methods.{self.label}.split: no stage '{stage}'; {hint}")
        return {stage: self.train * (self.split.get(stage, 0) if self.split else 1) for stage in self.stages}


@dataclass(frozen=True)
class Comparison:
    """The config of a comparison.

    Attributes:
        methods: by label; values are :class:`Entry`'s other attributes, or None: the label is the class.
        budgets: densities, or values of ``model.budget``, e.g. ``size=20MB``.
        seeds: of teachers and runs.
        learning_rates: tried for every method that is trained.
        updates: training steps after the teacher, over all stages.
        hold_out: training rows that choose learning rates and epochs.
        options: of ``fit``, by name, for all runs, the teacher's too.
        taught: options for all runs but the teacher's, e.g. of distillation.
        teacher: options of the teacher's run, or a folder of a fine-tuned model.
    """

    methods: Mapping[str, Any]
    budgets: Sequence[Any]
    seeds: Sequence[int] = (1,)
    learning_rates: Sequence[float] = (1e-4, 3e-4)
    updates: int = 1000
    hold_out: int = 1000
    options: Mapping[str, Any] = field(default_factory=dict)
    taught: Mapping[str, Any] = field(default_factory=dict)
    teacher: Mapping[str, Any] | str = field(default_factory=dict)

    def entries(self) -> list[Entry]:
        """Return the methods; raises UserError for one with unknown keys."""
        return [_entry(str(label), values or {}) for label, values in self.methods.items()]


def _entry(label: str, values: Any) -> Entry:
    """Return the method that one key of ``methods`` describes."""
    if not isinstance(values, dict):
        raise UserError(f"config: methods.{label}: '{values}'; give keys, e.g. {{method: LPAF}}")
    given = _given(values, Entry, f"methods.{label}", f"methods.{label}.")
    entry = Entry(label, **{"method": label.partition(",")[0].strip(), **given})
    check_options(entry.options, f"methods.{label}.options")
    return entry


def read_comparison(values: dict[str, Any], path: str) -> Comparison:
    """Return the comparison that the content of a YAML file describes; raises UserError for the first bad key."""
    given = _given(values, Comparison, f"'{path}'")
    for name in ("methods", "budgets"):
        if not given.get(name):
            raise UserError(f"config: '{path}' names no {name}")
    given |= {name: list(dict.fromkeys(value)) for name, value in given.items() if isinstance(value, list | tuple)}
    made = Comparison(**given)
    for where in ("options", "taught", "teacher"):
        if isinstance(options := getattr(made, where), Mapping):
            check_options(options, where)
    entries = made.entries()
    named: dict[str, dict[Any, Any]] = {
        "methods": {entry.label: slug(entry.label) for entry in entries},
        "budgets": {name: tuple(map(slug, name.partition("="))) for name in _budgets(made, entries)},
        "learning_rates": {rate: f"{rate:g}" for rate in made.learning_rates},
    }
    for key, names in named.items():
        if len({*names.values()}) < len(names):
            raise UserError(f"config: {key}: {', '.join(map(str, names))}: two would have the same folder; change one")
    return made


def _given(values: Mapping[str, Any], kind: Any, where: str, before: str = "") -> dict[str, Any]:
    """Return the values that are not None; refuse the first one that ``kind`` has not, or that cannot be used."""
    known = [f.name for f in fields(kind) if f.name not in ("label", "stages")]
    given = {key: value for key, value in values.items() if value is not None}
    for key in values:
        if key not in known:
            raise UserError(f"config: unknown key '{key}' in {where}; {nearest(key, known)}")
        fits, advice = _RULES.get(key, (None, ""))
        if fits and key in given and not fits(given[key]):
            raise UserError(f"config: {before}{key}: {given[key]!r}; give {advice}")
    return given


def _options(value: Any) -> bool:  # YAML reads 2026-01-31 as a date
    return isinstance(value, dict) and all(isinstance(n, str) and not isinstance(v, date) for n, v in value.items())


def _list(value: Any, *kinds: type) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0 and all(type(one) in kinds for one in value)


# key -> whether a value can be used, and advice
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "methods": (lambda value: isinstance(value, dict), "one key per method"),
    "method": (lambda value: isinstance(value, str), "the name of a class, e.g. LPAF"),
    **dict.fromkeys(("options", "taught"), (_options, "OPTION: VALUE, with a date in quotes")),
    "teacher": (lambda value: isinstance(value, str) or _options(value), "OPTION: VALUE, or a folder"),
    "without": (
        lambda value: isinstance(value, str) or _list(value, str),
        "beginnings of options, e.g. model.distillation",
    ),
    "split": (  # 0 is a stage without steps
        lambda value: isinstance(value, dict) and _list([*(n := value.values())], int) and min(n) >= 0 < max(n),
        "whole numbers from 0 on by stage; for no steps at all train: false",
    ),
    "budgets": (lambda value: _list(value, str, int, float), "a list, e.g. [0.25]"),
    "seeds": (lambda value: _list(value, int), "a list of whole numbers, e.g. [1]"),
    "learning_rates": (  # YAML reads 1e-4 as text
        lambda value: _list(value, int, float) and min(value) > 0,
        "a list of numbers above 0, with a point, e.g. [1.0e-4]",
    ),
    **dict.fromkeys(
        ("updates", "hold_out"), (lambda value: type(value) is int and value >= 1, "a whole number from 1 on")
    ),
}


def budget_name(budget: Any) -> str:
    """Return a budget as ``kind=value``; a number is a density."""
    text = str(budget)
    asked = parse_budget(text if "=" in text else f"density={text}")
    return f"density={asked.value:g}" if asked and asked.kind == "density" else text


def _budgets(made: Comparison, entries: Sequence[Entry]) -> list[str]:
    """Return all budgets, those of single methods last."""
    every = [*made.budgets, *(budget for entry in entries for budget in entry.budgets)]
    return [*dict.fromkeys(map(budget_name, every))]


def slug(text: str) -> str:
    """Return a name for files.

    >>> slug("SecondOrder, no training")
    'secondorder-no-training'
    """
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")


def words_of(options: Mapping[str, Any]) -> list[str]:
    """Return options as words of a command line."""
    return [f"--{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in options.items()]


# ------------------------------------------------------------------------------------------------------------- runs


def divide(updates: int, splits: Sequence[Mapping[str, int]], batches: int) -> tuple[int, int]:
    """Return the fewest epochs over all stages after the teacher, and the training steps of each.

    Every method has the same number of epochs, all of the same length, so a stage's share must be whole epochs.

    Args:
        updates: training steps over all stages.
        splits: shares of the stages of all methods that are trained.
        batches: of one epoch of the training data.

    Raises:
        UserError: it cannot be done; has the nearest number that can.
    """
    step = lcm(1, *(sum(split.values()) for split in splits if any(split.values())))
    for epochs in range(step, MOST_PIECES * step + 1, step):
        if updates % epochs == 0 and updates // epochs <= batches:
            return epochs, updates // epochs
    parts = step * min(MOST_PIECES, -(-updates // (batches * step)))  # the fewest epochs that are short enough
    near = parts * max(1, min(batches, round(updates / parts)))
    raise UserError(
        f"config: updates: {updates} cannot be divided into epochs of at most {batches} steps each, a multiple of "
        f"{step} in number and at most {MOST_PIECES * step}; nearest: updates {near}"
    )


def jobs_of(made: Comparison, entries: Sequence[Entry], out: Path, epochs: int, length: int) -> list[Fit]:
    """Return all runs: of a teacher per seed, unless a folder is given; then per budget, seed, method and rate.

    ``entries`` are the methods with their stages, which share ``epochs`` epochs of ``length`` training steps.
    """
    common = {  # after the recipes' options, which have other batches
        "data.batch_size": 32, "trainer.accumulate_grad_batches": 1, "trainer.enable_progress_bar": False,
        **made.options, "data.hold_out": made.hold_out,
    }  # fmt: skip

    def job(name: str, words: Sequence[str], seed: int, **more: Any) -> Fit:
        folder = Fit(out, name, (), **more).folder
        place = (f"--seed_everything={seed}", f"--run_dir={folder}", "--ckpt_path=last")
        return Fit(out, name, ("fit", *words, *place), seed, **more)

    teachers = {}
    if not isinstance(made.teacher, str):
        words = ["--model=SVD", "--model.density=1.0", *words_of(common | {**made.teacher, "model.retrain.epochs": 0})]
        teachers = {seed: job(f"seed={seed}", words, seed) for seed in made.seeds}
    jobs = [*teachers.values()]
    for budget, seed, entry in product(_budgets(made, entries), made.seeds, entries):
        if budget not in map(budget_name, entry.budgets or made.budgets):
            continue
        kind, _, value = budget.partition("=")
        cell = f"{slug(entry.label)}-{slug(kind)}={slug(value)}-seed={seed}"
        teacher, shares = teachers.get(seed), entry.shares()
        total = sum(shares.values()) or 1
        without = (entry.without,) if isinstance(entry.without, str) else tuple(entry.without)
        taught = {k: v for k, v in made.taught.items() if not k.startswith(without)}
        for rate in made.learning_rates if entry.train else (None,):
            schedule: dict[str, Any] = {f"model.{n}.epochs": round(epochs * s / total) for n, s in shares.items()}
            if rate is not None:
                schedule |= {f"model.{name}.learning_rate": rate for name, share in shares.items() if share}
            words = [
                f"--model={entry.method}", *words_of({**common, **taught, **entry.options}),
                f"--model.density={value}" if kind == "density" else f"--model.budget={budget}", *words_of(schedule),
                f"--model.teacher={teacher.folder / 'dense' / 'net' if teacher else made.teacher}",
                f"--trainer.limit_train_batches={length}",
            ]  # fmt: skip
            jobs.append(job(
                cell if rate is None else f"{cell}-rate={rate:g}", words, seed, label=entry.label, budget=budget,
                method=entry.method.rpartition(".")[2], cell=cell, rate=rate, teacher=teacher,
            ))  # fmt: skip
    return jobs


@dataclass(frozen=True)
class Plan:
    """A comparison that was checked, and all runs in its folder, the teachers' first.

    ``only`` are the labels of the methods whose runs are made; results are gathered for all. ``data`` has hashes of the
    splits' rows, ``batch`` is the number of rows of a training step.
    """

    comparison: Comparison
    out: Path
    jobs: Sequence[Fit]
    task: str = ""
    only: frozenset[str] = frozenset()
    data: Mapping[str, str] = field(default_factory=dict)
    batch: int = 0

    @property
    def teachers(self) -> list[Fit]:
        """The runs of the dense model; [] if a folder is given."""
        return [job for job in self.jobs if not job.label]

    @property
    def asked(self) -> list[Fit]:
        """The runs to be made, without teachers, in their order."""
        return [job for job in self.jobs if job.label in self.only]

    def check(self) -> None:
        """Refuse a folder that cannot be written, or that holds runs of other settings or data."""
        check_folder("out", self.out)
        known = (read_record(self.out / COMPARISON) or {}) if any(job.done for job in self.jobs) else {}
        for split in [name for name, key in (known.get("data") or {}).items() if self.data.get(name, key) != key]:
            raise UserError(f"out: '{self.out}' has runs with other {split} rows; give the same rows, or another --out")
        if (batch := known.get("batch", self.batch)) != self.batch:
            raise UserError(
                f"out: '{self.out}' has runs of a global batch of {batch}, now {self.batch} (batch_size, "
                "accumulate_grad_batches, devices); give the same, or another --out"
            )
        for job in self.jobs:
            job.check_same()

    def fairness(self) -> str:
        """Return the sentence on how the runs were made equal, for the screen and the page."""
        made, rates = self.comparison, len(self.comparison.learning_rates)
        return (
            f"Every trained method takes {made.updates:,} steps after the teacher and tries {rates} learning "
            f"rate{'s' if rates != 1 else ''}; rate and epoch are chosen on {made.hold_out:,} training rows that are "
            "held out, not on the dev set. Runs of one seed share teacher, training rows and their order."
        )

    def gather(self) -> dict[str, Any]:
        """Write ``compare.json``, a function of the files in the folder, and return its content."""
        runs = [job for job in self.jobs if job.label]
        done = next((job for job in runs if job.done), None)
        metric = (read_report(done.folder) or {})["metric"] if done else None
        gathered = {
            "config": asdict(self.comparison), "task": self.task, "metric": metric,
            "fairness": self.fairness(), "data": dict(self.data), "batch": self.batch,
            "cells": [_cell(name, [*jobs], metric) for name, jobs in groupby(runs, lambda job: job.cell)],
        }  # fmt: skip
        write_json(self.out / COMPARISON, gathered)
        return gathered


def _cell(name: str, jobs: Sequence[Fit], metric: Any) -> dict[str, Any]:
    """Return the entry of a cell: its learning rates, and the run that held-out rows choose."""
    first, tried = jobs[0], [_tried(job, metric) for job in jobs]
    errors = [one["error"] for one in tried if one["error"]]
    done = [one for one in tried if one["status"] == "done"]
    going = next((one["status"] for one in tried if one["status"] not in ("done", "failed")), None)
    status, error, chosen = going or ("done" if done else "failed"), next(iter(errors), None), tried[0]
    if status == "done":
        best = max if metric["mode"] == "max" else min
        chosen = best(done, key=lambda one: one["held_out"]) if len(done) > 1 else done[0]
        error = error and f"{len(errors)} of {len(tried)} learning rates failed: {error}"
    return {
        "name": name, "method": first.method, "label": first.label, "budget": first.budget, "seed": first.seed,
        "learning_rate": chosen["learning_rate"] if status == "done" else None,
        "tried": tried if first.rate is not None else [], "status": status, "error": error, "run": chosen["run"],
        "seconds": sum(one["seconds"] or 0 for one in tried),
    }  # fmt: skip


def _tried(job: Fit, metric: Any) -> dict[str, Any]:
    """Return the entry of a learning rate."""
    last = read_record(job.folder / "stages.json")[-1] if job.done else {}
    return {
        "learning_rate": job.rate, "held_out": (last.get("held_out") or {}).get(f"val/{(metric or {}).get('name')}"),
        "run": job.folder.relative_to(job.out).as_posix(), "status": job.status, "error": job.error,
        "seconds": job.state.get("seconds"),
    }  # fmt: skip
