"""The command ``compare``: from its config to a plan, to runs, to a table, compare.json and the page."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

from lit_compress.cli.lines import checked
from lit_compress.cli.options import CommandLine, method_class
from lit_compress.cli.recipes import COMPARISONS, resolve_config, shipped
from lit_compress.cli.words import Line, from_python
from lit_compress.methods import __all__ as method_names
from lit_compress.models.backbones import finetuned_on
from lit_compress.run import pages
from lit_compress.run.comparison import Entry, Plan, divide, jobs_of, read_comparison
from lit_compress.run.fair import check_options
from lit_compress.run.folder import Run
from lit_compress.run.results import groups, read_results
from lit_compress.run.trainer import processes
from lit_compress.run.workers import Fit, Worker, stop
from lit_compress.stages.base import Training
from lit_compress.utils.errors import UserError, nearest
from lit_compress.utils.progress import note
from lit_compress.utils.tables import print, show


def compare(
    *, config: str | None = None, out: str | None = None, list: bool = False, index: int | None = None,
    workers: int = 1, methods: list[str] | None = None, budgets: list[str] | None = None,
    seeds: list[int] | None = None, learning_rates: list[float] | None = None, updates: int | None = None,
    hold_out: int | None = None, line: Line,
) -> None:  # fmt: skip
    """Run several methods, budgets and seeds from the same teachers with equal training steps, and compare them.

    Args:
        config: a path, or a shipped comparison, e.g. compare_sst2.yaml; options of fit are for all runs, e.g.
            --model.backbone DIR.
        out: folder to write (default runs/NAME).
        list: print all runs as commands, one a line, and make none.
        index: make only the run of this line of --list, from 0, and the teacher it needs.
        workers: runs at one time.
        methods: make only the runs of these of the config's methods.
        budgets: densities, or size=20MB, params=5M, flops=0.3, speedup=3x, in place of the config's.
        seeds: in place of the config's.
        learning_rates: in place of the config's.
        updates: training steps after the teacher, in place of the config's.
        hold_out: training rows that choose learning rates and epochs, in place of the config's.
        line: options of fit, for all runs.

    Raises:
        UserError: a run failed; the results of the others are there.
    """
    if config is None:
        raise UserError(f"config: it is missing; shipped are {', '.join(shipped(COMPARISONS))}")
    given = [name for name, _ in line.options if name.endswith("+")]
    if twice := next((name for name in given if given.count(name) > 1), None):
        raise UserError(f'{twice}: it is given twice; give a list, e.g. \'["A", "B"]\'')
    own = {"methods": methods, "budgets": budgets, "seeds": seeds, "learning_rates": learning_rates}
    plan = plan_of(config, out, own | {"updates": updates, "hold_out": hold_out}, dict(line.options))
    if list:
        for job in (*plan.teachers, *plan.asked):
            print(job.command)
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        run_plan(plan, workers, index)
    finally:
        signal.signal(signal.SIGTERM, before)
    if failed := sum(bool(job.error) for job in plan.asked):
        raise UserError(f"{failed} of {len(plan.asked)} runs failed; the same command tries them again")


def plan_of(config: str, out: str | None, own: Mapping[str, Any], options: dict[str, Any]) -> Plan:
    """Return the plan of a comparison; names on the hub, the teacher, and the number of epochs are known afterwards.

    Args:
        config: path or name of a shipped comparison.
        out: folder to write; None: runs/NAME.
        own: values that replace the config's; None: they do not. ``methods`` says whose runs are made.
        options: of ``fit``, by name, for all runs; they replace the config's.

    Raises:
        UserError: an option, the config or the data cannot be used.
    """
    check_options(options)
    values = resolve_config(config, options.get("data.task"), COMPARISONS)
    place = Path(out or f"runs/{Path(config).stem}").expanduser()
    own = {name: value for name, value in own.items() if value is not None}
    made = read_comparison({**values, **own, "methods": values.get("methods")}, config)
    for key in own.get("methods", ()):
        if key not in made.methods:
            raise UserError(f"methods: no method '{key}' in '{config}'; {nearest(key, made.methods)}")

    made = replace(made, options={**made.options, **options})
    shared = {"data.batch_size": 32, **made.options, "data.hold_out": made.hold_out}
    cli = CommandLine(checked(from_python("fit", {"model": "SVD", **shared, "seed_everything": made.seeds[0]})))
    # a run that is there already has the revisions of all
    parts = cli.ready(next((Run(path.parent).config() for path in sorted(place.glob("*/*/config.yaml"))), None))
    made = replace(made, options={**made.options, **cli.revisions()})
    task = parts.data.record
    if not made.teacher and finetuned_on(parts.method.backbone, task):
        cli.backbone_as_teacher()
        made = replace(made, teacher=cli.config.model.init_args.teacher)
        note(f"model.backbone: '{made.teacher}' is fine-tuned on these labels: it teaches all seeds directly")
    entries = [_resolve(entry) for entry in made.entries()]
    parts.data.setup("fit")
    parts.data.devices = processes(parts.trainer)
    epochs, length = 0, 1
    if trained := [entry.shares() for entry in entries if entry.train]:
        epochs, length = divide(made.updates, trained, parts.data.steps_per_epoch())
    only = frozenset(map(str, own.get("methods", made.methods)))
    jobs = jobs_of(made, entries, place, epochs, length)
    return Plan(made, place, jobs, task.name, only, parts.data.contents, parts.data.global_batch)


def _resolve(entry: Entry) -> Entry:
    """Return an entry with the stages of its class."""
    kind = method_class(entry.method)
    if kind is None:
        hint = nearest(entry.method, (name for name in method_names if name != "Method"))
        raise UserError(f"config: methods.{entry.label}: unknown method '{entry.method}'; {hint}")
    own = signature(kind).parameters
    stages = tuple(name for name, p in own.items() if isinstance(p.default, Training) and name != "dense")
    return replace(entry, stages=stages)


def run_plan(plan: Plan, workers: int, index: int | None = None) -> None:
    """Make all runs that are missing, then write and print the results and the page.

    With ``index`` the run of this line of --list alone; the page is written once there is no other to be made.

    Raises:
        UserError: the folder cannot be used or holds runs of other settings, there is no such line, or its run failed.
    """
    if workers < 1:
        raise UserError(f"workers: {workers} is below 1, the smallest valid value")
    plan.check()
    jobs, every = plan.asked, [*plan.teachers, *plan.asked]
    if index is not None:
        if not 0 <= index < len(every):
            near = 0 if index < 0 else len(every) - 1
            raise UserError(f"index: {index} is not in [0, {len(every) - 1}]; nearest valid {near}")
        jobs = [every[index]]
    print(f"{len(jobs)} of {len(plan.asked)} runs, {sum(job.done for job in jobs)} of them done already: {plan.out}")
    print(plan.fairness(), flush=True)

    def ended(job: Fit, error: str | None) -> None:
        count = sum(some.done or bool(some.error) for some in jobs)
        said = f"failed: {error}" if error else f"done, {job.state['seconds']:.0f} s"
        print(f"[{count}/{len(jobs)}] {job.name if job.label else f'teacher {job.name}'}: {said}", flush=True)
        plan.gather()

    Worker(jobs, workers, ended).work()
    results = plan.gather()
    if index is not None:
        if error := jobs[0].error:
            raise UserError(f"{jobs[0].name} failed: {error}; its log: {jobs[0].log}")
        if any(cell["status"] not in ("done", "failed") for cell in results["cells"]):
            return
    name = (results["metric"] or {}).get("name", "metric")
    print(f"dev {name} on {plan.task}, mean ± standard deviation over seeds:")
    found = groups(read_results(plan.out)[0])
    body = [[each["label"], each["budget"], pages.cell(each), pages.number(each["density"])] for each in found]
    show(["method", "budget", name, "density"], body)
    for cell in results["cells"]:
        if cell["error"]:
            print(f"{cell['name']}: {cell['status']}: {cell['error']}")
    print(f"results: {plan.out / 'compare.json'}\npage: {pages.write(plan.out)}")
