"""Charts of a page as inline SVG: scatter plots, curves, maps of layers; colours are the page's CSS variables.

They have no size of their own and no script, so that a page of 200 runs opens at once, in both themes and on paper.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from lit_compress.analysis.styles import LIGHT, look

COLOURS = len(LIGHT)  # --c0 ... --c7 in the page
_SHAPES = (
    "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0-9 0z", "M-4 -4h8v8h-8z", "M0 -5.2L4.9 3.6H-4.9z",
    "M0 -5.4L5.4 0L0 5.4L-5.4 0z",
)  # fmt: skip
_DENSE = "M0 -7L1.7 -2.2L6.7 -2.2L2.7 .8L4.1 5.7L0 2.8L-4.1 5.7L-2.7 .8L-6.7 -2.2L-1.7 -2.2z"


@dataclass(frozen=True)
class Point:
    """A point of a scatter plot.

    Attributes:
        x, y: where it is.
        series: number of its label (styles.py), which decides colour and shape; None: the dense model, a star.
        title: the text shown under the pointer.
        link: where a click leads, e.g. ``#run-3``; "" for nowhere.
        spread: half the length of its error bar; None for none.
        small: True for one run of several behind a mean.
        note: text next to it, e.g. the value of a point that is at the edge.
    """

    x: float
    y: float
    series: int | None
    title: str
    link: str = ""
    spread: float | None = None
    small: bool = False
    note: str = ""


def mark(series: int | None) -> str:
    """Return the marker of a label for a legend, an SVG of its own."""
    return f'<svg class="mark" viewBox="-8 -8 16 16" aria-hidden="true">{_marker(series)}</svg>'


def _marker(series: int | None) -> str:
    if series is None:
        return f'<path d="{_DENSE}" style="fill:var(--ink)"/>'
    colour, shape = look(series)
    return f'<path d="{_SHAPES[shape]}" style="fill:var(--c{colour})"/>'


def compact(value: float) -> str:
    """Return a number for an axis: three digits, thousands as k, M or G.

    >>> [compact(v) for v in (0.25, 12, 1_500, 2_000_000, 0)]
    ['0.25', '12', '1.5k', '2M', '0']
    """
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return round numbers between ``low`` and ``high``, at most ``most`` of them.

    >>> ticks(0.81, 0.87, 4)
    [0.82, 0.84, 0.86]
    """
    if not high > low:
        return [low]
    raw = (high - low) / most
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    values = [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]
    return values[:most] if values else [low]


def log_ticks(low: float, high: float) -> list[float]:
    """Return round numbers between ``low`` and ``high``, both above 0, for a logarithmic axis; about six.

    >>> log_ticks(1.2e6, 1.1e7)
    [2000000.0, 5000000.0, 10000000.0]
    """
    values = []
    for steps in ((1, 2, 5), (1, 1.5, 2, 3, 5, 7), (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9)):
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        values = [m * 10.0**d for d in decades for m in steps if low <= m * 10.0**d <= high]
        if len(values) >= 3:
            break
    return values[:: max(1, len(values) // 6)] or [low]


class _Axes:
    """A frame with grid and ticks, and the places of values in it."""

    def __init__(
        self, xs: Sequence[float], ys: Sequence[float], size: tuple[int, int], labels: tuple[str, str], log: bool
    ) -> None:
        self.width, self.height = size
        self.left, self.right, self.top, self.bottom = 52, 12, 10, 38
        self.log = log and min(xs) > 0
        self.x0, self.x1 = self._wide(min(xs), max(xs), self.log)
        self.y0, self.y1 = self._wide(min(ys), max(ys), False)
        self.labels = labels

    @staticmethod
    def _wide(low: float, high: float, log: bool) -> tuple[float, float]:
        """Return ends with some room; a single value is in the middle."""
        if log:
            room = 0.05 * math.log(high / low) or 0.3
            return low * math.exp(-room), high * math.exp(room)
        room = 0.06 * (high - low) or abs(high) * 0.05 or 1.0
        return low - room, high + room

    def x(self, value: float) -> float:
        low, high, value = (math.log(v) if self.log else v for v in (self.x0, self.x1, value))
        return round(self.left + (value - low) / (high - low) * (self.width - self.left - self.right), 1)

    def y(self, value: float) -> float:
        part = (value - self.y0) / (self.y1 - self.y0)
        return round(self.height - self.bottom - part * (self.height - self.top - self.bottom), 1)

    def frame(self) -> list[str]:
        end, low = self.width - self.right, self.height - self.bottom
        parts = []
        for value in ticks(self.y0, self.y1):
            y = self.y(value)
            parts.append(f'<path class="grid" d="M{self.left} {y}H{end}"/>')
            parts.append(f'<text x="{self.left - 6}" y="{y + 3.5}" text-anchor="end">{compact(value)}</text>')
        for value in log_ticks(self.x0, self.x1) if self.log else ticks(self.x0, self.x1):
            x = self.x(value)
            parts.append(f'<path class="grid" d="M{x} {self.top}V{low}"/>')
            parts.append(f'<text x="{x}" y="{low + 15}" text-anchor="middle">{compact(value)}</text>')
        middle = (self.left + end) / 2
        parts.append(
            f'<text class="axis" x="{middle}" y="{self.height - 5}" text-anchor="middle">'
            f"{escape(self.labels[0])}</text>"
        )
        parts.append(
            f'<text class="axis" transform="translate(12 {(self.top + low) / 2}) rotate(-90)" text-anchor="middle">'
            f"{escape(self.labels[1])}</text>"
        )
        return parts

    def whole(self, parts: list[str], title: str) -> str:
        return (
            f'<svg class="chart" viewBox="0 0 {self.width} {self.height}" role="img" aria-label="{escape(title)}">'
            f"{''.join([*self.frame(), *parts])}</svg>"
        )


def lines_of(places: Sequence[float], width: float) -> list[int]:
    """Return the line, from 0, on which each label is so that none of this width covers another.

    Args:
        places: where labels begin, horizontally.
        width: of a label.

    >>> lines_of([0, 3, 50, 4], 10)
    [0, 1, 0, 2]
    """
    rows, begins = [0] * len(places), list[float]()  # begins: of the last label on every line
    for i in sorted(range(len(places)), key=places.__getitem__):
        free = (line for line, begin in enumerate(begins) if places[i] - begin >= width)
        rows[i] = next(free, len(begins))
        begins[rows[i] : rows[i] + 1] = [places[i]]
    return rows


def scatter(
    points: Sequence[Point], front: Sequence[tuple[float, float]], labels: tuple[str, str], level: float | None = None
) -> str:
    """Return a scatter plot; ``front`` is drawn as steps, ``level`` as a dashed line: the dense model's metric.

    Thin lines join the points of a series that are not small.

    Args:
        points: at least one.
        front: points that no other is better than in both, from left to right.
        labels: of the axes.
        level: None for none.
    """
    xs = [p.x for p in points]
    ys = [p.y + (p.spread or 0) * sign for p in points for sign in (-1, 1)]
    ys += [] if level is None else [level]
    axes = _Axes(xs, ys, (540, 340), labels, log=min(xs) > 0 and max(xs) / min(xs) > 3)
    parts = []
    if level is not None:
        parts.append(f'<path class="level" d="M{axes.left} {axes.y(level)}H{axes.width - axes.right}"/>')
    if len(front) > 1:
        path = f"M{axes.x(front[0][0])} {axes.y(front[0][1])}"
        path += "".join(f"H{axes.x(x)}V{axes.y(y)}" for x, y in front[1:])
        parts.append(f'<path class="front" d="{path}"/>')
    for series in {p.series for p in points if p.series is not None}:
        line = sorted((p.x, p.y) for p in points if p.series == series and not p.small)
        path = "M" + "L".join(f"{axes.x(x)} {axes.y(y)}" for x, y in line)
        parts.append(f'<path class="join" style="stroke:var(--c{series % COLOURS})" d="{path}"/>')
    notes = [point for point in points if point.note]
    lines = dict(zip(map(id, notes), lines_of([axes.x(point.x) for point in notes], 40), strict=True))
    for point in sorted(points, key=lambda p: not p.small):
        parts.append(_drawn(point, axes, lines.get(id(point), 0)))
    return axes.whole(parts, f"{labels[1]} against {labels[0]}")


def _drawn(point: Point, axes: _Axes, line: int) -> str:
    x, y = axes.x(point.x), axes.y(point.y)
    bar = ""
    if point.spread:
        low, high = axes.y(point.y - point.spread), axes.y(point.y + point.spread)
        colour = f"var(--c{(point.series or 0) % COLOURS})"
        bar = f'<path class="bar" style="stroke:{colour}" d="M{x} {low}V{high}M{x - 3} {low}h6M{x - 3} {high}h6"/>'
    scale = " scale(.55)" if point.small else ""
    kind = ' class="small"' if point.small else ""
    inside = f"<title>{escape(point.title)}</title>{_marker(point.series)}"
    if point.note:
        away = 11 * line if y < axes.height / 2 else -11 * line  # from the edge
        inside += f'<text x="8" y="{3.5 + away}">{escape(point.note)}</text>'
    body = f'<g{kind} transform="translate({x} {y}){scale}">{inside}</g>'
    return bar + (f'<a href="{escape(point.link)}">{body}</a>' if point.link else body)


def curves(
    lines: dict[str, list[tuple[float, float]]], labels: tuple[str, str], stages: Sequence[tuple[str, float]] = ()
) -> str:
    """Return curves, one colour each; a name is at the last point where there are several.

    Args:
        lines: name -> points (step, value), at least one line of at least one point.
        labels: of the axes.
        stages: name and first step of every stage, which vertical lines show.
    """
    points = [p for line in lines.values() for p in line]
    axes = _Axes([x for x, _ in points], [y for _, y in points], (440, 220), labels, log=False)
    parts = []
    for name, start in stages:
        if axes.x0 <= start <= axes.x1:
            x = axes.x(start)
            parts.append(f'<path class="level" d="M{x} {axes.top}V{axes.height - axes.bottom}"/>')
            parts.append(f'<text class="stage" x="{x + 4}" y="{axes.top + 10}">{escape(name)}</text>')
    for number, (name, line) in enumerate(lines.items()):
        colour, line = f"var(--c{number % COLOURS})", sorted(line)
        path = "M" + "L".join(f"{axes.x(x)} {axes.y(y)}" for x, y in line)
        parts.append(f'<path class="line" style="stroke:{colour}" d="{path}"><title>{escape(name)}</title></path>')
        if len(line) < 12:
            parts += [
                f'<circle cx="{axes.x(x)}" cy="{axes.y(y)}" r="2.6" style="fill:{colour}"/>' for x, y in line
            ]  # fmt: skip
    return axes.whole(parts, f"{labels[1]} over {labels[0]}")


def grid(rows: Sequence[str], columns: Sequence[str], cells: dict[tuple[int, int], tuple[float, str, str]]) -> str:
    """Return a map: cells of rows and columns, the stronger the colour the more is left.

    Args:
        rows: their labels.
        columns: their labels.
        cells: (row, column) -> share that is left, text in the cell, text shown when one points at it ("" for none).
    """
    left, top, wide, high = 12 + 6.2 * max(map(len, rows)), 20, 58, 21
    width, height = left + wide * len(columns) + 2, top + high * len(rows) + 2
    parts = []
    for number, name in enumerate(columns):
        parts.append(f'<text x="{left + (number + 0.5) * wide:.0f}" y="13">{escape(name)}</text>')
    for number, name in enumerate(rows):
        parts.append(f'<text class="row" x="{left - 6:.0f}" y="{top + number * high + 14}">{escape(name)}</text>')
    for (row, column), (share, text, title) in cells.items():
        x, y = left + column * wide, top + row * high
        shade = f"{0.06 + 0.94 * min(max(share, 0.0), 1.0):.2f}" if share > 0 else "0"
        kind = ' class="full"' if share > 0.5 else "" if share > 0 else ' class="gone"'
        inside = f"<title>{escape(title)}</title>" if title else ""
        parts.append(
            f'<rect{kind} x="{x + 1:.0f}" y="{y + 1}" width="{wide - 2}" height="{high - 2}" fill-opacity="{shade}">'
            f'{inside}</rect><text{kind} x="{x + wide / 2:.0f}" y="{y + 14}">{escape(text)}</text>'
        )
    style = f'style="max-width:{width:.0f}px"'
    head = f'<svg class="map" viewBox="0 0 {width:.0f} {height}" {style} role="img" aria-label="sizes kept">'
    return f"{head}{''.join(parts)}</svg>"
