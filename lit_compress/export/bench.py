"""The speed of models on this machine: every model in every runtime, in turns, over batch sizes and lengths."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lit_compress.evaluation.evaluate import evaluate, interval_of
from lit_compress.export.integers import integers_of, training_feeds
from lit_compress.export.modelling import MODULE, is_own_code
from lit_compress.export.program import PROBES, Program, example_inputs, program_bytes, write_program
from lit_compress.export.report import hardware, versions
from lit_compress.export.runtimes import FILES, RUNTIMES, Dtype, Format, Inputs, Runner, Runtime, Setting, placed
from lit_compress.models.checks import check_head
from lit_compress.models.own_code import check_code, trusts_code
from lit_compress.models.padding import usable_positions
from lit_compress.models.shards import tensor_files
from lit_compress.models.storage import load_net
from lit_compress.tasks import task_type_of_net
from lit_compress.utils.errors import UserError
from lit_compress.utils.files import read_json
from lit_compress.utils.progress import note, track
from lit_compress.utils.timing import in_turns, is_steady, pinned, speedup, summary

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lit_compress.data.datamodule import DataModule

FILE = "bench.json"
BATCHES, LENGTHS = (1, 8, 32, 128), (32, 128, 384)
ROUNDS, SECONDS = 30, 60.0
# by how much results of PyTorch may differ between two of its ways, relative above 1
ROUNDING = {"float32": 0.0, "float16": 0.02, "bfloat16": 0.1}

Data = Callable[[], "DataModule"]


@dataclass(frozen=True)
class Settings:
    """What is measured.

    Attributes:
        batches, lengths: sizes of the batches and lengths in tokens, each with each.
        own: further lengths, by name, e.g. the median of the texts.
        runtimes: their names.
        threads: of every runtime.
        rounds: forwards of every model at every shape.
        seconds: no further round of a shape begins after these.
        device: ``cpu``, ``cuda``, or another type of PyTorch's.
        trust: run the code of a folder also if this version would not write it.
        dtype: of weights and products in PyTorch.
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
    dtype: str = "float32"


class BenchedNet:
    """A folder whose model is timed.

    Args:
        label: ``dense`` or ``compressed``.
        folder: an export, or what ``save_pretrained`` wrote.
        settings: how it is run.
        work: folder for programs that are not next to the model.
        data: function that returns the data of its task; None without any.

    Raises:
        UserError: it cannot be loaded, or brings code that no export has.
    """

    def __init__(self, label: str, folder: Path, settings: Settings, work: Path, data: Data | None = None) -> None:
        self.label, self.folder, self.work, self._data = label, folder, work / label, data
        self.work.mkdir()
        self.net, self.tokenizer = self._load(), _tokenizer(folder)
        kind = task_type_of_net(self.net.config)
        if not (settings.trust or is_own_code(self.net, folder)):
            raise UserError(
                f"bench: '{folder}' brings code that this version of lit_compress does not write; --trust_remote_code "
                "runs it, or export the model again"
            )
        trust = trusts_code() or (folder / f"{MODULE}.py").is_file()
        self.setting = Setting(kind.auto_class, kind.results, settings.threads, settings.device, trust, settings.dtype)

    @cached_property
    def quantized(self) -> dict[str, str]:
        """The program of integers in the folder, of ``export --dtype``: its file and its dtype; {} for none."""
        report = self.folder / "report.json"
        program = (read_json("bench", report, dict).get("program") if report.is_file() else None) or {}
        return {program.get("file", FILES["onnx"]): program["dtype"]} if "dtype" in program else {}

    @cached_property
    def data(self) -> DataModule:
        """The data, as the model's tokenizer reads it.

        Raises:
            UserError: an option of it is wrong or missing.
        """
        if self._data is None:
            raise UserError("needs training texts, from which it reads the ranges of activations")
        data = self._data()
        data.read_as(str(self.folder))
        return data

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
            raise UserError(f"bench: cannot load a model from '{self.folder}': {reason}") from error

    def inputs(self, batch: int, length: int, padded: bool = False) -> Inputs:
        """Return arrays of random tokens; ``padded``: half of the second text is padding."""
        tensors = example_inputs(self.net, self.tokenizer, batch, length, padded)
        return {name: value.numpy() for name, value in tensors.items()}

    def at_tokens(self, results: Sequence[Any], inputs: Inputs) -> np.ndarray:
        """Return the results as one array, without padding."""
        whole = torch.stack([torch.as_tensor(value).float().cpu() for value in results])
        mask = {"attention_mask": torch.from_numpy(inputs["attention_mask"])}
        return task_type_of_net(self.net.config).at_tokens(whole, mask).numpy()

    def file(self, form: Format, dtype: Dtype) -> Path:
        """Return the input of a runtime: the folder, or a program, which is written first if it is not there."""
        if form == "hf":
            return self.folder
        there, made = self.folder / FILES[form], self.work / dtype / FILES[form]
        if there.is_file() and self.quantized.get(there.name, "float32") == dtype:
            return there
        made.parent.mkdir(exist_ok=True)
        if not made.is_file() and dtype == "float32":
            write_program(self.net, self.tokenizer, made.parent, form)
        elif not made.is_file():
            writes, feeds = self.net.can_generate(), lambda: training_feeds(self.data, "int8")
            integers_of(self.file(form, "float32"), made, "int8", writes, feeds)
        return made

    def bytes(self, path: Path) -> int:
        """Return the size of a program, or of the tensors of a folder."""
        if path.is_file():
            return program_bytes(path)
        return sum(file.stat().st_size for file in tensor_files(path) if file.is_file())

    def score(self, run: Runner) -> dict[str, Any]:
        """Return the dev ``metric`` of a runtime's answers and its ``interval``.

        Raises:
            UserError: the model answers another task, or there are no data.
        """
        data = self.data
        check_head(f"bench: '{self.folder}'", self.net.config, data.record)

        def answers(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
            results = run({name: value.numpy() for name, value in inputs.items()})
            values = [torch.as_tensor(value).float().cpu() for value in results]
            return dict(zip(self.setting.results, values, strict=True))

        scores = evaluate(Program(answers, self.net.config), data, sure=True)  # type: ignore[arg-type]
        key = f"val/{data.record.metrics[0]}"
        return {"metric": scores[key], "interval": interval_of(scores, key)}


def _tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a folder; where it has none, what says that token types are not needed."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trusts_code())
    except (OSError, ValueError):
        return lambda text: {}


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
        return self.runtime.dtype if self.runtime.runs_programs else self.source.setting.dtype

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
    data: Data | None = None,
    compared: bool = False,
) -> dict[str, Any]:
    """Time models in runtimes and return the result.

    Args:
        nets: label -> folder; where there is a ``dense`` one, the other is compared with it.
        settings: shapes, runtimes and threads.
        keep: is called with the result after every shape. Ctrl-C ends the work with the result so far (``stopped``).
        data: as :class:`BenchedNet`; without it programs of int8 are timed only if a folder has them.
        compared: every program needs a dev metric. Else, as far as there are data, all have one in 16 bits; in
            float32 the programs of models that integers change by more than is usual.

    Raises:
        UserError: a folder cannot be loaded, or no runtime is left.
    """
    with tempfile.TemporaryDirectory() as work, pinned(settings.threads):
        sources = [BenchedNet(label, folder, settings, Path(work), data) for label, folder in nets.items()]
        shapes, left_out = _shapes(sources, settings)
        programs = _opened(sources, settings, left_out)
        packages = sorted({name for program in programs for name in program.runtime.packages})
        changed = {program.source.label for program in programs if program.far}
        all_judged = compared or settings.dtype != "float32"
        judged = [program for program in programs if all_judged or program.source.label in changed]
        scores = _scored(judged, compared) if data else {}
        result: dict[str, Any] = {
            "nets": {label: str(folder) for label, folder in nets.items()}, "own_lengths": dict(settings.own),
            "threads": settings.threads, "device": settings.device, "rounds": settings.rounds,
            "hardware": hardware(), "load_average": list(os.getloadavg()),
            "versions": versions() | {package: version(package) for package in packages},
            "programs": [p.entry() | scores.get((p.source.label, p.runtime.name), {}) for p in programs],
            "left_out": left_out, "shapes": [], "asked": len(shapes), "stopped": False,
        }  # fmt: skip
        try:
            for batch, length in track(shapes, "time"):  # nothing says how long all will take: they are not alike
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


def _shapes(sources: Sequence[BenchedNet], settings: Settings) -> tuple[list[tuple[int, int]], list[dict[str, str]]]:
    """Return batch and length of all shapes, the cheapest first, and the lengths that a model does not read."""
    limit = min(usable_positions(source.net.config) or sys.maxsize for source in sources)
    lengths = {*settings.lengths, *(length for _, length in settings.own)}
    shapes = [(batch, length) for batch in set(settings.batches) for length in lengths if length <= limit]
    if not shapes:
        raise UserError(f"length: {min(settings.lengths)} is more than the model reads; the largest is {limit}")
    longer = sorted(length for length in lengths if length > limit)
    left_out = [{"what": f"length {length}", "why": f"the model reads {limit} tokens"} for length in longer]
    return sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape)), left_out


def _opened(sources: Sequence[BenchedNet], settings: Settings, left_out: list[dict[str, str]]) -> list[OpenedProgram]:
    """Load every model in every runtime that can have it and agrees with PyTorch; append the others to ``left_out``.

    Programs of integers need not agree, if their results are finite.
    """
    opened = []
    for source in sources:
        probes = [source.inputs(*shape, padded=True) for shape in PROBES]
        given, known = [RUNTIMES[name] for name in settings.runtimes], RUNTIMES["eager"]
        reference = known.load(source.folder, source.setting)
        expected = [source.at_tokens(reference(probe), probe) for probe in probes]
        for runtime in track(given, f"load {source.label}", len(given)):
            try:
                if missing := [package for package in runtime.packages if find_spec(package) is None]:
                    raise ModuleNotFoundError(f"not installed; pip install {' '.join(missing)}")
                path = source.file(*runtime.forms[0])
                run = reference if runtime is known else runtime.load(path, source.setting)
                results = [source.at_tokens(run(probe), probe) for probe in probes]
                off = [np.abs(r - e).max() / max(1.0, np.abs(e).max()) for r, e in zip(results, expected, strict=True)]
                difference = float(np.max(off))  # max() would lose nan
                integers = runtime.dtype != "float32" and np.isfinite(difference)
                most = max(runtime.tolerance, ROUNDING[settings.dtype])
                if not (integers or difference <= most):
                    raise LookupError(f"its results differ from PyTorch's by {difference:.1e}, more than {most:.0e}")
                answers = run if runtime.runs_programs else reference
                opened.append(OpenedProgram(source, runtime, path, run, difference, answers))
            except Exception as error:  # compilers, exporters and runtimes raise anything
                lines = str(error).strip().splitlines() or [type(error).__name__]
                of = "" if isinstance(error, ModuleNotFoundError) else f" of the {source.label} model"
                reason = {"what": f"{runtime.name}{of}", "why": lines[0][:160]}
                if reason not in left_out:
                    left_out.append(reason)
    if not opened:
        raise UserError(f"bench: no runtime is left; {left_out[-1]['what']}: {left_out[-1]['why']}")
    return opened


def _scored(programs: Sequence[OpenedProgram], needed: bool) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the metrics by model and runtime; all of one dtype but int8 share the first one's.

    A note names those without one, unless they are ``needed``.
    """
    known: dict[tuple[str, str], dict[str, Any]] = {}
    for program in track(programs, "evaluate", len(programs)):
        label, runtime = program.source.label, program.runtime
        key = label, program.dtype if runtime.dtype == "float32" else runtime.name
        if key not in known:
            try:
                known[key] = program.source.score(program.answers)
            except UserError as error:
                if needed:
                    raise
                note(f"bench: no dev metric of the {label} model: {error}")
                known[key] = {}
        known[label, runtime.name] = known[key]
    return known


def _measure_shape(programs: Sequence[OpenedProgram], batch: int, length: int, settings: Settings) -> dict[str, Any]:
    """Time all programs at one shape and return its entry in the result."""
    given = {p.source.label: p.source.inputs(batch, length) for p in programs}
    inputs = [placed(given[p.source.label], "cpu" if p.runtime.runs_programs else settings.device) for p in programs]
    runs = [partial(p.run, own) for p, own in zip(programs, inputs, strict=True)]
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
                entry[name] = speedup(by_program[other], record).entry()
        entries.append(entry)
    return {"batch": batch, "length": length, "rounds": len(times[0]), "times": entries}
