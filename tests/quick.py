"""What runs of tests leave out: most of the seconds of a tiny run go into it, and other tests look at it."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib
import pytest
from lightning.pytorch.cli import LightningCLI
from matplotlib.layout_engine import ConstrainedLayoutEngine

LAYOUT = ConstrainedLayoutEngine.execute
_parsers: dict[str, Any] = {}  # command -> the parser of its options, the same for every command line


def _setup_parser(self: LightningCLI, *args: Any, **more: Any) -> None:
    """Take the parser that this process has made for the command before: making it is half of reading a line."""
    command = self.command  # type: ignore[attr-defined]
    if command not in _parsers:
        SETUP(self, *args, **more)
        _parsers[command] = self.parser
    self.parser = _parsers[command]


SETUP = LightningCLI.setup_parser


@contextmanager
def quick_runs() -> Iterator[None]:
    """Draw coarse figures whose parts are not moved apart, time nets 10 times instead of 30, keep parsers."""
    report = importlib.import_module("lit_compress.export.report")
    with pytest.MonkeyPatch.context() as patch, matplotlib.rc_context({"figure.dpi": 20, "savefig.dpi": 20}):
        patch.setattr(LightningCLI, "setup_parser", _setup_parser)
        patch.setattr(ConstrainedLayoutEngine, "execute", lambda self, figure: None)
        patch.setattr(report, "forward_times", functools.partial(report.forward_times, repeats=10))
        yield
