"""How fast nets are on this machine: every net in every runtime, in turns, over batch sizes and lengths."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lit_compress.export import runtimes
from lit_compress.export.modelling import MODULE, is_own_code
from lit_compress.export.program import example_inputs, program_bytes, write_program
from lit_compress.export.quantize import Feed, quantize
from lit_compress.export.report import hardware, versions
from lit_compress.export.runtimes import (
    NEEDED,
    ONNX,
    ONNX_INT8,
    OPENVINO,
    OPENVINO_INT8,
    RUNTIMES,
    Inputs,
    Runner,
    Runtime,
    Setting,
)
from lit_compress.models.own_code import check_code, trusts_code
from lit_compress.models.positions import usable_positions
from lit_compress.models.shards import tensor_files
from lit_compress.models.storage import load_net
from lit_compress.tasks import task_type_of_net
from lit_compress.utils.errors import UserError
from lit_compress.utils.progress import Bar, track
from lit_compress.utils.timing import in_turns, is_steady, pinned, speedup, summary

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BATCHES, LENGTHS = (1, 8, 32, 128), (32, 128, 384)
PROBES = ((1, 11), (3, 37))  # batch and length at which results are compared
MEMORY_TOKENS = 32 * 128  # the largest shape up to here is that at which memory is measured
ROUNDS, SECONDS = 30, 60.0
FILE = "bench.json"

Texts = Callable[[Path], list[Feed]]
Score = Callable[["BenchedNet", Runner], dict[str, Any]]
_PLAIN = {ONNX_INT8: ONNX, OPENVINO_INT8: OPENVINO}  # which program in float32 becomes one of int8


@dataclass(frozen=True)
class Settings:
    """What is measured.

    Attributes:
        batches, lengths: sizes of the batches and lengths in tokens, each with each.
        own: further lengths, those of the task, by what they are.
        runtimes: their names.
        threads: of every runtime.
        rounds: forwards of every model at every shape.
        seconds: no further round of a shape begins after these.
        device: ``cpu`` or ``cuda``.
        trust: run the code of a folder also if this version would not write it.
    """

    batches: tuple[int, ...] = BATCHES
    lengths: tuple[int, ...] = LENGTHS
    own: tuple[tuple[str, int], ...] = ()
    runtimes: tuple[str, ...] = tuple(RUNTIMES)
    threads: int = 1
    rounds: int = ROUNDS
    seconds: float = SECONDS
    device: str = "cpu"
    trust: bool = False

    def shapes(self, limit: int) -> list[tuple[int, int]]:
        """Return batch and length of all shapes that nets read which have ``limit`` positions, the cheapest first."""
        lengths = {length for length in (*self.lengths, *(length for _, length in self.own)) if length <= limit}
        pairs = [(batch, length) for batch in set(self.batches) for length in lengths]
        return sorted(pairs, key=lambda shape: (shape[0] * shape[1], shape))


class BenchedNet:
    """A folder whose net is timed.

    Args:
        label: ``dense`` or ``compressed``.
        folder: an export, or what ``save_pretrained`` wrote.
        settings: how it is run.
        work: folder for programs that are not beside the net.
        texts: function of the folder that returns training texts, from which int8 reads ranges of activations.

    Raises:
        UserError: it cannot be loaded, or brings code that is not that of an export.
    """

    def __init__(self, label: str, folder: Path, settings: Settings, work: Path, texts: Texts | None = None) -> None:
        self.label, self.folder, self.work, self.texts = label, folder, work / label, texts
        self.work.mkdir()
        self.net, self.tokenizer = self._load(), _tokenizer(folder)
        kind = task_type_of_net(self.net.config)
        if not (settings.trust or is_own_code(self.net, folder)):
            raise UserError(
                f"bench: '{folder}' brings code that this version of lit_compress does not write; --trust_remote_code "
                "runs it, or export the net again"
            )
        trust = trusts_code() or (folder / f"{MODULE}.py").is_file()
        self.setting = Setting(kind.auto_class, kind.results, settings.threads, settings.device, trust=trust)

    @property
    def longest(self) -> int:
        """How many tokens the net reads."""
        return usable_positions(self.net.config) or sys.maxsize

    @cached_property
    def quantized(self) -> dict[str, str]:
        """The program of integers in the folder, of ``export --dtype``: its file and its dtype; {} for none."""
        report = self.folder / "report.json"
        program = (json.loads(report.read_text()).get("program") if report.is_file() else None) or {}
        return {program.get("file", ONNX): program["dtype"]} if "dtype" in program else {}

    def _load(self) -> PreTrainedModel:
        import transformers

        if (self.folder / "structure.json").is_file():
            return load_net(self.folder)
        try:
            check_code(f"bench: '{self.folder}'", self.folder)
            trust = {"trust_remote_code": trusts_code()}
            config = transformers.AutoConfig.from_pretrained(self.folder, **trust)
            kind = getattr(transformers, task_type_of_net(config).auto_class)
            return kind.from_pretrained(self.folder, dtype=torch.float32, **trust).eval()
        except UserError:
            raise
        except Exception as error:
            reason = " ".join(str(error).split())[:160]
            raise UserError(f"bench: cannot load a net from '{self.folder}': {reason}") from error

    def inputs(self, batch: int, length: int, padded: bool = False) -> Inputs:
        """Return arrays of random tokens; ``padded``: half of the second text is padding."""
        tensors = example_inputs(self.net, self.tokenizer, batch, length, padded)
        return {name: value.numpy() for name, value in tensors.items()}

    def at_tokens(self, results: Sequence[Any], inputs: Inputs) -> np.ndarray:
        """Return the results as one array, without those of padding."""
        whole = torch.stack([torch.as_tensor(value).cpu() for value in results])
        mask = {"attention_mask": torch.from_numpy(inputs["attention_mask"])}
        return task_type_of_net(self.net.config).at_tokens(whole, mask).numpy()

    def file(self, name: str | None) -> Path:
        """Return what a runtime reads: the folder, or a program, which is written first if it is not there."""
        if name is None:
            return self.folder
        plain, made = _PLAIN.get(name, name), self.work / name
        if (self.folder / plain).is_file() and self.quantized.get(plain) == (None if name == plain else "int8"):
            return self.folder / plain
        if not made.is_file() and name == plain:
            write_program(self.net, self.tokenizer, self.work, "onnx" if name == ONNX else "openvino")
        elif not made.is_file():
            if self.texts is None:
                raise LookupError("needs training texts, from which it reads the ranges of activations")
            quantize(self.file(plain), made, self.texts(self.folder))
        return made


def _tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a folder; where it has none, what says that token types are not needed."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trusts_code())
    except Exception:  # any of many
        return lambda text: {}


@dataclass(frozen=True)
class OpenedProgram:
    """A net in a runtime, ready to be timed."""

    source: BenchedNet
    runtime: Runtime
    path: Path
    run: Runner
    difference: float  # of its results from PyTorch's

    @property
    def far(self) -> bool:
        """Whether integers change the results by more than is usual; the metric says what such a program is worth."""
        return self.difference > self.runtime.tolerance

    def entry(self) -> dict[str, Any]:
        """Return what the result says of it."""
        return {
            "net": self.source.label, "runtime": self.runtime.name, "dtype": self.runtime.dtype,
            "difference": self.difference, "far": self.far, "bytes": _bytes(self.path) or None,
        }  # fmt: skip


def _bytes(path: Path) -> int:
    """Return the size of a program, or of the tensors of a folder."""
    if path.is_file():
        return program_bytes(path)
    return sum(file.stat().st_size for file in tensor_files(path) if file.is_file())


def bench(
    nets: dict[str, Path],
    settings: Settings,
    keep: Callable[[dict[str, Any]], None] = lambda result: None,
    texts: Texts | None = None,
    score: Score | None = None,
    score_all: bool = False,
) -> dict[str, Any]:
    """Time nets in runtimes and return what was found.

    Args:
        nets: label -> folder; where there is a ``dense`` one, the other is compared with it.
        settings: what is measured.
        keep: is called with the result after every shape. Ctrl-C ends the work with what there is (``stopped``).
        texts: as :class:`BenchedNet`; without it programs of int8 are timed only if a folder has them.
        score: function of a net and of a runtime's call that returns what the result says of its answers.
        score_all: score every program; else those of nets that integers change by more than is usual.

    Raises:
        UserError: a folder cannot be loaded, or no runtime is left.
    """
    with tempfile.TemporaryDirectory() as work, pinned(settings.threads):
        sources = [BenchedNet(label, folder, settings, Path(work), texts) for label, folder in nets.items()]
        limit = min(source.longest for source in sources)
        shapes = settings.shapes(limit)
        if not shapes:
            raise UserError(f"length: {min(settings.lengths)} is more than the net reads; the largest is {limit}")
        left_out: list[dict[str, str]] = [
            {"what": f"length {length}", "why": f"the net reads {limit} tokens"}
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
            with Bar("time", sum(batch * length for batch, length in shapes)) as bar:
                for batch, length in shapes:
                    bar.say(f"time {batch} x {length}")
                    result["shapes"].append(_measure_shape(programs, batch, length, settings, bar))
                    keep(result)
        except KeyboardInterrupt:
            result["stopped"] = True
            keep(result)
    return result


def _opened(sources: Sequence[BenchedNet], settings: Settings, left_out: list[dict[str, str]]) -> list[OpenedProgram]:
    """Load every net in every runtime that can have it and agrees with PyTorch; append the others to ``left_out``.

    Programs of integers need not agree, if their results are finite.
    """
    opened = []
    for source in sources:
        probes = [source.inputs(*shape, padded=True) for shape in PROBES]
        eager = RUNTIMES["eager"].load(source.folder, source.setting)
        expected = [source.at_tokens(eager(probe), probe) for probe in probes]
        for name in track(settings.runtimes, f"load {source.label}", len(settings.runtimes)):
            runtime = RUNTIMES[name]
            try:
                _check_installed(runtime)
                path = source.file(runtime.reads)
                run = eager if name == "eager" else runtime.load(path, source.setting)
                results = [source.at_tokens(run(probe), probe) for probe in probes]
                difference = float(np.max([*map(_difference, results, expected)]))  # max() would lose nan
                integers = runtime.dtype != "float32" and np.isfinite(difference)
                if not (integers or difference <= runtime.tolerance):
                    raise LookupError(
                        f"its results differ from PyTorch's by {difference:.1e}, more than {runtime.tolerance:.0e}"
                    )
                opened.append(OpenedProgram(source, runtime, path, run, difference))
            except Exception as error:  # compilers, exporters and runtimes raise anything
                lines = str(error).strip().splitlines() or [type(error).__name__]
                reason = {"what": f"{name} of the {source.label} net", "why": lines[0][:160]}
                if isinstance(error, ModuleNotFoundError):
                    reason["what"] = name
                if reason not in left_out:
                    left_out.append(reason)
    if not opened:
        raise UserError(f"bench: no runtime is left; {left_out[-1]['what']}: {left_out[-1]['why']}")
    return opened


def _scored(programs: Sequence[OpenedProgram], score: Score) -> dict[tuple[str, str], dict[str, Any]]:
    """Return what is said of the answers by net and runtime; runtimes of float32 give those of the first of them."""
    known: dict[tuple[str, str], dict[str, Any]] = {}
    for program in track(programs, "evaluate", len(programs)):
        label, runtime = program.source.label, program.runtime
        key = label, runtime.dtype if runtime.dtype == "float32" else runtime.name
        if key not in known:
            known[key] = score(program.source, program.run)
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


def _measure_shape(
    programs: Sequence[OpenedProgram], batch: int, length: int, settings: Settings, bar: Bar
) -> dict[str, Any]:
    """Time all programs at one shape and return what the result says of it."""
    inputs = {p.source.label: p.source.inputs(batch, length) for p in programs}
    share = batch * length / settings.rounds
    times = in_turns(
        [partial(program.run, inputs[program.source.label]) for program in programs],
        settings.rounds, seconds=settings.seconds, after_round=lambda: bar.advance(share),
    )  # fmt: skip
    bar.advance(share * (settings.rounds - len(times[0])))
    return shape_entry(batch, length, programs, times)


def shape_entry(
    batch: int, length: int, programs: Sequence[OpenedProgram], times: Sequence[Sequence[float]]
) -> dict[str, Any]:
    """Return what the result says of one shape.

    ``over_dense`` compares a net with the dense one in the same runtime, ``over_eager`` a runtime with PyTorch's for
    the same net.
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
