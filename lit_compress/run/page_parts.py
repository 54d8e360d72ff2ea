"""The content of a page, as plain values and figures: studies (per task and metric), runs, versions."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from lit_compress.analysis.gains import UNSTEADY
from lit_compress.analysis.inline import curves_figure, inline_svg
from lit_compress.analysis.pareto import costs_of
from lit_compress.evaluation.intervals import standard_error
from lit_compress.export.report import counted, rows, same_tokens, speed_lines
from lit_compress.run.curves import thin
from lit_compress.run.details import details_of
from lit_compress.run.results import RunResult, budget_order, groups
from lit_compress.utils.files import yaml_text

FEW = 12  # runs: what was not kept is read from their models and events
SOME = 60  # runs: their curves are drawn, their options shown
MOST_TEXT = 300  # characters of a text of a changed answer


def studies(runs: Sequence[RunResult], anchors: dict[str, str]) -> list[dict[str, Any]]:
    """Return for every task and metric the tables and charts of its runs."""
    by_task: dict[tuple[str, str], list[RunResult]] = {}
    for run in runs:
        if run.report:
            by_task.setdefault((run.report["task"], run.report["metric"]["name"]), []).append(run)
    without = [run for run in runs if run.report is None]
    if len(by_task) == 1:  # what is not there is of the only task
        by_task = {key: [run for run in runs if run in some or run in without] for key, some in by_task.items()}
    return [_study(task, metric, some, anchors) for (task, metric), some in by_task.items()]


def _study(task: str, metric: str, runs: list[RunResult], anchors: dict[str, str]) -> dict[str, Any]:
    first = next(run.report for run in runs if run.report)
    grouped, mode = groups(runs), first["metric"].get("mode", "max")
    labels = list(dict.fromkeys(group["label"] for group in grouped))
    budgets = sorted({group["budget"] for group in grouped}, key=budget_order)
    dense = [run.report["dense"]["metric"] for run in runs if run.report]
    ends = [run.report["dense"].get("interval") for run in runs if run.report]
    error = mean(standard_error(pair) for pair in ends if pair) if any(ends) else None
    cells = {(group["label"], group["budget"]): group for group in grouped}
    best = {budget: _best([g for g in grouped if g["budget"] == budget], mode) for budget in budgets}
    for group in grouped:
        share = group["mean"] / mean(dense) if group["mean"] is not None and mean(dense) else None
        group |= {
            "best": len(labels) > 1 and group is best[group["budget"]], "of_dense": share,
            "link": anchors[group["runs"][0].name],
        }  # fmt: skip
    several = len({round(value, 9) for value in dense}) > 1
    net = {
        "mean": mean(dense), "spread": stdev(dense) if several else None, "n": len(dense),
        "costs": costs_of([run.report for run in runs if run.report])[1],
    }  # fmt: skip
    return {
        "task": task, "metric": metric, "mode": mode, "groups": grouped, "labels": labels, "budgets": budgets,
        "rows": counted(first) if "rows" in first["metric"] else "", "error": error,
        "dense": net, "unsteady": UNSTEADY if any(g["gain"] and not g["gain"].steady for g in grouped) else "",
        "table": [{"label": label, "cells": [cells.get((label, b)) for b in budgets]} for label in labels],
    }  # fmt: skip


def _best(some: list[dict[str, Any]], mode: str) -> dict[str, Any] | None:
    done = [group for group in some if group["mean"] is not None]
    return (max if mode == "max" else min)(done, key=lambda group: group["mean"]) if len(done) > 1 else None


# ------------------------------------------------------------------------------------------------------------ runs


def shown_runs(runs: Sequence[RunResult], out: Path, anchors: dict[str, str]) -> list[dict[str, Any]]:
    """Return the page's entry of every run."""
    few, some = len(runs) <= FEW, len(runs) <= SOME
    flips = max(4, min(30, 600 // max(1, len(runs))))
    return [_shown(run, out, anchors[run.name], few, some, flips) for run in runs]


def _shown(run: RunResult, out: Path, anchor: str, few: bool, some: bool, flips: int) -> dict[str, Any]:
    report, details = run.report, {}
    if run.folder is not None:
        details = details_of(run.folder, look=few)
    ends = report["compressed"].get("interval") if report else None
    header, body = rows(report) if report else ([], [])
    return {
        "run": run, "anchor": anchor, "error": standard_error(ends) if ends else None,
        "place": quote(os.path.relpath(run.folder, out)) + "/" if run.folder else None,
        "header": header, "body": body, "speed": speed_lines(report) if report else [],
        "generation": shown_generation(report),
        "curves": curve_chart(details.get("curves") or {}, run.stages, report, anchor[1:]) if some else None,
        "map": layer_map(details.get("layers") or []),
        "changes": shown_changes(details.get("changes"), flips),
        "minutes": None if run.seconds is None else run.seconds / 60,
        "config": _config_text(report) if some and report else None,
    }  # fmt: skip


def shown_generation(report: dict[str, Any] | None) -> dict[str, str] | None:
    """Return a prompt and how both models continue with it, as short texts; None for models that do not write."""
    if not (texts := (report or {}).get("generation")):
        return None
    return {key: _text(texts[key]) for key in ("prompt", "dense", "compressed")} | {"same": same_tokens(texts)}


def _config_text(report: dict[str, Any]) -> str:
    config = {key: report["config"].get(key) for key in ("model", "data", "seed_everything")}
    return yaml_text(config, unicode=True)


def curve_chart(
    curves: dict[str, Any], stages: list[dict[str, Any]], report: dict[str, Any] | None, name: str
) -> Markup | None:
    """Return the chart of a run's training: loss, dev metric, density, each if it was logged; ``name``: of the run."""
    starts, step = [], 0
    for record in stages:
        if record.get("steps"):
            starts.append((record["name"], float(step)))
            step += record["steps"]
    metric = f"val/{report['metric']['name']}" if report else ""
    wanted = {"training loss": "train/loss", metric.replace("val/", "dev "): metric, "density": "train/density"}
    charts = {label: thin([(x, y) for x, y in curves[key]], 120) for label, key in wanted.items() if curves.get(key)}
    return Markup(inline_svg(curves_figure(charts, starts), name, "curves of the training")) if charts else None


def layer_map(layers: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the map of the kept size of every matrix, its rank or else its density; None without layers.

    ``columns``: roles; ``rows``: name of a layer -> a cell per role: share that is left, text; None for no matrix.
    """
    if not layers:
        return None
    blocks = [_split(row) for row in layers]
    roles = list(dict.fromkeys(role for _, role in blocks))
    rows: dict[str, list[tuple[float, str] | None]] = {block: [None] * len(roles) for block, _ in blocks}
    for row, (block, role) in zip(layers, blocks, strict=True):
        density, rank = row["density"], row.get("rank")
        text = "gone" if not density else f"r {rank}" if rank else "dense" if density > 0.9995 else f"{density:.0%}"
        rows[block][roles.index(role)] = density, text
    return {"columns": roles, "rows": rows}


def _split(row: dict[str, Any]) -> tuple[str, str]:
    """Return the block and the role of a matrix; a decoder's attention over the encoder's states has own roles."""
    name = row["name"]
    stack = next((s for s in ("encoder", "decoder") if f"{s}.layers." in name or f"{s}.block." in name), "")
    cross = " cross" if any(part in name for part in ("encoder_attn", "EncDecAttention", "crossattention")) else ""
    return f"{stack} {row['layer']}".strip(), f"{row['role']}{cross}"


def shown_changes(changes: dict[str, Any] | None, flips: int) -> dict[str, Any] | None:
    """Return the changes between two models' answers, with a few examples as short texts."""
    if not changes:
        return None
    examples = [
        {"texts": {name: _text(value) for name, value in line["texts"].items()},
         **{key: _text(line.get(key)) for key in ("given", "before", "after")}}
        for line in changes["examples"][:flips]
    ]  # fmt: skip
    numbers = changes.get("confusion")
    most = max((n for key in ("before", "after") for line in numbers[key] for n in line), default=1) if numbers else 1
    return {**changes, "examples": examples, "most": max(most, 1)}


def _text(value: Any) -> str:
    """Return a value of a row as a short text."""
    if value is None:
        return ""
    if isinstance(value, dict) and "text" in value:
        value = value["text"]
    if isinstance(value, list):
        value = (" " if all(isinstance(v, str) and " " not in v for v in value) else " | ").join(map(str, value))
    text = f"{value:.4g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]} …"


def origins(runs: Sequence[RunResult]) -> list[dict[str, Any]]:
    """Return the different versions and machines of the runs, with the number of runs and the commits of each."""
    by_origin: dict[str, dict[str, Any]] = {}
    for run in runs:
        if run.report:
            own = {"versions": run.report.get("versions") or {}, "hardware": run.report.get("hardware") or {}}
            entry = by_origin.setdefault(json.dumps(own, sort_keys=True), {**own, "runs": 0, "commits": []})
            entry["runs"] += 1
            if (commit := run.report.get("commit")) and commit not in entry["commits"]:
                entry["commits"].append(commit)
    return list(by_origin.values())
