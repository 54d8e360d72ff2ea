"""Figures as users see them."""

from __future__ import annotations

import matplotlib
import pytest
from matplotlib.layout_engine import ConstrainedLayoutEngine
from quick import LAYOUT


@pytest.fixture(autouse=True)
def _fine_figures(monkeypatch):
    """Undo what :func:`quick.quick_runs` does to figures."""
    monkeypatch.setattr(ConstrainedLayoutEngine, "execute", LAYOUT)
    with matplotlib.rc_context({"figure.dpi": 100, "savefig.dpi": "figure"}):
        yield
