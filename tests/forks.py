"""Runs of a comparison as forks of the test's process: most seconds of a tiny run go into imports."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from lit_compress.__main__ import main


def start_process(words: Sequence[str], log: Path, handle: int, environment: dict[str, str]) -> int:
    """Stand in for ``lit_compress.run.workers.start_process``."""
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    code = 1
    try:
        sys.stdout = sys.stderr = log.open("a", buffering=1)
        main(list(words))
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
