"""Time and memory of LPAF's stages against dense fine-tuning, interleaved in one run.

    python -m benchmarks.speed.run [--threads 2] [--rounds 4] [--precision 32] [--only steps memory factorize help]

A step is what the stage does in a fit, without distillation on either side: forward, loss, backward, scores, clipping,
AdamW, zeroing. The variants take turns within a round; a ratio is the median over rounds of variant / dense of the same
round. Memory is the peak of a process of its own (CUDA: the allocator's peak). Writes
benchmarks/speed/results/*.json.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import common, timing
from lit_compress.methods.baselines import SVD
from lit_compress.methods.lpaf import LPAF, LPAFSettings, MixedRank

STUDY = "speed"
DENSITY = 0.25
MODES = ("sequential", "accumulated")  # on an accelerator the two forwards are one batch
# `accumulated`: two passes over half batches, two of which make a step (batch_size 16, accumulate_grad_batches 2)
VARIANTS = ("dense", "prune", "svd", *(f"mixed {m}{half}" for m in MODES for half in ("", " p=0")))


def step_of(variant: str, folder: Path, precision: str, device: str) -> Any:
    """Return a function that makes one training step of a variant."""
    method: Any
    if variant == "svd":
        method = SVD(backbone="unused", density=DENSITY)
    else:
        method = LPAF(backbone="unused", density=DENSITY, prune=LPAFSettings(), retrain=MixedRank())
    names = {"dense": "dense", "prune": "prune"}
    stage = next(s for s in method.stages() if s.name == names.get(variant, "retrain"))
    method.prepare(stage, 0, folder, None)
    method.configure_model()
    method.to(device).train()
    steps = 100  # of the imagined stage; pruning is in its ramp, mixing at p_init / 2 or 0
    stage.set_total_steps(steps)
    at = 40 if variant == "prune" else 60 if "p=0" in variant else 25
    type(method).trainer = property(lambda self: self._at)
    method._at = timing.At(at)
    optimizer = torch.optim.AdamW(method.net.parameters(), lr=1e-5, fused=True)
    batch = timing.random_batch(method.net, device)
    pieces = 2 if "accumulated" in variant else 1
    batches = [{key: value.chunk(pieces)[i] for key, value in batch.items()} for i in range(pieces)]
    count = 0

    def step() -> float:
        nonlocal count
        count += 1
        method.step_seed = method.own_seed = count
        timing.wait(device)
        start = time.perf_counter()
        optimizer.zero_grad()
        autocast = torch.autocast(device, torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()
        for piece in batches:
            with autocast:
                loss = sum(stage.losses(method, piece).values())
            (loss / pieces).backward()
        stage.before_step(method.net)
        torch.nn.utils.clip_grad_norm_(method.net.parameters(), 1.0)
        optimizer.step()
        stage.after_step(method.net, at + count)  # every tenth step ranks the scores again
        timing.wait(device)
        return time.perf_counter() - start

    return step


def time_steps(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Let every variant take turns with dense fine-tuning, one pair after another: all at once fill the memory."""
    dense = step_of("dense", folder, options.precision, options.device)
    dense()
    times: dict[str, dict[str, list[float]]] = {}
    for variant in options.variants:
        if variant == "dense":
            continue
        step = step_of(variant, folder, options.precision, options.device)
        step()
        pairs = [(step(), dense()) for _ in range(options.rounds)]
        times[variant] = {"step": [a for a, _ in pairs], "dense": [b for _, b in pairs]}
        del step
    return {"seconds": times, "ratio": {v: timing.ratio(t["step"], t["dense"]) for v, t in times.items()}}


def peak_memory(shape: str, variant: str, options: argparse.Namespace) -> float:
    """Return the peak MiB of a process that makes two steps of a variant."""
    words = ["--peak", variant, "--shapes", shape, "--precision", options.precision, "--threads", options.threads,
             "--device", options.device]  # fmt: skip
    return float(timing.again(STUDY, *words, **timing.ALLOCATOR).split()[-1])


def print_peak(options: argparse.Namespace) -> None:
    """Make two steps of one variant and print the peak MiB."""
    with tempfile.TemporaryDirectory() as work:
        timing.make_folder(options.shapes[0], Path(work))
        step = step_of(options.peak, Path(work), options.precision, options.device)
    timing.print_peak(step, options.device)


def time_factorize(folder: Path) -> dict[str, Any]:
    """Factorize all 72 matrices of BERT-base with a weighted SVD, as LPAF's last stage does."""
    method = LPAF(backbone="unused", density=DENSITY)
    stage: Any = method.stages()[-1]
    method.prepare(stage, 0, folder, None)
    start = time.perf_counter()
    method.configure_model()
    return {"seconds": time.perf_counter() - start, "matrices": len(stage._layers)}


def time_help(rounds: int = 7) -> dict[str, Any]:
    """Time `python -m lit_compress --help` against importing Lightning."""
    commands = {
        "help": [sys.executable, "-m", "lit_compress", "--help"],
        "import lightning.pytorch": [sys.executable, "-c", "import lightning.pytorch"],
    }
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, command in commands.items():
            start = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            times[name].append(time.perf_counter() - start)
    return {"seconds": times, "ratio": timing.ratio(*times.values())}


def main() -> None:
    """Measure what was asked for and store it."""
    parts = ("steps", "memory", "factorize", "help")
    parser = common.parser(
        STUDY, __doc__, threads=2, rounds=4, precision=timing.PRECISIONS, device=timing.DEVICES, only=parts,
        shapes=tuple(timing.SHAPES),
    )  # fmt: skip
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, metavar="VARIANT", default=list(VARIANTS))
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.peak:
        print_peak(options)
        return
    setting = {"threads": options.threads, "precision": options.precision, "device": options.device,
               "batch": timing.BATCH, "length": timing.LENGTH, "density": DENSITY}  # fmt: skip

    def keep(name: str, value: dict[str, Any]) -> None:
        timing.store(options, name, value, f"-{options.device}-{options.precision}", setting=setting)

    if "help" in options.only:
        keep("help", time_help())
    for shape in options.shapes:
        with tempfile.TemporaryDirectory() as work:
            timing.make_folder(shape, Path(work))
            if "factorize" in options.only:
                keep(f"factorize-{shape}", time_factorize(Path(work)))
            if "steps" in options.only:
                keep(f"steps-{shape}", time_steps(options, Path(work)))
        if "memory" in options.only:
            peaks = {v: peak_memory(shape, v, options) for v in options.variants}
            shares = {v: peak / peaks["dense"] for v, peak in peaks.items()}
            keep(f"memory-{shape}", {"mib": peaks, "allocator": timing.ALLOCATOR, "ratio": shares})


if __name__ == "__main__":
    main()
