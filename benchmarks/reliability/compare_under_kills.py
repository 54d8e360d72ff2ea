"""Kill a comparison of small models at random moments, for some minutes: does it end with the same page?

    python -m benchmarks.reliability.compare_under_kills [--minutes 30] [--mean 4] [--work DIR]

A comparison is made once unbroken. Then it is made again and again until the minutes are over: the same command is
given, and after a random time either the worker or one of its runs or all of them are killed by SIGKILL, and the
command is given again, until it ends by itself. Its cells and the page's table must be those of the unbroken
one; only times and memory may differ. The last one goes on to its end without kills. Writes
benchmarks/reliability/results/compare_under_kills/kills.json.
"""

from __future__ import annotations

import csv
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks import common
from benchmarks.forks import Fork
from benchmarks.reliability import tiny

SCRIPT = "reliability/compare_under_kills"
CONFIG: dict[str, Any] = {
    "options": {"data.task": "sst2", "data.batch_size": 8, "trainer.accelerator": "cpu", "trainer.logger": False,
                "trainer.enable_progress_bar": False, "checkpoint_every": 2},
    "teacher": {"model.dense.epochs": 1, "model.dense.learning_rate": 3e-3},
    "budgets": [0.5], "seeds": [1, 2], "learning_rates": [1e-3], "updates": 10, "hold_out": 8,
    "methods": {"SVD": {}, "LPAF": {}, "Magnitude": {}},
}  # fmt: skip
WHOM = ("all", "worker", "run")
TIMED = ("seconds", "memory_mib", "speedup", "latency", "peak", "_ms", "minutes", "steady", "timing")


def start_process(words: Sequence[str], log: Path, handle: int, environment: dict[str, str]) -> Fork:
    """Be a run of the comparison in a fork of its worker; stands in for run/workers.py's, which starts Python again."""

    def work() -> int:
        with log.open("ab") as said:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
        sys.stdout = sys.stderr = os.fdopen(os.dup(1), "w", buffering=1)
        _main(list(words))
        raise AssertionError

    return Fork(work, handle)


def _main(words: list[str]) -> None:
    """Be ``python -m lit_compress WORDS``, and end."""
    import traceback

    from lit_compress.__main__ import main

    code: object = 0
    try:
        main(words)
    except SystemExit as stop:
        code = stop.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def start(words: list[str], said: Path) -> int:
    """Start the command in a process group of its own; return its number."""
    sys.stdout.flush()
    if child := os.fork():
        return child
    from lit_compress.export import folder as exporting
    from lit_compress.run import workers

    os.setsid()
    with said.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout = sys.stderr = os.fdopen(os.dup(1), "w", buffering=1)
    exporting.check_export = lambda *_: 0.0
    workers.start_process = start_process  # type: ignore[assignment]
    _main(words)
    raise AssertionError


def result(out: Path) -> dict[str, Any]:
    """Return what a comparison found and what its page says, without what differs from time to time."""
    found = json.loads((out / "compare.json").read_text())
    rows = list(csv.DictReader((out / "report" / "results.csv").open()))
    reports = [json.loads((out / cell["run"] / "report.json").read_text())["compressed"] for cell in found["cells"]]
    return {
        "cells": untimed(found["cells"]), "page": untimed(rows),
        "page_files": sorted(path.name for path in (out / "report").iterdir()),
        "nets": [[report[key] for key in ("metric", "density", "bytes")] for report in reports],
        "left": sorted(str(path.relative_to(out)) for path in out.rglob(".*.tmp")),
    }  # fmt: skip


def untimed(value: Any) -> Any:
    """Return JSON without the fields that are times or memory."""
    if isinstance(value, dict):
        return {key: untimed(some) for key, some in value.items() if not any(name in key for name in TIMED)}
    return [untimed(some) for some in value] if isinstance(value, list) else value


def whole(out: Path) -> bool:
    """Say whether all runs of a comparison are done."""
    return all(cell["status"] == "done" for cell in json.loads((out / "compare.json").read_text())["cells"])


def children(process: int) -> list[int]:
    """Return the processes that a process has started."""
    try:
        return [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:
        return []


def kill(process: int, whom: str, rng: random.Random) -> str:
    """Kill a worker, one of its runs, or all; return who it was."""
    runs = children(process)
    if whom == "run" and runs:
        os.kill(rng.choice(runs), signal.SIGKILL)
        return "run"
    if whom == "worker":
        os.kill(process, signal.SIGKILL)
        return "worker"
    os.killpg(process, signal.SIGKILL)
    return "all"


def under_kills(out: Path, words: list[str], until: float, mean: float, rng: random.Random) -> tuple[list[str], int]:
    """Give the command until all is done; return who was killed, and its last exit code."""
    said, words = out.with_name("said"), [*words, "--out", str(out)]
    killed: list[str] = []
    process, wait = start(words, said), rng.expovariate(1 / mean)
    while True:
        moment = time.time() + wait
        while time.time() < moment or time.time() > until:
            gone, status = os.waitpid(process, os.WNOHANG)
            if gone:
                code = os.waitstatus_to_exitcode(status)
                if code or whole(out):  # a run that was killed has failed until the command is given again
                    return killed, code
                break
            time.sleep(0.02)
        else:
            killed.append(kill(process, rng.choice(WHOM), rng))
            if killed[-1] == "run":
                wait = rng.expovariate(1 / mean)
                continue
            os.waitpid(process, 0)
        process, wait = start(words, said), rng.expovariate(1 / mean)


def main() -> None:
    """Kill comparisons until the time is over."""
    parser = common.parser(SCRIPT, __doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="after which no new comparison is begun")
    parser.add_argument("--mean", type=float, default=4.0, help="mean seconds between two kills")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="compare-"))
    tiny.prepare(place)
    (place / "c.yaml").write_text(yaml.safe_dump(CONFIG, sort_keys=False))
    words = ["compare", "--config", str(place / "c.yaml"), f"--model.backbone={place / 'net'}",
             f"--data.path={place / 'data'}"]  # fmt: skip
    began = time.time()
    os.waitpid(start([*words, "--out", str(place / "whole")], place / "said"), 0)
    seconds, expected = time.time() - began, result(place / "whole")
    began, rng, ended = time.time(), random.Random(options.seed), list[dict[str, Any]]()
    until = began + 60 * options.minutes
    while time.time() < until:
        out = place / f"out{len(ended)}"
        killed, code = under_kills(out, words, until, options.mean, rng)
        found = result(out) if code == 0 else {"code": code}
        wrong = [key for key in {**expected, **found} if found.get(key) != expected.get(key)]
        ended.append({"killed": {name: killed.count(name) for name in WHOM}, "wrong": wrong})
        print(ended[-1], flush=True)
        if not wrong:
            shutil.rmtree(out)
    made = {
        "name": "kills", "minutes": round((time.time() - began) / 60, 1), "mean": options.mean, "seed": options.seed,
        "unbroken_seconds": round(seconds, 1), "runs": len(expected["cells"]), "comparisons": ended,
    }  # fmt: skip
    common.write(options, "kills", made | common.frame())
    if not any(one["wrong"] for one in ended):
        shutil.rmtree(place)


if __name__ == "__main__":
    main()
