"""The speed that a budget asks for: in which runtime and for which batches, and programs timed there in turns.

It times the program that an export writes (program.py, integers.py), of one thread, by processor time: another process
on the machine makes a forward longer, not its work. On an accelerator it times PyTorch in bfloat16, on CUDA as graphs.
Values do not change the time. So a model without values gets random ones, and integers random texts to read their
ranges from.
"""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lit_compress.export.choices import Choices
from lit_compress.export.integers import SMOOTH, quantize
from lit_compress.export.program import example_inputs, program_bytes, write_program
from lit_compress.export.runtimes import RUNTIMES, Runner, Setting, placed, torch_runner
from lit_compress.models.budget import Budget
from lit_compress.models.padding import usable_positions
from lit_compress.models.sites import Model
from lit_compress.models.surgery import with_random_values
from lit_compress.tasks import task_type_of_net
from lit_compress.utils.errors import UserError, nearest
from lit_compress.utils.progress import track
from lit_compress.utils.timing import in_turns, pinned, speedup, summary

BATCHES = (1, 32)  # texts of which a speed-up is if the budget names no shape
ORDER = ("openvino-int8", "onnx-int8", "openvino", "onnx", "eager")  # the fastest first
ACCELERATORS = ("cuda", "xpu", "mps", "graphs")
ROUNDS, SECONDS, WARM_UP = 15, 20.0, 2  # of a shape, as utils/timing.py counts them
LEAST, FEW = 7, 3  # rounds in any case, of an export and while a density is searched


@dataclass(frozen=True)
class Place:
    """Where a speed-up is measured.

    Attributes:
        runtime: its name.
        shapes: batch and length of the texts.
        choices: for the export, with the format and the dtype of the program that the runtime runs.
        device: type of the accelerator, or ``cpu``.
    """

    runtime: str
    shapes: tuple[tuple[int, int], ...]
    choices: Choices
    device: str = "cpu"

    @property
    def dtype(self) -> str:
        """Of the products."""
        return self.choices.dtype if self.device == "cpu" else "bfloat16"

    def __str__(self) -> str:
        """Return the words for users.

        >>> print(Place("onnx", ((1, 32), (32, 32)), Choices()))
        onnx, 1 x 32 and 32 x 32 tokens
        """
        name = self.runtime if self.device == "cpu" else f"{self.runtime} on {self.device}"
        return f"{name}, {' and '.join(f'{batch} x {length}' for batch, length in self.shapes)} tokens"


def find_place(budget: Budget, choices: Choices, net: Model, length: int) -> Place:
    """Return where the speed-up of a budget is measured: the runtime that it names, or the fastest of those installed.

    A format or a dtype that the choices name must be of the runtime. Of the dense ``net`` only shapes are read.
    ``length`` is of the task's texts.

    Raises:
        UserError: the runtime is unknown or not installed, does not run the chosen number formats or this model; the
            model reads fewer tokens.
    """
    batches = BATCHES[:1] if task_type_of_net(net.config).over_vocabulary else BATCHES  # logits of 32 texts take GB
    shapes = budget.shapes or tuple((batch, length) for batch in batches)
    if (longest := max(tokens for _, tokens in shapes)) > (limit := usable_positions(net.config) or longest):
        raise _refused(budget, f"has texts of {longest} tokens, more than the model reads; the largest is {limit}")
    choices.check()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    here, name = accelerator.type if accelerator else "none", budget.runtime
    if name and (name in ACCELERATORS or name == here):
        if name != here:
            why = f"is measured on an accelerator '{name}', and this machine has {here}"
            raise _refused(budget, f"{why}; nearest here: {'eager' if here == 'none' else here}")
        if choices.format != "hf":
            given = f"--format {choices.format} --dtype {choices.dtype}"
            why = f"is of PyTorch in bfloat16, and {given} is not; nearest: --format hf --dtype bfloat16"
            raise _refused(budget, why)
        return Place("graphs" if here == "cuda" else "eager", shapes, choices, here)
    errors = []
    for runtime in [name] if name else ORDER:
        try:
            return Place(runtime, shapes, _choices_for(runtime, budget, choices, net))
        except UserError as error:
            errors.append(error)
    raise errors[-1]


def _refused(budget: Budget, why: str) -> UserError:
    return UserError(f"model.budget: '{budget.asked}' {why}")


def _choices_for(name: str, budget: Budget, choices: Choices, net: Model) -> Choices:
    """Return the choices with the format and the dtype of the program that a runtime runs."""
    if name not in RUNTIMES:
        raise _refused(budget, f"has an unknown runtime '{name}'; {nearest(name, RUNTIMES)}")
    if missing := RUNTIMES[name].missing():
        there = next(other for other in ORDER if not RUNTIMES[other].missing())
        how = f"pip install {' '.join(missing)}, or nearest here: {there}"
        raise _refused(budget, f"is for {name}, which is not installed; {how}")
    given, form, dtype = choices.format, RUNTIMES[name].form, RUNTIMES[name].dtype
    if name == given == "openvino":  # which reads both formats
        form = given
    if (given, choices.dtype) not in ((form, dtype), ("hf", "float32")):
        near = f"nearest: --format {form} --dtype {dtype}"
        raise _refused(budget, f"is for {name}, and --format {given} --dtype {choices.dtype} is not; {near}")
    fitting = replace(choices, format=form, dtype=dtype)
    fitting.check(net)
    return fitting


class Programs:
    """Programs of models in the runtime of a place, timed in turns with that of ``dense``, with or without values."""

    def __init__(self, dense: Model, tokenizer: Any, place: Place) -> None:
        self.place, self._tokenizer = place, tokenizer
        net, dtype = with_random_values(dense), "float32" if place.device == "cpu" else "bfloat16"
        self._setting = Setting(task_type_of_net(net.config).results, device=place.device, dtype=dtype)
        examples = (example_inputs(net, tokenizer, *shape, padded=False) for shape in place.shapes)
        self._inputs = [placed(inputs, place.device) for inputs in examples]
        self._dense = self._runner(net)

    def gains(self, net: Model) -> list[dict[str, Any]]:
        """Return the speed-ups of a model's program, as the shapes of :meth:`speed_of`, in few rounds.

        ``net`` is as exported, with or without values.
        """
        return self._gains_of(self._runner(with_random_values(net)), SECONDS / 4, FEW)

    def speed_of(self, net: Model, program: Path | None) -> dict[str, Any]:
        """Time an export in turns with the dense model: the ``program`` in its folder, if its runtime reads one.

        Returns:
            The field ``speed`` of a report: the place, and in ``shapes`` for each ``batch``, ``length``, ``rounds``,
            ``median``, ``low``, ``high`` and ``verdict`` of the speed-up, and the milliseconds of both, ``dense_ms``
            and ``ms``.
        """
        place = self.place
        if program is None or place.choices.format == "hf":
            run = self._runner(net)
        else:
            run = RUNTIMES[place.runtime].load(program, self._setting)
        return {
            "runtime": place.runtime, "device": place.device, "dtype": place.dtype, "threads": 1,
            "clock": "processor" if place.device == "cpu" else place.device,
            "shapes": self._gains_of(run, SECONDS, LEAST),
        }  # fmt: skip

    def _gains_of(self, run: Runner, seconds: float, least: int) -> list[dict[str, Any]]:
        place, entries = self.place, []
        clock = time.process_time if place.device == "cpu" else time.perf_counter
        shapes = list(zip(place.shapes, self._inputs, strict=True))
        with pinned(1):
            for (batch, length), inputs in track(shapes, f"time {place.runtime}", len(shapes)):
                slow, fast = in_turns(
                    [partial(self._dense, inputs), partial(run, inputs)], ROUNDS, warm_up=WARM_UP, seconds=seconds,
                    least=least, clock=clock, device=place.device,
                )  # fmt: skip
                entries.append({
                    "batch": batch, "length": length, "rounds": len(slow), **speedup(slow, fast).entry(),
                    "dense_ms": summary(slow)["median"], "ms": summary(fast)["median"],
                })  # fmt: skip
        return entries

    def _runner(self, net: Model) -> Runner:
        """Write the program of a model with values, and load it."""
        choices = self.place.choices
        if choices.format == "hf":
            own = net if self.place.device == "cpu" else copy.deepcopy(net)  # which is moved
            return torch_runner(own, self._setting, self.place.runtime)
        with tempfile.TemporaryDirectory() as folder:  # a runner holds what it read
            program = _write_shapes(net, self._tokenizer, Path(folder), choices)
            return RUNTIMES[self.place.runtime].load(program, self._setting)


def _write_shapes(net: Model, tokenizer: Any, folder: Path, choices: Choices) -> Path:
    """Write the program of a model with any values into ``folder``; return its file."""
    path = folder / write_program(net, tokenizer, folder, choices.format)["file"]  # type: ignore[arg-type]
    if integers := choices.integers:
        texts = [example_inputs(net, tokenizer, 8, 32) for _ in range(2)]
        feeds = None if net.can_generate() else [placed(text, "cpu") for text in texts]
        quantize(path, path, integers, feeds, SMOOTH[:1])
    return path


def bytes_of_shapes(net: Model, tokenizer: Any, choices: Choices) -> int:
    """Return the size of the program of ``net``, as exported, without values.

    Raises:
        UserError: it cannot be written.
    """
    with tempfile.TemporaryDirectory() as folder:
        return program_bytes(_write_shapes(with_random_values(net), tokenizer, Path(folder), choices))


def slowest(gains: Sequence[dict[str, Any]]) -> float:
    """Return the speed-up at the shape at which it is least."""
    return min(gain["median"] for gain in gains)
