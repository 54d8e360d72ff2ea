"""Runs of a comparison as forks of their worker: most seconds of a tiny run go into imports."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable


class Fork:
    """A fork, in the place of a ``Popen``.

    Args:
        work: function that the fork calls; it returns the exit code.
        handle: of a lock, which the fork keeps.
    """

    def __init__(self, work: Callable[[], int], handle: int) -> None:
        sys.stdout.flush()
        kept = os.dup(handle)  # filelock closes its own in a fork
        self.returncode: int | None = None
        self.pid = os.fork()
        if not self.pid:
            os._exit(work())
        os.close(kept)

    def poll(self) -> int | None:
        """Return the exit code; None while the fork lives."""
        if self.returncode is None:
            gone, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if gone else None
        return self.returncode

    def wait(self, timeout: float = 60.0) -> int:
        """Return the exit code once the fork has ended.

        Raises:
            subprocess.TimeoutExpired: it has not, after ``timeout`` seconds.
        """
        end = time.time() + timeout
        while (code := self.poll()) is None:
            if time.time() > end:
                raise subprocess.TimeoutExpired("fork", timeout)
            time.sleep(0.02)
        return code

    def terminate(self) -> None:
        """Send SIGTERM."""
        os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        os.kill(self.pid, signal.SIGKILL)
