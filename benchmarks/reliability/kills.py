"""Kill runs of every method at random moments, continue them, and compare every model with the unbroken run's.

    python -m benchmarks.reliability.kills [--points 16] [--only LPAF CoFi] [--work DIR]

A run of a method is made once unbroken and once counted. Then, for every point, a new run is killed by SIGKILL before
its n-th event, sometimes with the file at hand half written, and continued by the same command. Every process
is a fork of one that has imported the package and run nothing. A method's result is written when its points are done,
and not made again. Writes benchmarks/reliability/results/kills/<method>.json.
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.reliability import tiny
from benchmarks.reliability.events import Event, Kill, forked, nothing

SCRIPT = "reliability/kills"


def choose(events: Sequence[dict[str, Any]], count: int, rng: random.Random) -> list[tuple[int, bool]]:
    """Return ``count`` numbers of events, and whether the file before is torn: one of every group, then any."""
    made = [Event(**{key: value for key, value in event.items() if key != "size"}) for event in events]
    groups: dict[str, list[int]] = {}
    for number, event in enumerate(made):
        groups.setdefault(event.group, []).append(number)
    found = [rng.choice(numbers) for numbers in groups.values()][:count]
    left = sorted(set(range(len(made))) - set(found))
    found += rng.sample(left, count - len(found))
    wrote = [number for number in found if number and made[number - 1].kind in ("open", "write")]
    return [(number, number in wrote and rng.random() < 0.7) for number in sorted(found)]


def differences(one: Path, other: Path) -> list[str]:
    """Return what differs between two finished runs: models of stages, the export, metrics; [] if nothing does."""
    found = []
    for file in sorted(one.glob("**/*.safetensors")):
        name = file.relative_to(one)
        if not (other / name).is_file() or (other / name).read_bytes() != file.read_bytes():
            found.append(str(name))
    records = [json.loads((run / "stages.json").read_text()) for run in (one, other)]
    for key in ("name", "metric", "initial", "steps", "best_step"):
        if [record.get(key) for record in records[0]] != [record.get(key) for record in records[1]]:
            found.append(f"stages.json: {key}")
    reports = [json.loads((run / "report.json").read_text()) for run in (one, other)]
    for key in ("metric", "density", "params"):
        if reports[0]["compressed"][key] != reports[1]["compressed"][key]:
            found.append(f"report.json: {key}")
    return found


def leftovers(run: Path) -> list[str]:
    """Return what a finished run has that an unbroken one has not, once it was continued."""
    return sorted(str(path.relative_to(run)) for path in run.rglob(".*") if path.name != ".lock")


def one_point(words: list[str], straight: Path, run: Path, at: int, torn: bool, start: Any = forked) -> dict[str, Any]:
    """Kill a run before event ``at``, continue it, and say how it ended.

    Args:
        words: of the command, but for the folder.
        straight: the unbroken run.
        run: folder of the run; removed where all is well.
        at: number of the event.
        torn: whether the file that is being written is left half written.
        start: runs ``events.command`` in a process of its own and returns its exit code.
    """
    again = [*words, f"--run_dir={run}", "--ckpt_path=last"]
    said = run.with_name(f"{run.name}.said")
    killed = start(again, run, said, Kill(at, torn))
    code = start(again, run, said)
    wrong = [] if killed == -9 else [f"was not killed: {killed}"]
    if code:
        wrong.append(f"exit code {code}: {' '.join(said.read_text().splitlines()[-1:])}")
    else:
        wrong += differences(straight, run) + leftovers(run)
    if not wrong:
        shutil.rmtree(run)
    return {"at": at, "torn": torn, "wrong": wrong}


def measure(method: str, place: Path, teacher: Path | None, points: int, seed: int) -> dict[str, Any]:
    """Return the points of one method."""
    words, began = tiny.options(method, place, teacher), time.time()
    runs = place / method
    shutil.rmtree(runs, ignore_errors=True)
    runs.mkdir()
    straight, counted = runs / "straight", runs / "counted"
    said = runs / "said"
    for run, *more in ((straight,), (counted, nothing, runs / "events")):
        if forked([*words, f"--run_dir={run}"], run, said, *more):
            raise RuntimeError(said.read_text())
    if differences(straight, counted):
        raise RuntimeError(f"{method}: counting changes the run: {differences(straight, counted)}")
    events = json.loads((runs / "events").read_text())
    found = []
    for at, torn in choose(events, points, random.Random(f"{seed} {method}")):
        event = Event(**{key: value for key, value in events[at].items() if key != "size"})
        point = one_point(words, straight, runs / str(at), at, torn)
        found.append(
            {"group": event.group, "event": f"{event.kind} {event.what}".strip(), "stage": event.stage} | point
        )
        print(method, found[-1], flush=True)
    seconds = round(time.time() - began, 1)
    return {"name": method, "events": len(events), "points": found, "seed": seed, "seconds": seconds}


def main() -> None:
    """Measure the methods that have no result yet."""
    parser = common.parser(SCRIPT, __doc__, only=tiny.METHODS)
    parser.add_argument("--points", type=int, default=16, help="kills per method")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, help="folder of the runs (default: a temporary one)")
    options = parser.parse_args()
    options.list = None
    place = (options.work or Path(tempfile.mkdtemp(prefix="kills-"))).absolute()
    tiny.prepare(place)
    teacher = place / "teacher"
    if not (teacher / "report.json").is_file():
        forked([*tiny.options("SVD", place), f"--run_dir={teacher}", "--ckpt_path=last"], teacher, place / "said")
    for method in options.only:
        if not common.missing(options, method):
            continue
        given = None if method in tiny.WHOLE else teacher / "dense" / "net"
        made = measure(method, place, given, options.points, options.seed)
        common.write(options, method, made | common.frame())
        wrong = sum(bool(point["wrong"]) for point in made["points"])
        groups = Counter(point["group"] for point in made["points"])
        print(f"{method}: {len(made['points'])} kills, {wrong} ended wrong, {made['seconds']} s: {dict(groups)}")
    if options.work is None:
        shutil.rmtree(place)


if __name__ == "__main__":
    main()
