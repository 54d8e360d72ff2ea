"""Reading of results: every run of a comparison, of one run folder or export, or of a folder with several of them.

Also their costs and speed-ups, and the Pareto front.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from lit_compress.evaluation.intervals import near_chance, standard_error
from lit_compress.export.report import of_program
from lit_compress.utils.errors import UserError
from lit_compress.utils.files import json_of, read_yaml
from lit_compress.utils.manifest import check_manifest

COMPARISON = "compare.json"  # the results of a comparison, in its folder

COSTS = ("parameters", "flops", "bytes", "latency")


@dataclass
class RunResult:
    """A run or an export on a page.

    Its name is different for every run, its label, e.g. the method, is for tables. ``budget`` is e.g. ``density=0.25``,
    ``status`` is ``done``, ``failed``, ``missing`` or ``unfinished``, ``report`` is None unless it is done.

    Attributes:
        metric: dev metric of the compressed model.
        steps, seconds: of all finished stages together; None without a record.
        peak_mib: the largest memory of a stage, the GPU's if there is one; None in runs of earlier versions.
    """

    name: str
    label: str
    budget: str
    seed: int | None
    status: str
    folder: Path | None
    report: dict[str, Any] | None = None
    error: str | None = None
    learning_rate: float | None = None

    def __post_init__(self) -> None:
        stages = (self.folder and read_record(self.folder / "stages.json")) or []
        if not (isinstance(stages, list) and all(isinstance(stage, dict) for stage in stages)):
            stages = []
        self.metric: float | None = self.report["compressed"]["metric"] if self.report else None
        self.steps = sum(stage.get("steps") or 0 for stage in stages) if stages else None
        self.seconds = sum(stage.get("seconds") or 0 for stage in stages) or None
        peaks = (stage.get("gpu_peak_mib") or stage["peak_mib"] for stage in stages if stage.get("peak_mib"))
        self.peak_mib: float | None = max(peaks, default=None)


def read_results(folder: Path, command: str = "report") -> tuple[list[RunResult], dict[str, Any]]:
    """Return the runs of a comparison, a run, an export, or a folder that has several of them, in order.

    The second value is the content of ``compare.json``, {} outside of a comparison.

    Raises:
        UserError: there is none; begins with ``command``.
    """
    if not folder.is_dir():
        raise UserError(f"{command}: no folder '{folder}'; give a run, an export or a folder of runs")
    if (folder / COMPARISON).is_file():
        return _comparison(folder)
    places = list(_runs(folder, 3))
    if not places:
        raise UserError(f"{command}: '{folder}' has no run (report.json); give a run, an export or a folder of runs")
    return [_result(place, place.name if place == folder else str(place.relative_to(folder))) for place in places], {}


def _runs(folder: Path, depth: int) -> Iterable[Path]:
    """Yield ``folder`` if it is a run or an export, else those under it, in the order of their names."""
    if any((folder / name).is_file() for name in ("report.json", "config.yaml")):
        yield folder
    elif depth:
        for path in sorted(folder.iterdir()):
            if path.is_dir() and not path.name.startswith("."):
                yield from _runs(path, depth - 1)


def read_record(path: Path) -> Any:
    """Return the content of a JSON or YAML file; None if it is missing or broken.

    Raises:
        UserError: it differs from the manifest of its folder.
    """
    if path.is_file():
        check_manifest(f"'{path.parent}'", path.parent, path.name)
    try:
        return read_yaml("config", path) if path.suffix == ".yaml" else json_of(path)
    except (OSError, ValueError, UserError):
        return None


def read_report(folder: Path) -> dict[str, Any] | None:
    """Return the report of a run or an export, of its program of integers if it has one; None without one of ours."""
    report = read_record(folder / "report.json")
    fits = isinstance(report, dict) and isinstance(report.get("metric"), dict)
    return of_program(report) if fits and {"task", "dense", "compressed", "stages"} <= report.keys() else None


def _comparison(folder: Path) -> tuple[list[RunResult], dict[str, Any]]:
    comparison = read_record(folder / COMPARISON)
    cells = comparison.get("cells") if isinstance(comparison, dict) else None
    if not isinstance(cells, list) or any(not isinstance(cell, dict) or "name" not in cell for cell in cells):
        raise UserError(f"report: '{folder / COMPARISON}' is not the record of a comparison; run compare again")
    runs = []
    for cell in cells:
        place = folder / cell["run"] if cell.get("run") else None
        report = read_report(place) if place else None
        status = cell.get("status") or "missing"
        status = "missing" if status == "done" and report is None else status
        runs.append(RunResult(
            cell["name"], cell.get("label") or cell.get("method") or "?", str(cell.get("budget") or ""),
            cell.get("seed"), status, place if place and place.is_dir() else None, report if status == "done" else None,
            cell.get("error"), cell.get("learning_rate"),
        ))  # fmt: skip
    return runs, comparison


def _result(folder: Path, name: str) -> RunResult:
    report = read_report(folder)
    config = _group((report or {}).get("config") or read_record(folder / "config.yaml"))
    model = _group(config.get("model"))
    method = (report or {}).get("method") or str(model.get("class_path", "")).rpartition(".")[2] or "?"
    init = _group(model.get("init_args"))
    density = init.get("density") or (report and f"{report['compressed']['density']:.2g}")
    budget = str(init.get("budget") or (f"density={density}" if density else ""))
    status = "done" if report else "unfinished"
    return RunResult(name, method, budget, config.get("seed_everything"), status, folder, report)


def _group(value: Any) -> dict[str, Any]:
    """Return a group of options; {} for anything else, as a config.yaml of another program may have."""
    return value if isinstance(value, dict) else {}


def groups(runs: Sequence[RunResult]) -> list[dict[str, Any]]:
    """Return for every label and budget of finished runs: how many, mean, spread (standard deviation), mean costs.

    ``bar`` is the spread, or of a single run the standard error.
    ``chance``: none is clearly better than a constant answer.
    """
    by_key: dict[tuple[str, str], list[RunResult]] = {}
    labels = list(dict.fromkeys(run.label for run in runs))
    for run in sorted(runs, key=lambda run: labels.index(run.label)):
        by_key.setdefault((run.label, run.budget), []).append(run)
    grouped = []
    for (label, budget), some in by_key.items():
        reports = [run.report for run in some if run.report]
        entries = [report["compressed"] for report in reports]
        values = [entry["metric"] for entry in entries]
        spread = stdev(values) if len(values) > 1 else None
        errors = [standard_error(entry["interval"]) for entry in entries if entry.get("interval")]
        grouped.append({
            "label": label, "budget": budget, "n": len(values), "wanted": len(some), "runs": some,
            "mean": mean(values) if values else None, "spread": spread,
            "bar": errors[0] if spread is None and errors else spread,
            "density": mean(entry["density"] for entry in entries) if entries else None,
            "gain": mean_gain(reports),
            "costs": mean_costs([costs_in(entry) for entry in entries]),
            "chance": bool(reports) and all(near_chance(report, "compressed") for report in reports),
        })  # fmt: skip
    return grouped


def mean_gain(reports: Sequence[dict[str, Any]]) -> tuple[float, bool] | None:
    """Return how many times faster than the dense ones the models are, the mean of the known ratios; None of none.

    Also whether no report says that its times are too noisy. Reports of earlier versions have no verdict.
    """
    timed = [report for report in reports if report["ratios"].get("speedup") is not None]
    timings = [report.get("timing") or {} for report in timed]
    verdicts = [(timing.get("speedup") or {}).get("verdict", "faster") for timing in timings]
    steady = {*verdicts} <= {"faster", "slower"} and all(timing.get("steady", True) for timing in timings)
    return (mean(report["ratios"]["speedup"] for report in timed), steady) if timed else None


def costs_in(entry: dict[str, Any]) -> dict[str, float | None]:
    """Return every cost of a model from its entry in the report; None if it is not there."""
    params, latency = (entry.get("params") or {}).get("non_embedding"), (entry.get("latency_ms") or {}).get("median")
    return dict(zip(COSTS, (params, entry.get("flops"), entry.get("bytes"), latency), strict=True))


def mean_costs(entries: Sequence[dict[str, float | None]]) -> dict[str, float | None]:
    """Return the mean of every cost over the models of which it is known; None if it is of none."""
    known = {cost: [entry[cost] for entry in entries if entry[cost] is not None] for cost in COSTS}
    return {cost: mean(values) if values else None for cost, values in known.items()}  # type: ignore[type-var]


def front(points: Sequence[tuple[float, float]], mode: str = "max") -> list[tuple[float, float]]:
    """Return the points (cost, metric) that no other is better than in both, cheapest first.

    >>> front([(1, 0.5), (2, 0.4), (3, 0.9), (3, 0.8)])
    [(1, 0.5), (3, 0.9)]
    """
    sign, kept = (1 if mode == "max" else -1), list[tuple[float, float]]()
    for x, y in sorted(points, key=lambda p: (p[0], -sign * p[1])):
        if not kept or sign * y > sign * kept[-1][1]:
            kept.append((x, y))
    return kept
