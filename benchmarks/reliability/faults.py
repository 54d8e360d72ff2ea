"""Let every write of a command fail, one after another, and see what it says, what it leaves, and how it goes on.

    python -m benchmarks.reliability.faults [--only fit export] [--work DIR]

At every file that a command opens to write, writes, renames, makes or removes, a new process meets a fault: an error of
the file system (full, read-only, broken, in turn), another one a disk that is full in the middle of the file, and
another one ``kill -9``, with the file half written. The command must end with one line and exit code 2, or well in
spite of it; what it leaves must be readable; and the same command, without a fault, must end as an unbroken one. Writes
benchmarks/reliability/results/faults/<command>.json; it may be stopped, and goes on where it was.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.reliability import tiny
from benchmarks.reliability.events import FILES, Act, Event, Fill, Kill, Refuse, forked, nothing
from benchmarks.reliability.kills import differences, leftovers

SCRIPT = "reliability/faults"
ERRORS = ("ENOSPC", "EROFS", "EIO")


@dataclass(frozen=True)
class Case:
    """A command that writes.

    Attributes:
        name: of the command.
        words: of its command line, given the folder that it writes.
        same: says what differs between two of its folders.
        cache: whether the folder is the cache.
    """

    name: str
    words: Callable[[Path], list[str]]
    same: Callable[[Path, Path], list[str]]
    cache: bool = False


def cases(place: Path) -> list[Case]:
    """Return the commands; ``place`` has a model, data, and the finished run ``teacher``."""
    run = place / "teacher"
    short = [*tiny.options("SVD", place, run / "dense" / "net"), "--model.retrain.epochs=1", "--ckpt_path=last"]
    source = ["--data.task=sst2", f"--data.path={place / 'data'}"]
    return [
        Case("fit", lambda out: [*short, f"--run_dir={out}"], _runs),
        Case("export", lambda out: ["export", str(run), str(out)], _tensors),
        Case(
            "factorize",
            lambda out: ["factorize", str(run / "dense" / "net"), str(out), *source, "--model.density=0.5"],
            _tensors,
        ),
        Case("plan", lambda out: ["plan", *(word for word in short[1:] if "ckpt" not in word)], _entries, cache=True),
        Case("report", lambda out: ["report", str(run), "--out", str(out)], _files),
        Case("predict", lambda out: ["predict", str(run), "--output", str(out / "p.jsonl")], _files),
    ]  # fmt: skip


def _runs(one: Path, other: Path) -> list[str]:
    return differences(one, other) + leftovers(other)


def _tensors(one: Path, other: Path) -> list[str]:
    names = sorted(path.name for path in one.iterdir())
    same = (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    found = [] if same else ["model.safetensors"]
    return found + sorted({*names} ^ {path.name for path in other.iterdir()}) + _left_of(other)


def _files(one: Path, other: Path) -> list[str]:
    names = [{_plain(path, folder) for path in folder.rglob("*") if path.is_file()} for folder in (one, other)]
    return sorted(names[0] ^ names[1]) + _left_of(other)


def _entries(one: Path, other: Path) -> list[str]:
    """Compare two caches: the times of layers depend on what was fast; what a kill left goes after a day."""
    names = [{_plain(path, folder) for path in folder.rglob("*") if path.is_file()} for folder in (one, other)]
    return sorted(name for name in names[0] ^ names[1] if not name.startswith((".", "times-")))


def _plain(path: Path, folder: Path) -> str:
    """Return the path without the parts that differ between processes."""
    return "/".join(part for part in path.relative_to(folder).parts if not part.startswith("cache-"))


def _left_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.parent.glob(f".{folder.name}.*"))


def faults(number: int, before: int | None, size: int | None) -> Iterator[tuple[str, Act]]:
    """Yield the faults that can meet an event at a file, with their names: an error in turn, a full disk, a kill.

    Args:
        number: of the event.
        before: bytes of the file that the event before wrote; None if it did not.
        size: bytes that this one writes.
    """
    code = ERRORS[number % len(ERRORS)]
    yield code, Refuse(number, code)
    if size:
        yield "half", Fill(number, size // 2)
    yield "torn" if before else "kill", Kill(number, torn=bool(before))


def unreadable(run: Path) -> list[str]:
    """Return what of a run folder cannot be read, as the commands read it."""
    from lit_compress.models.storage import load_net
    from lit_compress.run.folder import Run
    from lit_compress.run.trainer import read_checkpoint
    from lit_compress.utils.errors import UserError

    found, made = [], Run(run)
    reads: list[Callable[[], Any]] = [made.facts, made.finished]
    reads += [made.config] if (run / "config.yaml").exists() else []
    reads += [partial(read_checkpoint, path) for path in run.glob("*/[!.]*.ckpt")]
    reads += [partial(load_net, path) for path in (*run.glob("*/net"), *run.glob("export"))]
    for read in reads:
        try:
            read()
        except UserError as error:
            found.append(str(error))
    return found


def one_fault(case: Case, straight: Path, out: Path, act: Act, start: Any) -> dict[str, Any]:
    """Let a command meet a fault, and give it again; return the exit code, its line, and what is wrong."""
    said = out.parent.with_suffix(".said")
    said.unlink(missing_ok=True)
    (out if case.name == "predict" else out.parent).mkdir(parents=True)
    first = start(case.words(out), out, said, act)
    text = said.read_text() if said.exists() else ""
    last = text.splitlines()[-1] if text.strip() else ""
    wrong = []
    if isinstance(act, Kill):
        wrong += [] if first == -9 else [f"was not killed: {first}"]
    elif first not in (0, 2) or "Traceback" in text or (first == 2 and not last.startswith("error: ")):
        wrong.append(f"exit code {first}: {last}")
    if case.name == "fit" and out.exists():
        wrong += unreadable(out)
    if code := start(case.words(out), out, said):
        wrong.append(f"again: exit code {code}: {' '.join(said.read_text().splitlines()[-1:])}")
    else:
        wrong += case.same(straight, out)
    if not wrong:
        shutil.rmtree(out.parent)
    return {"code": first, "line": last.replace(str(out.parent), "."), "wrong": wrong}


def measure(case: Case, place: Path, known: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the result so far after every fault of one command, in a random order; ``known`` are not repeated."""
    runs = place / case.name
    shutil.rmtree(runs, ignore_errors=True)
    runs.mkdir()

    def start(words: list[str], out: Path, *more: Any) -> int:
        if case.cache:
            os.environ["LIT_COMPRESS_CACHE"] = str(out)
        return forked(words, out.parent, *more)  # what becomes a folder is written next to it

    straight, said = runs / "straight" / "out", runs / "said"
    (straight if case.name == "predict" else straight.parent).mkdir(parents=True)
    if start(case.words(straight), straight, said, nothing, runs / "events"):
        raise RuntimeError(said.read_text())
    left, before = [], None
    for number, record in enumerate(json.loads((runs / "events").read_text())):
        size = record.pop("size")
        event = Event(**record)
        if event.kind in FILES and event.what != ".":  # that is a probe, or there already
            left += [(number, event, *fault) for fault in faults(number, before, size)]
        before = size
    points, count = list(known), len(left)
    random.Random(0).shuffle(left)
    for number, event, name, act in left:
        if (number, name) in {(point["at"], point["fault"]) for point in points}:
            continue
        result = one_fault(case, straight, runs / f"{number}-{name}" / "out", act, start)
        points.append({"at": number, "event": f"{event.kind} {event.name}", "fault": name, **result})
        yield {"name": case.name, "points": points, "of": count}
    os.environ["LIT_COMPRESS_CACHE"] = str(place / "cache")


def main() -> None:
    """Measure the commands that have no result yet."""
    names = ("fit", "export", "factorize", "plan", "report", "predict")
    parser = common.parser(SCRIPT, __doc__, only=names)
    parser.add_argument("--work", type=Path, help="folder of the runs (default: a temporary one)")
    options = parser.parse_args()
    options.list = None
    place = (options.work or Path(tempfile.mkdtemp(prefix="faults-"))).absolute()
    tiny.prepare(place)
    frame, run = common.frame(), place / "teacher"
    if not (run / "report.json").is_file():
        forked([*tiny.options("SVD", place), f"--run_dir={run}", "--ckpt_path=last"], run, place / "said")
    for case in cases(place):
        if case.name not in options.only:
            continue
        file = options.results / f"{case.name}.json"
        known = json.loads(file.read_text()) if file.is_file() else {"points": [], "of": None}
        if len(known["points"]) == known["of"]:
            continue
        for made in measure(case, place, known["points"]):
            common.write(options, case.name, made | frame)
            print(f"{case.name} {len(made['points'])}/{made['of']}", made["points"][-1], flush=True)
    if options.work is None:
        shutil.rmtree(place)


if __name__ == "__main__":
    main()
