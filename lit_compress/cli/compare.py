"""The command ``compare``: from its config to a plan, to runs, to a table, compare.json and the page."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from rich.console import Console
from rich.table import Table

from lit_compress.cli.options import CommandLine, method_class, parameters_of
from lit_compress.cli.parsers import OWN, comparison_words, options_in, silence_libraries
from lit_compress.cli.recipes import method_at_hand, resolve_comparison
from lit_compress.cli.words import take_apart
from lit_compress.export.report import final_metric
from lit_compress.methods import __all__ as method_names
from lit_compress.models.backbones import finetuned_on
from lit_compress.run import pages
from lit_compress.run.comparison import (
    COMMAND,
    Cell,
    Comparison,
    Entry,
    Job,
    cells,
    divide,
    read_comparison,
    shares,
    teachers,
    words_of,
)
from lit_compress.run.folder import Run
from lit_compress.run.results import other_density
from lit_compress.run.workers import Layout, Worker, fairness, gather, stopped_by_sigterm
from lit_compress.stages.base import Training
from lit_compress.utils.errors import UserError, nearest
from lit_compress.utils.files import check_folder, json_of
from lit_compress.utils.progress import note
from lit_compress.utils.tables import print, screen_table


@dataclass(frozen=True)
class Plan:
    """A comparison that was checked: its cells and teachers, and their data.

    Only the runs of the methods ``only`` are made; results are gathered for all.
    """

    comparison: Comparison
    place: Layout
    task: str
    teachers: list[Job]
    cells: list[Cell]
    command: str
    only: frozenset[str]

    @property
    def jobs(self) -> list[Job]:
        """The runs to be made, without teachers, in their order."""
        return [job for cell in self.cells if cell.label in self.only for job in cell.jobs]

    def gathered(self) -> dict[str, Any]:
        """Write the results so far and return them, as :func:`~lit_compress.run.workers.gather`."""
        return gather(self.place, self.cells, asdict(self.comparison), self.command, self.task)


def compare_command(args: list[str]) -> None:
    """Plan a comparison, and list its runs, make one, or make all."""
    silence_libraries()
    plan, given = plan_of(args)
    if given.list:
        for job in (*plan.teachers, *plan.jobs):
            print(job.command)
        return
    with stopped_by_sigterm():
        if given.index is not None:
            check_plan(plan)
            _make_one(plan, given.index)
        else:
            run_plan(plan, given.workers)


def plan_of(args: list[str]) -> tuple[Plan, argparse.Namespace]:
    """Return the plan of a comparison, and its notes.

    Raises:
        UserError: an option, the config or the data cannot be used.
    """
    given, rest = comparison_words(args)
    own = {name: getattr(given, name) for name, *_ in OWN if getattr(given, name) is not None}
    options = options_in(rest)
    file, values, remark = resolve_comparison(given.config, options.get("data.task"))
    if remark:
        note(f"config: {remark}")
    out = Path(given.out or f"runs/{Path(given.config).stem}").expanduser()
    command = shlex.join([*COMMAND, "compare", *_whole(args)])
    return make_plan(file, values, out, own, options, command), given


def check_plan(plan: Plan) -> None:
    """Refuse a folder that cannot be written, or that holds runs of other settings.

    Raises:
        UserError: it does.
    """
    check_folder("out", plan.place.out)
    plan.place.check_same([*plan.teachers, *(job for cell in plan.cells for job in cell.jobs)])


def _whole(args: Sequence[str]) -> list[str]:
    """Return the words of the command that makes all runs, not one of them."""
    left_out, left = [], iter(args)
    for word in left:
        if word == "--index":
            next(left, None)
        elif word != "--list" and not word.startswith("--index="):
            left_out.append(word)
    return left_out


def make_plan(file: Path, values: Any, out: Path, own: dict[str, Any], options: dict[str, str], command: str) -> Plan:
    """Return the plan of a comparison.

    Args:
        file: its config.
        values: the content of that, with the row of the task.
        out: folder to write.
        own: keys of the config from the command line, which replace its own; ``methods`` says whose runs are made.
        options: of fit, from the command line; they replace the config's.
        command: that makes all of it.

    Raises:
        UserError: the config, the data, or the number of steps cannot be used.
    """
    keys = own.get("methods")
    own = {name: value for name, value in own.items() if name != "methods"}
    made = read_comparison(values | own if isinstance(values, dict) else values, str(file))
    for key in keys or ():
        if key not in made.methods:
            raise UserError(f"methods: no method '{key}' in '{file}'; {nearest(key, made.methods)}")
    only = frozenset(map(str, made.methods if keys is None else keys))
    made = replace(made, options={**made.options, **options})
    shared = {"data.batch_size": 32, **made.options, "data.hold_out": made.hold_out}
    cli = CommandLine(["--model=SVD", *words_of(shared), f"--seed_everything={made.seeds[0]}"], "fit")
    parts = cli.ready(_recorded(out))
    made = replace(made, options={**made.options, **cli.revisions()})
    task, devices = parts.data.record, parts.trainer.get("devices")
    if not made.teacher and finetuned_on(parts.method.backbone, task):
        cli.backbone_as_teacher()
        made = replace(made, teacher=cli.config.model.init_args.teacher)
        note(f"model.backbone: '{made.teacher}' is fine-tuned on these labels: it teaches all seeds directly")
    entries = [_resolve(entry, task.name) for entry in made.entries()]
    parts.data.setup("fit")
    parts.data.devices = devices if isinstance(devices, int) and devices > 0 else 1
    epochs, length = 0, 1
    if any(entry.train for entry in entries):
        epochs, length = divide(made.updates, made.epochs, list(map(shares, entries)), parts.data.steps_per_epoch())
    made = replace(made, epochs=epochs or None)
    planned = cells(made, entries, out, epochs, length)
    return Plan(made, Layout(out), task.name, teachers(made, out), planned, command, only)


def _recorded(out: Path) -> dict[str, Any] | None:
    """Return the config of a run that is there already, whose revisions are those of all; None without one."""
    return next((Run(path.parent).config() for path in sorted(out.glob("*/*/config.yaml"))), None)


def _resolve(entry: Entry, task: str) -> Entry:
    """Return an entry with its class, its stages, and the words that choose it.

    Raises:
        UserError: no class has this name.
    """
    words = [f"--config={entry.config}"] if entry.config else []
    words += [f"--model={entry.method}"] if entry.method else []
    kind = method_class(method_at_hand(take_apart("fit", [*words, f"--data.task={task}"], {})))
    if kind is None:
        names = [name for name in method_names if name != "Method"]
        raise UserError(
            f"config: methods.{entry.label}: unknown method '{entry.method}'; {nearest(entry.method, names)}"
        )
    own = parameters_of(kind)
    stages = tuple(name for name, p in own.items() if isinstance(p.default, Training) and name != "dense")
    if "params" in own:
        words.append("--model.params=null")  # a density or a budget is in its place
    return replace(entry, method=kind.__name__, stages=stages, words=tuple(words))


def _make_one(plan: Plan, index: int) -> None:
    """Make the run of one line of --list.

    Raises:
        UserError: there is no such line; the run failed.
    """
    jobs = [*plan.teachers, *plan.jobs]
    if not 0 <= index < len(jobs):
        raise UserError(
            f"index: {index} is not in [0, {len(jobs) - 1}]; nearest valid {0 if index < 0 else len(jobs) - 1}"
        )
    job = jobs[index]
    was_there = plan.place.done(job)
    Worker(plan.place, [job], plan.teachers).work()
    results = plan.gathered()
    if error := plan.place.error(job):
        raise UserError(f"{job.name} failed: {error}; its log: {plan.place.log(job)}")
    print(f"{job.name}: {'was done already' if was_there else 'done'}")
    if all(cell["status"] in ("done", "failed") for cell in results["cells"]):
        print(f"page: {pages.write(plan.place.out)}")


def run_plan(plan: Plan, workers: int) -> Path:
    """Make all runs that are missing, then write and print the results; return the page.

    Raises:
        UserError: the folder cannot be used.
    """
    check_plan(plan)
    place, jobs = plan.place, plan.jobs
    there = sum(map(place.done, jobs))
    said = f", {there} of them done already" if there else ""
    count = sum(cell.label in plan.only for cell in plan.cells)
    print(f"{count} cells, {len(jobs)} runs{said}, {len(plan.teachers) or 'one given'} "
          f"teacher{'s' if len(plan.teachers) > 1 else ''}: {place.out}")  # fmt: skip
    print(fairness(asdict(plan.comparison)), flush=True)

    def ended(job: Job, error: str | None) -> None:
        seconds = place.state(job).get("seconds")
        what = f"failed: {error}" if error else f"done, {seconds:.0f} s"
        count = sum(place.done(job) or bool(place.error(job)) for job in jobs)
        print(f"[{count}/{len(jobs)}] {job.name if job.label else f'teacher {job.name}'}: {what}", flush=True)
        plan.gathered()

    Worker(place, jobs, plan.teachers, workers, ended).work()
    results = plan.gathered()
    name = (results["metric"] or {}).get("name", "metric")
    print(f"dev {name} on {plan.task}, mean ± standard deviation over seeds:")
    console = Console(highlight=False)
    (console if console.is_terminal else Console(highlight=False, width=160)).print(table(results, place.out))
    for cell in results["cells"]:
        if cell["error"]:
            print(f"{cell['name']}: {cell['status']}: {cell['error']}")
    page = pages.write(place.out)
    print(f"results: {place.out / 'compare.json'}\npage: {page}")
    return page


def table(comparison: dict[str, Any], out: Path) -> Table:
    """Return the table for the screen: the dev metric of every method at every budget, over the seeds."""
    budgets = list(dict.fromkeys(cell["budget"] for cell in comparison["cells"]))
    body = []
    for label in dict.fromkeys(cell["label"] for cell in comparison["cells"]):
        mine = [cell for cell in comparison["cells"] if cell["label"] == label]
        body.append([label, *(_shown([c for c in mine if c["budget"] == budget], out) for budget in budgets)])
    return screen_table(["method", *budgets], body)


def _shown(cells: Sequence[dict[str, Any]], out: Path) -> str:
    reports = [json_of(out / cell["run"] / "report.json") for cell in cells if cell["status"] == "done"]
    values = [final_metric(report) for report in reports]
    left = {status: sum(cell["status"] == status for cell in cells) for status in ("failed", "running", "missing")}
    rest = ", ".join(f"{count} {status}" for status, count in left.items() if count)
    if not values:
        return rest
    text = f"{mean(values):.4f}" + (f" ± {stdev(values):.4f} ({len(values)})" if len(values) > 1 else "")
    stored = other_density(cells[0]["budget"], mean(report["compressed"]["density"] for report in reports))
    text += "" if stored is None else f", stored {stored:.3f}"
    return f"{text}, {rest}" if rest else text
