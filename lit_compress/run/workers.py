"""Making the runs of a comparison: a process per run, several workers in one folder, a failure does not stop the rest.

OUT/compare.json      the results so far: cells and chosen learning rates
OUT/runs/<run>/       an ordinary run folder; OUT/teachers/<seed>/ the same of a dense model
OUT/state/<run>.json  the words of its command; how it ended: ``error``, ``seconds``
OUT/logs/<run>.log    its output
OUT/locks/<run>       locked while a process makes it, also if its worker is killed
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, NoReturn

from filelock import FileLock, Timeout

from lit_compress.models.own_code import read_settings
from lit_compress.utils.errors import UserError
from lit_compress.utils.files import link_if_equal, write_json

COMMAND = ("python", "-m", "lit_compress")
POLL = 0.2  # seconds
GRACE = 20.0  # seconds in which a process may end by itself
# options that may differ when a comparison is continued: they change no result
_FREE = ("--data.path=", "--data.num_workers=", "--trainer.accelerator=", "--trainer.devices=", "--checkpoint_every=")


@dataclass(frozen=True)
class Fit:
    """One ``fit`` of a comparison in ``out``, and its files.

    Attributes:
        words: of the command, after ``python -m lit_compress``.
        label: of the method, whose class is ``method``; "" for a teacher.
        budget: ``kind=value``.
        cell: name of the method at this budget with this seed; held-out rows choose one of its jobs.
        rate: learning rate; None if nothing is trained after the teacher.
        teacher: that it needs; None if a folder is given.
    """

    out: Path
    name: str
    words: tuple[str, ...]
    seed: int = 1
    label: str = ""
    method: str = ""
    budget: str = ""
    cell: str = ""
    rate: float | None = None
    teacher: Fit | None = None

    @property
    def folder(self) -> Path:
        """Of the run."""
        return self.out / ("runs" if self.label else "teachers") / self.name

    @property
    def command(self) -> str:
        """The command as users type it."""
        return shlex.join([*COMMAND, *self.words])

    @property
    def log(self) -> Path:
        """The file of its output."""
        return self.out / "logs" / f"{self.name}.log"

    @property
    def state(self) -> dict[str, Any]:
        """The record of the job; {} if it was never begun."""
        return read_settings(self.out / "state" / f"{self.name}.json")

    def record(self, **values: Any) -> None:
        """Write the record of the job."""
        (self.out / "state").mkdir(parents=True, exist_ok=True)
        write_json(self.out / "state" / f"{self.name}.json", {"words": self._words, **values})

    @property
    def _words(self) -> list[str]:
        words = (word.replace(f"={self.out}/", "=OUT/", 1) for word in self.words)
        return [word for word in words if not word.startswith(_FREE)]

    @property
    def done(self) -> bool:
        """Whether the run has its export and its report, which is written last."""
        return (self.folder / "report.json").is_file()

    @property
    def error(self) -> str | None:
        """The line of a run that failed; None if it did not."""
        return None if self.done else self.state.get("error")

    @property
    def status(self) -> str:
        """``done``, ``failed``, ``unfinished``, of a run that runs or was stopped, or ``missing``."""
        if self.done:
            return "done"
        return "failed" if self.error else "unfinished" if self.state else "missing"

    def lock(self) -> tuple[FileLock, int] | None:
        """Take the lock of the job, and return it with its descriptor; None if another process has it."""
        folder, handles = self.out / "locks", list[int]()
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / self.name, timeout=0, mode=0o664, on_acquired=handles.append)
        with suppress(Timeout):
            lock.acquire()
        return (lock, handles[0]) if handles else None

    def check_same(self) -> None:
        """Refuse a run that was begun with other options, by the first; ``fit`` refuses one that failed with them."""
        old, new = self.state.get("words", self._words), self._words
        was, now = sorted({*old} - {*new}), sorted({*new} - {*old})
        if (was or now) and self.error is None:
            raise UserError(
                f"out: '{self.out}' has '{self.name}' with other options: {was[0] if was else 'none'}, now "
                f"{now[0] if now else 'none'}; give another --out, or remove {self.folder}"
            )


def stop(*_: object) -> NoReturn:
    """End the process as an exception does: what SIGTERM does to a comparison."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one would break off the end of the runs
    raise SystemExit(128 + signal.SIGTERM)


def start_process(words: Sequence[str], log: Path, handle: int, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start ``python -m lit_compress WORDS``, which keeps a lock's ``handle`` while it lives."""
    with log.open("ab") as said:
        return subprocess.Popen(
            [sys.executable, "-m", "lit_compress", *words], stdin=subprocess.DEVNULL, stdout=said,
            stderr=subprocess.STDOUT, pass_fds=[handle], env=environment,
        )  # fmt: skip


class Worker:
    """Makes jobs in their order, ``at_once`` at a time; their teachers are made first.

    ``ended`` is called after every job that ended here, with its error or None.
    """

    def __init__(
        self, jobs: Sequence[Fit], at_once: int = 1, ended: Callable[[Fit, str | None], None] = lambda job, error: None
    ) -> None:
        teachers = dict.fromkeys(job.teacher for job in jobs if job.teacher and not job.done)
        self.waiting = [job for job in (*teachers, *jobs) if job]
        self.at_once, self.ended, self.began = at_once, ended, time.time()
        self._running = dict[Fit, tuple[subprocess.Popen[bytes], FileLock, float]]()

    def work(self, until: float = inf) -> None:
        """Make all jobs that are not done, and wait for those that other workers make, ``until`` a time."""
        try:
            while (self.waiting or self._running) and time.time() < until:
                for job in [*self._running]:
                    self._look(job)
                self.waiting = [job for job in self.waiting if not self._begin(job)]
                time.sleep(POLL)
        finally:  # the same command continues runs that are stopped
            for process, *_ in self._running.values():
                process.terminate()
            end = time.time() + GRACE
            for process, lock, _ in self._running.values():
                try:
                    process.wait(max(0.0, end - time.time()))
                except subprocess.TimeoutExpired:
                    process.kill()
                lock.release()

    def _is_over(self, job: Fit) -> bool:
        """Return whether a job needs no run: it is done, or failed since this worker began."""
        return job.done or job.state.get("ended", 0) >= self.began

    def _begin(self, job: Fit) -> bool:
        """Start a job if it is its turn; return whether it need not wait any more."""
        if len(self._running) >= self.at_once:
            return False
        if self._is_over(job):
            return True
        if job.teacher and not job.teacher.done:
            if failed := self._is_over(job.teacher):
                self._end(job, f"its teacher {job.teacher.name} failed: {job.teacher.error}")
            return failed
        if not (held := job.lock()):
            return False
        lock, handle = held
        if self._is_over(job):  # by another worker, a moment ago
            lock.release()
            return True
        job.record()
        job.log.parent.mkdir(parents=True, exist_ok=True)
        share = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // self.at_once))} if self.at_once > 1 else {}
        environment = {"TERM": "dumb", **share, **os.environ}  # several at once share the cores
        self._running[job] = start_process(job.words, job.log, handle, environment), lock, time.time()
        return True

    def _look(self, job: Fit) -> None:
        """Record the end of a job if its process has ended."""
        process, lock, begin = self._running[job]
        if (code := process.poll()) is None:
            return
        error = None if job.done else last_line(job.log, code)  # also if it was killed after its report
        if job.teacher:  # hundreds of copies of it would fill the disk
            link_if_equal(*(one.folder / "dense" / "net" / "model.safetensors" for one in (job, job.teacher)))
        self._end(job, error, seconds=round(time.time() - begin, 1))
        del self._running[job]
        lock.release()

    def _end(self, job: Fit, error: str | None, **values: Any) -> None:
        """Record the end of a job, and tell it."""
        job.record(error=error, **values, ended=time.time())
        self.ended(job, error)


def last_line(log: Path, code: int) -> str:
    """Return in one line why a process failed: its last ``error: ``, else the last line it wrote."""
    if code < 0:
        return f"killed by signal {-code}{'; was memory short?' if code == -9 else ''}"
    lines = log.read_text(errors="replace").splitlines()[-200:] if log.is_file() else []
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    said = errors or [line for line in lines if line.strip()] or [f"exit code {code}"]
    return " ".join(said[-1].split())[:300]
