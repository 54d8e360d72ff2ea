"""The front table: runs of a finished comparison as 8-bit programs of OpenVINO, beside what a user would pick instead.

    python -m benchmarks.comparison.front --comparison DIR [--work DIR] [--results DIR] [--seed 1] [--only ROW ...]

DIR is a folder of ``compare`` (runs/compare_<task>). A row is a finished run there, or its teacher. `export` writes its
program, without and with the vocabulary of the data, and scores both on the dev set. The row ``static`` is a table of
vectors that model2vec makes from the teacher. Rows whose runs are not finished are named and left out. The part
``times`` then times all programs of the results in turns, with one thread, by the processor time of the process.

Writes benchmarks/comparison/results/front/<task>-<row>.json (metric and bytes of the program, and ``vocabulary``: the
same with the vocabulary of the data) and <task>-times.json. Existing rows are kept, so the script can be stopped and
started again. Times are measured again if a row was added. `python -m benchmarks.tables` makes the table from them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import common

SCRIPT = "comparison/front"
SHAPES = ((1, 32), (32, 32), (32, 128))  # texts x tokens
ROUNDS, SECONDS = 20, 60.0
TEACHER, STATIC, TIMES = "teacher", "static", "times"
BASE = "dense-int8"  # row whose time is 1


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        shown: its name in the table.
        label, budget: of the comparison's cell; TEACHER for its dense model.
        dtype: of the program.
    """

    shown: str
    label: str = TEACHER
    budget: str = ""
    dtype: str = "int8"


ROWS = {
    "dense": Row("dense, float32", dtype="float32"),
    BASE: Row("dense, int8: the program of the dense model"),
    "layers-3": Row("Layers, 3 of 6", "Layers", "density=0.5"),
    "layers-2": Row("Layers, 2 of 6", "Layers", "density=0.33"),
    "cofi-0.1": Row("CoFi, 0.10", "CoFi", "density=0.1"),
    "structures-0.25": Row("SecondOrder, heads and neurons, 0.25", "SecondOrder, structures", "density=0.25"),
    "structures-0.1": Row("SecondOrder, heads and neurons, 0.10", "SecondOrder, structures", "density=0.1"),
    "structures-6x": Row(
        "SecondOrder, heads and neurons, 6x asked",
        "SecondOrder, structures",
        "speedup=6x@openvino-int8,32x32",
    ),
    "structures-0.05": Row("SecondOrder, heads and neurons, 0.05", "SecondOrder, structures", "density=0.05"),
    "structures-0.03": Row("SecondOrder, heads and neurons, 0.03", "SecondOrder, structures", "density=0.03"),
    "components-0.1": Row("SecondOrder, components, 0.10", "SecondOrder", "density=0.1"),
    STATIC: Row("static vectors (model2vec)", dtype="float16"),
}


def folder_of(options: Any, row: Row) -> Path | None:
    """Return the finished run of a row in the comparison; None if there is none."""
    if row.label == TEACHER:
        teacher = options.comparison / "teachers" / f"seed={options.seed}"
        return teacher if (teacher / "report.json").is_file() else None
    file = options.comparison / "compare.json"
    cells = json.loads(file.read_text())["cells"] if file.is_file() else []
    wanted = row.label, row.budget, options.seed, "done"
    runs = [c["run"] for c in cells if (c["label"], c["budget"], c["seed"], c["status"]) == wanted]
    return options.comparison / runs[0] if runs else None


def program_of(options: Any, source: Path, out: Path, dtype: str, *words: object) -> dict[str, Any]:
    """Write the program of a run with ``export``; return what its report says of it."""
    if not (out / "report.json").is_file():
        common.command(options, "export", source, out, "--format", "openvino", *words,
                       *(["--dtype", dtype] if dtype != "float32" else []))  # fmt: skip
    if options.list:
        return {}
    report = json.loads((out / "report.json").read_text())
    made = report["program"]
    scored = made if "metric" in made else report["compressed"]
    return {
        "metric": scored["metric"], "interval": scored["interval"], "bytes": made["bytes"],
        "float32": report["compressed"]["metric"], "dense": report["dense"]["metric"],
        "density": report["compressed"]["density"], "rows": report["metric"]["rows"], "name": report["metric"]["name"],
    }  # fmt: skip


def static(options: Any, run: Path, out: Path) -> dict[str, Any]:
    """Make static vectors of the teacher, and what answers the task with them; return what is said of a program."""
    if options.list:
        return {}
    import numpy

    from benchmarks.comparison.static import distil, fit_head, read, score
    from lit_compress.cli.lines import read_line
    from lit_compress.cli.targets import find_target
    from lit_compress.evaluation.evaluate import interval_of

    target = find_target(str(run), "front")
    data = target.parse(read_line("bench", [])).build().data
    data.read_as(str(target.folder))
    if not (out / "config.json").is_file():
        distil(target.folder, out)
    vectors = fit_head(read(out), data)
    if vectors.head is not None:
        numpy.savez(out / "head.npz", weight=vectors.head[0], bias=vectors.head[1])
    scores, name = score(vectors, data), data.record.metrics[0]
    dense = json.loads((run / "report.json").read_text())["dense"]["metric"]
    return {"texts": len(data.record.text), "program": {
        "metric": scores[f"val/{name}"], "interval": interval_of(scores, f"val/{name}"), "bytes": vectors.bytes,
        "float32": None, "dense": dense, "density": None, "rows": scores["val/rows"], "name": name,
    }}  # fmt: skip


def make(options: Any, task: str, key: str) -> None:
    """Write the result of a row, if it is missing and its run is finished."""
    row, name = ROWS[key], f"{task}-{key}"
    if not common.missing(options, name):
        return
    if (run := folder_of(options, row)) is None:
        print(f"{key}: {row.label} {row.budget}, seed {options.seed}: not finished in {options.comparison}", flush=True)
        return
    about = {
        "name": name, "row": key, "task": task, "seed": options.seed, "threads": options.threads,
        "precision": options.precision,
    }  # fmt: skip
    out = options.work / name
    if key == STATIC:
        made = static(options, run, out)
    else:
        made = {"program": program_of(options, run / "export", out, row.dtype)}
        if row.dtype == "int8":
            words = ("--vocabulary", "data")
            made["vocabulary"] = program_of(options, run, options.work / f"{name}-vocabulary", row.dtype, *words)
    if not options.list:
        common.write(options, name, {**about, **made, **common.frame()})


def runner(options: Any, task: str, key: str) -> Callable[[dict[str, Any]], Any]:
    """Return what is timed: the program of a row in OpenVINO, or the vectors and what answers with them."""
    import numpy

    from benchmarks.comparison.static import read
    from lit_compress.export.runtimes import FILES, RUNTIMES, Setting

    folder = options.work / f"{task}-{key}"
    if key != STATIC:
        return RUNTIMES["openvino"].load(folder / FILES["openvino"], Setting(("logits",), options.threads))
    vectors = read(folder)
    if (folder / "head.npz").is_file():
        stored = numpy.load(folder / "head.npz")
        vectors.head = stored["weight"], stored["bias"]
    texts = json.loads((options.results / f"{task}-{key}.json").read_text())["texts"]
    return lambda inputs: vectors.run(inputs["input_ids"] % len(vectors.table), texts)


def has_vnni(info: str) -> bool:
    """Return whether a processor, by its /proc/cpuinfo, adds products of 8-bit integers in 32 bits."""
    flags = {word for line in info.splitlines() if line.startswith(("flags", "Features")) for word in line.split()}
    return bool(flags & {"avx512_vnni", "avx_vnni", "asimddp"})


def measure(options: Any, task: str) -> None:
    """Time the programs of all rows of a task in turns, if a row is new."""
    import numpy

    from lit_compress.utils.timing import in_turns, pinned, speedup, summary

    made = [key for key in ROWS if (options.results / f"{task}-{key}.json").is_file()]
    file = options.results / f"{task}-{TIMES}.json"
    known = json.loads(file.read_text())["rows"] if file.is_file() else []
    if options.list or BASE not in made or made == known:
        return
    runs = {key: runner(options, task, key) for key in made}
    shapes: list[dict[str, Any]] = []
    with pinned(options.threads):
        for texts, tokens in SHAPES:
            ids = numpy.random.default_rng(0).integers(1000, 20000, (texts, tokens))
            inputs = {"input_ids": ids, "attention_mask": numpy.ones_like(ids), "token_type_ids": numpy.zeros_like(ids)}
            turns = [partial(run, inputs) for run in runs.values()]
            record = in_turns(turns, ROUNDS, warm_up=3, seconds=SECONDS, clock=time.process_time)
            times = dict(zip(made, record, strict=True))
            shapes.append({
                "texts": texts, "tokens": tokens, "rounds": len(record[0]),
                "milliseconds": {key: summary(each) for key, each in times.items()},
                "faster": {key: asdict(speedup(times[BASE], each)) for key, each in times.items()},
            })  # fmt: skip
            print(f"{texts} x {tokens}:", {key: round(s["median"], 2) for key, s in shapes[-1]["faster"].items()})
    about = {
        "name": f"{task}-{TIMES}", "task": task, "threads": options.threads, "rows": made, "shapes": shapes,
        "vnni": has_vnni(Path("/proc/cpuinfo").read_text()),
    }  # fmt: skip
    common.write(options, f"{task}-{TIMES}", {**about, **common.frame()})


def main() -> None:
    """Make the rows that are missing, then the times."""
    parser = common.parser(SCRIPT, __doc__, "work", only=(*ROWS, TIMES))
    parser.add_argument("--comparison", type=Path, required=True, help="folder of a comparison, made by compare")
    parser.add_argument("--seed", type=int, default=1, help="of teacher and runs (default 1)")
    options = parser.parse_args()
    file = options.comparison / "teachers" / f"seed={options.seed}" / "report.json"
    if not file.is_file():
        parser.error(f"--comparison: '{options.comparison}' has no finished teacher of seed {options.seed}")
    teacher = json.loads(file.read_text())
    task, options.precision = teacher["task"], teacher["config"]["trainer"]["precision"]
    for key in options.only:
        if key != TIMES:
            make(options, task, key)
    if TIMES in options.only:
        measure(options, task)


if __name__ == "__main__":
    main()
