"""What the comparison scripts share: commands as users type them, and results without this machine's paths."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"


def command(*words: object, threads: int) -> float:
    """Run ``python -m lit_compress WORDS`` and return its peak memory in MiB; its failure ends the script."""
    line = [sys.executable, "-m", "lit_compress", *map(str, words)]
    print(" ".join(line[2:]), flush=True)
    process = subprocess.Popen(line, env=os.environ | {"OMP_NUM_THREADS": str(threads)})
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, line)
    return usage.ru_maxrss / 1024


def dense_net(folder: Path, *words: object, epochs: int, rate: float, threads: int) -> Path:
    """Return the net of a dense fine-tuning in ``folder``; make it with ``fit WORDS`` where it is not there."""
    if not (folder / "dense" / "net").exists():  # density 1: nothing is factorized; only the dense stage is used
        command(
            "fit", "--model", "SVD", "--model.density", 1.0, *words, "--model.dense.epochs", epochs,
            "--model.dense.learning_rate", rate, "--model.retrain.epochs", 1, "--run_dir", folder, threads=threads,
        )  # fmt: skip
    return folder / "dense" / "net"


def peak_mib() -> float:
    """Return this process's peak resident size; not ru_maxrss, which begins with that of the process it came from."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024


def report_of(run: Path) -> dict[str, Any]:
    """Return a finished run's report with what its stages measured before and after."""
    report = json.loads((run / "report.json").read_text())
    report["records"] = json.loads((run / "stages.json").read_text())
    for record in report["records"]:
        record.pop("teacher", None)
    for key in ("backbone", "path"):  # where the inputs lay on this machine says nothing elsewhere
        report["config"]["data"][key] = Path(report["config"]["data"][key]).name
    init = report["config"]["model"]["init_args"]
    init["backbone"], init["teacher"] = Path(init["backbone"]).name, init["teacher"] and "dense"
    report["config"].pop("run_dir")
    return report


def last_scalar(run: Path, tag: str) -> float:
    """Return the last value that a run wrote of a curve in TensorBoard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return events.Scalars(tag)[-1].value


def write(folder: str, name: str, result: dict[str, Any]) -> None:
    """Write results/<folder>/<name>.json."""
    path = RESULTS / folder / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def load(folder: str) -> list[dict[str, Any]]:
    """Return every result of a folder, with the name of its file."""
    paths = sorted((RESULTS / folder).glob("*.json"))
    return [{"file": path.stem, **json.loads(path.read_text())} for path in paths]


def table(header: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows]) + "\n"


def percent(value: float) -> str:
    """Return a fraction as a percentage with one decimal."""
    return f"{100 * value:.1f}"


def mean_and_deviation(values: list[float]) -> str:
    """Return mean and standard deviation in %."""
    return f"{percent(mean(values))} ± {percent(stdev(values))}" if len(values) > 1 else percent(values[0])


def spread(ratio: dict[str, float]) -> str:
    """Return a ratio with its range."""
    return f"{ratio['median']:.2f} ({ratio['min']:.2f} - {ratio['max']:.2f})"


def origin(result: dict[str, Any], script: str, threads: int) -> str:
    """Say where a table comes from."""
    return (
        f"Made by `python benchmarks/{script}` on {result['hardware']['cpu']}, {threads} thread(s), "
        f"torch {result['versions']['torch']}; every JSON names its commit. No GPU was measured.\n"
    )
