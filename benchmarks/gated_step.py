"""Time of a gated training step against the same step of the dense net, both with CoFi's distillation, interleaved.

    python benchmarks/gated_step.py [--threads 1] [--rounds 6] [--precision bf16] [--shapes minilm-l6-h384]

A step: gates drawn, teacher, student, matched layers, Lagrangian, backward, clipping, AdamW, clamping. Writes
benchmarks/results/gated_step/*.json.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from common import write
from speed import BATCH, LENGTH, SHAPES, At, make_folder

from lit_compress.export.report import commit, hardware, versions
from lit_compress.methods import CoFi
from lit_compress.methods.cofi import CoFiPruning


def step_of(name: str, folder: Path, precision: str, device: str) -> Callable[[], float]:
    """Return a function that makes one step of a stage of CoFi on the net in ``folder`` and returns its seconds."""
    method = CoFi(backbone="unused", density=0.4, prune=CoFiPruning(init="finetuned"))
    stage = next(s for s in method.stages() if s.name == name)
    method.enter(stage, 0, folder, folder)
    method.configure_model()
    method.to(device).train()
    for teacher in method._teacher:
        teacher.to(device)
    stage.begin(100)
    type(method).trainer = property(lambda self: At(50))
    method.log = method.log_dict = lambda *_, **__: None
    weights = [p for p in method.net.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW([{"params": weights}, *stage.own_groups(method.net)], lr=1e-5, fused=True)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, method.net.config.vocab_size, (BATCH, LENGTH), generator=generator).to(device)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, 0] % 2}

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    def step() -> float:
        method.micro_seed = 1
        wait()
        start = time.perf_counter()
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16) if precision == "bf16" else contextlib.nullcontext():
            loss = method.training_step(batch, 0)
        loss.backward()
        stage.before_step(method.net)
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        stage.after_step(method.net, 51)
        wait()
        return time.perf_counter() - start

    return step


def main() -> None:
    """Measure what was asked for and store it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--precision", choices=["32", "bf16"], default="32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shapes", nargs="*", default=["minilm-l6-h384"], choices=list(SHAPES))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for shape in options.shapes:
        with tempfile.TemporaryDirectory() as work:
            make_folder(shape, Path(work))
            dense, gated = (step_of(n, Path(work), options.precision, options.device) for n in ("retrain", "prune"))
            dense(), gated()
            pairs = [(gated(), dense()) for _ in range(options.rounds)]
        found = sorted(a / b for a, b in pairs)
        ratio = {"median": median(found), "min": found[0], "max": found[-1]}
        print(shape, ratio, flush=True)
        result = {
            "seconds": {"gated": [a for a, _ in pairs], "dense": [b for _, b in pairs]}, "ratio": ratio,
            "setting": vars(options) | {"batch": BATCH, "length": LENGTH}, "versions": versions(),
            "hardware": hardware(), "commit": commit(),
        }  # fmt: skip
        write("gated_step", f"{shape}-{options.device}-{options.precision}", result)


if __name__ == "__main__":
    main()
