"""Making the runs of a comparison: a process per run, several workers in one folder, a failure does not stop the rest.

OUT/compare.json      the results so far: cells and chosen learning rates
OUT/runs/<run>/       an ordinary run folder; OUT/teachers/<seed>/ the same of a dense model
OUT/state/<run>.json  the words of its command; how it ended: ``status``, ``error``, ``seconds``
OUT/logs/<run>.log    its output
OUT/locks/<run>       locked while a process makes it, also if its worker is killed
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, NoReturn

from filelock import FileLock, Timeout

from lit_compress.utils.errors import UserError
from lit_compress.utils.files import json_of, link_if_equal, write_json
from lit_compress.utils.tables import print

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
        try:
            return json_of(self.out / "state" / f"{self.name}.json")
        except (OSError, ValueError):
            return {}

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
        status = self.state.get("status", "missing")
        lost = {"done": "missing", "running": "unfinished"}  # as version 0.2 called it
        return "done" if self.done else lost.get(status, status)

    @contextmanager
    def lock(self) -> Iterator[int | None]:
        """Hold the lock of the job, and yield its descriptor; None if another process has it."""
        folder, handles = self.out / "locks", list[int]()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            held = FileLock(folder / self.name, timeout=0, mode=0o664, on_acquired=handles.append).acquire()
        except Timeout:
            yield None
            return
        with held:
            yield handles[0]

    def check_same(self) -> None:
        """Refuse a run that was begun with other options, by the first; one that failed with them is made again."""
        old, new = self.state.get("words"), self._words
        if old in (None, new) or self.error is not None:
            return
        was, now = ([w for w in some if w not in other][:1] for some, other in ((old, new), (new, old)))
        raise UserError(
            f"out: '{self.out}' has '{self.name}' with other options: {' '.join(was) or 'none'}, now "
            f"{' '.join(now) or 'none'}; give another --out, or remove {self.folder}"
        )

    def clear(self) -> None:
        """Remove a folder that was killed before it was a run, which ``fit`` refuses, or failed with other options."""
        begun = (self.folder / "config.yaml").is_file() and self.state.get("words") in (None, self._words)
        if self.folder.is_dir() and not begun:
            shutil.rmtree(self.folder)


@contextmanager
def stopped_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the block as an exception does, with one line and exit code 143; then it is as it was before."""

    def stop(*_: object) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one would break off the end of the runs
        print("stopped by SIGTERM; the same command continues", file=sys.stderr)
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


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
        self.jobs, self.at_once, self.ended = jobs, at_once, ended
        self.began, self.stopped, self._patience, self._told = time.time(), False, 0.0, Lock()

    def work(self) -> None:
        """Make all jobs that are not done, and at the end wait for those that other workers make."""
        teachers = dict.fromkeys(job.teacher for job in self.jobs if job.teacher and not job.done)
        with ThreadPoolExecutor(self.at_once) as pool:
            try:
                for jobs, wait in (([*teachers, *self.jobs], False), (self.jobs, True)):
                    for made in [pool.submit(self.make, job, wait) for job in jobs if job]:
                        made.result()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
                self.stop()

    def make(self, job: Fit, wait: bool = True) -> None:
        """Make a job, and the teacher that it needs; ``wait`` if another worker makes it."""
        if job.teacher and not job.teacher.done and not self._is_over(job):
            self.make(job.teacher)
            if not job.teacher.done:
                return self._end(job, f"its teacher {job.teacher.name} failed: {job.teacher.error}")
        while not self._is_over(job):
            with job.lock() as handle:
                if handle is not None and not self._is_over(job):  # by another worker, a moment ago
                    return self._run(job, handle)
            if not wait:
                return None
            time.sleep(POLL)

    def _is_over(self, job: Fit) -> bool:
        """Return whether a job needs no run: it is done, failed since this worker began, or the worker was stopped."""
        state = job.state
        failed = state.get("status") == "failed" and state.get("ended", 0) >= self.began
        return self.stopped or failed or job.done

    def _run(self, job: Fit, handle: int) -> None:
        """Run the process of a job, and record its end."""
        begin = time.time()
        job.clear()
        job.record(status="unfinished")
        job.log.parent.mkdir(parents=True, exist_ok=True)
        share = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // self.at_once))} if self.at_once > 1 else {}
        environment, told = {"TERM": "dumb", **share, **os.environ}, False  # several at once share the cores
        process = start_process(job.words, job.log, handle, environment)
        while (code := process.poll()) is None:
            if self.stopped and time.time() > self._patience:
                process.kill()
            elif self.stopped and not told:  # a second time would break off its end
                process.terminate()
            told = self.stopped
            time.sleep(POLL)
        error = None if code == 0 and job.done else last_line(job.log, code)
        if error is None:
            self._share(job)
        self._end(job, error, seconds=round(time.time() - begin, 1))

    def _end(self, job: Fit, error: str | None, **values: Any) -> None:
        """Record the end of a job, and tell it; a job that this worker has stopped is as it was."""
        with self._told:
            if not self.stopped:
                said = {"status": "failed", "error": error} if error else {"status": "done"}
                job.record(**said, **values, ended=time.time())
                self.ended(job, error)

    def _share(self, job: Fit) -> None:
        """Let a run's copy of the teacher be the teacher's own file: hundreds of copies would fill the disk."""
        if job.teacher:
            link_if_equal(*(one.folder / "dense" / "net" / "model.safetensors" for one in (job, job.teacher)))

    def stop(self, patience: float = GRACE) -> None:
        """Let processes that still run end, after ``patience`` seconds hard; the same command continues their runs."""
        self.stopped, self._patience = True, time.time() + patience


def last_line(log: Path, code: int) -> str:
    """Return in one line why a process failed: its last ``error: ``, else the last line it wrote."""
    if code < 0:
        return f"killed by signal {-code}{'; was memory short?' if code == -9 else ''}"
    lines = log.read_text(errors="replace").splitlines()[-200:] if log.is_file() else []
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    said = errors or [line for line in lines if line.strip()] or [f"exit code {code}"]
    return " ".join(said[-1].split())[:300]
