"""Time of the weighted decompositions of single matrices: BERT-base's 72, one of Llama, the element-wise ones.

    python -m benchmarks.fwsvd.decompose [--threads 2] [--only bert-base llama-mlp element]

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
from torch import Tensor

from benchmarks import common, timing
from lit_compress.numerics.decompose import decompose, decompose_elementwise, weighted_error, weighted_svd
from lit_compress.numerics.ranks import rank_for_density

BERT_BASE = {(768, 768): 48, (3072, 768): 12, (768, 3072): 12}
LLAMA_MLP = (4096, 11008)
ELEMENT = [(384, 384), (1536, 384)]  # MiniLM
ELEMENT_RANKS = (38, 115, 192)
DENSITY = 0.25
EXAMPLES, TOKENS = 64, 16


def importance_of(axis: str, shape: tuple[int, int], generator: torch.Generator) -> Any:
    """Return a random importance over some decades for ``axis``, None for ``none``."""
    rows, columns = (torch.randn(size, generator=generator, dtype=torch.float64).exp() for size in shape)
    return {"none": None, "out": rows, "in": columns, "both": (rows, columns)}[axis]


def fisher(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Return the mean square over examples of gradients that are sums over tokens, with 30 factors on each side."""
    scale, loadings = [], []
    for size in shape:
        scale.append(torch.randn(size, generator=generator).exp())
        loadings.append(torch.randn(30, size, generator=generator) / 5)
    total = torch.zeros(shape)
    for _ in range(EXAMPLES):
        deltas, inputs = (
            (torch.randn(TOKENS, 30, generator=generator) @ load + torch.randn(TOKENS, len(s), generator=generator)) * s
            for load, s in zip(loadings, scale, strict=True)
        )
        total += (deltas.T @ inputs).square()
    return total.double() / EXAMPLES


def timed(action: Callable[[], Any]) -> tuple[list[float], Any]:
    """Return [elapsed, processor] seconds and the result."""
    start = time.perf_counter(), time.process_time()
    result = action()
    return [round(time.perf_counter() - start[0], 3), round(time.process_time() - start[1], 3)], result


def nested(shapes: dict[tuple[int, int], int]) -> dict[str, Any]:
    """Decompose every matrix once at the rank of the density, plain, by columns and by both."""
    found: dict[str, Any] = {}
    for axis in ("none", "in", "both"):
        generator = torch.Generator().manual_seed(0)
        seconds: dict[str, list[list[float]]] = {}
        for shape, count in shapes.items():
            rank = rank_for_density(DENSITY, *shape)
            for _ in range(count):
                weight = torch.randn(shape, generator=generator)
                importance = importance_of(axis, shape, generator)
                where: Any = "out" if axis == "none" else axis
                spent, _ = timed(lambda: decompose(weight, rank, importance, where))  # noqa: B023
                seconds.setdefault(f"{shape[0]}x{shape[1]} rank {rank}", []).append(spent)
        pairs = [pair for runs in seconds.values() for pair in runs]
        found[axis] = {"total": [round(sum(kind), 2) for kind in zip(*pairs, strict=True)], "seconds": seconds}
    return found


def element() -> dict[str, Any]:
    """Minimise the element-wise error; show what it gains over the closed forms and what it costs."""
    found: dict[str, Any] = {}
    for shape in ELEMENT:
        generator = torch.Generator().manual_seed(0)
        weight, importance = torch.randn(shape, generator=generator).double(), fisher(shape, generator)
        rows, columns = importance.sum(1), importance.sum(0)
        starts: dict[Any, Any] = {"out": rows, "in": columns, "both": (rows, columns)}
        closed = {axis: weighted_svd(weight, values, axis) for axis, values in starts.items()}
        for rank in ELEMENT_RANKS:
            spent, (left, right) = timed(lambda: decompose_elementwise(weight, rank, importance))  # noqa: B023
            once, _ = timed(lambda: decompose_elementwise(weight, rank, importance, iterations=1))  # noqa: B023
            none, _ = timed(lambda: decompose_elementwise(weight, rank, importance, iterations=0))  # noqa: B023
            error = weighted_error(weight, left @ right, importance, "element") ** 2
            best = {
                axis: weighted_error(weight, torch.mm(*svd.factors(rank)), importance, "element") ** 2
                for axis, svd in closed.items()
            }
            found[f"{shape[0]}x{shape[1]} rank {rank}"] = {
                "seconds": spent,
                "seconds of a sweep": [round(a - b, 3) for a, b in zip(once, none, strict=True)],
                "squared error / closed form's": {axis: round(error / value, 4) for axis, value in best.items()},
            }
    return found


def main() -> None:
    """Measure what was asked for and store it."""
    jobs: dict[str, Callable[[], dict[str, Any]]] = {
        "bert-base": lambda: nested(BERT_BASE),
        "llama-mlp": lambda: nested({LLAMA_MLP: 1}),
        "element": element,
    }
    options = common.parser("fwsvd/decompose", __doc__, threads=2, only=tuple(jobs)).parse_args()
    torch.set_num_threads(options.threads)
    for name in options.only:
        load = os.getloadavg()[0]
        setting = {"threads": options.threads, "device": "cpu", "density": DENSITY, "load_before": round(load, 2)}
        timing.store(options, name, {"result": jobs[name]()}, f"-cpu-{options.threads}", setting=setting)


if __name__ == "__main__":
    main()
