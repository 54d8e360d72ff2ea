"""Steps per second of a training step with one and two threads, on a quiet machine and next to a process that spins.

    python -m benchmarks.threads.run [--rounds 3] [--seconds 3] [--shapes quickstart minilm-l6-h384]

Every setting is a process of its own, because OMP_WAIT_POLICY is read when PyTorch is loaded; the settings take turns
within a round. `quiet` is as quiet as the machine is: nothing else may run. With one thread the policy has no meaning,
nobody waits. Writes benchmarks/threads/results/*.json.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from benchmarks import common, timing

STUDY = "threads"
MACHINES = ("quiet", "busy")
DEFAULT, PASSIVE = "default", "passive"  # of OMP_WAIT_POLICY; by default threads that wait spin for a while
SETTINGS = ((1, PASSIVE), (2, DEFAULT), (2, PASSIVE))
# batch and tokens: those of the quickstart; a small batch of sentences
SHAPES = {"quickstart": (32, 30), timing.MINILM: (16, 32)}


def make_net(shape: str) -> Any:
    """Return a model with random weights."""
    if shape != "quickstart":
        return timing.random_bert(shape)
    from benchmarks.quickstart import BACKBONE

    return timing.random_bert(timing.MINILM, vocab_size=4096, **BACKBONE)


def measure(shape: str, threads: int, seconds: float) -> float:
    """Return steps per second of forward, backward, clipping and AdamW, after a first step."""
    import torch

    torch.set_num_threads(threads)
    net = make_net(shape).train()
    batch = timing.random_batch(net, "cpu", *SHAPES[shape])
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-5, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        net(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()

    step()
    count, start = 0, time.perf_counter()
    while not count or time.perf_counter() - start < seconds:
        step()
        count += 1
    return count / (time.perf_counter() - start)


@contextlib.contextmanager
def machine(state: str) -> Iterator[None]:
    """Let a process without any waiting run next to, where the machine is to be busy."""
    if state == "quiet":
        yield
        return
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        other.kill()
        other.wait()


def in_a_process(shape: str, threads: int, policy: str, seconds: float) -> float:
    """Return :func:`measure` of a process with this policy."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "KMP_", "MKL_"))}
    if policy == PASSIVE:
        environment["OMP_WAIT_POLICY"] = "PASSIVE"
    line = [sys.executable, "-m", common.module(STUDY), "--one", "--shapes", shape, "--threads", threads,
            "--seconds", seconds]  # fmt: skip
    made = subprocess.run(list(map(str, line)), capture_output=True, text=True, check=True, env=environment)
    return float(made.stdout.split()[-1])


def chosen(shape: str) -> dict[str, Any]:
    """Return what a run takes on this machine if the environment does not say otherwise."""
    from lit_compress.models.accounting import dense_site_params
    from lit_compress.run.runner import SMALL

    weights = dense_site_params(make_net(shape))
    return {"weights": weights, "threads": 1 if weights < SMALL else os.cpu_count() or 1, "policy": PASSIVE}


def main() -> None:
    """Measure all settings and store them, a result per model."""
    parser = common.parser(STUDY, __doc__, rounds=3, shapes=tuple(SHAPES))
    parser.add_argument("--seconds", type=float, default=3.0, help="time that a process measures for")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(measure(options.shapes[0], options.threads, options.seconds))
        return
    cells = [(shape, *setting, state) for shape in options.shapes for setting in SETTINGS for state in MACHINES]
    found: dict[tuple[Any, ...], list[float]] = {cell: [] for cell in cells}
    for round_ in range(options.rounds):
        for shape, threads, policy, state in cells:
            with machine(state):
                found[shape, threads, policy, state].append(in_a_process(shape, threads, policy, options.seconds))
            speed = found[shape, threads, policy, state][-1]
            print(f"round {round_ + 1}: {shape}, {threads} threads, {policy}, {state}: {speed:.2f} steps/s", flush=True)
    for shape in options.shapes:
        rows = [
            {"threads": threads, "policy": policy} | {state: found[shape, threads, policy, state] for state in MACHINES}
            for threads, policy in SETTINGS
        ]
        about = {"batch": SHAPES[shape][0], "length": SHAPES[shape][1], "seconds": options.seconds}
        timing.store(options, shape, {"steps_per_second": rows}, chosen=chosen(shape), setting=about)


if __name__ == "__main__":
    main()
