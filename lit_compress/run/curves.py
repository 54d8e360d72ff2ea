"""Reading the logs of a run: the curves of TensorBoard's events, or of a CSV logger's files."""

from __future__ import annotations

import csv
from pathlib import Path

Curves = dict[str, list[tuple[float, float]]]  # name -> (step, value), by step

MOST = 120  # points of a curve that are kept
_WANTED = ("train/loss", "train/density", "val/", "val_")


def read_curves(folder: Path) -> Curves:
    """Return the losses, densities and dev metrics that the run in ``folder`` has logged, thinned; {} without any."""
    curves = _events(folder / "tensorboard") or _tables(folder)
    return {name: thin(sorted(points)) for name, points in curves.items() if points}


def thin(points: list[tuple[float, float]], most: int = MOST) -> list[tuple[float, float]]:
    """Return at most ``most`` of the points, evenly, with the first and the last.

    >>> thin([(i, i) for i in range(7)], 3)
    [(0, 0), (3, 3), (6, 6)]
    """
    if len(points) <= most:
        return points
    return [points[round(i * (len(points) - 1) / (most - 1))] for i in range(most)]


def _wanted(name: str) -> bool:
    return name.startswith(_WANTED) and not name.endswith(("/score", "val/loss"))


def _events(folder: Path) -> Curves:
    """Return the scalars of all files of events under ``folder``."""
    if not folder.is_dir():
        return {}
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    curves: Curves = {}
    none = {name: 1 for name in ("images", "histograms", "compressedHistograms", "audio", "tensors")}
    for place in sorted({path.parent for path in folder.rglob("events.out.tfevents.*")}):
        events = EventAccumulator(str(place), size_guidance={**none, "scalars": 0})
        events.Reload()
        for name in filter(_wanted, events.Tags()["scalars"]):
            curves.setdefault(name, []).extend((float(e.step), e.value) for e in events.Scalars(name))
    return curves


def _tables(folder: Path) -> Curves:
    """Return the columns of all ``metrics.csv`` under ``folder``, as Lightning's CSVLogger writes them."""
    curves: Curves = {}
    for path in sorted(folder.rglob("metrics.csv")):
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                for name, value in row.items():
                    if value and row.get("step") and name and _wanted(name):
                        curves.setdefault(name, []).append((float(row["step"]), float(value)))
    return curves
