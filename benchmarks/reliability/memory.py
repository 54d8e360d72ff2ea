"""Does memory grow with the steps of a run, or with its data?

    python -m benchmarks.reliability.memory [--only steps data] [--steps 1000] [--rows 20000]

steps: a stage of 1,000 optimizer steps, by several methods; the resident memory every 50 steps. data: the peak of a run
of 100 steps on so many rows, and on ten times as many, from reading and tokenising to the export. Every run is a fork
of a process that has imported the package. Writes benchmarks/reliability/results/memory/*.json.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from benchmarks import common
from benchmarks.reliability import tiny
from benchmarks.reliability.events import forked, nothing

SCRIPT = "reliability/memory"
METHODS = ("LPAF", "CoFi", "PLATON", "SP3")
EVERY = 50
SAMPLES = "memory.json"


def resident() -> dict[str, float]:
    """Return the resident memory of this process and its peak, in MiB; ``own``: without the files that are mapped."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    found = {line[0]: int(line[1]) / 1024 for line in lines if line[0] in ("VmHWM:", "VmRSS:", "RssAnon:")}
    return {"peak": found["VmHWM:"], "all": found["VmRSS:"], "own": found["RssAnon:"]}


class Sample(Callback):
    """Note the memory every 50 steps, ``memory.json`` in the stage's folder."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Note it."""
        if trainer.global_step % EVERY == 0:
            self.seen.append({"step": trainer.global_step, **resident()})
            (Path(trainer.default_root_dir) / SAMPLES).write_text(json.dumps(self.seen))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin again: the next stage has its own."""
        self.seen = []


def over_steps(place: Path, method: str, steps: int) -> dict[str, Any]:
    """Return the memory over the steps of the longest stage of a method."""
    out = place / method
    long = "prune"
    words = _without(place, method, ".epochs=", "--checkpoint_every", "--trainer.accumulate", "--data.path")
    words += [f"--model.{name}.epochs={1 if name == long else 0}" for name in _stages(method) if name != "dense"]
    words += [f"--data.path={place / 'steps'}", "--checkpoint_every=200", f"--run_dir={out}"]
    began = time.time()
    if forked([*words, "--trainer.callbacks+=benchmarks.reliability.memory.Sample"], out, place / "said"):
        raise RuntimeError((place / "said").read_text()[-2000:])
    samples = json.loads((out / long / SAMPLES).read_text())
    seconds = round(time.time() - began, 1)
    return {"method": method, "stage": long, "steps": steps, "samples": samples, "seconds": seconds}


def _without(place: Path, method: str, *parts: str) -> list[str]:
    """Return the words of a tiny run of a given teacher, but for some."""
    words = tiny.options(method, place, place / "teacher" / "dense" / "net")
    return [word for word in words if not any(part in word for part in parts)]


def _stages(method: str) -> list[str]:
    from lit_compress import methods

    return [stage.name for stage in getattr(methods, method)(task="sst2", backbone="unused").stages()]


def over_data(place: Path, rows: int) -> dict[str, Any]:
    """Return the peak of a run on ``rows`` training rows."""
    tiny.write_sentences(place / f"rows{rows}", rows, 200)
    out = place / f"run{rows}"
    words = _without(place, "SVD", "--data.path")
    words += [f"--data.path={place / f'rows{rows}'}", "--trainer.limit_train_batches=200", f"--run_dir={out}"]
    began = time.time()
    if forked(words, out, place / "said"):
        raise RuntimeError((place / "said").read_text()[-2000:])
    records = json.loads((out / "stages.json").read_text())
    return {"rows": rows, "peak": max(record["peak_mib"] for record in records if "peak_mib" in record),
            "seconds": round(time.time() - began, 1)}  # fmt: skip


def main() -> None:
    """Measure what has no result yet."""
    parser = common.parser(SCRIPT, __doc__, only=("steps", "data"))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=20000)
    options = parser.parse_args()
    options.list = None
    place = Path(tempfile.mkdtemp(prefix="memory-"))
    tiny.prepare(place)
    run = place / "teacher"
    forked([*tiny.options("SVD", place), f"--run_dir={run}"], run, place / "said", nothing)
    about = common.frame()
    if "steps" in options.only and common.missing(options, "steps"):
        tiny.write_sentences(place / "steps", 4 * options.steps, 24)
        found = [over_steps(place, method, options.steps) for method in METHODS]
        common.write(options, "steps", {"name": "steps", "runs": found, **about})
        for one in found:
            print(one["method"], [round(sample["own"], 1) for sample in one["samples"]], flush=True)
    if "data" in options.only and common.missing(options, "data"):
        found = [over_data(place, rows) for rows in (options.rows, 10 * options.rows)]
        common.write(options, "data", {"name": "data", "runs": found, **about})
        print(found)
    shutil.rmtree(place)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
