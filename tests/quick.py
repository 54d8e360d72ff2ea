"""What runs of tests leave out: most of the seconds of a tiny run go into it, and other tests look at it."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from contextlib import contextmanager

import matplotlib
import pytest
from matplotlib.layout_engine import ConstrainedLayoutEngine


@contextmanager
def quick_runs() -> Iterator[None]:
    """Draw coarse figures whose parts are not moved apart, and time models 10 times."""
    report = importlib.import_module("lit_compress.export.report")
    with pytest.MonkeyPatch.context() as patch, matplotlib.rc_context({"figure.dpi": 20, "savefig.dpi": 20}):
        patch.setattr(ConstrainedLayoutEngine, "execute", lambda self, figure: None)
        patch.setattr(report, "forward_times", functools.partial(report.forward_times, repeats=10))
        yield
