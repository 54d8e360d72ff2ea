"""What runs of tests leave out: most of the seconds of a tiny run go into it, and other tests look at it."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib
import pytest
from matplotlib.layout_engine import ConstrainedLayoutEngine

from lit_compress.models import accounting
from lit_compress.run import guard
from lit_compress.stages import recompute

_bytes: dict[Any, int | None] = {}  # a model's form, texts and tokens -> what a forward takes, for the same tiny models


def _forward_bytes(net: Any, *args: Any) -> int | None:
    """Take what was counted for a model of this form: the same few are counted in every run."""
    parameters = tuple((name, value.shape, value.dtype, value.requires_grad) for name, value in net.named_parameters())
    form = (repr(net), repr(net.config), parameters, args)
    if form not in _bytes:
        _bytes[form] = accounting.forward_bytes(net, *args)
    return _bytes[form]


@contextmanager
def quick_runs() -> Iterator[None]:
    """Draw coarse figures whose parts are not moved apart, time models 10 times, keep counted bytes."""
    report = importlib.import_module("lit_compress.export.report")
    with pytest.MonkeyPatch.context() as patch, matplotlib.rc_context({"figure.dpi": 20, "savefig.dpi": 20}):
        patch.setattr(ConstrainedLayoutEngine, "execute", lambda self, figure: None)
        for module in (recompute, guard):
            patch.setattr(module, "forward_bytes", _forward_bytes)
        patch.setattr(report, "forward_times", functools.partial(report.forward_times, repeats=10))
        yield
