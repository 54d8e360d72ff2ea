"""Runs of a comparison as forks of the test's process: most seconds of a tiny run go into imports."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.forks import Fork
from lit_compress.__main__ import main


def start_process(words: Sequence[str], log: Path, handle: int, environment: dict[str, str]) -> Fork:
    """Stand in for ``lit_compress.run.workers.start_process``."""

    def work() -> int:
        try:
            sys.stdout = sys.stderr = log.open("a", buffering=1)
            main(list(words))
        except SystemExit as stop:
            return stop.code if isinstance(stop.code, int) else 1
        except BaseException:
            traceback.print_exc()
            return 1
        return 0

    return Fork(work, handle)
