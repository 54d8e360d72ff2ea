"""The plan of a comparison: methods x budgets x seeds, and for each of these cells a ``fit`` per learning rate.

All runs of a seed have the same teacher, the same examples in the same order and the same number of steps after the
teacher. Every method that is trained tries the same learning rates. Training rows that are held out choose among them.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import product
from math import lcm
from pathlib import Path
from typing import Any

from lit_compress.utils.errors import UserError, nearest

COMMAND = ("python", "-m", "lit_compress")
COMPARISON = "compare.json"  # file with the results
# beginnings of options that no method may have for itself: with them it would train on something else, or longer
SHARED = (
    "data.", "seed_everything", "trainer.accumulate_grad_batches", "trainer.limit_train_batches", "trainer.max_steps",
)  # fmt: skip
TEACHER = "teachers"  # folder of a comparison; RUNS: of the runs
RUNS = "runs"
MOST_PIECES = 1000  # epochs into which the steps are divided, if the user does not set a number
_REMOVED = {
    "claims": "python -m benchmarks.comparison.claims tests claims on the folder of a comparison",
    "each": "give every value a method of its own",
}  # keys of version 0.2


@dataclass(frozen=True)
class Entry:
    """A method of a comparison, with its options.

    Attributes:
        label: the user's name for it.
        method: class; with ``config`` it follows from that.
        config: recipe or config of the method.
        train: False: nothing is trained after the teacher; the method's untrained result is measured.
        options: of ``fit``, by name.
        split: its stages' shares of the training steps; without it all stages get the same.
        without: beginnings of options in ``taught`` that this method does not take.
        budgets: of its runs, in place of the comparison's.
        stages: after the teacher; this and ``words``, which choose the method, are the command line's.
        words: see there.
    """

    label: str
    method: str | None = None
    config: str | None = None
    train: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    split: Mapping[str, float] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    budgets: Sequence[Any] = ()
    stages: tuple[str, ...] = ()
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """The config of a comparison.

    Attributes:
        methods: by label; values are :class:`Entry`'s other attributes, or None: the label is the class.
        budgets: densities, or values of ``model.budget``, e.g. ``size=20MB``.
        seeds: of teachers and runs.
        learning_rates: tried for every method that is trained.
        updates: training steps after the teacher, over all stages.
        epochs: parts of them, after each of which the model is validated; without it the smallest number that the data
            allow.
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
    epochs: int | None = None
    hold_out: int = 1000
    options: Mapping[str, Any] = field(default_factory=dict)
    taught: Mapping[str, Any] = field(default_factory=dict)
    teacher: Mapping[str, Any] | str = field(default_factory=dict)

    def entries(self) -> list[Entry]:
        """Return the methods.

        Raises:
            UserError: a method has unknown keys, or names no method.
        """
        return [_entry(str(label), values or {}) for label, values in self.methods.items()]


@dataclass(frozen=True)
class Fit:
    """One ``fit``.

    Attributes:
        name: of its folder in ``runs`` or ``teachers``.
        words: of the command, after ``python -m lit_compress``.
        label: of the method; "" for a teacher.
        rate: learning rate; None for teachers, and where nothing is trained.
        teacher: that it needs; None if a folder is given.
    """

    name: str
    words: tuple[str, ...]
    label: str = ""
    rate: float | None = None
    teacher: Fit | None = None

    @property
    def folder(self) -> Path:
        """Relative to the comparison's."""
        return Path(RUNS if self.label else TEACHER) / self.name

    @property
    def command(self) -> str:
        """The command as users type it."""
        return shlex.join([*COMMAND, *self.words])


@dataclass(frozen=True)
class Cell:
    """A method at a budget with a seed, and the jobs among which held-out rows choose."""

    name: str
    label: str
    method: str
    budget: str
    seed: int
    jobs: tuple[Fit, ...]


@dataclass(frozen=True)
class Plan:
    """A comparison that was checked: its runs and their folder.

    Attributes:
        comparison: its config.
        entries: the methods, with their stages.
        out: folder of the comparison.
        epochs: over all stages after the teacher.
        length: training steps of each.
        task: of all runs.
        command: that makes all of this again.
        only: labels of the methods whose runs are made; results are gathered for all.
    """

    comparison: Comparison
    entries: Sequence[Entry]
    out: Path
    epochs: int
    length: int
    task: str = ""
    command: str = ""
    only: frozenset[str] = frozenset()

    @cached_property
    def teachers(self) -> dict[int, Fit]:
        """A ``fit`` of the dense model for every seed; {} if a folder is given."""
        given, seeds = self.comparison.teacher, self.comparison.seeds
        if isinstance(given, str):
            return {}
        words = ["--model=SVD", "--model.density=1.0", *words_of({**self._common, **given}), "--model.retrain.epochs=0"]
        return {seed: Fit(f"seed={seed}", self._words(Path(TEACHER) / f"seed={seed}", words, seed)) for seed in seeds}

    @cached_property
    def cells(self) -> list[Cell]:
        """All cells: for each budget, and each seed, all methods that have it."""
        made, cells = self.comparison, []
        every = (*made.budgets, *(budget for entry in self.entries for budget in entry.budgets))
        for budget, seed, entry in product(dict.fromkeys(map(budget_name, every)), made.seeds, self.entries):
            if budget not in map(budget_name, entry.budgets or made.budgets):
                continue
            kind, _, value = budget.partition("=")
            name = f"{slug(entry.label)}-{slug(kind)}={slug(value)}-seed={seed}"
            rates: Sequence[float | None] = made.learning_rates if entry.train else [None]
            jobs = tuple(self._job(entry, budget, seed, rate, name) for rate in rates)
            cells.append(Cell(name, entry.label, str(entry.method), budget, seed, jobs))
        return cells

    @property
    def jobs(self) -> list[Fit]:
        """The runs to be made, without teachers, in their order."""
        return [job for cell in self.cells if cell.label in self.only for job in cell.jobs]

    def _job(self, entry: Entry, budget: str, seed: int, rate: float | None, cell: str) -> Fit:
        split, made = shares(entry), self.comparison
        total = sum(split.values()) or 1
        taught = {k: v for k, v in made.taught.items() if not k.startswith(tuple(entry.without))}
        kind, _, value = budget.partition("=")
        schedule: dict[str, Any] = {f"model.{name}.epochs": round(self.epochs * split[name] / total) for name in split}
        if rate is not None:
            schedule |= {f"model.{name}.learning_rate": rate for name in split if split[name]}
        teacher = self.teachers.get(seed)
        words = [
            *entry.words, *words_of({**self._common, **taught, **entry.options}),
            f"--model.density={value}" if kind == "density" else f"--model.budget={budget}", *words_of(schedule),
            f"--model.teacher={self.out / teacher.folder / 'dense' / 'net' if teacher else made.teacher}",
            f"--trainer.limit_train_batches={self.length}",
        ]  # fmt: skip
        cell += "" if rate is None else f"-rate={rate:g}"
        return Fit(cell, self._words(Path(RUNS) / cell, words, seed), entry.label, rate, teacher)

    @property
    def _common(self) -> dict[str, Any]:
        """The options of all runs; they come after the recipes' options, which have other batches."""
        return {
            "data.batch_size": 32, "trainer.accumulate_grad_batches": 1, "trainer.enable_progress_bar": False,
            **self.comparison.options, "data.hold_out": self.comparison.hold_out,
        }  # fmt: skip

    def _words(self, folder: Path, words: Sequence[str], seed: int) -> tuple[str, ...]:
        return "fit", *words, f"--seed_everything={seed}", f"--run_dir={self.out / folder}", "--ckpt_path=last"


def read_comparison(values: dict[str, Any], path: str) -> Comparison:
    """Return the comparison that the content of a YAML file describes.

    Raises:
        UserError: a key is unknown, missing, or has a value that cannot be used.
    """
    _check_keys(values, Comparison, f"'{path}'")
    for name in ("methods", "budgets"):
        if not values.get(name):
            raise UserError(f"config: '{path}' names no {name}")
    made = Comparison(**{key: value for key, value in values.items() if value is not None})
    _check(made)
    return made


def _check_keys(values: Mapping[str, Any], kind: Any, where: str) -> None:
    """Refuse a key that is no attribute of ``kind``, or was one."""
    known = [f.name for f in fields(kind) if f.name not in ("label", "stages", "words")]
    for key in values:
        if key in _REMOVED:
            raise UserError(f"config: {key} in {where}: this key was removed in version 0.3; {_REMOVED[key]}")
        if key not in known:
            raise UserError(f"config: unknown key '{key}' in {where}; {nearest(key, known)}")


def _check(made: Comparison) -> None:
    """Refuse values that cannot be used.

    Raises:
        UserError: the first of them.
    """
    several = "give a list of one or more, each once, e.g. "
    rules: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
        *((name, lambda value: isinstance(value, dict), f"give {form}") for name, form in (
            ("methods", "one key per method"), ("options", "OPTION: VALUE"), ("taught", "OPTION: VALUE"))),
        ("budgets", _several, f"{several}[0.25]"),
        ("seeds", _several, f"{several}[1]"),
        ("learning_rates", _several, f"{several}[1.0e-4]"),
        ("seeds", lambda values: all(map(_whole, values)), "give whole numbers"),
        ("learning_rates", lambda values: all(isinstance(v, int | float) and v > 0 for v in values),
         "give numbers above 0, with a point: 1.0e-4"),  # YAML reads 1e-4 as text
        *((name, lambda value: value is None or (_whole(value) and value >= 1), "give a whole number from 1 on")
          for name in ("updates", "hold_out", "epochs")),
    )  # fmt: skip
    for name, fits, advice in rules:
        if not fits(value := getattr(made, name)):
            raise UserError(f"config: {name}: {value!r}; {advice}")
    entries = made.entries()
    for entry in entries:
        if not isinstance(entry.budgets, list | tuple):
            raise UserError(f"config: methods.{entry.label}.budgets: '{entry.budgets}'; give a list, e.g. [0.25]")
        for name in entry.options:
            if name.startswith(SHARED) or re.fullmatch(r"model\.\w+\.epochs", name):
                raise UserError(
                    f"config: methods.{entry.label}.options: {name} is the same for all methods; "
                    "give it in options, updates or split"
                )
    if len({slug(entry.label) for entry in entries}) < len(entries):
        labels = ", ".join(entry.label for entry in entries)
        raise UserError(f"config: methods: {labels}: two would have the same folder; rename one")


def _several(values: Any) -> bool:
    return isinstance(values, list | tuple) and 0 < len(values) == len(set(map(str, values)))


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _entry(label: str, values: Any) -> Entry:
    """Return the method that one key of ``methods`` describes."""
    if not isinstance(values, dict):
        raise UserError(f"config: methods.{label}: '{values}'; give keys, e.g. {{method: LPAF}}")
    _check_keys(values, Entry, f"methods.{label}")
    whole = {"method": None if "config" in values else label.partition(",")[0].strip(), **values}
    if isinstance(whole.get("without"), str):
        whole["without"] = (whole["without"],)
    return Entry(label, **whole)


def budget_name(budget: Any) -> str:
    """Return a budget as ``kind=value``; a number is a density."""
    if isinstance(budget, str) and "=" in budget:
        return budget
    try:
        return f"density={float(budget):g}"
    except (TypeError, ValueError):
        raise UserError(f"budget: '{budget}' is no density; give 0.25, or size=20MB, params=5M, flops=0.3") from None


def slug(text: str) -> str:
    """Return a name for files.

    >>> slug("SecondOrder, no training")
    'secondorder-no-training'
    """
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")


def words_of(options: Mapping[str, Any]) -> list[str]:
    """Return options as words of a command line."""
    return [f"--{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in options.items()]


def shares(entry: Entry) -> dict[str, float]:
    """Return each stage's share of a method's training steps after the teacher.

    Raises:
        UserError: ``split`` names another stage, or shares that are no numbers.
    """
    if not entry.train:
        return dict.fromkeys(entry.stages, 0)
    for stage, share in entry.split.items():
        if stage not in entry.stages:
            raise UserError(f"config: methods.{entry.label}.split: no stage '{stage}'; {nearest(stage, entry.stages)}")
        if not isinstance(share, int) or share < 0:
            raise UserError(f"config: methods.{entry.label}.split.{stage}: '{share}' is no whole number from 0 on")
    if entry.split and not any(entry.split.values()):
        raise UserError(f"config: methods.{entry.label}.split: all shares are 0; give train: false")
    return {stage: entry.split.get(stage, 0) if entry.split else 1 for stage in entry.stages}


def divide(updates: int, epochs: int | None, splits: Sequence[Mapping[str, float]], batches: int) -> tuple[int, int]:
    """Return the number of epochs over all stages after the teacher, and the training steps of each.

    Every method has the same number of epochs, all of the same length, so a stage's share must be whole epochs.

    Args:
        updates: training steps over all stages.
        epochs: as asked for; None: the fewest that fit.
        splits: shares of the stages of all methods that are trained.
        batches: of one epoch of the training data.

    Raises:
        UserError: it cannot be done; the message has the nearest number that can.
    """
    step = lcm(1, *(int(sum(split.values())) for split in splits if any(split.values())))
    fits = [n for n in range(step, MOST_PIECES * step + 1, step) if updates % n == 0 and updates // n <= batches]
    if epochs is None:
        if not fits:
            raise UserError(
                f"config: updates: {updates} cannot be divided into epochs of at most {batches} steps each, a "
                f"multiple of {step} in number; nearest: updates {_near(updates, step, batches)}"
            )
        return fits[0], updates // fits[0]
    if epochs in fits:
        return epochs, updates // epochs
    hint = f"nearest: epochs {min(fits, key=lambda n: abs(n - epochs))}" if fits else "change updates"
    raise UserError(
        f"config: epochs: {epochs} with updates {updates}: epochs must divide the steps into parts of at most "
        f"{batches} (one pass over the data), and be a multiple of {step} for the stages' shares; {hint}"
    )


def _near(updates: int, step: int, batches: int) -> int:
    parts = step * -(-updates // (batches * step))  # the fewest epochs that are short enough
    return parts * max(1, min(batches, round(updates / parts)))
