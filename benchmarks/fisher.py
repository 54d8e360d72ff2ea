"""Time and memory of the Fisher pass against a training step and against one example at a time, interleaved.

    python benchmarks/fisher.py [--threads 2] [--rounds 4] [--only time memory] [--shapes bert-base minilm-l6-h384]

The training step is forward, loss and backward with the gradients of all weights, in training mode, without an
optimizer: what the Fisher pass replaces, not what a fit costs. The loop is the definition: a backward per example, its
weight gradients squared and summed over rows and columns. A ratio is the median over rounds of two neighbours in the
same round; the loop does a part of the batch and is scaled up. Memory is the peak of a process of its own (CUDA: the
allocator's). Writes benchmarks/results/fisher/*.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import peak_mib

from lit_compress.export.report import commit, hardware, versions
from lit_compress.families import find_sites
from lit_compress.fisher import estimate_fisher
from lit_compress.losses import task_loss

RESULTS = Path(__file__).resolve().parent / "results" / "fisher"
SHAPES = {
    "minilm-l6-h384": {
        "hidden_size": 384,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "intermediate_size": 1536,
    },
    "bert-base": {},
}
# glibc keeps freed tensors below 32 MiB in a heap that fragments; mapped one by one, the resident size is what is alive
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536"}
LOOP_EXAMPLES = 8  # of the batch
GOALS = {"fisher / step": 1.2, "loop / fisher": 5.0, "memory": 1.2}


def steps_of(options: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    """Return what is compared, on one random net and batch."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    torch.manual_seed(0)
    net = AutoModelForSequenceClassification.from_config(AutoConfig.for_model("bert", **SHAPES[options.shape]))
    net.to(options.device)
    sites = [site.name for site in find_sites(net)]
    weights = [net.get_submodule(name).weight for name in sites]
    ids = torch.randint(5, net.config.vocab_size, (options.batch, options.length), device=options.device)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, 0] % 2}

    def backward(rows: dict[str, torch.Tensor]) -> None:
        net.zero_grad()
        logits = net(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"]).logits
        task_loss(logits, rows["labels"], "classification").backward()

    def step() -> None:
        net.train()
        backward(batch)

    def fisher() -> None:
        net.zero_grad()
        estimate_fisher(net, [batch], "classification", sites)

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


def time_all(options: argparse.Namespace) -> dict[str, Any]:
    """Let step, Fisher pass and loop take turns."""
    variants = steps_of(options)
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for round_ in range(options.rounds + 1):
        for name, variant in variants.items():
            if options.device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            variant()
            if options.device == "cuda":
                torch.cuda.synchronize()
            if round_:  # the first one warms up
                scale = options.batch / LOOP_EXAMPLES if name == "loop" else 1
                seconds[name].append(scale * (time.perf_counter() - start))
    ratios = {}
    for above, below in (("fisher", "step"), ("loop", "fisher")):
        found = sorted(a / b for a, b in zip(seconds[above], seconds[below], strict=True))
        ratios[f"{above} / {below}"] = {"median": median(found), "min": found[0], "max": found[-1]}
    return {"seconds": seconds, "ratio": ratios}


def peak_memory(variant: str, options: argparse.Namespace) -> float:
    """Return the peak MiB of a process that does a variant twice."""
    code = [sys.executable, __file__, "--peak", variant, "--shapes", options.shape, "--threads", str(options.threads),
            "--batch", str(options.batch), "--length", str(options.length), "--device", options.device]  # fmt: skip
    environment = os.environ | ALLOCATOR
    return float(subprocess.run(code, capture_output=True, text=True, check=True, env=environment).stdout.split()[-1])


def report_peak(options: argparse.Namespace) -> None:
    """Do one variant twice and print the peak MiB."""
    variant = steps_of(options)[options.peak]
    variant()
    variant()
    if options.device == "cuda":
        print(torch.cuda.max_memory_allocated() / 2**20)
    else:
        print(peak_mib())


def main() -> None:
    """Measure what was asked for and store it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="*", default=["time", "memory"])
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for shape in options.shapes:
        options.shape = shape
        if options.peak:
            report_peak(options)
            continue
        setting = {"threads": options.threads, "device": options.device, "precision": "32", "batch": options.batch,
                   "length": options.length, "loop_examples": LOOP_EXAMPLES}  # fmt: skip
        frame = {"goals": GOALS, "setting": setting, "versions": versions(), "hardware": hardware(), "commit": commit()}
        found: dict[str, dict[str, Any]] = {}
        if "time" in options.only:
            found["time"] = time_all(options)
        if "memory" in options.only:
            peaks = {variant: peak_memory(variant, options) for variant in ("step", "fisher")}
            found["memory"] = {"mib": peaks, "ratio": peaks["fisher"] / peaks["step"], "allocator": ALLOCATOR}
        for kind, value in found.items():
            name = f"{kind}-{options.shape}"
            RESULTS.mkdir(parents=True, exist_ok=True)
            path = RESULTS / f"{name}-{options.device}-b{options.batch}-l{options.length}.json"
            path.write_text(json.dumps({"name": name, **value, **frame}, indent=1) + "\n")
            print(path.name, json.dumps(value["ratio"]), flush=True)


if __name__ == "__main__":
    main()
