"""The command bench: its options, the models it compares, and its output."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lit_compress.analysis.speed import BUSY, alternatives_table, far_line, is_busy, programs_table, times_table
from lit_compress.cli.targets import Target, find_target
from lit_compress.evaluation.metrics import higher_is_better
from lit_compress.export.bench import BATCHES, FILE, LENGTHS, ROUNDS, SECONDS, Settings
from lit_compress.export.bench import bench as measure
from lit_compress.export.modelling import MODULE
from lit_compress.export.runtimes import RUNTIMES
from lit_compress.export.table import of_all
from lit_compress.models.own_code import trust_code
from lit_compress.utils.devices import find_device
from lit_compress.utils.errors import UserError, nearest
from lit_compress.utils.files import check_folder, read_json, write_json
from lit_compress.utils.progress import note
from lit_compress.utils.tables import print, show

if TYPE_CHECKING:
    from lit_compress.cli.words import Line
    from lit_compress.data.datamodule import DataModule

ON_ACCELERATORS = ("eager", "graphs", "compiled")


def bench(
    out: str, *, baseline: str | None = None, against: list[str] | None = None, batch: list[int] | None = None,
    length: list[int] | None = None, runtimes: list[str] | None = None, threads: int = 1, rounds: int = ROUNDS,
    seconds: float = SECONDS, device: str = "auto", dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    output: str | None = None, line: Line,
) -> None:  # fmt: skip
    """Time an export, or any fine-tuned model, and a dense one, in the runtimes that are installed.

    Args:
        out: an export, a run (its export), any fine-tuned model folder, or a name on the hub.
        baseline: folder of the dense model to compare OUT with (default the run's).
        against: other exports, runs, models or names for the same task: dev metric, MB, ms and texts a second of all,
            in one table; the data is the run's or of --data.path.
        batch: texts in a batch (default 1 8 32 128).
        length: tokens of a text (default 32 128 384, and the median and the longest of the task; with options of the
            data, e.g. --data.path FILE, of its texts).
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
        KeyboardInterrupt: Ctrl-C; the measurements so far are printed and written.
    """
    numbers = {"threads": [threads], "rounds": [rounds], "batch": batch or [], "length": length or []}
    for name, values in numbers.items():
        if (wrong := next((value for value in values if value < 1), None)) is not None:
            raise UserError(f"{name}: '{wrong}' is not a positive integer; the smallest is 1")
    for name in runtimes or ():
        if name not in RUNTIMES:
            raise UserError(f"--runtimes: unknown runtime '{name}'; {nearest(name, RUNTIMES)}")
    place = find_device(device, "--device")
    usual = [name for name in RUNTIMES if name != "graphs"] if place.type == "cpu" else ON_ACCELERATORS
    if place.index is not None:
        raise UserError(f"--device: '{place}' names one of several; bench measures on the first: '{place.type}'")
    target, trusted = find_target(out, "bench"), line.last("trust_remote_code") == "true"
    trust_code(trusted)
    nets = {**_named(against or []), "compressed": _loadable(target.folder, out)}
    if dense := _baseline(baseline, target, out):
        nets = {"dense": dense, **nets}
    folder = Path(output or target.place).expanduser()
    check_folder("--output", folder)
    others = [name for name in line.names if name != "trust_remote_code"]
    settings = Settings(
        tuple(batch or BATCHES), tuple(length or LENGTHS), () if length and not others else _own_lengths(target, line),
        tuple(dict.fromkeys(runtimes or usual)), threads, rounds, seconds, place.type, trusted,
        dtype or ("float32" if place.type == "cpu" else "bfloat16"),
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    result = _measured(nets, settings, target, folder, bool(against), line)
    _show(result, folder)
    if result["stopped"]:
        raise KeyboardInterrupt


def _measured(
    nets: dict[str, Path], settings: Settings, target: Target, output: Path, compared: bool, line: Line
) -> dict[str, Any]:
    """Measure the models, and write the results so far after every shape; ``compared``: all have a dev metric."""

    def data() -> DataModule:
        return target.parse(line).build().data

    metric = None
    if compared:
        task = data().record
        metric = {"name": task.metrics[0], "mode": "max" if higher_is_better(task) else "min"}
    command = shlex.join(["lit_compress", "bench", *line.args])

    def keep(results: dict[str, Any]) -> None:
        write_json(output / FILE, {"command": command, "metric": metric, **results})

    return {"metric": metric, **measure(nets, settings, keep, data, compared)}


def _named(models: list[str]) -> dict[str, Path]:
    """Return the folders of other models, by the last part of their names.

    Raises:
        UserError: two have the same, or one cannot be used.
    """
    named: dict[str, Path] = {}
    for name in models:
        label = Path(name).name
        if label in (*named, "dense", "compressed"):
            raise UserError(f"--against: '{name}': another model has the label '{label}'; rename the folder")
        named[label] = _loadable(find_target(name, "--against").folder, name)
    return named


def _loadable(folder: Path, name: str) -> Path:
    """Return a folder that transformers can load.

    Raises:
        UserError: it is the compressed model of a stage, whose layers only this package has.
    """
    structure = folder / "structure.json"
    if structure.is_file() and read_json("bench", structure, dict) and not (folder / f"{MODULE}.py").is_file():
        raise UserError(f"bench: '{name}' is the model of a stage, which loads in this package only; give the run")
    return folder


def _baseline(given: str | None, target: Target, out: str) -> Path | None:
    """Return the folder of the model to compare with: the one that is named, else the dense model of the run."""
    if given is not None:
        return _loadable(find_target(given, "--baseline").folder, given)
    dense = target.folder.resolve().parent / "dense" / "net"
    if target.folder.name != "export" or not (dense / "config.json").is_file():
        note(f"bench: '{out}' is compared with nothing; name its dense model with --baseline DENSE")
        return None
    return dense


def _own_lengths(target: Target, line: Line) -> tuple[tuple[str, int], ...]:
    """Return median and longest length of the task: of the data that options name, else those in the report.

    Raises:
        UserError: an option is unknown, or the data cannot be read.
    """
    if any(name != "trust_remote_code" for name in line.names):
        data = target.parse(line).build().data
        data.backbone = str(target.folder)  # the tokenizer that belongs to the model
        inputs = data.predict_dataloader().dataset
        lengths, rows = sorted(inputs.encoded["length"]), of_all(len(inputs.rows), inputs.available)
        note(f"bench: the median and the longest length are from {rows} rows of split {data.predicted}")
        return ("median", int(lengths[len(lengths) // 2])), ("longest", int(lengths[-1]))
    path = target.folder / "report.json"
    report = read_json("bench", path, dict) if path.is_file() else {}
    known = [("median", report["dense"]["latency_ms"]["length"])] if "dense" in report else []
    splits = (report.get("data") or {}).get("splits") or []
    return *known, *(("longest", split["longest"]) for split in splits[1:2])


def _show(result: dict[str, Any], output: Path) -> None:
    """Print the tables."""
    hardware, threads = result["hardware"], result["threads"]
    machine = hardware["accelerator"] if result["device"] != "cpu" else hardware["cpu"]
    print(f"{machine}, {threads} thread{'s' * (threads > 1)}, {hardware['cores']} cores")
    if result["programs"]:
        show(programs_table(result))
        for entry in result["programs"]:
            if entry["far"]:
                print(far_line(entry, result["programs"]))
    if result["shapes"]:
        show(times_table(result))
        print(f"median (p10-p90) of up to {result['rounds']} forwards in turns; speed-ups are per round")
        if is_busy(result):
            print(BUSY)
    if result["shapes"] and result["metric"]:
        show(alternatives_table(result))
        print("front: no other is better in both the metric and ms, or MB")
    for left in result["left_out"]:
        print(f"left out: {left['what']}: {left['why']}")
    if result["stopped"]:
        print(f"stopped: {len(result['shapes'])} of {result['asked']} shapes are measured")
    print(f"numbers: {output / FILE}")
