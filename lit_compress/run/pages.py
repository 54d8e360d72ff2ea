"""The page of a comparison, a run, or a folder of runs: one HTML file; also Markdown, CSV, JSON, PNG and SVG."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from lit_compress.analysis.pareto import COSTS, compact, cost_of, write_pareto
from lit_compress.analysis.styles import DARK, LIGHT, variables
from lit_compress.run import page_parts as parts
from lit_compress.run.results import Results, RunResult, read_results
from lit_compress.utils.errors import UserError, printable
from lit_compress.utils.files import atomic_folder, check_folder, write_json, yaml_text
from lit_compress.utils.tables import escaped, markdown_table

TEMPLATE = Path(__file__).with_name("page.html.jinja")


def write(folder: Path, out: Path | None = None) -> Path:
    """Write the page of the runs in ``folder`` and return its file, ``index.html``.

    Nothing is trained; a model is loaded only if a run of an earlier version did not keep its layers' sizes.

    Args:
        folder: of a comparison, a run, an export, or several of them.
        out: folder to write, an earlier page there is replaced; None: ``report`` in ``folder``.

    Raises:
        UserError: there is no run in ``folder``, or something else in ``out``.
    """
    folder = folder.expanduser().resolve()
    out = (out.expanduser() if out else folder / "report").resolve()
    results = read_results(folder)
    check_folder("--out", out)
    if out.is_dir() and any(out.iterdir()) and not (out / "index.html").is_file():
        raise UserError(f"--out: '{out}' holds something that is not a report; give a new or empty folder")
    anchors = {run.name: f"#run-{number}" for number, run in enumerate(results.runs, 1)}
    studies = parts.studies(results.runs, anchors)
    with atomic_folder(out) as temporary:
        for number, study in enumerate(studies):
            study["picture"] = (
                "pareto" if not number else re.sub(r"\W+", "_", f"pareto-{study['task']}-{study['metric']}")
            )
            done = [group for group in study["groups"] if group["n"]]
            study["chart"] = Markup(
                write_pareto(done, study["dense"], f"dev {study['metric']}", study["mode"], temporary, study["picture"])
            )
        _write(temporary / "index.html", page(results, studies, out, anchors))
        _write(temporary / "report.md", markdown(results, studies))
        _write(temporary / "results.csv", table(results.runs))
        write_json(temporary / "results.json", plain(results, studies))
    return out / "index.html"


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", errors="replace")  # a file may hold half of a character


def page(results: Results, studies: list[dict[str, Any]], out: Path, anchors: dict[str, str]) -> str:
    """Return the HTML of the page; every text from a file is escaped."""
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {
        "number": _number, "signed": _signed, "short": compact, "milliseconds": _milliseconds,
    }  # fmt: skip
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    counts = {status: sum(run.status == status for run in results.runs) for status in _STATUS}
    return template.render(
        title=_title(results), studies=studies, runs=parts.shown_runs(results.runs, out, anchors),
        origins=parts.origins(results.runs), command=results.command,
        counts={status: count for status, count in counts.items() if count}, files=_files(studies),
        config=_yaml(results.config), fairness=results.fairness, many=len(results.runs) > parts.FEW,
        light=variables(LIGHT), dark=variables(DARK),
    )  # fmt: skip


_STATUS = ("done", "running", "failed", "missing")


def _title(results: Results) -> str:
    done = next((run.report for run in results.runs if run.report), None)
    tasks = list(dict.fromkeys(run.report["task"] for run in results.runs if run.report))
    if len(results.runs) == 1:
        run = results.runs[0]
        return f"{run.label} on {done['task']}, {run.budget}" if done else f"{run.label}, {run.status}"
    return f"{len(results.runs)} runs on {', '.join(tasks) or 'nothing yet'}"


def _files(studies: list[dict[str, Any]]) -> list[str]:
    pictures = [f"{study['picture']}.{suffix}" for study in studies for suffix in ("png", "svg")]
    return ["report.md", "results.csv", "results.json", *pictures]


def _yaml(config: dict[str, Any] | None) -> str:
    return yaml_text(config, unicode=True) if config else ""


def _number(value: float | None, digits: int = 4) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def _signed(group: dict[str, Any] | None) -> str:
    """Return mean, spread and number of runs of a group; missing runs are named, and a density that is not as asked."""
    if group is None:
        return "-"
    if group["mean"] is None:
        return ", ".join(dict.fromkeys(run.status for run in group["runs"]))
    text = f"{group['mean']:.4f}"
    text += f" ± {group['spread']:.4f}" if group["spread"] is not None else ""
    of = f" of {group['wanted']}" if group["wanted"] > group["n"] else ""
    text += f" ({group['n']}{of})" if group["wanted"] > 1 else ""
    return text if group["stored"] is None else f"{text}, stored {group['stored']:.3f}"


def _milliseconds(group: dict[str, Any]) -> str:
    """Return the latency of a group, which is the dense models' over its speed-up and as certain."""
    value, gain = group["costs"]["latency"], group["gain"]
    return "" if value is None else f"{value:.2f}" if gain is None or gain.steady else f"≈{value:.1f}"


# -------------------------------------------------------------------------------------------- the other formats


def _rows_of(header: list[str], body: list[list[Any]]) -> str:
    return markdown_table(header, ([escaped(cell) for cell in row] for row in body))


def markdown(results: Results, studies: list[dict[str, Any]]) -> str:
    """Return the tables, the versions and the command as Markdown."""
    text = [f"# {escaped(_title(results))}"]
    for study in studies:
        text.append(f"## {escaped(study['task'])}: dev {escaped(study['metric'])}")
        dense = study["dense"]["mean"]
        said = f"The dense model has {dense:.4f}. Mean ± standard deviation (number of runs)"
        error = study["error"]
        text.append(said + (f"; the standard error of one run is {error:.4f}." if error else "."))
        header = ["method", "budget", f"dev {study['metric']}", "of dense", "density", "parameters", "FLOPs", "bytes",
                  "latency ms", "speed-up"]  # fmt: skip
        if results.fairness:
            text.append(escaped(results.fairness))
        body = []
        for group in (group for group in study["groups"] if group["n"]):
            costs = [group["costs"][cost] for cost in COSTS]
            body.append([
                group["label"], group["budget"], _signed(group), _number(group["of_dense"], 3),
                _number(group["density"]),
                *("" if value is None else f"{value:,.0f}" for value in costs[:-1]), _milliseconds(group),
                group["gain"] or "",
            ])  # fmt: skip
        text += [_rows_of(header, body), *([study["unsteady"]] if study["unsteady"] else []),
                 f"![Pareto fronts]({study['picture']}.png)"]  # fmt: skip
    missing = [[run.name, run.status, run.error or ""] for run in results.runs if run.status != "done"]
    if missing:
        text += ["## Not done", _rows_of(["run", "status", "error"], missing)]
    for origin in parts.origins(results.runs):
        listed = {**origin["versions"], **origin["hardware"], "commit": " ".join(origin["commits"]) or None}
        words = ", ".join(f"{key} {value}" for key, value in listed.items() if value is not None)
        text.append(f"{origin['runs']} run{'s' if origin['runs'] > 1 else ''} with {escaped(words)}.")
    if results.command:
        text.append(f"```bash\n{printable(results.command.replace('```', ''))}\n```")
    return "\n\n".join(text) + "\n"


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
        **{cost: cost_of(entry, cost) for cost in COSTS}, "speedup": report and report["ratios"]["speedup"],
        "speedup_verdict": report and ((report.get("timing") or {}).get("speedup") or {}).get("verdict"),
        "steps": run.steps, "seconds": run.seconds, "peak_mib": run.peak_mib,
    }  # fmt: skip


def table(runs: list[RunResult]) -> str:
    """Return a line per run as CSV; a text that a spreadsheet would take for a formula begins with an apostrophe."""
    file = io.StringIO()
    lines = [record(run) for run in runs]
    writer = csv.DictWriter(file, lines[0].keys(), lineterminator="\n")
    writer.writeheader()
    for line in lines:
        writer.writerow({k: f"'{v}" if isinstance(v, str) and v[:1] in "=+-@" and v else v for k, v in line.items()})
    return file.getvalue()


def plain(results: Results, studies: list[dict[str, Any]]) -> dict[str, Any]:
    """Return all numbers of the page as JSON."""
    kept = ("label", "budget", "n", "wanted", "mean", "spread", "density", "costs")
    return {
        "studies": [
            {"task": study["task"], "metric": study["metric"], "mode": study["mode"], "dense": study["dense"],
             "groups": [{**{key: group[key] for key in kept}, "speedup": (gain := group["gain"]) and gain.times,
                         "steady": gain and gain.steady} for group in study["groups"]]}
            for study in studies
        ],
        "runs": [record(run) for run in results.runs],
        "command": results.command, "config": results.config,
    }  # fmt: skip
