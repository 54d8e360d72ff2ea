"""Time of a gated training step against the same step of the dense model, both with CoFi's distillation, interleaved.

    python -m benchmarks.cofi.gated_step [--threads 1] [--rounds 6] [--precision bf16] [--shapes minilm-l6-h384]

A step: gates drawn, teacher, student, matched layers, Lagrangian, backward, clipping, AdamW, clamping. Writes
benchmarks/cofi/results/gated_step/*.json.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import common, timing
from lit_compress.methods.cofi.cofi import CoFi, CoFiPruning
from lit_compress.models.storage import load_net
from lit_compress.utils.devices import move


class Alone(CoFi):
    """CoFi at a step, without a Trainer and logs."""

    trainer: Any = timing.At(50)

    def log(self, *_: Any, **__: Any) -> None:
        """Log nothing."""

    def log_dict(self, *_: Any, **__: Any) -> None:
        """Log nothing."""


def step_of(name: str, folder: Path, precision: str, device: str) -> Callable[[], float]:
    """Return a function that makes one step of a stage of CoFi on the model in ``folder`` and returns its seconds."""
    method = Alone(backbone="unused", density=0.4, prune=CoFiPruning(init="finetuned"))
    stage = next(s for s in method.stages() if s.name == name)
    method.prepare(stage, 0, folder, lambda: load_net(folder))
    method.configure_model()
    method.to(device).train()
    for teacher in method._teacher:
        move(teacher, torch.device(device))
    stage.set_total_steps(100)
    weights = [p for p in method.net.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW([{"params": weights}, *stage.param_groups(method.net)], lr=1e-5, fused=True)
    batch = timing.random_batch(method.net, device)

    def step() -> float:
        method.step_seed = method.own_seed = 1
        timing.wait(device)
        start = time.perf_counter()
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16) if precision == "bf16" else contextlib.nullcontext():
            loss = method.training_step(batch, 0)
        loss.backward()
        stage.before_step(method.net)
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        stage.after_step(method.net, 51)
        timing.wait(device)
        return time.perf_counter() - start

    return step


def main() -> None:
    """Measure what was asked for and store it."""
    parser = common.parser(
        "cofi/gated_step", __doc__, rounds=6, precision=timing.PRECISIONS, device=timing.DEVICES,
        shapes=tuple(timing.SHAPES),
    )  # fmt: skip
    parser.set_defaults(shapes=[timing.MINILM])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for shape in options.shapes:
        with tempfile.TemporaryDirectory() as work:
            timing.make_folder(shape, Path(work))
            dense, gated = (step_of(n, Path(work), options.precision, options.device) for n in ("retrain", "prune"))
            dense(), gated()
            pairs = [(gated(), dense()) for _ in range(options.rounds)]
        seconds = {"gated": [a for a, _ in pairs], "dense": [b for _, b in pairs]}
        setting = {"threads": options.threads, "rounds": options.rounds, "precision": options.precision,
                   "device": options.device, "batch": timing.BATCH, "length": timing.LENGTH}  # fmt: skip
        value = {"seconds": seconds, "ratio": timing.ratio(seconds["gated"], seconds["dense"])}
        timing.store(options, f"{shape}-{options.device}-{options.precision}", value, setting=setting)


if __name__ == "__main__":
    main()
