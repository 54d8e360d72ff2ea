"""The output of `fit`, `export` and `factorize`."""

from __future__ import annotations

import warnings
from typing import Any

from lit_compress.evaluation.intervals import near_chance, standard_error
from lit_compress.export.table import print_table
from lit_compress.models.budget import budget_line
from lit_compress.run.trials import trial_line
from lit_compress.utils.tables import print

LEAST_ORDER = 0.95  # Spearman's correlation below which the order of a program of 8-bit integers counts as lost
LEAST_SHARE = 0.99  # of a metric without a standard error, below which it counts as lost


def print_report(report: dict[str, Any]) -> None:
    """Print a report as a table, and choices; warn of a missed budget."""
    print_table(report)
    print_choices(report)
    warn_missed(report)


def warn_missed(report: dict[str, Any]) -> None:
    """Warn that the export is beyond its budget, or may be, or that its teacher knew nothing; the run is not lost."""
    if finding := near_chance(report):
        warnings.warn(f"the dense model has hardly learned anything: {finding}", stacklevel=2)
    if (budget := report.get("budget")) and not budget["met"]:
        advice = f"ask for {'more' if budget['kind'] == 'speedup' else 'less'}"
        if budget["met"] is None:
            advice = f"export again on a quiet machine, or {advice}"
        warnings.warn(f"{budget_line(budget)}; {advice}", stacklevel=2)


def print_choices(report: dict[str, Any]) -> None:
    """Print one line for everything that was chosen besides the folder itself."""
    for trial in report.get("tried") or ():
        print(trial_line(trial))
    if words := report["vocabulary"]:
        print(
            f"vocabulary: {words['rows']:,} of {words['of']:,} pieces are left; {words['changed']:,} of "
            f"{words['inputs']:,} training inputs and {words['dev_changed']:,} of {words['dev_inputs']:,} dev inputs "
            "have other pieces now"
        )
    if table := report["embeddings"]:
        print(
            f"embeddings: {table['form']}, {table['bytes']:,} of {table['of']:,} bytes; off by {table['error']:.1%} of "
            "the norm"
        )
    if made := report.get("program"):
        if "dtype" in made:
            _print_integers(made, report)
        else:
            print(f"{made['file']}: its logits differ by {made['difference']:.1e}")
        if wrote := made.get("writing"):
            print(f"write.py: with the cache of {wrote['files'][2]}, {wrote['tokens']} tokens as the model writes them")


def _print_integers(made: dict[str, Any], report: dict[str, Any]) -> None:
    """Print the metric and the order of a program of integers, with those in float; warn if either is lost."""
    metric, order, before = made["metric"], made.get("order"), report["compressed"]["metric"]
    text = f"dev {report['metric']['name']} {metric:.4f}, in float {before:.4f}"
    ranks = "" if order is None else f", Spearman's correlation with the order in float {order:.2f}"
    print(f"{made['file']}: {made['dtype']}, {made['bytes']:,} bytes, {text}{ranks}")
    error = standard_error(made["interval"]) if made["interval"] else (1 - LEAST_SHARE) * abs(before)
    lost = before - metric if report["metric"]["mode"] == "max" else metric - before
    words = [f"the metric ({text})"] if lost > error else []
    if order is not None and order < LEAST_ORDER:
        words.append(f"the order of texts (Spearman's correlation {order:.2f})")
    if words:
        dtype = made["dtype"]
        warnings.warn(f"{dtype} loses {' and '.join(words)}; leave --dtype {dtype} out, or compress less", stacklevel=3)
