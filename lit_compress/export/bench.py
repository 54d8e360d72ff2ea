"""The speed of models on this machine: every model in every runtime, in turns, over batch sizes and lengths."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lit_compress.export import runtimes
from lit_compress.export.benched import BenchedNet, Settings, Texts
from lit_compress.export.report import hardware, versions
from lit_compress.export.runtimes import NEEDED, RUNTIMES, Runner, Runtime, placed
from lit_compress.utils.errors import UserError
from lit_compress.utils.progress import track
from lit_compress.utils.timing import in_turns, is_steady, pinned, speedup, summary

PROBES = ((1, 11), (3, 37))  # batch and length at which results are compared
MEMORY_TOKENS = 32 * 128  # the largest shape up to here is that at which memory is measured
FILE = "bench.json"
# by how much results of PyTorch may differ between two of its ways, relative above 1
ROUNDING = {"float32": 0.0, "float16": 0.02, "bfloat16": 0.1}

Score = Callable[[BenchedNet, Runner], dict[str, Any]]


@dataclass(frozen=True)
class OpenedProgram:
    """A model in a runtime, ready to be timed."""

    source: BenchedNet
    runtime: Runtime
    path: Path
    run: Runner
    difference: float  # of its results from PyTorch's
    answers: Runner  # gives the same, for texts of many shapes

    @property
    def far(self) -> bool:
        """Whether integers change the results by more than is usual; its metric shows the cost."""
        return self.difference > self.runtime.tolerance

    @property
    def dtype(self) -> str:
        """Of its products."""
        return self.source.setting.dtype if self.runtime.reads is None else self.runtime.dtype

    def entry(self) -> dict[str, Any]:
        """Return its entry in the result."""
        return {
            "net": self.source.label, "runtime": self.runtime.name, "dtype": self.dtype,
            "difference": self.difference, "far": self.far, "bytes": self.source.bytes(self.path) or None,
        }  # fmt: skip


def bench(
    nets: dict[str, Path],
    settings: Settings,
    keep: Callable[[dict[str, Any]], None] = lambda result: None,
    texts: Texts | None = None,
    score: Score | None = None,
    score_all: bool = False,
) -> dict[str, Any]:
    """Time models in runtimes and return the result.

    Args:
        nets: label -> folder; where there is a ``dense`` one, the other is compared with it.
        settings: shapes, runtimes and threads.
        keep: is called with the result after every shape. Ctrl-C ends the work with the result so far (``stopped``).
        texts: as :class:`~lit_compress.export.benched.BenchedNet`; without it programs of int8 are timed only if a
            folder has them.
        score: function of a folder and of a runtime's call that returns the metric of its answers and their interval.
        score_all: score every program; else the programs of models that integers change by more than is usual.

    Raises:
        UserError: a folder cannot be loaded, or no runtime is left.
    """
    with tempfile.TemporaryDirectory() as work, pinned(settings.threads):
        sources = [BenchedNet(label, folder, settings, Path(work), texts) for label, folder in nets.items()]
        limit = min(source.longest for source in sources)
        shapes = settings.shapes(limit)
        if not shapes:
            raise UserError(f"length: {min(settings.lengths)} is more than the model reads; the largest is {limit}")
        left_out: list[dict[str, str]] = [
            {"what": f"length {length}", "why": f"the model reads {limit} tokens"}
            for length in sorted({*settings.lengths, *(length for _, length in settings.own)})
            if length > limit
        ]
        programs = _opened(sources, settings, left_out)
        changed = {program.source.label for program in programs if program.far}
        judged = [program for program in programs if score_all or program.source.label in changed]
        scores = _scored(judged, score) if score else {}
        result: dict[str, Any] = {
            "nets": {label: str(folder) for label, folder in nets.items()}, "own_lengths": dict(settings.own),
            "threads": settings.threads, "device": settings.device, "rounds": settings.rounds,
            "hardware": hardware(), "load_average": list(os.getloadavg()), "versions": _versions(programs),
            "programs": [], "left_out": left_out, "shapes": [], "asked": len(shapes), "stopped": False,
        }  # fmt: skip
        try:
            batch, length = ([shape for shape in shapes if shape[0] * shape[1] <= MEMORY_TOKENS] or shapes[:1])[-1]
            result["memory_shape"] = {"batch": batch, "length": length}
            _measure_fresh(
                programs, batch, length, Path(work),
                lambda entry: result["programs"].append(entry | scores.get((entry["net"], entry["runtime"]), {})),
            )  # fmt: skip
            for batch, length in track(
                shapes, "time"
            ):  # their times are not alike: nothing says how long all will take
                try:
                    result["shapes"].append(_measure_shape(programs, batch, length, settings))
                except torch.OutOfMemoryError:
                    left_out.append({"what": f"{batch} x {length} and larger", "why": "not enough memory"})
                    break
                keep(result)
        except KeyboardInterrupt:
            result["stopped"] = True
            keep(result)
    return result


def _opened(sources: Sequence[BenchedNet], settings: Settings, left_out: list[dict[str, str]]) -> list[OpenedProgram]:
    """Load every model in every runtime that can have it and agrees with PyTorch; append the others to ``left_out``.

    Programs of integers need not agree, if their results are finite.
    """
    opened = []
    for source in sources:
        probes = [source.inputs(*shape, padded=True) for shape in PROBES]
        given, known = [RUNTIMES[name] for name in settings.runtimes], RUNTIMES["eager"]
        reference = known.load(source.file(known.reads), source.setting)
        expected = [source.at_tokens(reference(probe), probe) for probe in probes]
        for runtime in track(given, f"load {source.label}", len(given)):
            try:
                _check_installed(runtime)
                path = source.file(runtime.reads)
                run = reference if runtime is known else runtime.load(path, source.setting)
                results = [source.at_tokens(run(probe), probe) for probe in probes]
                difference = float(np.max([*map(_difference, results, expected)]))  # max() would lose nan
                integers = runtime.dtype != "float32" and np.isfinite(difference)
                most = max(runtime.tolerance, ROUNDING[settings.dtype])
                if not (integers or difference <= most):
                    raise LookupError(f"its results differ from PyTorch's by {difference:.1e}, more than {most:.0e}")
                answers = reference if runtime.reads is None and runtime.dtype == "float32" else run
                opened.append(OpenedProgram(source, runtime, path, run, difference, answers))
            except Exception as error:  # compilers, exporters and runtimes raise anything
                lines = str(error).strip().splitlines() or [type(error).__name__]
                reason = {"what": f"{runtime.name} of the {source.label} model", "why": lines[0][:160]}
                if isinstance(error, ModuleNotFoundError):
                    reason["what"] = runtime.name
                if reason not in left_out:
                    left_out.append(reason)
    if not opened:
        raise UserError(f"bench: no runtime is left; {left_out[-1]['what']}: {left_out[-1]['why']}")
    return opened


def _scored(programs: Sequence[OpenedProgram], score: Score) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the metrics by model and runtime; all of one dtype but int8 have that of the first."""
    known: dict[tuple[str, str], dict[str, Any]] = {}
    for program in track(programs, "evaluate", len(programs)):
        label, runtime = program.source.label, program.runtime
        key = label, program.dtype if runtime.dtype == "float32" else runtime.name
        if key not in known:
            known[key] = score(program.source, program.answers)
        known[label, runtime.name] = known[key]
    return known


def _check_installed(runtime: Runtime) -> None:
    missing = [package for package in runtime.packages if find_spec(package) is None]
    if missing:
        raise ModuleNotFoundError(f"not installed; pip install {' '.join(missing)}")


def _difference(results: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference, relative above 1."""
    return float(np.abs(results - expected).max() / max(1.0, np.abs(expected).max()))


def _versions(programs: Sequence[OpenedProgram]) -> dict[str, str]:
    packages = {package for program in programs for package in NEEDED.get(program.runtime.name, ())}
    return {**versions(), **{package: version(package) for package in sorted(packages)}}


def _measure_fresh(
    programs: Sequence[OpenedProgram], batch: int, length: int, work: Path, keep: Callable[[dict[str, Any]], None]
) -> None:
    """Load and run every program in a process of its own, and hand what the result says of it to ``keep``."""
    environment = os.environ | {"HF_MODULES_CACHE": str(work / "modules"), "HF_HUB_OFFLINE": "1"}
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(work / "inductor")  # what was compiled before would not be again
    for program in track(programs, "load in a process of its own", len(programs)):
        source = program.source
        inputs = source.work / "inputs.npz"
        np.savez(inputs, **source.inputs(batch, length))
        done = subprocess.run(
            [sys.executable, "-I", runtimes.__file__, program.runtime.name, str(program.path.resolve()),
             json.dumps(asdict(source.setting)), str(inputs)],
            cwd=work, env=environment | {"OMP_NUM_THREADS": str(source.setting.threads)},
            capture_output=True, text=True,
        )  # fmt: skip
        failed = done.returncode and (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        fresh = None if failed else json.loads(done.stdout.splitlines()[-1])
        keep({**program.entry(), "fresh": fresh, "failed": failed or None})


def _measure_shape(programs: Sequence[OpenedProgram], batch: int, length: int, settings: Settings) -> dict[str, Any]:
    """Time all programs at one shape and return its entry in the result."""
    inputs = {p.source.label: p.source.inputs(batch, length) for p in programs}
    runs = [
        partial(p.run, placed(given, settings.device) if p.runtime.reads is None else given)
        for p in programs
        for given in [inputs[p.source.label]]
    ]
    times = in_turns(runs, settings.rounds, seconds=settings.seconds, device=settings.device)
    return shape_entry(batch, length, programs, times)


def shape_entry(
    batch: int, length: int, programs: Sequence[OpenedProgram], times: Sequence[Sequence[float]]
) -> dict[str, Any]:
    """Return the entry of one shape in the result.

    ``over_dense`` compares a model with the dense one in the same runtime, ``over_eager`` a runtime with PyTorch's for
    the same model.
    """
    by_program = {(p.source.label, p.runtime.name): record for p, record in zip(programs, times, strict=True)}
    entries = []
    for (net, runtime), record in by_program.items():
        entry = {"net": net, "runtime": runtime, **summary(record), "steady": is_steady(record)}
        for name, other in (("over_dense", ("dense", runtime)), ("over_eager", (net, "eager"))):
            if other in by_program and other != (net, runtime):
                gain = speedup(by_program[other], record)
                entry[name] = {**asdict(gain), "verdict": gain.verdict}
        entries.append(entry)
    return {"batch": batch, "length": length, "rounds": len(times[0]), "times": entries}
