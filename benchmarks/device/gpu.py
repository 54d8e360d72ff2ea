"""What compression gives on this machine's accelerator: answers, training steps and the command `factorize`.

    python -m benchmarks.device.gpu [--minutes 5] [--device cuda] [--only answers mixed compiled training factorize]

Needs nothing but the tree: BERTs of random weights, whose speed is that of any weights. *Answers*: dense models and
their compressed forms (gpu_forms.py) in bfloat16, in turns, eager and as CUDA graphs, over batches and lengths.
*Mixed*: 512 texts of mixed lengths, padded, and packed without their head. *Compiled*: answers after `torch.compile`
of the blocks. *Training*: every method's steps by `fit` in bf16-mixed, 32 texts of 128 tokens, each next to dense
fine-tuning. *factorize*: seconds and memory of the command. It ends after --minutes, writes what is there after every
row, and prints the tables last. Rows that a result has are not measured again.
Writes benchmarks/device/results/gpu/<card>.json.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import common, timing
from benchmarks.device.accelerator import device_of
from benchmarks.device.run import METHODS
from lit_compress.utils.errors import UserError

SCRIPT = "device/gpu"
SHARES = {
    "answers": 0.45,
    "mixed": 0.5,
    "compiled": 0.72,
    "training": 0.9,
    "factorize": 1.0,
}  # of the time, when a part must be over
BATCHES: tuple[int, ...] = (1, 32, 128)
LENGTHS: tuple[int, ...] = (32, 128, 384)
ROUNDS = 10
SHAPES: tuple[str, ...] = (timing.BERT_BASE, timing.MINILM)
MEMORY_SHAPE = (32, 128)
COMPILED_AT = ((1, 128), (32, 128), (128, 128))
COMPILED = ("dense", "even, multiples of 64, 0.10", "components, 0.10")
MIXED_TEXTS, VOCABULARY = 512, 1000
TEXTS = 768  # of training: 24 steps an epoch
LABELS = "LPAF, labels alone"  # no teacher
FIRST: tuple[str, ...] = (
    "dense",
    LABELS,
    "LPAF",
    "SecondOrder",
    "LoSparse",
    "CoFi",
    "SP3",
)  # then the others, while there is time
Row = Callable[[dict[str, Any]], None]  # keeps a row of a part


def main() -> None:
    """Measure every part until its share of the time is over."""
    parser = common.parser(SCRIPT, __doc__, device="auto", only=tuple(SHARES))
    parser.add_argument("--minutes", type=float, default=5.0, help="when it ends")
    options = parser.parse_args()
    begin, device = time.monotonic(), device_of(options.device)
    frame = common.frame()
    name = str(frame["hardware"]["accelerator"]).replace(" ", "-")
    known: dict[str, Any] = next((found for found in common.load(options.results) if found["name"] == name), {})
    result: dict[str, Any] = {**known, "name": name, "device": device, **frame}
    for part in options.only:
        end = begin + 60 * options.minutes * SHARES[part]
        result[part] = [row for row in result.get(part, []) if "failed" not in row]

        def keep(part: str, row: dict[str, Any]) -> None:
            result[part].append(row)
            common.write(options, result["name"], result)

        try:
            PARTS[part](device, end, partial(keep, part), {key(row) for row in result[part]})
        except Exception as error:  # a part that fails must not cost the others
            keep(part, failed(error))
        print(f"{part}: {len(result[part])} rows, {time.monotonic() - begin:.0f} s", flush=True)
    from benchmarks.device.gpu_tables import tables

    print("\n".join(tables(result)))


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return which row of its part this is."""
    return tuple(row.get(name) for name in ("shape", "form", "batch", "length", "method"))


def failed(error: BaseException) -> dict[str, Any]:
    """Return the row of what could not be measured."""
    return {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}


def apart(function: Callable[..., Any], *args: Any, seconds: float) -> Any:
    """Return ``function(*args)`` of a process of its own, forked from one that has imported everything.

    Raises:
        TimeoutError: it takes longer than ``seconds``; it is killed, and every command that it started.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(["lightning.pytorch", "lit_compress.cli.commands", "lit_compress.methods", __name__])
    pool = ProcessPoolExecutor(1, mp_context=context, initializer=os.setsid)
    try:
        return pool.submit(function, *args).result(timeout=max(1.0, seconds))
    finally:
        for pid, process in list((pool._processes or {}).items()):
            process.kill()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        pool.shutdown()


# ------------------------------------------------------------------------------------------------- answers


def answers(device: str, end: float, keep: Row, done: Collection[Any] = ()) -> None:
    """Time the forms of BERT-base, then of MiniLM; a card too small for one may have room for the other."""
    for shape in SHAPES:
        try:
            _answers_of(shape, device, end, keep, done)
        except torch.OutOfMemoryError as error:
            keep({"shape": shape, **failed(error)})


def _answers_of(shape: str, device: str, end: float, keep: Row, done: Collection[Any]) -> None:
    """Time the forms of one shape at every batch and length, the cheapest first."""
    from benchmarks.device.gpu_forms import forms
    from lit_compress.export.runtimes import placed

    pairs = sorted(((batch, length) for batch in BATCHES for length in LENGTHS), key=lambda pair: pair[0] * pair[1])
    pairs = [pair for pair in pairs if key({"shape": shape, "batch": pair[0], "length": pair[1]}) not in done]
    if not pairs or time.monotonic() > end:
        return
    nets = forms(shape)
    runs = _runners(nets, device, ("eager", "graphs"))
    for name, net in nets.items():
        if key({"shape": shape, "form": name}) not in done:
            keep({"shape": shape, "form": name, **_size(net, nets["dense"], device)})
    for batch, length in pairs:
        if time.monotonic() > end:
            return
        inputs = placed(_inputs(batch, length), device)
        keep({"shape": shape, "batch": batch, "length": length, "times": _times(runs, inputs, device)})


def mixed(device: str, end: float, keep: Row, done: Collection[Any] = ()) -> None:
    """Time 512 texts of mixed lengths: padded, sorted by length, and packed without padding."""
    from benchmarks.device.gpu_forms import forms

    for shape in SHAPES:
        if key({"shape": shape}) not in done and time.monotonic() < end:
            nets = {name: net for name, net in forms(shape, COMPILED).items() if name in COMPILED}
            keep({"shape": shape, "mixed": _mixed(nets, device)})


def compiled(device: str, end: float, keep: Row, done: Collection[Any] = ()) -> None:
    """Compile the blocks of some forms of BERT-base, and time them next to CUDA graphs of the eager forward."""
    if done:
        return
    from benchmarks.device.gpu_forms import forms
    from lit_compress.export.runtimes import placed

    nets = {name: net for name, net in forms(timing.BERT_BASE, COMPILED).items() if name in COMPILED}
    runs, seconds = _runners(nets, device, ("graphs", "compiled")), dict[str, float]()
    for batch, length in COMPILED_AT:
        inputs = placed(_inputs(batch, length), device)
        for (name, way), run in runs.items():
            if time.monotonic() > end:
                return
            start = time.perf_counter()
            run(inputs)
            timing.wait(device)
            if way == "compiled":
                seconds[name] = time.perf_counter() - start
        times = _times(runs, inputs, device)
        keep({"shape": timing.BERT_BASE, "batch": batch, "length": length, "times": times, "first": dict(seconds)})


def _inputs(batch: int, length: int) -> dict[str, Any]:
    import numpy as np

    ids = np.random.default_rng(0).integers(5, VOCABULARY, (batch, length))
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


def _runners(
    nets: dict[str, Any], device: str, ways: tuple[str, ...], result: str = "logits"
) -> dict[tuple[str, str], Callable[[Any], Any]]:
    """Return (form, way) -> the call; a way that the device does not have is left out."""
    import copy

    from lit_compress.export.runtimes import Setting, torch_runner

    setting, runs = Setting((result,), device=device, dtype="bfloat16"), {}
    for name, net in nets.items():
        for way in ways:
            try:
                runs[name, way] = torch_runner(copy.deepcopy(net) if way == "compiled" else net, setting, way)
            except LookupError as error:
                print(f"{way}: {error}", flush=True)
    return runs


def _times(runs: dict[tuple[str, str], Any], inputs: dict[str, Any], device: str) -> list[dict[str, Any]]:
    """Return median, p10 and p90 of all, and their speed-ups over the dense model in the same way."""
    from dataclasses import asdict

    from lit_compress.utils.timing import in_turns, speedup, summary

    times = dict(
        zip(runs, in_turns([partial(run, inputs) for run in runs.values()], ROUNDS, device=device), strict=True)
    )
    return [
        {"form": form, "way": way, **summary(record), "over_dense": asdict(speedup(times["dense", way], record))}
        for (form, way), record in times.items()
    ]


def _size(net: Any, dense: Any, device: str) -> dict[str, Any]:
    """Return the density, the MB of the weights and the peak MB of a forward, weights included."""
    from lit_compress.models.accounting import dense_site_params, stored_density

    weights, place = sum(p.numel() * p.element_size() for p in net.parameters()), torch.device(device)
    inputs = {name: torch.as_tensor(value, device=device) for name, value in _inputs(*MEMORY_SHAPE).items()}
    with torch.inference_mode():
        peak = peak_of(partial(net, **inputs), place) + weights
    density = stored_density(net) * dense_site_params(net) / dense_site_params(dense)
    return {"density": density, "weights_mb": weights / 1e6, "peak_mb": peak / 1e6}


def peak_of(call: Callable[[], object], device: torch.device) -> int:
    """Return the most bytes that a call adds to those in use on ``device``; 0, and no call, for the CPU."""
    if device.type == "cpu":
        return 0
    before = torch.accelerator.memory_allocated(device)
    torch.accelerator.reset_peak_memory_stats(device)
    call()
    return int(torch.accelerator.max_memory_allocated(device) - before)


def _mixed(nets: dict[str, Any], device: str) -> list[dict[str, Any]]:
    """Return texts a second of texts of mixed lengths: in any order, by length, and without padding."""
    import copy

    import numpy as np

    from benchmarks.device.mixed import PACKED_STEP, RESULT, Packed, mixed_calls
    from lit_compress.utils.timing import in_turns

    drawn = np.random.default_rng(0).lognormal(4.0, 0.7, MIXED_TEXTS)
    lengths, limit = drawn.clip(8, max(LENGTHS)).astype(int), max(*LENGTHS, PACKED_STEP)
    ends = {form: Packed(copy.deepcopy(net).float().cpu(), limit) for form, net in nets.items()}
    runs = _runners(nets, device, ("eager", "graphs")), _runners(ends, device, ("eager", "graphs"), RESULT)
    calls = dict[tuple[str, str], Callable[[], object]]()
    for form in nets:
        padded, packed = ({way: (run, device) for (of, way), run in some.items() if of == form} for some in runs)
        made = mixed_calls(lengths, _inputs, padded, packed, limit, VOCABULARY)
        calls |= {(form, way): call for way, call in made.items()}
    times = in_turns(list(calls.values()), 3, warm_up=1, device=device)
    return [
        {"form": form, "way": name, "texts_a_second": 1000 * MIXED_TEXTS / median(record)}
        for (form, name), record in zip(calls, times, strict=True)
    ]


# ------------------------------------------------------------------------------------------------- training


def training(device: str, end: float, keep: Row, done: Collection[Any] = ()) -> None:
    """Run a short `fit` of every method but those ``done``, in a process of its own; keep what its steps took."""
    from benchmarks.scaling.run import write_inputs

    width, layers = TRAINED
    with tempfile.TemporaryDirectory() as work:
        write_inputs(Path(work), width, layers, (WORDS, WORDS), TEXTS)
        left_over = [name for name in dict.fromkeys((*FIRST, *METHODS)) if key({"method": name}) not in done]
        dense = None  # of this machine and hour
        for method in dict.fromkeys(["dense", *left_over] if left_over else []):
            if (left := end - time.monotonic()) < 5:
                return
            try:
                rows = apart(steps, method, device, work, seconds=left)
            except (Exception, SystemExit) as error:
                rows = [failed(error)]
            if method == "dense":
                dense = rows[0].get("ms")
            for row in rows if method in left_over else []:
                keep({"method": method, "dense_ms": dense, **row})


TRAINED, WORDS = (768, 12), 126


def steps(method: str, device: str, work: str) -> list[dict[str, Any]]:
    """Return what a training step of every stage takes; ``dense``: fine-tuning. The run ends before its export."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
    from quick import quick_runs

    from benchmarks.device.step_times import Done, StepTimes
    from lit_compress.__main__ import main

    fine_tuned = ["--model.dense.epochs", "2"] if method == "dense" else ["--model.teacher", f"{work}/net"]
    name = {"dense": "SVD", LABELS: "LPAF"}.get(method, method)
    words = ["--model", name, *METHODS[name]]
    words += ["--model.distillation.alpha", "0", "--model.distillation.alpha_layers", "0"] if method == LABELS else []
    StepTimes.last, StepTimes.rows = "dense" if method == "dense" else None, []
    with tempfile.TemporaryDirectory() as run, quick_runs(), contextlib.suppress(Done):
        main([
            "fit", *words, "--model.density", "0.25", *fine_tuned, "--model.backbone", f"{work}/net",
            "--data.task", "sst2", "--data.path", work, "--data.batch_size", "32", "--device", device,
            "--trainer.precision", "bf16-mixed", "--trainer.enable_progress_bar", "false",
            "--trainer.logger", "false", "--run_dir", f"{run}/run",
            "--trainer.callbacks+=benchmarks.device.step_times.StepTimes",
        ])  # fmt: skip
    return StepTimes.rows


# ------------------------------------------------------------------------------------------------- factorize


def factorize(device: str, end: float, keep: Row, done: Collection[Any] = ()) -> None:
    """Time the command for BERT-base, calibration by K-FAC and all checks included."""
    if done:
        return
    from argparse import Namespace

    from benchmarks.speed.one_shot import measure

    left = end - time.monotonic()
    if left < 40:
        raise UserError(f"{left:.0f} s are left")
    options = Namespace(threads=8, list=None, listed=set(), examples=1024)
    keep(apart(measure, options, timing.BERT_BASE, {}, seconds=left))


PARTS = {"answers": answers, "mixed": mixed, "compiled": compiled, "training": training, "factorize": factorize}

if __name__ == "__main__":
    main()
