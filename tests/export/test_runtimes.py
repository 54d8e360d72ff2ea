"""Runtimes and the process that they run in."""

import subprocess
import sys

import pytest

pytest.importorskip("openvino")

# in a process of its own, as a signal without a stack for its handler ends it
SIGNAL_AFTER_TWO = """
import gc, os, signal, sys
import openvino
from pathlib import Path
from openvino import opset13 as ops
from lit_compress.export.runtimes import RUNTIMES, Setting

x = ops.parameter([-1, 4], name="x")
openvino.save_model(openvino.Model([ops.relu(x)], [x]), file := sys.argv[1])
first, second = (RUNTIMES["openvino"].load(Path(file), Setting(())) for _ in range(2))
del first
gc.collect()
del second
gc.collect()
signal.signal(signal.SIGTERM, lambda *_: print("handled"))
os.kill(os.getpid(), signal.SIGTERM)
"""


def test_a_signal_is_handled_after_programs_of_openvino_are_gone(tmp_path):
    """The end of a data loader's worker is one: it ended a fit with a budget in OpenVINO by a segmentation fault."""
    words = [sys.executable, "-c", SIGNAL_AFTER_TWO, str(tmp_path / "model.xml")]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout) == (0, "handled\n"), ended.stderr[-2000:]
