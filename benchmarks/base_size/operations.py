"""What OpenVINO's program of an export spends its time on, by kind of operation, next to the dense model's program.

    python -m benchmarks.base_size.operations dense=DIR small=DIR ... [--batch 32] [--length 128] [--rounds 15]

A DIR is an export with ``openvino_model.xml``. Every operation of the compiled program is timed by OpenVINO itself,
with one thread. Programs take turns, and the median over the rounds is kept. Writes results/operations/<name>.json.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks import common
from lit_compress.export.runtimes import FILES, openvino_core

STUDY = "base_size/operations"
# words in the type of an operation -> what it is counted as; the first that fits, else the rest
KINDS = {
    "matrices": ("FullyConnected", "Gather"),
    "attention": ("MatMul", "Softmax", "ScaledDotProductAttention", "SDPA"),
    "normalization": ("MVN", "RMS"),
}


def kind_of(operation: str) -> str:
    """Return what an operation is counted as.

    >>> kind_of("FullyConnected"), kind_of("Softmax"), kind_of("Reorder")
    ('matrices', 'attention', 'rest')
    """
    return next((kind for kind, words in KINDS.items() if any(word in operation for word in words)), "rest")


def request(folder: Path) -> Any:
    """Return a request of the program of a folder, whose operations are timed."""
    options = {"INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": "f32", "PERF_COUNT": True}
    return openvino_core().compile_model(str(folder / FILES["openvino"]), "CPU", options).create_infer_request()


def milliseconds(request: Any) -> dict[str, float]:
    """Return the time of the last run by type of operation, in ms."""
    times: dict[str, float] = defaultdict(float)
    for node in request.get_profiling_info():
        times[node.node_type] += node.real_time.total_seconds() * 1e3
    return times


def main() -> None:
    """Time the programs, print the shares, and write them."""
    parser = common.parser(STUDY, __doc__)
    parser.add_argument("programs", nargs="+", metavar="NAME=DIR")
    parser.add_argument("--name", default="programs", help="of the result")
    for name, value in {"batch": 32, "length": 128, "rounds": 15}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    made = {name: request(Path(folder)) for name, _, folder in (item.partition("=") for item in options.programs)}
    tokens = np.random.default_rng(0).integers(1000, 20_000, (options.batch, options.length))
    inputs = {"input_ids": tokens, "attention_mask": np.ones_like(tokens)}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in made}
    for number in range(options.rounds + 1):
        for name, one in made.items():
            one.infer({item.any_name: inputs[item.any_name] for item in one.model_inputs})
            if number:  # the first one prepares
                found[name].append(milliseconds(one))
    rows = []
    for name, times in found.items():
        types = sorted({kind for one in times for kind in one})
        by_type = {kind: median(one.get(kind, 0.0) for one in times) for kind in types}
        kinds = {kind: sum(time for one, time in by_type.items() if kind_of(one) == kind) for kind in (*KINDS, "rest")}
        rows.append({"name": name, "ms": median(sum(one.values()) for one in times), "kinds": kinds, "types": by_type})
        print(name, f"{rows[-1]['ms']:.0f} ms", {kind: round(time, 1) for kind, time in kinds.items()})
    shape = {"batch": options.batch, "length": options.length, "rounds": options.rounds}
    common.write(options, options.name, {"name": options.name, **shape, "rows": rows, **common.frame()})


if __name__ == "__main__":
    main()
