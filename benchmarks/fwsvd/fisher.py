"""Time and memory of the Fisher pass against a training step and against one example at a time, interleaved.

    python -m benchmarks.fwsvd.fisher [--threads 2] [--rounds 4] [--only time memory] [--shapes bert-base]

The training step is forward, loss and backward with the gradients of all weights, in training mode, without an
optimizer: what the Fisher pass replaces, not what a fit costs. The loop is the definition: a backward per example, its
weight gradients squared and summed over rows and columns. A ratio is the median over rounds of two neighbours in the
same round; the loop does a part of the batch and is scaled up. Memory is the peak of a process of its own (CUDA: the
allocator's). Writes benchmarks/fwsvd/results/fisher/*.json.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import common, timing
from lit_compress.calibration.gradients import DiagonalFisher
from lit_compress.calibration.statistics import whole
from lit_compress.models.sites import find_sites
from lit_compress.numerics.losses import task_loss

SCRIPT = "fwsvd/fisher"
LOOP_EXAMPLES = 8  # of the batch
GOALS = {"fisher / step": 1.2, "loop / fisher": 5.0, "memory": 1.2}


def steps_of(options: argparse.Namespace, shape: str) -> dict[str, Callable[[], Any]]:
    """Return what is compared, on one random model and batch."""
    net = timing.random_bert(shape).to(options.device)
    sites = [site.name for site in find_sites(net)]
    weights = [net.get_submodule(name).weight for name in sites]
    batch = timing.random_batch(net, options.device, options.batch, options.length)

    def backward(rows: dict[str, torch.Tensor]) -> None:
        net.zero_grad()
        logits = net(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"]).logits
        task_loss(logits, rows["labels"], "classification").backward()

    def step() -> None:
        net.train()
        backward(batch)

    def fisher() -> None:
        net.zero_grad()
        whole(net, DiagonalFisher(sites=sites), [batch], "classification")

    def loop() -> None:
        net.eval()
        rows, columns = (
            [torch.zeros(w.shape[i], dtype=torch.float64, device=w.device) for w in weights] for i in (0, 1)
        )
        for i in range(LOOP_EXAMPLES):
            backward({name: column[i : i + 1] for name, column in batch.items()})
            for weight, row, column in zip(weights, rows, columns, strict=True):
                assert weight.grad is not None
                squares = weight.grad.square()
                row += squares.sum(1)
                column += squares.sum(0)

    return {"step": step, "fisher": fisher, "loop": loop}


def time_all(options: argparse.Namespace, shape: str) -> dict[str, Any]:
    """Let step, Fisher pass and loop take turns."""
    variants = steps_of(options, shape)
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for round_ in range(options.rounds + 1):
        for name, variant in variants.items():
            timing.wait(options.device)
            start = time.perf_counter()
            variant()
            timing.wait(options.device)
            if round_:  # the first one warms up
                scale = options.batch / LOOP_EXAMPLES if name == "loop" else 1
                seconds[name].append(scale * (time.perf_counter() - start))
    pairs = (("fisher", "step"), ("loop", "fisher"))
    return {
        "seconds": seconds,
        "ratio": {f"{above} / {below}": timing.ratio(seconds[above], seconds[below]) for above, below in pairs},
    }


def peak_memory(variant: str, options: argparse.Namespace, shape: str) -> float:
    """Return the peak MiB of a process that does a variant twice."""
    words = ["--peak", variant, "--shapes", shape, "--threads", options.threads, "--batch", options.batch,
             "--length", options.length, "--device", options.device]  # fmt: skip
    return float(timing.again(SCRIPT, *words, **timing.ALLOCATOR).split()[-1])


def main() -> None:
    """Measure what was asked for and store it."""
    shapes = (timing.MINILM, timing.BERT_BASE)
    parser = common.parser(
        SCRIPT, __doc__, threads=2, rounds=4, device=timing.DEVICES, only=("time", "memory"), shapes=shapes
    )
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.peak:
        timing.print_peak(steps_of(options, options.shapes[0])[options.peak], options.device)
        return
    setting = {"threads": options.threads, "device": options.device, "precision": "32", "batch": options.batch,
               "length": options.length, "loop_examples": LOOP_EXAMPLES}  # fmt: skip
    ending = f"-{options.device}-b{options.batch}-l{options.length}"
    for shape in options.shapes:
        if "time" in options.only:
            timing.store(options, f"time-{shape}", time_all(options, shape), ending, goals=GOALS, setting=setting)
        if "memory" in options.only:
            peaks = {variant: peak_memory(variant, options, shape) for variant in ("step", "fisher")}
            value = {"mib": peaks, "ratio": peaks["fisher"] / peaks["step"], "allocator": timing.ALLOCATOR}
            timing.store(options, f"memory-{shape}", value, ending, goals=GOALS, setting=setting)


if __name__ == "__main__":
    main()
