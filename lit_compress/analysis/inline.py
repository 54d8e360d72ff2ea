"""Figures of matplotlib as SVG inside a page, in the page's colours of either theme, and the curves of a run."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from lit_compress.analysis.styles import LIGHT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# what matplotlib writes, and what a page without any namespace or style of a file has no use for
_UNUSED = re.compile(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->|\sxmlns(?::\w+)?=\"[^\"]*\"", re.S)
_COLOURS = {"#000000": "currentColor", "#262626": "currentColor", "#ffffff": "var(--paper)"} | {
    colour: f"var(--c{number})" for number, colour in enumerate(LIGHT)
}  # fmt: skip


def inline_svg(figure: Figure, name: str, label: str) -> str:
    """Return a figure as SVG for a page of HTML.

    Args:
        figure: with the colours of styles.py's light theme.
        name: begins the names of its parts, which are then no other figure's.
        label: says what it shows, for readers who do not see it.
    """
    import matplotlib

    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):  # the same text from the same numbers
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue()
    text = _UNUSED.sub("", text[text.index("<svg") :])
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(url\(#|href="#)', rf"\g<1>{name}-", text)
    for colour, shown in _COLOURS.items():
        text = text.replace(f": {colour}", f": {shown}")
    head = rf'<svg class="chart" \g<1> role="img" aria-label="{escape(label)}">'
    return re.sub(r'<svg[^>]*?(viewBox="[^"]*")[^>]*>', lambda found: found.expand(head), text, count=1)


def curves_figure(
    charts: Mapping[str, Sequence[tuple[float, float]]], stages: Sequence[tuple[str, float]] = ()
) -> Figure:
    """Return a figure with a panel of the curve of every chart.

    Args:
        charts: label of a vertical axis -> points (step, value), at least one chart of at least one point.
        stages: name and first step of every stage, which vertical lines show.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.4 * len(charts), 2.4), layout="constrained")
    for axes, (label, points) in zip(figure.subplots(1, len(charts), squeeze=False)[0], charts.items(), strict=True):
        line = sorted(points)
        axes.plot(*zip(*line, strict=True), color=LIGHT[0], marker="o" if len(line) < 12 else None, markersize=3)
        low, high = axes.get_xlim()
        for name, start in stages:
            if low <= start <= high:
                axes.axvline(start, color="0.5", linewidth=0.8, linestyle="--")
                axes.annotate(
                    name.replace("$", r"\$"), (start, 1), (3, -9), xycoords=("data", "axes fraction"),
                    textcoords="offset points", fontsize=7,
                )  # fmt: skip
        axes.set(xlabel="optimizer step", ylabel=label.replace("$", r"\$"))
        axes.grid(alpha=0.3)
    return figure
