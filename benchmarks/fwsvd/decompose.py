"""Time of the weighted decompositions of single matrices: BERT-base's 72, one of Llama.

    python -m benchmarks.fwsvd.decompose [--threads 2] [--only bert-base llama-mlp]

Random weights and importances; one run each, so the shapes that occur many times are the ones to trust. Times are
[elapsed, processor] seconds; on a machine that others use, too, the second is the one to trust: it is the sum over
threads. Writes benchmarks/fwsvd/results/decompose/*.json.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import common, timing
from lit_compress.numerics.decompose import weighted_svd
from lit_compress.numerics.ranks import rank_for_density

BERT_BASE = {(768, 768): 48, (3072, 768): 12, (768, 3072): 12}
LLAMA_MLP = (4096, 11008)
DENSITY = 0.25


def importance_of(axis: str, shape: tuple[int, int], generator: torch.Generator) -> Any:
    """Return a random importance over some decades for ``axis``, None for ``none``."""
    rows, columns = (torch.randn(size, generator=generator, dtype=torch.float64).exp() for size in shape)
    return {"none": None, "out": rows, "in": columns}[axis]


def timed(action: Callable[[], Any]) -> tuple[list[float], Any]:
    """Return [elapsed, processor] seconds and the result."""
    start = time.perf_counter(), time.process_time()
    result = action()
    return [round(time.perf_counter() - start[0], 3), round(time.process_time() - start[1], 3)], result


def nested(shapes: dict[tuple[int, int], int]) -> dict[str, Any]:
    """Decompose every matrix once at the rank of the density, plain and by columns."""
    found: dict[str, Any] = {}
    for axis in ("none", "in"):
        generator = torch.Generator().manual_seed(0)
        seconds: dict[str, list[list[float]]] = {}
        for shape, count in shapes.items():
            rank = rank_for_density(DENSITY, *shape)
            for _ in range(count):
                weight = torch.randn(shape, generator=generator)
                importance = importance_of(axis, shape, generator)
                where: Any = "out" if axis == "none" else axis
                spent, _ = timed(lambda: weighted_svd(weight, importance, where, components=rank).factors(rank))  # noqa: B023
                seconds.setdefault(f"{shape[0]}x{shape[1]} rank {rank}", []).append(spent)
        pairs = [pair for runs in seconds.values() for pair in runs]
        found[axis] = {"total": [round(sum(kind), 2) for kind in zip(*pairs, strict=True)], "seconds": seconds}
    return found


def main() -> None:
    """Measure what was asked for and store it."""
    jobs: dict[str, Callable[[], dict[str, Any]]] = {
        "bert-base": lambda: nested(BERT_BASE),
        "llama-mlp": lambda: nested({LLAMA_MLP: 1}),
    }
    options = common.parser("fwsvd/decompose", __doc__, threads=2, only=tuple(jobs)).parse_args()
    torch.set_num_threads(options.threads)
    for name in options.only:
        load = os.getloadavg()[0]
        setting = {"threads": options.threads, "device": "cpu", "density": DENSITY, "load_before": round(load, 2)}
        timing.store(options, name, {"result": jobs[name]()}, f"-cpu-{options.threads}", setting=setting)


if __name__ == "__main__":
    main()
