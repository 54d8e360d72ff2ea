"""Time and memory of LPAF's stages against dense fine-tuning, interleaved in one run.

    python benchmarks/speed.py [--threads 2] [--rounds 4] [--precision 32] [--only steps memory factorize help]

A step is what the stage does in a fit, without distillation on either side: forward, loss, backward, scores, clipping,
AdamW, zeroing. The variants take turns within a round; a ratio is the median over rounds of variant / dense of the same
round. Memory is the peak of a process of its own (CUDA: the allocator's peak). Writes benchmarks/results/speed/*.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import peak_mib

from lit_compress.export.report import commit, hardware, versions
from lit_compress.families import find_sites
from lit_compress.importance import Weighting
from lit_compress.methods import LPAF, SVD
from lit_compress.methods.lpaf import MixedRank
from lit_compress.methods.pruning_stage import Pruning
from lit_compress.surgery import save_net

RESULTS = Path(__file__).resolve().parent / "results" / "speed"
SHAPES = {
    "bert-base": {},
    "minilm-l6-h384": {
        "hidden_size": 384,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "intermediate_size": 1536,
    },
}
# glibc keeps freed tensors below 32 MiB in a heap that fragments; mapped one by one, the resident size is what is alive
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536"}
DENSITY, BATCH, LENGTH = 0.25, 32, 128
MODES = ("sequential", "concat", "accumulated")
# `accumulated`: two passes over half batches, two of which make a step (batch_size 16, accumulate_grad_batches 2)
VARIANTS = ("dense", "prune", "svd", *(f"mixed {m}{half}" for m in MODES for half in ("", " p=0")))


class At:
    """Stands for a trainer at a step."""

    def __init__(self, step: int) -> None:
        self.global_step = step


def make_folder(shape: str, folder: Path, **settings: Any) -> None:
    """Write a random net with a random row importance, as a pruning stage would leave it; ``settings`` come last."""
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForSequenceClassification

    torch.manual_seed(0)
    net = AutoModelForSequenceClassification.from_config(AutoConfig.for_model("bert", **SHAPES[shape] | settings))
    rows: dict[str, torch.Tensor] = {}
    for site in find_sites(net):
        weight = net.get_submodule(site.name).weight
        for weighting in Weighting.__args__:
            rows[f"{site.name}/{weighting}"] = torch.rand(len(weight), dtype=torch.float64)
    save_file(rows, folder / "importance.safetensors")
    save_net(net, folder)


def step_of(variant: str, folder: Path, precision: str, device: str) -> Any:
    """Return a function that makes one training step of a variant."""
    mode = "concat" if "concat" in variant else "sequential"
    method: Any
    if variant == "svd":
        method = SVD(backbone="unused", density=DENSITY)
    else:
        method = LPAF(backbone="unused", density=DENSITY, prune=Pruning(), retrain=MixedRank(double_forward=mode))
    names = {"dense": "dense", "prune": "prune"}
    stage = next(s for s in method.stages() if s.name == names.get(variant, "retrain"))
    method.enter(stage, 0, folder, None)
    method.configure_model()
    method.to(device).train()
    steps = 100  # of the imagined stage; pruning stands in its ramp, mixing at p_init / 2 or 0
    stage.begin(steps)
    at = 40 if variant == "prune" else 60 if "p=0" in variant else 25
    type(method).trainer = property(lambda self: self._at)
    method._at = At(at)
    optimizer = torch.optim.AdamW(method.net.parameters(), lr=1e-5, fused=True)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, method.net.config.vocab_size, (BATCH, LENGTH), generator=generator).to(device)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, 0] % 2}
    pieces = 2 if "accumulated" in variant else 1
    batches = [{key: value.chunk(pieces)[i] for key, value in batch.items()} for i in range(pieces)]
    count = 0

    def step() -> float:
        nonlocal count
        count += 1
        method.micro_seed = count
        if device == "cuda":
            torch.cuda.synchronize()
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
        stage.after_step(method.net, at + count)  # every tenth step ranks the scores anew
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    return step


def time_steps(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Let every variant take turns with dense fine-tuning, one pair after another: all at once fill the memory."""
    dense = step_of("dense", folder, options.precision, options.device)
    dense()
    times: dict[str, dict[str, list[float]]] = {}
    ratios: dict[str, dict[str, float]] = {}
    for variant in options.variants:
        if variant == "dense":
            continue
        step = step_of(variant, folder, options.precision, options.device)
        step()
        pairs = [(step(), dense()) for _ in range(options.rounds)]
        found = sorted(a / b for a, b in pairs)
        times[variant] = {"step": [a for a, _ in pairs], "dense": [b for _, b in pairs]}
        ratios[variant] = {"median": median(found), "min": found[0], "max": found[-1]}
        del step
    return {"seconds": times, "ratio": ratios}


def peak_memory(shape: str, variant: str, options: argparse.Namespace) -> float:
    """Return the peak MiB of a process that makes two steps of a variant."""
    code = [sys.executable, __file__, "--peak", variant, "--shape", shape, "--precision", options.precision,
            "--threads", str(options.threads), "--device", options.device]  # fmt: skip
    environment = os.environ | ALLOCATOR
    return float(subprocess.run(code, capture_output=True, text=True, check=True, env=environment).stdout.split()[-1])


def report_peak(options: argparse.Namespace) -> None:
    """Make two steps of one variant and print the peak MiB; the empty process is not counted."""
    with tempfile.TemporaryDirectory() as work:
        make_folder(options.shape, Path(work))
        step = step_of(options.peak, Path(work), options.precision, options.device)
    step()
    step()
    if options.device == "cuda":
        print(torch.cuda.max_memory_allocated() / 2**20)
    else:
        print(peak_mib())


def time_factorize(folder: Path) -> dict[str, Any]:
    """Factorize all 72 matrices of BERT-base with a weighted SVD, as LPAF's last stage does."""
    method = LPAF(backbone="unused", density=DENSITY)
    method.enter(method.stages()[-1], 0, folder, None)
    start = time.perf_counter()
    method.configure_model()
    return {"seconds": time.perf_counter() - start, "matrices": len(method.stage._layers)}


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
    pairs = [a / b for a, b in zip(*times.values(), strict=True)]
    return {"seconds": times, "ratio": {"median": median(pairs), "min": min(pairs), "max": max(pairs)}}


def main() -> None:
    """Measure what was asked for and store it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--precision", choices=["32", "bf16"], default="32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="*", default=["steps", "memory", "factorize", "help"])
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS))
    parser.add_argument("--shape", default="bert-base", help=argparse.SUPPRESS)
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.peak:
        report_peak(options)
        return
    RESULTS.mkdir(parents=True, exist_ok=True)
    setting = {"threads": options.threads, "precision": options.precision, "device": options.device,
               "batch": BATCH, "length": LENGTH, "density": DENSITY}  # fmt: skip
    frame = {"setting": setting, "versions": versions(), "hardware": hardware(), "commit": commit()}

    def store(name: str, value: dict[str, Any]) -> None:
        path = RESULTS / f"{name}-{options.device}-{options.precision}.json"
        path.write_text(json.dumps({"name": name, **value, **frame}, indent=1) + "\n")
        print(path.name, json.dumps(value.get("ratio", value)), flush=True)

    if "help" in options.only:
        store("help", time_help())
    for shape in options.shapes:
        with tempfile.TemporaryDirectory() as work:
            make_folder(shape, Path(work))
            if "factorize" in options.only:
                store(f"factorize-{shape}", time_factorize(Path(work)))
            if "steps" in options.only:
                store(f"steps-{shape}", time_steps(options, Path(work)))
        if "memory" in options.only:
            peaks = {v: peak_memory(shape, v, options) for v in options.variants}
            store(
                f"memory-{shape}",
                {"mib": peaks, "allocator": ALLOCATOR, "ratio": {v: p / peaks["dense"] for v, p in peaks.items()}},
            )


if __name__ == "__main__":
    main()
