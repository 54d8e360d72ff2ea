"""Making the runs of a comparison: a process per run, several workers in one folder, a failure does not stop the rest.

OUT/compare.json      the results so far: cells and chosen learning rates
OUT/runs/<run>/       an ordinary run folder; OUT/teachers/<seed>/ the same of a dense model
OUT/state/<run>.json  the words of its command; how it ended: ``status``, ``error``, ``seconds``
OUT/logs/<run>.log    its output
OUT/locks/<run>       locked while a process makes it, also if its worker is killed
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any, NoReturn

from filelock import FileLock, Timeout

from lit_compress.export.report import of_program
from lit_compress.run.comparison import Cell, Fit
from lit_compress.utils.errors import UserError
from lit_compress.utils.files import json_of, link_if_equal, write_json
from lit_compress.utils.manifest import check_manifest
from lit_compress.utils.tables import print

COMPARISON, FORMAT = "compare.json", 1
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
            return json_of(self._state_file(job))
        except (OSError, ValueError):
            return {}

    def _state_file(self, job: Fit) -> Path:
        return self.out / "state" / f"{job.name}.json"

    def record(self, job: Fit, **values: Any) -> None:
        """Write the record of a job."""
        self._state_file(job).parent.mkdir(parents=True, exist_ok=True)
        write_json(self._state_file(job), {"words": self._words(job), **values})

    def _words(self, job: Fit) -> list[str]:
        words = (word.replace(f"={self.out}/", "=OUT/", 1) for word in job.words)
        return [word for word in words if not word.startswith(_FREE)]

    def done(self, job: Fit) -> bool:
        """Return whether a run has its export and its report, which is written last."""
        return (self.out / job.folder / "report.json").is_file()

    def error(self, job: Fit) -> str | None:
        """Return the line of a run that failed; None if it did not."""
        state = self.state(job)
        return state.get("error") if state.get("status") == "failed" and not self.done(job) else None

    def lock(self, job: Fit) -> Path:
        """Return the lock file of a job."""
        return self.out / "locks" / job.name

    def running(self, job: Fit) -> bool:
        """Return whether a worker, here or elsewhere, is making a job."""
        if not self.lock(job).is_file():
            return False
        if (taken := lock_of(self.lock(job))) is None:
            return True
        taken[0].release()
        return False

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


def lock_of(file: Path) -> tuple[FileLock, int] | None:
    """Take the lock of ``file``; return it with its descriptor, or None if another process has it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handles: list[int] = []
    lock = FileLock(file, timeout=0, mode=0o664, on_acquired=handles.append)
    try:
        lock.acquire()
    except Timeout:
        return None
    return lock, handles[0]


class Worker:
    """Makes jobs one after another, or several at once.

    Args:
        place: the folder.
        jobs: to make, in this order.
        teachers: made when a job needs one.
        at_once: how many processes.
        ended: is called after every job that ended here, with its error or None.
    """

    def __init__(
        self, place: Layout, jobs: Sequence[Fit], teachers: Sequence[Fit], at_once: int = 1,
        ended: Callable[[Fit, str | None], None] = lambda job, error: None,
    ) -> None:  # fmt: skip
        self.place, self.jobs, self.at_once, self.ended = place, jobs, at_once, ended
        self.teachers = {job.name: job for job in teachers}
        self.began, self.stopped, self._patience = time.time(), False, 0.0
        self._told = Lock()

    def work(self) -> None:
        """Make all jobs that are not done, and at the end wait for those that other workers make."""
        needed = {job.needs for job in self.jobs if not self.place.done(job)}
        teachers = [job for job in self.teachers.values() if job.name in needed]
        with ThreadPoolExecutor(self.at_once) as pool:
            try:
                for jobs, wait in (([*teachers, *self.jobs], False), (self.jobs, True)):
                    for made in [pool.submit(self.make, job, wait) for job in jobs]:
                        made.result()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
                self.stop()

    def make(self, job: Fit, wait: bool = True) -> None:
        """Make a job, and the teacher that it needs; ``wait`` if another worker makes it."""
        if self.stopped or self.place.done(job) or self._failed(job):
            return
        teacher = self.teachers.get(job.needs or "")
        if teacher is not None and not self.place.done(teacher):
            self.make(teacher)
            if not self.place.done(teacher):
                return self._end(job, f"its teacher {teacher.name} failed: {self.place.error(teacher)}")
        while (taken := lock_of(self.place.lock(job))) is None:
            if self.stopped or not wait:
                return None
            time.sleep(POLL)
        lock, handle = taken
        try:
            if not (self.stopped or self.place.done(job) or self._failed(job)):  # by another worker, a moment ago
                self._run(job, handle)
        finally:
            lock.release()

    def _failed(self, job: Fit) -> bool:
        """Return whether a job failed since this worker began, here or elsewhere; earlier failures are tried again."""
        state = self.place.state(job)
        return state.get("status") == "failed" and state.get("ended", 0) >= self.began

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
        if (teacher := self.teachers.get(job.needs or "")) is not None:
            link_if_equal(*(self.place.out / t.folder / "dense" / "net" / "model.safetensors" for t in (job, teacher)))

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


def gather(place: Layout, cells: Sequence[Cell], config: dict[str, Any], command: str, task: str) -> dict[str, Any]:
    """Write ``compare.json``, a function of the files in the folder, and return its content.

    Args:
        place: the folder of the comparison.
        cells: of its plan.
        config: as the user gave it.
        command: that makes all of this again.
        task: of all runs.
    """
    entries = [_cell(place, cell) for cell in cells]
    done = [place.out / entry["run"] for entry in entries if entry["status"] == "done"]
    gathered = {
        "format": FORMAT, "config": config, "task": task,
        "metric": of_program(_read(done[-1] / "report.json"))["metric"] if done else None,
        "fairness": fairness(config), "cells": entries, "command": command,
    }  # fmt: skip
    write_json(place.out / COMPARISON, gathered)
    return gathered


def fairness(config: dict[str, Any]) -> str:
    """Return the sentence on how the runs were made equal, for the screen and the page."""
    rates, rows = len(config["learning_rates"]), config["hold_out"]
    return (
        f"Every trained method takes {config['updates']:,} steps after the teacher and tries {rates} learning "
        f"rate{'s' if rates != 1 else ''}; rate and epoch are chosen on {rows:,} training rows that are held out, not "
        "on the dev set. Runs of one seed share teacher, training rows and their order."
    )


def _cell(place: Layout, cell: Cell) -> dict[str, Any]:
    """Return the entry of a cell: the trials, and the run that held-out rows choose."""
    trained = cell.jobs[0].rate is not None
    tried, ranks = zip(*(_tried(place, job) for job in cell.jobs), strict=True)
    states, errors = [one["status"] for one in tried], [one["error"] for one in tried if one["error"]]
    best, error, status = tried[ranks.index(max(ranks))], next(iter(errors), None), "missing"
    if len(errors) == len(tried):
        status = "failed"
    elif {"done", "failed"} >= {*states} and (best["held_out"] is not None or not trained):
        status = "done"
        error = f"{len(errors)} of {len(tried)} learning rates failed: {errors[0]}" if errors else None
    elif "running" in states:
        status = "running"
    chosen = best if status == "done" else tried[0]
    return {
        "name": cell.name, "method": cell.method, "label": cell.label, "budget": cell.budget, "seed": cell.seed,
        "learning_rate": chosen["learning_rate"] if status == "done" else None, "tried": list(tried) if trained else [],
        "status": status, "error": error, "run": chosen["run"],
        "seconds": sum(one["seconds"] or 0 for one in tried), "memory_mib": chosen["memory_mib"],
    }  # fmt: skip


def _tried(place: Layout, job: Fit) -> tuple[dict[str, Any], float]:
    """Return the entry of a learning rate, and a number that is larger for a better metric on the held-out rows."""
    error, held_out, rank, memory = place.error(job), None, -math.inf, None
    status = "done" if place.done(job) else "failed" if error else "running" if place.running(job) else "missing"
    if status == "done":
        report, records = (_read(place.out / job.folder / name) for name in ("report.json", "stages.json"))
        memory = max((record.get("peak_mib") or 0 for record in records), default=0) or None
        held_out = (records[-1].get("held_out") or {}).get(f"val/{report['metric']['name']}")
        if held_out is not None:
            rank = held_out if report["metric"]["mode"] == "max" else -held_out
    return {
        "learning_rate": job.rate, "held_out": held_out, "run": job.folder.as_posix(), "status": status, "error": error,
        "seconds": place.state(job).get("seconds"), "memory_mib": memory,
    }, rank  # fmt: skip


def _read(path: Path) -> Any:
    """Return the content of a record of a run."""
    check_manifest(f"out: '{path.parent}'", path.parent, path.name)
    return json_of(path)
