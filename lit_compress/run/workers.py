"""Making the runs of a comparison: a process per run, several workers in one folder, a failure does not stop the rest.

OUT/compare.json      the results so far: cells and chosen learning rates
OUT/runs/<run>/       an ordinary run folder; OUT/teachers/<seed>/ the same of a dense model
OUT/state/<run>.json  the words of its command; how it ended: ``status``, ``error``, ``seconds``
OUT/logs/<run>.log    its output
OUT/locks/<run>       locked while a process makes it, also if its worker is killed
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from threading import Lock
from typing import Any, NoReturn

from filelock import FileLock, Timeout

from lit_compress.run.comparison import COMPARISON, Cell, Fit, Plan
from lit_compress.run.results import read_record, read_report
from lit_compress.utils.errors import UserError
from lit_compress.utils.files import json_of, link_if_equal, write_json
from lit_compress.utils.tables import print

FORMAT = 1
POLL = 0.2  # seconds
GRACE = 20.0  # seconds in which a process may end by itself
# options that may differ when a comparison is continued: they change no result
_FREE = ("--data.path=", "--data.num_workers=", "--trainer.accelerator=", "--trainer.devices=", "--checkpoint_every=")


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


class Layout:
    """The folder of a comparison: the state of each of its jobs."""

    def __init__(self, out: Path) -> None:
        self.out = out

    def state(self, job: Fit) -> dict[str, Any]:
        """Return the record of a job; {} if it was never begun."""
        try:
            return json_of(self._state(job))
        except (OSError, ValueError):
            return {}

    def record(self, job: Fit, **values: Any) -> None:
        """Write the record of a job."""
        self._state(job).parent.mkdir(parents=True, exist_ok=True)
        write_json(self._state(job), {"words": self._words(job), **values})

    def _state(self, job: Fit) -> Path:
        return self.out / "state" / f"{job.name}.json"

    def _words(self, job: Fit) -> list[str]:
        words = (word.replace(f"={self.out}/", "=OUT/", 1) for word in job.words)
        return [word for word in words if not word.startswith(_FREE)]

    def done(self, job: Fit) -> bool:
        """Return whether a run has its export and its report, which is written last."""
        return (self.out / job.folder / "report.json").is_file()

    def error(self, job: Fit) -> str | None:
        """Return the line of a run that failed; None if it did not."""
        return None if self.done(job) else self.state(job).get("error")

    def lock(self, job: Fit) -> tuple[FileLock, int] | None:
        """Take the lock of a job; return it with its descriptor, or None if another process has it."""
        file, handles = self.out / "locks" / job.name, list[int]()
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(file, timeout=0, mode=0o664, on_acquired=handles.append)
        try:
            lock.acquire()
        except Timeout:
            return None
        return lock, handles[0]

    def running(self, job: Fit) -> bool:
        """Return whether a worker, here or elsewhere, is making a job."""
        if not (self.out / "locks" / job.name).is_file():
            return False
        if (taken := self.lock(job)) is not None:
            taken[0].release()
        return taken is None

    def log(self, job: Fit) -> Path:
        """Return the log file of a job."""
        return self.out / "logs" / f"{job.name}.log"

    def same(self, job: Fit) -> bool:
        """Return whether a job was begun with the options of today, or never."""
        return self.state(job).get("words") in (None, self._words(job))

    def check_same(self, jobs: Sequence[Fit]) -> None:
        """Refuse a folder in which a run was begun with other options.

        Raises:
            UserError: one was; the message has its first option that differs.
        """
        for job in jobs:
            old = self.state(job).get("words")
            if old is None or old == (new := self._words(job)) or self.error(job) is not None:
                continue  # one that failed with other options is made again
            was, now = ([w for w in some if w not in other] for some, other in ((old, new), (new, old)))
            raise UserError(
                f"out: '{self.out}' has '{job.name}' with other options: {' '.join(was[:1]) or 'none'}, now "
                f"{' '.join(now[:1]) or 'none'}; give another --out, or remove {self.out / job.folder}"
            )


def start_process(words: Sequence[str], log: Path, handle: int, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start ``python -m lit_compress WORDS``, which keeps a lock's ``handle`` while it lives."""
    with log.open("ab") as said:
        return subprocess.Popen(
            [sys.executable, "-m", "lit_compress", *words], stdin=subprocess.DEVNULL, stdout=said,
            stderr=subprocess.STDOUT, pass_fds=[handle], env=environment,
        )  # fmt: skip


class Worker:
    """Makes jobs one after another, or several at once.

    Args:
        place: the folder.
        jobs: to make, in this order; their teachers are made first.
        at_once: how many processes.
        ended: is called after every job that ended here, with its error or None.
    """

    def __init__(
        self, place: Layout, jobs: Sequence[Fit], at_once: int = 1,
        ended: Callable[[Fit, str | None], None] = lambda job, error: None,
    ) -> None:  # fmt: skip
        self.place, self.jobs, self.at_once, self.ended = place, jobs, at_once, ended
        self.began, self.stopped, self._patience = time.time(), False, 0.0
        self._told = Lock()

    def work(self) -> None:
        """Make all jobs that are not done, and at the end wait for those that other workers make."""
        teachers = dict.fromkeys(job.teacher for job in self.jobs if job.teacher and not self.place.done(job))
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
        if self._is_over(job):
            return
        if job.teacher and not self.place.done(job.teacher):
            self.make(job.teacher)
            if not self.place.done(job.teacher):
                return self._end(job, f"its teacher {job.teacher.name} failed: {self.place.error(job.teacher)}")
        while (taken := self.place.lock(job)) is None:
            if self.stopped or not wait:
                return None
            time.sleep(POLL)
        try:
            if not self._is_over(job):  # by another worker, a moment ago
                self._run(job, taken[1])
        finally:
            taken[0].release()

    def _is_over(self, job: Fit) -> bool:
        """Return whether a job needs no run: it is done, failed since this worker began, or the worker was stopped."""
        state = self.place.state(job)
        failed = state.get("status") == "failed" and state.get("ended", 0) >= self.began
        return self.stopped or failed or self.place.done(job)

    def _run(self, job: Fit, handle: int) -> None:
        """Run the process of a job, and record its end."""
        folder, log, begin = self.place.out / job.folder, self.place.log(job), time.time()
        # killed before it was a run, which fit takes for something else; or failed with other options
        if folder.is_dir() and (not (folder / "config.yaml").is_file() or not self.place.same(job)):
            shutil.rmtree(folder)
        self.place.record(job, status="running")
        log.parent.mkdir(parents=True, exist_ok=True)
        process, told = start_process(job.words, log, handle, self._environment()), False
        while (code := process.poll()) is None:
            if self.stopped and time.time() > self._patience:
                process.kill()
            elif self.stopped and not told:  # a second time would break off its end
                process.terminate()
            told = self.stopped
            time.sleep(POLL)
        error = None if code == 0 and self.place.done(job) else last_line(log, code)
        if error is None:
            self._share(job)
        self._end(job, error, seconds=round(time.time() - begin, 1))

    def _environment(self) -> dict[str, str]:
        """Return the environment of a process; several at once share the cores."""
        variables = {"TERM": "dumb", **os.environ}
        if self.at_once > 1 and "OMP_NUM_THREADS" not in variables:
            variables["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // self.at_once))
        return variables

    def _end(self, job: Fit, error: str | None, **values: Any) -> None:
        """Record the end of a job, and tell it; a job that this worker has stopped is as it was."""
        with self._told:
            if not self.stopped:
                said = {"status": "failed", "error": error} if error else {"status": "done"}
                self.place.record(job, **said, **values, ended=time.time())
                self.ended(job, error)

    def _share(self, job: Fit) -> None:
        """Let a run's copy of the teacher be the teacher's own file: hundreds of copies would fill the disk."""
        if job.teacher:
            both = (self.place.out / one.folder / "dense" / "net" / "model.safetensors" for one in (job, job.teacher))
            link_if_equal(*both)

    def stop(self, patience: float = GRACE) -> None:
        """Let processes that still run end, after ``patience`` seconds hard; the same command continues their runs."""
        self.stopped, self._patience = True, time.time() + patience


def last_line(log: Path, code: int) -> str:
    """Return in one line why a process failed: its last ``error: ``, else the last line it wrote."""
    if code < 0:
        hint = "; was memory short?" if code == -9 else ""
        return f"killed by signal {-code}{hint}"
    try:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines()[-200:] if line.strip()]
    except OSError:
        lines = []
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return " ".join((errors or lines or [f"exit code {code}"])[-1].split())[:300]


def gather(plan: Plan) -> dict[str, Any]:
    """Write ``compare.json``, a function of the files in the folder, and return its content."""
    place, config = Layout(plan.out), asdict(plan.comparison)
    done = next((job for cell in plan.cells for job in cell.jobs if place.done(job)), None)
    metric = (read_report(plan.out / done.folder) or {})["metric"] if done else None
    gathered = {
        "format": FORMAT, "config": config, "task": plan.task, "metric": metric, "fairness": fairness(config),
        "cells": [_cell(place, cell, metric) for cell in plan.cells], "command": plan.command,
    }  # fmt: skip
    write_json(plan.out / COMPARISON, gathered)
    return gathered


def fairness(config: dict[str, Any]) -> str:
    """Return the sentence on how the runs were made equal, for the screen and the page."""
    rates, rows = len(config["learning_rates"]), config["hold_out"]
    return (
        f"Every trained method takes {config['updates']:,} steps after the teacher and tries {rates} learning "
        f"rate{'s' if rates != 1 else ''}; rate and epoch are chosen on {rows:,} training rows that are held out, not "
        "on the dev set. Runs of one seed share teacher, training rows and their order."
    )


def _cell(place: Layout, cell: Cell, metric: Any) -> dict[str, Any]:
    """Return the entry of a cell: the trials, and the run that held-out rows choose."""
    tried = [_tried(place, job, metric) for job in cell.jobs]
    errors = [one["error"] for one in tried if one["error"]]
    done = [one for one in tried if one["status"] == "done"]
    status = next(
        (one["status"] for one in tried if one["status"] in ("running", "missing")), "done" if done else "failed"
    )
    error, chosen = next(iter(errors), None), tried[0]
    if status == "done":
        best = max if metric["mode"] == "max" else min
        chosen = best(done, key=lambda one: one["held_out"]) if len(done) > 1 else done[0]
        error = error and f"{len(errors)} of {len(tried)} learning rates failed: {error}"
    return {
        "name": cell.name, "method": cell.method, "label": cell.label, "budget": cell.budget, "seed": cell.seed,
        "learning_rate": chosen["learning_rate"] if status == "done" else None,
        "tried": tried if cell.jobs[0].rate is not None else [], "status": status, "error": error, "run": chosen["run"],
        "seconds": sum(one["seconds"] or 0 for one in tried), "memory_mib": chosen["memory_mib"],
    }  # fmt: skip


def _tried(place: Layout, job: Fit, metric: Any) -> dict[str, Any]:
    """Return the entry of a learning rate."""
    error, held_out, memory = place.error(job), None, None
    status = "done" if place.done(job) else "failed" if error else "running" if place.running(job) else "missing"
    if status == "done":
        records = read_record(place.out / job.folder / "stages.json")
        memory = max((record.get("peak_mib") or 0 for record in records), default=0) or None
        held_out = (records[-1].get("held_out") or {}).get(f"val/{metric['name']}")
    return {
        "learning_rate": job.rate, "held_out": held_out, "run": job.folder.as_posix(), "status": status, "error": error,
        "seconds": place.state(job).get("seconds"), "memory_mib": memory,
    }  # fmt: skip
