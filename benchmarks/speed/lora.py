"""LoRA compared with full retraining of a factorized model: time of a step and peak memory, BERT-base shapes.

    python -m benchmarks.speed.lora [--threads 1] [--rounds 4] [--precision 32] [--shapes bert-base]

A step of the stage ``retrain`` of SVD at density 0.25, and at 1 (the dense model), with all parameters and with LoRA
(rank 16): forward, loss, backward, clipping, AdamW, zeroing; batches of 8 x 128 random tokens. The four take turns;
ratios are medians over the rounds. Memory is the peak of a process of its own, which makes two steps, less that of one
that only loads the model. Writes benchmarks/speed/results/lora/<shape>-<precision>.json.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import common, timing
from lit_compress.methods.baselines import SVD
from lit_compress.stages.lora import Retraining

SCRIPT = "speed/lora"
BATCH, LENGTH = 8, 128
DENSITIES = (0.25, 1.0)
VARIANTS = {f"{part} {density:g}": (density, part) for density in DENSITIES for part in ("all", "lora")}
LOADED = "loaded"


def step_of(variant: str, folder: Path, precision: str) -> tuple[Any, dict[str, int]]:
    """Return a function that makes a step, and how many parameters there are and are trained."""
    parameters: Any
    density, parameters = VARIANTS[variant.removeprefix(f"{LOADED} ")]
    method: Any = SVD(backbone="unused", density=density, retrain=Retraining(parameters=parameters))
    stage = method.stages()[-1]
    method.prepare(stage, 0, folder, None)
    method.configure_model()
    method.train()
    stage.set_total_steps(100)
    type(method).trainer = property(lambda self: self._at)
    method._at = timing.At(50)
    trained = [p for p in method.net.parameters() if p.requires_grad]
    counts = {"trained": sum(p.numel() for p in trained), "all": sum(p.numel() for p in method.net.parameters())}
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    batch = timing.random_batch(method.net, "cpu", BATCH, LENGTH)

    def step() -> float:
        start = time.perf_counter()
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else contextlib.nullcontext():
            loss = sum(stage.losses(method, batch).values())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        return time.perf_counter() - start

    return step, counts


def peak(shape: str, variant: str, options: argparse.Namespace) -> float:
    """Return the peak MiB of a process that makes two steps of a variant, or with ``loaded`` before it none."""
    words = ["--peak", variant, "--shapes", shape, "--precision", options.precision, "--threads", options.threads]
    return float(timing.again(SCRIPT, *words, **timing.ALLOCATOR).split()[-1])


def measure(shape: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return seconds, ratios, counts and memory of all variants of a model."""
    with tempfile.TemporaryDirectory() as work:
        timing.make_folder(shape, Path(work))
        made = {variant: step_of(variant, Path(work), options.precision) for variant in VARIANTS}
        for step, _ in made.values():
            step()
        seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
        for _ in range(options.rounds):
            for variant, (step, _) in made.items():
                seconds[variant].append(step())
        counts = {variant: found for variant, (_, found) in made.items()}
    del made
    peaks = {v: peak(shape, v, options) - peak(shape, f"{LOADED} {v}", options) for v in VARIANTS}
    pairs = {f"{d:g}": (f"lora {d:g}", f"all {d:g}") for d in DENSITIES}
    return {
        "seconds": seconds, "parameters": counts, "mib": peaks, "allocator": timing.ALLOCATOR,
        "ratio": {name: timing.ratio(seconds[a], seconds[b]) for name, (a, b) in pairs.items()},
        "memory": {name: peaks[a] / peaks[b] for name, (a, b) in pairs.items()},
    }  # fmt: skip


def main() -> None:
    """Measure every shape that is asked for and store it."""
    parser = common.parser(
        SCRIPT, __doc__, rounds=4, precision=timing.PRECISIONS, shapes=(timing.BERT_BASE, timing.MINILM)
    )
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.peak:
        with tempfile.TemporaryDirectory() as work:
            timing.make_folder(options.shapes[0], Path(work))
            step, _ = step_of(options.peak, Path(work), options.precision)
        timing.print_peak((lambda: None) if options.peak.startswith(LOADED) else step, "cpu")
        return
    setting = {"threads": options.threads, "precision": options.precision, "batch": BATCH, "length": LENGTH}
    for shape in options.shapes:
        timing.store(options, shape, measure(shape, options), f"-{options.precision}", setting=setting)


if __name__ == "__main__":
    main()
