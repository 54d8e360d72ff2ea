"""The final table of a run and the lines below it, from its report: for the screen, the page and the card."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lit_compress.evaluation.intervals import near_chance, standard_error
from lit_compress.export.report import of_program
from lit_compress.models.budget import budget_line, verdict
from lit_compress.models.budget import shown as shown_value
from lit_compress.utils.tables import escaped, print, show
from lit_compress.utils.timing import Speedup


def rows(report: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of the final table; its last column is compressed / dense, or the speed-up.

    Metric and bytes of the export are its program's, if it has one.
    """
    report = of_program(report)
    stages, dense, small = report["stages"], report["dense"], report["compressed"]
    body = []

    def add(label: str, form: str, value: Callable[[dict[str, Any]], float | None], ratio: str | None = None) -> None:
        values = [value(entry) for entry in stages.values()]
        if any(known is not None for known in values):
            whole, part = value(dense), value(small)
            ratio = f"{part / whole:.3f}" if ratio is None and whole and part else ratio or ""
            body.append([label, *("" if known is None else form.format(known) for known in values), ratio])

    add(f"dev {report['metric']['name']}", "{:.4f}", lambda e: e["metric"])
    if near_chance(report) or near_chance(report, "compressed"):
        body[-1][-1] += " (chance)"
    add("   standard error", "± {:.4f}", lambda e: standard_error(e["interval"]) if e.get("interval") else None, "")
    add("   before training", "{:.4f}", lambda e: e["initial"], "")
    add("density", "{:.4f}", lambda e: e["density"], "")
    if any(f"{entry['stored']:.4f}" != f"{entry['density']:.4f}" for entry in stages.values()):
        add("   counting stored zeros", "{:.4f}", lambda e: e["stored"], "")
    add("parameters", "{:,}", lambda e: e["params"]["total"])
    add("   without embeddings", "{:,}", lambda e: e["params"]["non_embedding"])
    tokens = dense["latency_ms"]["length"]
    add(f"MFLOPs, 1 x {tokens} tokens", "{:,.1f}", lambda e: e["flops"] / 1e6 if e["flops"] else None)
    add("MB on disk", "{:,.2f}", lambda e: e["bytes"] / 1e6)
    gain = speedup_of(report)
    times = "" if gain is None else f"{gain.median:.2f}x" if gain.is_named else "noise"
    add("CPU latency ms, median", "{:.2f}", lambda e: e["latency_ms"]["median"], times)
    if budget := report.get("budget"):
        reached = shown_value(budget["kind"], budget["reached"])
        body.append([f"budget {budget['asked']}", *[""] * (len(stages) - 1), reached, verdict(budget["met"])])
    return [f"{report['method']} on {report['task']}", *stages, "ratio"], body


def speedup_of(report: dict[str, Any]) -> Speedup | None:
    """Return the speed-up of the compressed model; None if nothing was timed in turns."""
    gain = (report.get("timing") or {}).get("speedup")
    return gain and Speedup.of(gain)


def speed_line(report: dict[str, Any]) -> str:
    """Return the line on the latency, for the screen, the page and the card; "" if nothing was timed in turns."""
    gain = speedup_of(report)
    return "" if gain is None else f"speed-up {gain}" + ("" if gain.is_named else "; measure it with the command bench")


def gain_words(gains: Sequence[Mapping[str, Any]]) -> str:
    """Return speed-ups for users.

    >>> gain_words([{"batch": 1, "length": 32, "median": 2.11, "low": 1.94, "high": 2.3}])
    '1 x 32: 2.11x (1.94-2.30)'
    """
    return ", ".join(f"{gain['batch']} x {gain['length']}: {Speedup.of(gain)}" for gain in gains)


def counted(report: dict[str, Any]) -> str:
    """Return the numbers of rows of the metric, and of the training if it was not all: text for users.

    >>> counted({"metric": {"rows": 64, "available": 872}, "data": {"splits": [{"rows": 96, "available": 67349}]}})
    '64 of 872 rows; 96 of 67,349 training rows were used'
    """
    metric = report["metric"]
    train = ((report.get("data") or {}).get("splits") or [{"rows": 0, "available": 0}])[0]
    text = f"{of_all(metric['rows'], metric.get('available'))} rows"
    if train["rows"] < train["available"]:
        text += f"; {of_all(train['rows'], train['available'])} training rows were used"
    return text


def of_all(used: int, available: int | None) -> str:
    """Return a number of rows, of how many it is: ``64 of 872``; the number alone if the rows are one text."""
    return f"{used:,}" if available is None else f"{used:,} of {available:,}"


def score_lines(report: dict[str, Any]) -> list[str]:
    """Return the metric of the export, as in its table, with its error and number of rows, and whether it is chance."""
    report = of_program(report)
    small, metric = report["compressed"], report["metric"]
    error = f" ± {standard_error(small['interval']):.4f}" if small.get("interval") else ""
    lines = [f"dev {metric['name']} {small['metric']:.4f}{error} ({counted(report)})"]
    if finding := near_chance(report, "compressed"):
        lines.append(f"the compressed model is at chance: {finding}")
    return lines


def choice_lines(report: dict[str, Any]) -> list[str]:
    """Return one line for everything that was chosen besides the folder itself, for the screen and the card."""
    lines = []
    if words := report["vocabulary"]:
        lines.append(
            f"vocabulary: {words['rows']:,} of {words['of']:,} pieces are left; {words['changed']:,} of "
            f"{words['inputs']:,} training inputs and {words['dev_changed']:,} of {words['dev_inputs']:,} dev inputs "
            "have other pieces now"
        )
        if words["dev_changed"] and report["metric"]["name"] == "perplexity":
            lines[-1] += ": their perplexity is of other pieces, so it cannot be compared"
    if table := report["embeddings"]:
        size = f"{table['bytes']:,} of {table['of']:,} bytes"
        lines.append(f"embeddings: {table['form']}, {size}; off by {table['error']:.1%} of the norm")
    if made := report.get("program"):
        said = "its outputs differ by {difference:.1e}"
        if "dtype" in made:
            said = f"{{dtype}}, {{bytes:,}} bytes, dev {report['metric']['name']} {{metric:.4f}}"
            said += " ({interval[0]:.4f}-{interval[1]:.4f})" if made["interval"] else ""
            said += " with {examples} training examples" if made.get("examples") else ""
        lines.append(f"{made['file']}: {said.format_map(made)}")
    return lines


def print_table(report: dict[str, Any]) -> None:
    """Print the final table, the score and the speed-up."""
    header, body = rows(report)
    show(header, body, whole=len(header))
    print(*filter(None, [*score_lines(report), speed_line(of_program(report))]), sep="\n")
    if speed := report.get("speed"):
        where = "one thread" if (device := speed.get("device", "cpu")) == "cpu" else f"{speed['dtype']} on {device}"
        print(f"speed-up in {speed['runtime']}, {where}: {gain_words(speed['shapes'])}")
    if budget := report.get("budget"):
        print(budget_line(budget))


def markdown(report: dict[str, Any]) -> str:
    """Return the final table as Markdown, for TensorBoard and the model card."""
    header, body = rows(report)
    lines = ["| " + " | ".join(map(escaped, line)) + " |" for line in (header, *body)]
    return "\n".join([lines[0], "|---" * len(header) + "|", *lines[1:]])
