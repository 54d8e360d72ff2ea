"""Every method on a base-size encoder: the comparisons of many tasks at once on one GPU, within a time limit.

    python -m benchmarks.base_size.run --backbone DIR --data DIR --minutes 7 [--device cuda] [--workers 14]
        [--tasks stsb ...] [--seeds 1 ...] [--exports DIR] [--config FILE] [--times]

Makes the runs of base_size.yaml, or of another --config of ``compare``, --workers at a time, the most valuable first,
until --minutes are over; the same command continues. A run that fails stops no other. Runs are forks of this process,
which spares their imports; it touches no GPU itself. Not made, for they take CPU time: milliseconds (but with --times),
and the check of an export by another process. Matrices are decomposed by their Gram matrices, as large ones always are.
SecondOrder's measurements of a teacher serve all its densities. --exports gets the teacher and two compressed models of
the first task (benchmarks/base_size/coding.py).
Writes benchmarks/base_size/results/<task>.json.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NoReturn

from benchmarks import common
from benchmarks.base_size.coding import pack
from benchmarks.forks import Fork
from lit_compress.cli.compare import plan_of
from lit_compress.cli.words import take_apart
from lit_compress.run import workers
from lit_compress.run.comparison import Plan

STUDY = "base_size"
CONFIG = Path(__file__).with_name("base_size.yaml")
TASKS = ("stsb", "mrpc", "rte", "cola", "sst2")  # in the order of their runs
EXPORTED = ("secondorder-density=0.1-seed=1", "secondorder-density=0.25-seed=1")  # of the first task
RESERVE = 35  # seconds for collecting and coding
ENTRY = "import sys, pathlib, benchmarks.base_size.run as run; run.be(pathlib.Path(sys.argv[1]), sys.argv[2:])"
THREADS = 3  # of a measurement, for which runs wait


# ------------------------------------------------------------------------------------------- a run, in a fork


def begin(words: Sequence[str], log: Path, handle: int, environment: dict[str, str]) -> Fork:
    """Stand in for ``lit_compress.run.workers.start_process``: fork a run; return its process."""

    def work() -> NoReturn:
        if "NO_FORKS" in os.environ:
            os.execv(sys.executable, [sys.executable, "-c", ENTRY, str(log), *words])
        be(log, words)

    return Fork(work, handle)


def be(log: Path, words: Sequence[str]) -> NoReturn:
    """Be ``python -m lit_compress WORDS``, whose output goes to ``log``, and end."""
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with log.open("ab") as said:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
        from lit_compress.__main__ import main

        be_quick()
        if "--model=SecondOrder" in words:
            share_measurements(log.parents[1] / "measured")
        main(list(words))
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def be_quick() -> None:
    """Leave out of an export what takes long on a CPU and changes no model; decompose by Gram matrices."""
    from lit_compress.cli import fitting
    from lit_compress.export import folder, report
    from lit_compress.numerics import decompose

    def none(entries: list[dict[str, Any]], nets: Any, task: Any) -> dict[str, Any]:
        for entry in entries:
            entry["latency_ms"] = {"median": None, "p10": None, "p90": None, "batch": 1, "length": 0, "threads": 1}
        return {"rounds": 0, "spread": None, "steady": False, "speedup": None}

    if "TIMES" not in os.environ:
        vars(report)["add_latency"] = none
    vars(folder)["check_export"] = lambda *_: None
    vars(decompose)["GRAM_FROM"] = 0  # of a matrix of 768 columns three times as fast; large singular values are exact
    vars(fitting)["log_report"] = lambda *_: None  # TensorBoard takes no missing times


def share_measurements(folder: Path) -> None:
    """Let the first run of a teacher measure its matrices, and others wait for that; they differ in density only."""
    import torch

    from lit_compress.stages import compression

    inner: Callable[..., dict[str, torch.Tensor]] = compression.measure

    def measure(net: Any, made: Any, task: Any, data: Any, device: Any, shared: bool = False) -> dict[str, Any]:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{made.name}-seed={data.seed}.pt"
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                before = torch.get_num_threads()
                torch.set_num_threads(THREADS)
                torch.save(inner(net, made, task, data, device, shared), path.with_suffix(".tmp"))
                path.with_suffix(".tmp").rename(path)
                torch.set_num_threads(before)
        return dict(torch.load(path))

    vars(compression)["measure"] = measure


# ------------------------------------------------------------------------------------------- all runs


def planned(options: Any, task: str) -> Plan:
    """Return the plan of a task's comparison; tokenizes its data."""
    words: list[object] = [
        "--config", options.config.absolute(), "--out", (options.work / task).absolute(), "--data.task", task,
        "--data.path", (options.data / task).absolute(), "--model.backbone", options.backbone.absolute(),
        "--trainer.precision", options.precision, "--trainer.accelerator", options.device, "--trainer.logger", "false",
        "--checkpoint_every", 10**9, "--seeds", *options.seeds,
        *(["--methods", *options.only] if options.only else []),
        *(["--updates", options.updates] if options.updates else []),
        *(["--hold_out", options.hold_out] if options.hold_out else []),
    ]  # fmt: skip
    return plan_in(words)


def plan_in(words: Sequence[object]) -> Plan:
    """Return the plan of ``compare WORDS``."""
    line = take_apart("compare", [str(word) for word in words])
    return plan_of(line.own.pop("config"), line.own.pop("out"), line.own, dict(line.options))


def apart(function: Callable[..., Any], given: Sequence[Any]) -> list[Any]:
    """Return ``function`` of each of ``given``, computed in forks, so that this process touches no GPU."""
    with ProcessPoolExecutor(len(given), mp_context=get_context("fork")) as pool:
        return list(pool.map(function, given))


def works(device: str) -> bool:
    """Return whether this process can use a device, which a fork of one that has begun to use a GPU cannot."""
    import torch

    try:
        return torch.zeros(1, device=None if device == "auto" else device).item() == 0
    except RuntimeError as error:
        print(f"no forks: {error}", flush=True)
        return False


def queue(plans: dict[str, Plan]) -> list[tuple[str, workers.Fit]]:
    """Return all runs with their tasks, the most valuable first: by seed, the methods' order and their budgets'."""
    ranked = []
    for place, (task, plan) in enumerate(plans.items()):
        entries = plan.comparison.entries()
        labels = [entry.label for entry in entries]
        for job in plan.asked:
            row = labels.index(job.label)
            budgets = [float(budget) for budget in entries[row].budgets or plan.comparison.budgets]
            turn = budgets.index(float(job.budget.partition("=")[2]))
            ranked.append(((job.seed, row, turn, place), task, job))
    return [(task, job) for _, task, job in sorted(ranked, key=lambda item: item[0])]


def make(plans: dict[str, Plan], at_once: int, until: float) -> None:
    """Make all runs that are missing, ``at_once`` at a time, until a time; then end those that still run."""
    began = time.time()

    def ended(job: workers.Fit, error: str | None) -> None:
        if job.label and error is None:  # its records are kept, and its export if that is wanted
            for net in job.folder.glob("*/net"):
                shutil.rmtree(net)
            if not job.name.startswith(EXPORTED):
                shutil.rmtree(job.folder / "export")
        seconds = job.state.get("seconds")
        print(f"{time.time() - began:4.0f} s: {job.out.name} {job.name}: {seconds} s, {error or 'done'}", flush=True)

    vars(workers)["GRACE"] = 0.0  # nothing is needed of a run that is stopped
    workers.Worker([job for _, job in queue(plans)], at_once, ended).work(until)


# ------------------------------------------------------------------------------------------- results


def collected(task: str, plan: Plan, commit: str | None) -> dict[str, Any]:
    """Return the result of a task: a row for every finished run, and what failed or is missing."""
    out = plan.out
    out.mkdir(parents=True, exist_ok=True)
    found = plan.gather()
    rows = []
    for cell in found["cells"]:
        if cell["status"] == "done":
            report = json.loads((out / cell["run"] / "report.json").read_text())
            records = json.loads((out / cell["run"] / "stages.json").read_text())
            small, dense, held_out = report["compressed"], report["dense"], records[-1].get("held_out")
            rows.append({
                **{key: cell[key] for key in ("label", "method", "seed", "learning_rate", "seconds")},
                **{key: small[key] for key in ("density", "stored", "metric", "interval", "initial")},
                "asked": cell["budget"],
                "held_out": held_out and held_out[f"val/{report['metric']['name']}"],
                "dense": dense["metric"], "dense_interval": dense.get("interval"),
                "ratios": {key: report["ratios"][key] for key in ("params", "flops", "bytes")},
                "steps": sum(record["steps"] for record in records[1:]),
                "gpu_peak_mib": max(record.get("gpu_peak_mib") or 0 for record in records),
            })  # fmt: skip
    teachers = [json.loads(path.read_text())[0] for path in sorted(out.glob("teachers/*/stages.json"))]
    config = found["config"]
    return {
        "name": task, "metric": found["metric"], "fairness": found["fairness"], "rows": rows,
        "backbone": Path(config["options"]["model.backbone"]).name,
        "teachers": [{key: teacher.get(key) for key in ("metric", "held_out", "seconds")} for teacher in teachers],
        "failed": {cell["name"]: cell["error"].replace(str(out), "OUT") for cell in found["cells"]
                   if cell["status"] == "failed"},
        "missing": [cell["name"] for cell in found["cells"] if cell["status"] not in ("done", "failed")],
        **common.frame(), **({"commit": commit} if commit else {}),
    }  # fmt: skip


def summary(results: list[dict[str, Any]]) -> str:
    """Return the table of all methods: dev metric in %, the mean over seeds, with that of the dense models."""
    names = [result["name"] for result in results]
    cells: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = {}
    for result in results:
        for row in result["rows"]:
            cells.setdefault((row["asked"], row["label"]), {}).setdefault(result["name"], []).append(row)
    shown: list[list[str]] = []
    for (asked, label), by_task in sorted(cells.items(), key=lambda item: item[0]):
        every = [row for rows in by_task.values() for row in rows]
        stored = [row["density"] for row in every]
        shown.append([
            asked.removeprefix("density="), label,
            f"{min(stored):.3f}" + (f" - {max(stored):.3f}" if max(stored) - min(stored) > 0.0015 else ""),
            *(common.mean_and_deviation([row["metric"] for row in by_task[name]]) if name in by_task else ""
              for name in names),
        ])  # fmt: skip
    dense = [
        common.mean_and_deviation(list({row["dense"] for row in result["rows"]})) if result["rows"] else ""
        for result in results
    ]
    return common.table(["asked", "method", "density", *names], [["1", "dense", "1", *dense], *shown])


def main() -> None:
    """Make the runs, collect their results, and print them."""
    started = time.time()
    parser = common.parser(
        STUDY, __doc__, "backbone", "data", "work", "precision", tasks=TASKS, seeds=[1], device="auto", only=None
    )
    parser.add_argument("--minutes", type=float, default=1e6, help="of everything, the end included")
    parser.add_argument("--workers", type=int, default=14, help="runs at one time")
    parser.add_argument("--config", type=Path, default=CONFIG, help="of compare")
    parser.add_argument("--times", action="store_true", help="time the models on the CPU, too")
    parser.add_argument("--exports", type=Path, help="folder for the coded teacher and models of the first task")
    parser.add_argument("--updates", type=int, help="as compare's, to try the script")
    parser.add_argument("--hold_out", type=int, help="as compare's, to try the script")
    parser.add_argument("--commit", help="of this copy of the code, if it is no checkout")
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": str(options.threads), "TOKENIZERS_PARALLELISM": "false"}
    os.environ |= {"TIMES": ""} if options.times else {}
    if options.list:
        for task in options.tasks:
            plan = planned(options, task)
            print(*(job.command for job in (*plan.teachers, *plan.asked)), sep="\n")
        return
    import lit_compress.cli.commands
    import lit_compress.methods  # noqa: F401  imported once, before the runs are forked

    vars(workers)["start_process"] = begin
    plan_of_task = partial(planned, options)
    if apart(works, [options.device]) == [True]:
        made = apart(plan_of_task, options.tasks)
    else:
        os.environ["NO_FORKS"] = "1"
        made = list(map(plan_of_task, options.tasks))
    plans = dict(zip(options.tasks, made, strict=True))
    for each in made:
        each.check()
    print(f"{time.time() - started:.0f} s: {sum(len(each.asked) for each in made)} runs are planned", flush=True)
    signal.signal(signal.SIGTERM, workers.stop)
    try:
        make(plans, options.workers, started + 60 * options.minutes - RESERVE)
    except (KeyboardInterrupt, SystemExit):
        print("stopped; what is done is collected", flush=True)
    results = [collected(task, plan, options.commit) for task, plan in plans.items()]
    for result in results:
        common.write(options, result["name"], result)
        for name, error in result["failed"].items():
            print(f"{result['name']} {name}: {error}")
    print(summary(results), flush=True)
    if options.exports:
        place = plans[options.tasks[0]].out
        models = {"teacher": place / "teachers" / "seed=1" / "dense" / "net"}
        models |= {name: path / "export" for name in EXPORTED for path in place.glob(f"runs/{name}*")}
        pack(options.exports, {k: v for k, v in models.items() if v.is_dir()}, options.backbone, 15.5, 60)
    print(f"{time.time() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
