"""The page of a comparison, a run, or a folder of runs: one HTML file and ``results.csv``."""

from __future__ import annotations

import base64
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import mean
from typing import Any
from urllib.parse import quote

import jinja2

from lit_compress.data.sources import CUSTOM
from lit_compress.evaluation.intervals import standard_error
from lit_compress.export.table import counted, rows, score_lines, speed_line
from lit_compress.run.pictures import as_svg, pareto_figure
from lit_compress.run.results import RunResult, costs_in, groups, mean_costs, read_results
from lit_compress.utils.errors import UserError
from lit_compress.utils.files import atomic_file, check_folder

TEMPLATE = Path(__file__).with_name("page.html.jinja")


def write(folder: Path, out: Path | None = None) -> Path:
    """Write the page of the runs in ``folder`` and return its file, ``index.html``; nothing is trained or loaded.

    It replaces an earlier page in ``out``, or in ``report`` of ``folder`` without it.

    Raises:
        UserError: there is no run in ``folder``, or something else in ``out``.
    """
    folder = folder.expanduser().resolve()
    out = (out.expanduser() if out else folder / "report").resolve()
    runs, about = read_results(folder)
    check_folder("--out", out)
    if out.is_dir() and any(out.iterdir()) and not _is_page(out):
        raise UserError(f"--out: '{out}' holds something that is not a report; give a new or empty folder")
    for run in runs if not about and len(runs) > 1 else ():
        run.label = run.name  # its options are its own
    by_data: dict[tuple[object, ...], list[RunResult]] = {}
    for run in runs if len(runs) > 1 else ():
        if run.report:
            by_data.setdefault(() if about else _compared_on(run.report), []).append(run)
    if len(by_data) == 1:  # what is not done is on the only data
        by_data = {key: list(runs) for key in by_data}
    tasks = ", ".join(dict.fromkeys(run.report["task"] for run in runs if run.report)) or "nothing yet"
    environment = jinja2.Environment(  # every text from a file is escaped
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {"number": number, "cell": cell, "times": times}
    page = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        title=f"{len(runs)} runs on {tasks}" if len(runs) > 1 else f"{runs[0].label} on {tasks}, {runs[0].budget}",
        about=about, studies=[_study(some) for some in by_data.values()],
        runs=[_shown(run, out) for run in runs],
    )  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    for name, text in (("index.html", page), ("results.csv", table(runs))):
        with atomic_file(out / name) as temporary:
            temporary.write_text(text, encoding="utf-8", errors="replace")  # a file may hold half a character
    return out / "index.html"


def _is_page(out: Path) -> bool:
    """Return whether a folder has the table of a page, by its first columns."""
    with suppress(OSError), (out / "results.csv").open("rb") as table:
        return table.readline().startswith(b"name,label,method")
    return False


def number(value: float | None, digits: int = 4) -> str:
    """Return a number for tables; "" for None."""
    return "" if value is None else f"{value:,.{digits}f}"


def times(gain: tuple[float, bool] | None) -> str:
    """Return a speed-up for tables, with one decimal if its timing is not steady.

    >>> times((2.153, True)), times((2.153, False)), times(None)
    ('2.15x', '≈2.2x', '')
    """
    return "" if gain is None else f"{gain[0]:.2f}x" if gain[1] else f"≈{gain[0]:.1f}x"


def cell(group: dict[str, Any]) -> str:
    """Return mean, spread and number of runs of a group, and whether it is missing or at chance."""
    if group["mean"] is None:
        return ", ".join(dict.fromkeys(run.status for run in group["runs"]))
    text = f"{group['mean']:.4f}" + (f" ± {group['spread']:.4f}" if group["spread"] is not None else "")
    if group["wanted"] > 1:
        text += f" ({group['n']})" if group["wanted"] == group["n"] else f" ({group['n']} of {group['wanted']})"
    return f"{text}, at chance" if group["chance"] else text


def _compared_on(report: dict[str, Any]) -> tuple[object, ...]:
    """Return what the runs of a table share: name of the task or the user's data, metric, dev rows."""
    task, metric, rows = report["task"], report["metric"], (report.get("data") or {}).get("dev")
    path = ((report.get("config") or {}).get("data") or {}).get("path") if task == CUSTOM else None
    return Path(path or task).name, metric["name"], metric.get("rows"), rows and tuple(rows)


def _study(runs: list[RunResult]) -> dict[str, Any]:
    """Return the content of the table and the picture for runs on the same data."""
    reports = [run.report for run in runs if run.report]
    first, mode = reports[0], reports[0]["metric"].get("mode", "max")
    name, metric, *_ = _compared_on(first)
    ends = [report["dense"]["interval"] for report in reports if report["dense"].get("interval")]
    costs = mean_costs([costs_in(report["dense"]) for report in reports])
    dense = {"mean": mean(report["dense"]["metric"] for report in reports), "costs": costs}
    grouped = groups(runs)
    for group in grouped:
        if group["gain"] and (latency := costs["latency"]):  # timed in turns: machines are not equally fast
            group["costs"]["latency"] = latency / group["gain"][0]
        here = [other["mean"] for other in grouped if other["budget"] == group["budget"] and other["n"]]
        group["best"] = len(here) > 1 and group["mean"] == (max if mode == "max" else min)(here)
    figure = pareto_figure([group for group in grouped if group["n"]], dense, f"dev {metric}", mode)
    picture = "data:image/svg+xml;base64," + base64.b64encode(as_svg(figure).encode()).decode()
    return {
        "name": name, "metric": metric, "mode": mode, "groups": grouped, "dense": dense, "picture": picture,
        "rows": counted(first) if "rows" in first["metric"] else "",
        "error": mean(map(standard_error, ends)) if ends else None,
    }  # fmt: skip


def table(runs: Sequence[RunResult]) -> str:
    """Return a line per run as CSV; a text that a spreadsheet would take for a formula begins with an apostrophe."""
    import pandas as pd

    lines = [
        {k: f"'{v}" if isinstance(v, str) and v[:1] in tuple("=+-@") else v for k, v in record(run).items()}
        for run in runs
    ]
    return str(pd.DataFrame(lines, dtype=object).to_csv(index=False))  # whole numbers stay whole next to missing ones


def record(run: RunResult) -> dict[str, Any]:
    """Return a run as one line of numbers."""
    report = run.report
    entry, dense = (report["compressed"], report["dense"]) if report else ({}, {})
    ends = entry.get("interval") or (None, None)
    return {
        "name": run.name, "label": run.label, "method": report and report["method"], "budget": run.budget,
        "seed": run.seed, "status": run.status, "error": run.error, "learning_rate": run.learning_rate,
        "task": report and report["task"], "metric_name": report and report["metric"]["name"], "metric": run.metric,
        "low95": ends[0], "high95": ends[1], "dense_metric": dense.get("metric"), "density": entry.get("density"),
        **costs_in(entry), "speedup": report and report["ratios"]["speedup"],
        "speedup_verdict": report and ((report.get("timing") or {}).get("speedup") or {}).get("verdict"),
        "steps": run.steps, "seconds": run.seconds, "peak_mib": run.peak_mib,
    }  # fmt: skip


def _shown(run: RunResult, out: Path) -> dict[str, Any]:
    """Return the content of a run on the page."""
    report, folder = run.report, run.folder
    places = (folder / "export", folder) if folder else ()
    links = {place: quote(os.path.relpath(place, out)) + "/" for place in places}
    return {
        "run": run, "place": folder and links[folder],
        "ship": next((link for place, link in links.items() if (place / "structure.json").is_file()), None),
        "table": rows(report) if report else None,
        "lines": [*score_lines(report), speed_line(report)] if report else [],
    }  # fmt: skip
