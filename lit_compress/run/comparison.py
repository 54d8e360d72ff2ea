"""The plan of a comparison: methods x budgets x seeds, and for each of these cells a ``fit`` per learning rate.

All runs of a seed have the same teacher, the same examples in the same order and the same number of steps after the
teacher. Every method that is trained tries the same learning rates. Training rows that are held out choose among them.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from itertools import product
from pathlib import Path
from typing import Any

from lit_compress.utils.errors import UserError, nearest

COMMAND = ("python", "-m", "lit_compress")
# beginnings of options that no method may have for itself: with them it would train on something else, or longer
SHARED = (
    "data.", "seed_everything", "trainer.accumulate_grad_batches", "trainer.limit_train_batches", "trainer.max_steps",
)  # fmt: skip
TEACHER = "teachers"  # folder of a comparison; RUNS: of the runs
RUNS = "runs"


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
        each: lists of values by option; every combination is a method of its own.
        budgets: of its runs, in place of the comparison's.
        key: of the config, which describes several methods where options are varied.
    """

    label: str
    method: str | None = None
    config: str | None = None
    train: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    split: Mapping[str, float] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    each: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    budgets: Sequence[Any] = ()
    key: str = ""


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
        """Return the methods; an entry with varied options counts as several.

        Raises:
            UserError: a method has unknown keys, or names no method.
        """
        return [part for label, values in self.methods.items() for part in _entries(str(label), values or {})]


@dataclass(frozen=True)
class Job:
    """One ``fit``.

    Attributes:
        name: of its folder in ``runs`` or ``teachers``.
        folder: relative to the comparison's.
        words: of the command, after ``python -m lit_compress``.
        label: of the method; "" for a teacher.
        seed: of the run.
        rate: learning rate; None for teachers, and where nothing is trained.
        needs: name of the teacher's job; None if there is none.
    """

    name: str
    folder: Path
    words: tuple[str, ...]
    label: str = ""
    seed: int = 0
    rate: float | None = None
    needs: str | None = None

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
    jobs: tuple[Job, ...]


def read_comparison(values: Any, path: str) -> Comparison:
    """Return the comparison that the content of a YAML file describes.

    Raises:
        UserError: a key is unknown, missing, or has a value that cannot be used.
    """
    if not isinstance(values, dict):
        raise UserError(f"config: '{path}' is no comparison; write methods, budgets, seeds, ... as keys")
    known = [f.name for f in fields(Comparison)]
    if "claims" in values:
        raise UserError(
            f"config: claims in '{path}': this key was removed in version 0.3; python -m benchmarks.comparison.claims "
            "tests claims on the folder of a comparison"
        )
    for key in values:
        if key not in known:
            raise UserError(f"config: unknown key '{key}' in '{path}'; {nearest(key, known)}")
    for f in fields(Comparison):
        if f.default is MISSING and f.default_factory is MISSING and not values.get(f.name):
            raise UserError(f"config: '{path}' names no {f.name}")
    made = Comparison(**{key: value for key, value in values.items() if value is not None})
    _check(made)
    return made


def _check(made: Comparison) -> None:
    for name, kind in (("budgets", list), ("seeds", list), ("learning_rates", list), ("methods", dict)):
        if not isinstance(getattr(made, name), kind) and getattr(made, name) != getattr(Comparison, name, None):
            what = "a list, e.g. [0.25]" if kind is list else "one key per method"
            raise UserError(f"config: {name}: '{getattr(made, name)}'; give {what}")
    for name in ("options", "taught"):
        if not isinstance(getattr(made, name), dict) and getattr(made, name):
            raise UserError(f"config: {name}: '{getattr(made, name)}'; give OPTION: VALUE")
    for name, least in (("updates", 1), ("hold_out", 1), ("epochs", 1)):
        value = getattr(made, name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            raise UserError(f"config: {name}: '{value}' is no whole number from {least} on")
    for name in ("seeds", "learning_rates", "budgets"):
        values = getattr(made, name)
        if not values or len(set(map(str, values))) < len(values):
            raise UserError(f"config: {name}: {list(values)}; give one or more, each once")
    if not all(isinstance(seed, int) and not isinstance(seed, bool) for seed in made.seeds):
        raise UserError(f"config: seeds: {list(made.seeds)}; give whole numbers")
    for rate in made.learning_rates:
        if not isinstance(rate, int | float) or rate <= 0:  # YAML reads 1e-4 as text
            raise UserError(f"config: learning_rates: '{rate}' is no number above 0; write 1.0e-4")
    for entry in made.entries():
        if not isinstance(entry.budgets, list | tuple):
            raise UserError(f"config: methods.{entry.label}.budgets: '{entry.budgets}'; give a list, e.g. [0.25]")
        for name in entry.options:
            if name.startswith(SHARED) or re.fullmatch(r"model\.\w+\.epochs", name):
                raise UserError(
                    f"config: methods.{entry.label}.options: {name} is the same for all methods; "
                    "give it in options, updates or split"
                )
    labels = [entry.label for entry in made.entries()]
    if len({slug(label) for label in labels}) < len(labels):
        raise UserError(f"config: methods: {', '.join(labels)}: two would have the same folder; rename one")


def _entries(label: str, values: Any) -> Iterator[Entry]:
    """Yield the methods that one key of ``methods`` describes."""
    if not isinstance(values, dict):
        raise UserError(f"config: methods.{label}: '{values}'; give keys, e.g. {{method: LPAF}}")
    known = [f.name for f in fields(Entry) if f.name not in ("label", "key")]
    for key in values:
        if key not in known:
            raise UserError(f"config: unknown key '{key}' in methods.{label}; {nearest(key, known)}")
    whole = {"method": None if "config" in values else label.partition(",")[0].strip(), **values}
    if isinstance(whole.get("without"), str):
        whole["without"] = (whole["without"],)
    varied = whole.pop("each", None) or {}
    for name, several in varied.items():
        if not isinstance(several, list) or not several:
            raise UserError(f"config: methods.{label}.each.{name}: '{several}'; give a list of values")
    for choice in product(*varied.values()):
        some = dict(zip(varied, choice, strict=True))
        shown = ", ".join(f"{name.rpartition('.')[2]} {as_text(value)}" for name, value in some.items())
        options = {**whole.get("options", {}), **some}
        yield Entry(f"{label}, {shown}" if shown else label, **whole | {"options": options, "key": label})


def budget_name(budget: Any) -> str:
    """Return a budget as ``kind=value``; a number is a density."""
    return budget if isinstance(budget, str) and "=" in budget else f"density={_number(budget)}"


def _number(value: Any) -> str:
    try:
        return f"{float(value):g}"
    except (TypeError, ValueError):
        raise UserError(f"budget: '{value}' is no density; give 0.25, or size=20MB, params=5M, flops=0.3") from None


def slug(text: str) -> str:
    """Return a name for files.

    >>> slug("SecondOrder, no training")
    'secondorder-no-training'
    """
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")


def as_text(value: Any) -> str:
    """Return a value as options take it."""
    return value if isinstance(value, str) else json.dumps(value)


def words_of(options: Mapping[str, Any]) -> list[str]:
    """Return options as words of a command line."""
    return [f"--{name}={as_text(value)}" for name, value in options.items()]


def shares(entry: Entry, stages: Sequence[str]) -> dict[str, float]:
    """Return each stage's share of a method's training steps after the teacher.

    Raises:
        UserError: ``split`` names another stage, or shares that are no numbers.
    """
    if not entry.train:
        return dict.fromkeys(stages, 0)
    for stage, share in entry.split.items():
        if stage not in stages:
            raise UserError(f"config: methods.{entry.label}.split: no stage '{stage}'; {nearest(stage, stages)}")
        if not isinstance(share, int) or share < 0:
            raise UserError(f"config: methods.{entry.label}.split.{stage}: '{share}' is no whole number from 0 on")
    if entry.split and not any(entry.split.values()):
        raise UserError(f"config: methods.{entry.label}.split: all shares are 0; give train: false")
    return {stage: entry.split.get(stage, 0) if entry.split else 1 for stage in stages}


# ------------------------------------------------------------------------------------------ cells


@dataclass(frozen=True)
class Resolved:
    """An entry as the command line resolves it: the class of the method, its stages, the words that choose it."""

    entry: Entry
    method: str
    stages: tuple[str, ...]
    words: tuple[str, ...]


def teachers(made: Comparison, out: Path) -> list[Job]:
    """Return a ``fit`` of the dense model for every seed; [] if a folder is given."""
    if isinstance(made.teacher, str):
        return []
    jobs = []
    for seed in made.seeds:
        folder = Path(TEACHER) / f"seed={seed}"
        words = [
            "fit", "--model=SVD", "--model.density=1.0", *words_of({**_common(made), **made.teacher}),
            "--model.retrain.epochs=0", f"--seed_everything={seed}", *_place(out / folder),
        ]  # fmt: skip
        jobs.append(Job(folder.name, folder, tuple(words), seed=seed))
    return jobs


def cells(made: Comparison, methods: Sequence[Resolved], out: Path, epochs: int, length: int) -> list[Cell]:
    """Return all cells: for each budget, and each seed, all methods that have it.

    Args:
        made: the comparison.
        methods: its methods.
        out: folder of the comparison.
        epochs: over all stages after the teacher.
        length: training steps of each.
    """
    made_cells = []
    budgets = {budget_name(b): b for b in (*made.budgets, *(b for method in methods for b in method.entry.budgets))}
    for (named, budget), seed, method in product(budgets.items(), made.seeds, methods):
        entry, name = method.entry, f"{slug(method.entry.label)}-{slug_budget(budget)}-seed={seed}"
        if named not in map(budget_name, entry.budgets or made.budgets):
            continue
        rates: Sequence[float | None] = made.learning_rates if entry.train else [None]
        jobs = tuple(_job(made, method, budget, seed, rate, name, out, epochs, length) for rate in rates)
        made_cells.append(Cell(name, entry.label, method.method, named, seed, jobs))
    return made_cells


def slug_budget(budget: Any) -> str:
    """Return a budget for names of files."""
    kind, _, value = budget_name(budget).partition("=")
    return f"{slug(kind)}={slug(value)}"


def _job(
    made: Comparison, method: Resolved, budget: Any, seed: int, rate: float | None, cell: str, out: Path, epochs: int,
    length: int,
) -> Job:  # fmt: skip
    entry = method.entry
    split = shares(entry, method.stages)
    total = sum(split.values()) or 1
    name = cell if rate is None else f"{cell}-rate={rate:g}"
    folder = Path(RUNS) / name
    taught = {k: v for k, v in made.taught.items() if not k.startswith(tuple(entry.without) or ("\0",))}
    kind, _, value = budget_name(budget).partition("=")
    schedule: dict[str, Any] = {f"model.{stage}.epochs": round(epochs * split[stage] / total) for stage in split}
    if rate is not None:
        schedule |= {f"model.{stage}.learning_rate": rate for stage in split if split[stage]}
    own = isinstance(made.teacher, str)
    teacher = made.teacher if own else out / TEACHER / f"seed={seed}" / "dense" / "net"
    words = [
        "fit", *method.words, *words_of({**_common(made), **taught, **entry.options}),
        f"--model.density={value}" if kind == "density" else f"--model.budget={kind}={value}",
        *words_of(schedule), f"--model.teacher={teacher}", f"--trainer.limit_train_batches={length}",
        f"--seed_everything={seed}", *_place(out / folder),
    ]  # fmt: skip
    return Job(name, folder, tuple(words), entry.label, seed, rate, None if own else f"seed={seed}")


def _common(made: Comparison) -> dict[str, Any]:
    """Return the options of all runs; they come after the recipes' options, which have other batches."""
    return {
        "data.batch_size": 32, "trainer.accumulate_grad_batches": 1, "trainer.enable_progress_bar": False,
        **made.options, "data.hold_out": made.hold_out,
    }  # fmt: skip


def _place(folder: Path) -> list[str]:
    return [f"--run_dir={folder}", "--ckpt_path=last"]
