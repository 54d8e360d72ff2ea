"""Every method in bf16-mixed on this machine's accelerator next to its CPU, and three methods in time and memory.

    python -m benchmarks.device.accelerator [--device cuda] [--only contract steps]

``contract``: a short fit of every method, as in run.py: in float32 and in bf16-mixed on the CPU, in bf16-mixed on the
accelerator. Its model and export answer as those of the CPU do, up to what 16 bits change on the CPU alone: the
model has no dropout, whose numbers are a device's own. ``steps``:
LPAF, SecondOrder and SP3 on a BERT-base with random weights, 200 steps in every stage: seconds and peak memory.
Without an accelerator it prints one line and exits with 2.
Writes benchmarks/device/results/accelerator/<part>-<method>.json.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.device.matmuls import FILE
from benchmarks.device.run import METHODS
from benchmarks.scaling.run import write_inputs

SCRIPT = "device/accelerator"
LONG = ("LPAF", "SecondOrder", "SP3")


@dataclass(frozen=True)
class Size:
    """A BERT, and texts of ``words`` (at least, at most); two epochs are ``2 * rows / batch`` steps."""

    width: int
    layers: int
    words: tuple[int, int]
    rows: int
    batch: int


SIZES = {"contract": Size(64, 4, (4, 9), 96, 8), "steps": Size(768, 12, (60, 120), 3200, 32)}


def fit(
    method: str, inputs: Path, run: Path, batch: int, device: str, precision: str, *words: str
) -> list[dict[str, Any]]:
    """Run a ``fit`` in this process; return the records of its stages, with the matrix products of a stage by dtype."""
    from lit_compress.__main__ import main

    main([
        "fit", "--model", method, "--model.density", "0.5", "--model.dense.epochs", "2", *METHODS[method],
        "--model.backbone", str(inputs / "net"), "--data.task", "sst2", "--data.path", str(inputs),
        "--data.batch_size", str(batch), "--device", device, "--trainer.precision", precision,
        "--trainer.enable_progress_bar", "false", "--trainer.logger", "false", "--run_dir", str(run),
        "--trainer.callbacks+=benchmarks.device.matmuls.Matmuls", *words,
    ])  # fmt: skip
    records = json.loads((run / "stages.json").read_text())
    return [record | {"products": json.loads((run / record["name"] / FILE).read_text())} for record in records]


def logits(net: Path, inputs: Path) -> Any:
    """Return the logits of a model for the dev texts, on the CPU."""
    from transformers import AutoTokenizer

    from lit_compress.models.storage import load_net

    texts = [json.loads(line)["sentence"] for line in (inputs / "validation.jsonl").read_text().splitlines()]
    rows = AutoTokenizer.from_pretrained(inputs / "net")(texts, padding=True, truncation=True, return_tensors="pt")
    return load_net(net)(**rows).logits.detach()


def apart(function: Callable[..., Any], *args: Any) -> Any:
    """Return ``function(*args)`` of a process of its own, whose peak of memory is that of nothing else."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def contract(method: str, device: str, size: Size, work: Path, *words: str) -> dict[str, Any]:
    """Return how far logits on the accelerator are from the CPU's, and the CPU's in 16 bits from those in 32.

    ``words`` are further options of ``fit``.
    """
    runs = {"float32": ("cpu", "32-true"), "cpu": ("cpu", "bf16-mixed"), "device": (device, "bf16-mixed")}
    records = {name: apart(fit, method, work, work / name, size.batch, *how, *words) for name, how in runs.items()}
    rows = []
    for net, stage in (("dense/net", records["device"][0]), ("export", records["device"][-1])):
        answers = {name: logits(work / name / net, work) for name in runs}
        rows.append({
            "net": net.removesuffix("/net"),
            "largest": float(answers["cpu"].abs().max()),
            "device": float((answers["device"] - answers["cpu"]).abs().max()),
            "rounding": float((answers["float32"] - answers["cpu"]).abs().max()),
            "products": stage["products"],
        })  # fmt: skip
    return {"rows": rows, "seconds": {name: sum(each.get("seconds") or 0 for each in records[name]) for name in runs}}


def steps(method: str, device: str, size: Size, work: Path) -> dict[str, Any]:
    """Return steps, seconds and the peak of memory so far of every stage, in bf16-mixed."""
    names = ("name", "steps", "seconds", "peak_mib", "gpu_peak_mib", "products")
    records = apart(fit, method, work, work / "run", size.batch, device, "bf16-mixed")
    return {"rows": [{name: record[name] for name in names} for record in records]}


PARTS = {"contract": (contract, tuple(METHODS)), "steps": (steps, LONG)}


def device_of(name: str) -> str:
    """Return the type of the accelerator; without one, end with a line and exit code 2."""
    from lit_compress.utils.devices import find_device
    from lit_compress.utils.errors import UserError

    try:
        device = find_device(name, "--device").type
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    if device == "cpu":
        print("error: --device: PyTorch finds no accelerator on this machine; nothing is measured", file=sys.stderr)
        raise SystemExit(2)
    return device


def main() -> None:
    """Measure what has no result."""
    options = common.parser(SCRIPT, __doc__, device="auto", only=tuple(PARTS)).parse_args()
    device = device_of(options.device)
    for part in options.only:
        measure, methods = PARTS[part]
        for method in methods:
            if (options.results / f"{part}-{method}.json").exists():
                continue
            size = SIZES[part]
            with tempfile.TemporaryDirectory() as work:
                dropout = 0.0 if part == "contract" else 0.1
                write_inputs(Path(work), size.width, size.layers, size.words, size.rows, dropout)
                found = measure(method, device, size, Path(work))
            common.write(options, f"{part}-{method}", {
                "name": f"{part}-{method}", "method": method, "part": part, "device": device, "size": vars(size),
                **found, **common.frame(),
            })  # fmt: skip


if __name__ == "__main__":
    main()
