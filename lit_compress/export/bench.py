"""The speed of models on this machine: every model in every runtime, in turns, over batch sizes and lengths."""

from __future__ import annotations

import copy
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.metadata import version
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_compress.data.datamodule import DataModule
from lit_compress.export.integers import quantize, training_feeds
from lit_compress.export.program import PROBES, by_name, example_inputs, farthest, program_bytes, write_program
from lit_compress.export.report import hardware, versions
from lit_compress.export.runtimes import FILES, RUNTIMES, Dtype, Format, Runner, Runtime, Setting, placed
from lit_compress.models.backbones import one_line
from lit_compress.models.files import net_bytes
from lit_compress.models.own_code import check_code, read_config
from lit_compress.models.padding import usable_positions
from lit_compress.models.sites import Model
from lit_compress.models.storage import load_net
from lit_compress.tasks import task_type_of_net
from lit_compress.utils.errors import UserError
from lit_compress.utils.files import read_json
from lit_compress.utils.progress import track
from lit_compress.utils.timing import STEADY, in_turns, pinned, speedup, spread, summary

FILE = "bench.json"
BATCHES, LENGTHS = (1, 8, 32, 128), (32, 128, 384)
# by how much results of PyTorch may differ between two of its ways, relative above 1
ROUNDING = {"float32": 0.0, "float16": 0.02, "bfloat16": 0.1}

Data = Callable[[], "DataModule"]


@dataclass(frozen=True)
class Settings:
    """The options of ``bench``."""

    batches: tuple[int, ...] = BATCHES
    lengths: tuple[int, ...] = LENGTHS
    runtimes: tuple[str, ...] = tuple(RUNTIMES)
    threads: int = 1
    rounds: int = 30
    seconds: float = 60.0
    device: str = "cpu"
    dtype: str = "float32"


class BenchedNet:
    """A folder whose model is timed: an export, or what ``save_pretrained`` wrote.

    ``work`` is a folder for programs that are not next to the model, ``data`` returns the data of its task.

    Raises:
        UserError: it cannot be loaded.
    """

    def __init__(self, label: str, folder: Path, settings: Settings, work: Path, data: Data | None = None) -> None:
        from transformers import AutoTokenizer

        self.label, self.folder, self.work, self._data = label, folder, work / label, data
        self.work.mkdir()
        self.net: Model = _load(folder).requires_grad_(False)
        self.tokenizer: Any = lambda text: dict[str, Any]()  # asks for no token types
        with suppress(OSError, ValueError):
            self.tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        self.kind = task_type_of_net(self.net.config)
        self.setting = Setting(self.kind.results, settings.threads, settings.device, settings.dtype)

    @cached_property
    def data(self) -> DataModule:
        """The data, as the model's tokenizer reads it."""
        if self._data is None:
            raise UserError("needs training texts, from which it reads the ranges of activations")
        data = self._data()
        data.read_as(str(self.folder))
        return data

    def inputs(self, batch: int, length: int, padded: bool = False) -> dict[str, Tensor]:
        """Return random tokens; ``padded``: half of the second text is padding."""
        return example_inputs(self.net, self.tokenizer, batch, length, padded)

    def load(self, runtime: Runtime) -> Runner:
        """Return the model, or its program, in a runtime."""
        hf = not runtime.runs_programs
        return runtime.load(copy.deepcopy(self.net) if hf else self.file(runtime.form, runtime.dtype), self.setting)

    def file(self, form: Format, dtype: Dtype) -> Path:
        """Return the input of a runtime: the folder, or a program, which is written first if it is not there."""
        if form == "hf":
            return self.folder
        there, made = self.folder / FILES[form], self.work / dtype / FILES[form]
        report = self.folder / "report.json"
        program = (read_json("bench", report, dict).get("program") if report.is_file() else None) or {}
        is_program = program.get("file", FILES["onnx"]) == there.name
        if there.is_file() and (program.get("dtype", "float32") if is_program else "float32") == dtype:
            return there
        made.parent.mkdir(exist_ok=True)
        if not made.is_file() and dtype == "float32":
            write_program(self.net, self.tokenizer, made.parent, form)
        elif not made.is_file():
            feeds = None if self.net.can_generate() else training_feeds(self.data, "int8")
            quantize(self.file(form, "float32"), made, "int8", feeds)
        return made


def _load(folder: Path) -> Model:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    if (folder / "structure.json").is_file():
        return load_net(folder)
    check_code(f"bench: '{folder}'", folder)
    with one_line("model", str(folder), "bench"):
        kind = getattr(transformers, task_type_of_net(read_config(f"bench: '{folder}'", folder)).auto_class)
        return kind.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()


@dataclass(frozen=True)
class OpenedProgram:
    """A model in a runtime, ready to be timed, and its entry in the result."""

    source: BenchedNet
    runtime: Runtime
    run: Runner
    entry: dict[str, Any]


def bench(
    nets: dict[str, Path],
    settings: Settings,
    keep: Callable[[dict[str, Any]], None] = lambda result: None,
    data: Data | None = None,
) -> dict[str, Any]:
    """Time models in runtimes and return the result.

    Args:
        nets: label -> folder; where there is a ``dense`` one, the other is compared with it.
        settings: the options.
        keep: is called with the result so far after every shape.
        data: as :class:`BenchedNet`; without it programs of int8 are timed only if a folder has them.

    Raises:
        UserError: a folder cannot be loaded, the models are for different tasks, or no runtime is left.
    """
    with tempfile.TemporaryDirectory() as work, pinned(settings.threads):
        sources = [BenchedNet(label, folder, settings, Path(work), data) for label, folder in nets.items()]
        if sources[0].kind is not (kind := sources[-1].kind):
            other = f"'{sources[0].folder}' is for {sources[0].kind.name}, '{sources[-1].folder}' for {kind.name}"
            raise UserError(f"bench: {other}; give a --baseline of the same task")
        shapes, left_out = _shapes(sources, settings)
        programs = _opened(sources, settings, left_out)
        packages = sorted({name for program in programs for name in program.runtime.packages})
        result: dict[str, Any] = {
            "nets": {label: str(folder) for label, folder in nets.items()},
            "threads": settings.threads, "device": settings.device, "rounds": settings.rounds,
            "hardware": hardware(),
            "versions": versions() | {package: version(package) for package in packages},
            "programs": [program.entry for program in programs],
            "left_out": left_out, "shapes": [], "asked": len(shapes),
        }  # fmt: skip
        for batch, length in track(shapes, "time"):  # nothing says how long all will take: they are not alike
            try:
                result["shapes"].append(_measure_shape(programs, batch, length, settings))
            except torch.OutOfMemoryError:
                left_out.append({"what": f"{batch} x {length} and larger", "why": "not enough memory"})
                keep(result)
                break
            keep(result)
    return result


def _shapes(sources: Sequence[BenchedNet], settings: Settings) -> tuple[list[tuple[int, int]], list[dict[str, str]]]:
    """Return batch and length of all shapes, the cheapest first, and the lengths that a model does not read."""
    limit = min(usable_positions(source.net.config) or sys.maxsize for source in sources)
    lengths = sorted(set(settings.lengths))
    shapes = [(batch, length) for batch in set(settings.batches) for length in lengths if length <= limit]
    if not shapes:
        raise UserError(f"length: {lengths[0]} is more than the model reads; the largest is {limit}")
    why = f"the model reads {limit} tokens"
    left_out = [{"what": f"length {length}", "why": why} for length in lengths if length > limit]
    return sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape)), left_out


def _opened(sources: Sequence[BenchedNet], settings: Settings, left_out: list[dict[str, str]]) -> list[OpenedProgram]:
    """Load models in all runtimes; append those that differ from PyTorch, or integers that are nan, to ``left_out``."""
    opened = list[OpenedProgram]()
    for source in sources:
        probes = [source.inputs(*shape, padded=True) for shape in PROBES]
        given, eager = [RUNTIMES[name] for name in settings.runtimes], RUNTIMES["eager"]
        reference = source.load(eager)
        expected = list(map(by_name(reference, source.setting.results), probes))
        for runtime in track(given, f"load {source.label}", len(given)):
            try:
                if missing := runtime.missing():
                    raise ModuleNotFoundError(f"not installed; pip install {' '.join(missing)}")
                path = source.file(runtime.form, runtime.dtype)
                run = reference if runtime is eager else source.load(runtime)
                off = farthest(source.kind, by_name(run, source.setting.results), probes, expected)
                most = max(runtime.tolerance, ROUNDING[settings.dtype])
                if not (off <= most or (runtime.dtype != "float32" and isfinite(off))):
                    raise LookupError(f"its results differ from PyTorch's by {off:.1e}, more than {most:.0e}")
                entry: dict[str, Any] = {
                    "net": source.label, "runtime": runtime.name,
                    "dtype": runtime.dtype if runtime.runs_programs else settings.dtype,
                    "difference": off, "far": off > most,
                    "bytes": (program_bytes(path) if path.is_file() else net_bytes(path)) or None,
                }  # fmt: skip
            except Exception as error:  # compilers, exporters and runtimes raise anything
                lines = str(error).strip().splitlines() or [type(error).__name__]
                of = "" if isinstance(error, ModuleNotFoundError) else f" of the {source.label} model"
                reason = {"what": f"{runtime.name}{of}", "why": lines[0][:160]}
                if reason not in left_out:
                    left_out.append(reason)
                continue
            opened.append(OpenedProgram(source, runtime, run, entry))
    if not opened:
        raise UserError(f"bench: no runtime is left; {left_out[-1]['what']}: {left_out[-1]['why']}")
    return opened


def _measure_shape(programs: Sequence[OpenedProgram], batch: int, length: int, settings: Settings) -> dict[str, Any]:
    """Time all programs at one shape; ``over_dense`` is the speed-up over the dense model in the same runtime."""
    given = {p.source.label: p.source.inputs(batch, length) for p in programs}
    inputs = [placed(given[p.source.label], "cpu" if p.runtime.runs_programs else settings.device) for p in programs]
    runs = [partial(p.run, own) for p, own in zip(programs, inputs, strict=True)]
    times = in_turns(runs, settings.rounds, seconds=settings.seconds, device=settings.device)
    by_program = {(p.source.label, p.runtime.name): record for p, record in zip(programs, times, strict=True)}
    entries = []
    for (net, runtime), record in by_program.items():
        entry = {"net": net, "runtime": runtime, **summary(record), "steady": spread(record) <= STEADY}
        if net != "dense" and (dense := by_program.get(("dense", runtime))):
            entry["over_dense"] = speedup(dense, record).entry()
        entries.append(entry)
    return {"batch": batch, "length": length, "rounds": len(times[0]), "times": entries}
