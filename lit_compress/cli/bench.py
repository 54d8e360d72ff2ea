"""The command bench: its options, the models it compares, and its tables."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any, Literal

from lit_compress.cli.targets import Target, find_target
from lit_compress.cli.words import Line
from lit_compress.data.datamodule import DataModule
from lit_compress.export.bench import BATCHES, FILE, LENGTHS, Settings
from lit_compress.export.bench import bench as measure
from lit_compress.export.runtimes import RUNTIMES
from lit_compress.utils.devices import find_device
from lit_compress.utils.errors import UserError, nearest
from lit_compress.utils.files import check_folder, write_json
from lit_compress.utils.progress import note
from lit_compress.utils.tables import print, show
from lit_compress.utils.timing import STEADY, Speedup

ON_ACCELERATORS = ("eager", "graphs", "compiled")
Table = tuple[list[str], list[list[str]]]  # header and rows


def bench(
    out: str, *, baseline: str | None = None, batch: list[int] | None = None, length: list[int] | None = None,
    runtimes: list[str] | None = None, threads: int = 1, rounds: int = 30, seconds: float = 60.0,
    device: str = "auto", dtype: Literal["float32", "bfloat16", "float16"] | None = None, output: str | None = None,
    line: Line,
) -> None:  # fmt: skip
    """Time an export, or any fine-tuned model, and a dense one, in the runtimes that are installed.

    Args:
        out: an export, a run (its export), any fine-tuned model folder, or a name on the hub.
        baseline: folder of the dense model to compare OUT with (default the run's).
        batch: texts in a batch (default 1 8 32 128).
        length: tokens of a text (default 32 128 384).
        runtimes: which are used (default: on an accelerator eager, graphs and compiled, on the CPU all but graphs).
        threads: of every runtime; more than there are free cores give noise.
        rounds: forwards of every model at every shape, in turns.
        seconds: no further round of a shape begins after these, five are made in any case.
        device: cpu, cuda, ... (default the accelerator if there is one).
        dtype: of PyTorch (default bfloat16 on an accelerator, float32 on the CPU).
        output: folder of bench.json (default OUT; for a name this one).
        line: further options.

    Raises:
        UserError: an option or a folder cannot be used.
    """
    for name, numbers in {"threads": [threads], "rounds": [rounds], "batch": batch, "length": length}.items():
        if (least := min(numbers or [1])) < 1:
            raise UserError(f"{name}: '{least}' is not a positive integer; the smallest is 1")
    for name in runtimes or ():
        if name not in RUNTIMES:
            raise UserError(f"--runtimes: unknown runtime '{name}'; {nearest(name, RUNTIMES)}")
    place = find_device(device, "--device")
    usual = [name for name in RUNTIMES if name != "graphs"] if place.type == "cpu" else ON_ACCELERATORS
    if place.index is not None:
        raise UserError(f"--device: '{place}' names one of several; bench measures on the first: '{place.type}'")
    target = find_target(out, "bench")
    nets = _nets(target, out, baseline)
    folder = Path(output or target.place).expanduser()
    check_folder("--output", folder)
    settings = Settings(
        tuple(batch or BATCHES), tuple(length or LENGTHS), tuple(dict.fromkeys(runtimes or usual)), threads, rounds,
        seconds, place.type, dtype or ("float32" if place.type == "cpu" else "bfloat16"),
    )  # fmt: skip

    def data() -> DataModule:
        return target.parse(line).build().data

    command = {"command": shlex.join(["lit_compress", "bench", *line.args])}
    if line.names:
        data()  # checks its options
    folder.mkdir(parents=True, exist_ok=True)
    result = command | measure(nets, settings, lambda result: write_json(folder / FILE, command | result), data)
    _show(result, folder)


def _nets(target: Target, out: str, baseline: str | None) -> dict[str, Path]:
    """Return the folders by label: the dense model, which is named or the run's, and OUT."""
    nets, dense = {}, target.folder.resolve().parent / "dense" / "net"
    if baseline is not None:
        nets["dense"] = find_target(baseline, "--baseline").folder
    elif target.folder.name == "export" and (dense / "config.json").is_file():
        nets["dense"] = dense
    else:
        note(f"bench: '{out}' is compared with nothing; name its dense model with --baseline DENSE")
    return nets | {"compressed": target.folder}


def _show(result: dict[str, Any], output: Path) -> None:
    """Print the tables."""
    hardware, threads = result["hardware"], result["threads"]
    machine = hardware["accelerator"] if result["device"] != "cpu" else hardware["cpu"]
    print(f"{machine}, {threads} thread{'s' * (threads > 1)}, {hardware['cores']} cores")
    shapes, programs = result["shapes"], result["programs"]
    body = [[p["runtime"], p["net"], f"{p['difference']:.0e}{'!' * p['far']}", _megabytes(p)] for p in programs]
    show(["runtime", "model", "difference", "MB"], body, left=2, whole=2)
    if any(entry["far"] for entry in programs):
        print("!: its integers change the results by more than is usual; an int8 export's report has its metric")
    if shapes:
        show(*times_table(result), left=2, whole=2)
        print(f"median (p10-p90) of up to {result['rounds']} forwards in turns; speed-ups are per round")
    if not all(entry["steady"] for shape in shapes for entry in shape["times"]):
        print(f"?: the machine was busy, p90 is over {STEADY} times p10; such times are only rough")
    for left in result["left_out"]:
        print(f"left out: {left['what']}: {left['why']}")
    print(f"numbers: {output / FILE}")


def times_table(result: dict[str, Any]) -> Table:
    """Return the table of times: median, p10 and p90 at every shape in every runtime, and the speed-ups."""
    nets = list(result["nets"])
    compared = "dense" in nets
    body = []
    for shape in result["shapes"]:
        label = f"{shape['batch']} x {shape['length']}"
        times = {(entry["net"], entry["runtime"]): entry for entry in shape["times"]}
        for runtime in dict.fromkeys(runtime for _, runtime in times):
            gain = times.get((nets[-1], runtime), {}).get("over_dense")
            body.append([label, runtime, *(_time(times.get((net, runtime))) for net in nets),
                         *([str(Speedup.of(gain)) if gain else ""] * compared)])  # fmt: skip
            label = ""
    return ["batch x length", "runtime", *(f"{net} ms" for net in nets), *["speed-up"] * compared], body


def _megabytes(program: dict[str, Any]) -> str:
    return "" if program["bytes"] is None else f"{program['bytes'] / 1e6:.1f}"


def _time(entry: dict[str, Any] | None) -> str:
    """Return a time with three digits: four columns with more would not fit the screen."""
    if entry is None:
        return ""
    times = (entry[name] for name in ("median", "p10", "p90"))
    middle, low, high = (f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}" for value in times)
    return f"{middle} ({low}-{high})" + "?" * (not entry["steady"])
