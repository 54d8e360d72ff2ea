"""Golden files: what every tiny export of cases.py was, tensor by tensor.

``python -m tests.golden.make`` writes a file of every group of cases, and says which cases changed.
``--check`` compares and writes nothing. ``--tensors FOLDER`` keeps the exports, and with ``--check`` it compares with
the exports kept there, so that a difference is exact. ``--only TEXT`` takes the cases whose names contain it.

On the processor and the libraries that a file names, every SHA-256 is equal. Elsewhere sums round differently, and the
structure, the shapes, and the norm of every tensor stand for the SHA-256. The sum of a tensor does not: it changes with
the signs of singular vectors. A case that was made on another machine than its file names its own.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import io
import json
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOM = Path(__file__).parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOM.parent))

import conftest  # noqa: E402, F401  one thread, no network
import pytest  # noqa: E402
import torch  # noqa: E402
from contract_cases import LEAN, STEPS, TEACHES, WHOLE  # noqa: E402
from contract_cases import options as run_options  # noqa: E402
from golden.cases import MODELS, groups  # noqa: E402
from quick import quick_runs  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from tiny import short_options, write_bert, write_model, write_sentences, write_texts  # noqa: E402

from lit_compress.__main__ import main as run_command  # noqa: E402

WIDTH = re.compile(r"(size|dim|heads|layers?|inner|ffn|widths|n_\w+)$")
TOLERANCE = 0.05  # on another processor, of a norm relative to itself, if above 1: close eigenvectors turn by rounding
DECIMALS = 6
# what runs do beside tensors, and what it returns here
UNSEEN = {
    "export.folder.check_export": 0.0, "cli.fitting.check_fit": "", "cli.factorizing.check_factorize": "",
}  # fmt: skip


def machine() -> dict[str, str]:
    """Return what the last bits of a result depend on: processor and libraries."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    parts = dict(line.partition(":")[::2] for line in reversed(lines))
    named = {key.strip(): value.strip() for key, value in parts.items()}
    processor = " ".join(named.get(key, "") for key in ("model name", "cpu family", "model", "stepping")).strip()
    return {
        "processor": processor or platform.processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        **{name: sys.modules[name].__version__ for name in ("numpy", "torch", "transformers")},
    }


class CommandFailed(Exception):
    """The command of a case ended with this line."""


class Exports:
    """Makes the exports of the cases in ``folder``, each once; see :data:`golden.cases.MODELS` for the models."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = functools.cache(self._model)
        self.make = functools.cache(self._make)
        self.data = {"sst2": write_sentences(self._new("sst2"), 56, 24), "plain_text": write_texts(self._new("texts"))}

    def _new(self, name: str) -> Path:
        path = self.folder / name
        path.mkdir(parents=True)
        return path

    def _model(self, name: str) -> Path:
        family, task, settings = MODELS[name]
        return write_model(self._new(f"models/{name}"), family, task, **settings)

    def _contract(self) -> list[str]:
        """Return the options of the contract's runs, and their teacher."""
        if not (place := self.folder / "contract_runs").exists():
            write_bert(self._new("contract_runs/backbone"))
            write_sentences(self._new("contract_runs/data"))
            teacher, more = TEACHES
            line = run_options(teacher, short_options(place / "backbone", place / "data"))
            self._run(["fit", *line, *more, "--run_dir", str(place / "teacher")])
        return short_options(place / "backbone", place / "data")

    def _make(self, group: str, name: str) -> Path:
        """Run the command of a case; return the folder of its export."""
        model, options = groups()[group][name]
        out = self.folder / group / name.replace(" ", "_")
        if group == "contract":
            line = run_options(model, self._contract(), options[0])
            taught = [] if name == WHOLE else ["--model.teacher", f"{self.folder}/contract_runs/teacher/dense/net"]
            self._run(["fit", *line, *taught, *STEPS, *LEAN, "--run_dir", str(out)])
            return out / "export"
        task, source = MODELS[model][1], self.model(model)
        data = ["--data.task", task, "--data.path", str(self.data[task]), "--data.max_length", "16"]
        if group == "fit":
            teacher = ["--model.backbone", str(source), "--model.teacher", str(source)]
            line = ["fit", *data, "--data.batch_size", "8", *options, *teacher, "--run_dir", str(out)]
        else:
            line = ["factorize", str(source), str(out), *data, "--data.batch_size", "4", *options]
        self._run(line)
        return out / "export" if group == "fit" else out

    def _run(self, line: list[str]) -> None:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors:
            try:
                run_command(line)
            except SystemExit as stop:
                raise CommandFailed(errors.getvalue().strip().rpartition("\n")[2]) from stop


@contextlib.contextmanager
def making() -> Iterator[Exports]:
    """Give a place to make exports in, with what no tensor depends on left out of runs."""
    with tempfile.TemporaryDirectory() as work, quick_runs(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIT_COMPRESS_CACHE", f"{work}/cache")
        for name, nothing in UNSEEN.items():
            patch.setattr(f"lit_compress.{name}", lambda *_, nothing=nothing, **__: nothing)
        yield Exports(Path(work))


def tensors_of(export: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of all files of an export."""
    return {name: t for path in sorted(export.glob("*.safetensors")) for name, t in load_file(path).items()}


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def fingerprint(export: Path) -> dict[str, Any]:
    """Return the record of an export: structure, widths, and of every tensor hash, shape, sum, norm."""
    structure = export / "structure.json"
    config = json.loads((export / "config.json").read_text())
    record: dict[str, Any] = {
        "structure": sha(json.dumps(json.loads(structure.read_text())).encode()) if structure.is_file() else None,
        "widths": {key: value for key, value in sorted(config.items()) if WIDTH.search(key)},
        "tensors": {},
    }
    for name, tensor in sorted(tensors_of(export).items()):
        wide = tensor.double()
        numbers = [round(float(value), DECIMALS) for value in (wide.sum(), wide.norm())]
        data = tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.ndim else str(wide).encode()
        record["tensors"][name] = [sha(data), [*tensor.shape], *numbers]
    return record


def difference(expected: dict[str, Any], record: dict[str, Any], exact: bool) -> str | None:
    """Return how a record differs from the expected one, or None; ``exact``: also in the last bit."""
    for key in ("structure", "widths"):
        if expected[key] != record[key]:
            return f"{key}: {record[key]}, expected {expected[key]}"
    old, new = expected["tensors"], record["tensors"]
    shapes = {name: (old.get(name, [0, None])[1], new.get(name, [0, None])[1]) for name in old | new}
    if unlike := {name: pair for name, pair in shapes.items() if pair[0] != pair[1]}:
        return f"shapes (expected, is) of {len(unlike)} tensors: {dict([*unlike.items()][:3])}"
    off = {name: abs(old[name][3] - new[name][3]) / max(1.0, old[name][3]) for name in old}
    differ = [name for name in old if (old[name][0] != new[name][0] if exact else off[name] > TOLERANCE)]
    if not differ:
        return None
    worst = max(differ, key=off.__getitem__)
    return f"{len(differ)} of {len(old)} tensors, norms by up to {off[worst]:.2g}, most of {worst}"


def distance(first: Path, second: Path) -> float:
    """Return the largest difference of two exports' tensors, relative to a tensor's largest value above 1."""
    one, other = tensors_of(first), tensors_of(second)
    if {n: t.shape for n, t in one.items()} != {n: t.shape for n, t in other.items()}:
        return float("inf")
    return max(float((one[n].double() - t.double()).abs().max() / t.abs().max().clamp(1)) for n, t in other.items())


def read(group: str) -> dict[str, Any]:
    """Return a golden file: the machine that made it, and the records by case."""
    path = ROOM / f"{group}.json"
    return json.loads(path.read_text()) if path.is_file() else {"machine": machine(), "cases": {}}


def is_exact(golden: dict[str, Any], name: str) -> bool:
    """Return whether a case of a golden file was made on this machine, so that every bit is compared."""
    return golden["cases"].get(name, {}).get("machine", golden["machine"]) == machine()


def write(group: str, cases: dict[str, Any], made_on: dict[str, str]) -> None:
    """Write a golden file, a line per tensor."""
    text = json.dumps({"machine": made_on, "cases": dict(sorted(cases.items()))}, indent=1)
    (ROOM / f"{group}.json").write_text(
        re.sub(r"\[[^][{}]*(?:\[[^][]*\][^][{}]*)?\]", lambda m: " ".join(m[0].split()), text) + "\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden.make", description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--tensors", type=Path)
    parser.add_argument("--only", default="")
    chosen, changed = parser.parse_args(), 0
    with making() as exports:
        for group, cases in groups().items():
            known, here = read(group), machine()
            made_on = known["machine"] if chosen.only else here
            golden = {name: record for name, record in known["cases"].items() if name in cases}
            for name in (name for name in cases if chosen.only in f"{group}: {name}"):
                try:
                    export = exports.make(group, name)
                except CommandFailed as failure:
                    print(f"{group}: {name}: {failure}", flush=True)
                    changed += 1
                    continue
                record = fingerprint(export)
                says = difference(golden[name], record, is_exact(known, name)) if name in golden else "is new"
                changed += says is not None
                kept = chosen.tensors and chosen.tensors / group / name.replace(" ", "_")
                if kept and not chosen.check:
                    shutil.copytree(export, kept, dirs_exist_ok=True)
                elif kept and kept.is_dir():
                    says = f"{says or 'equal'}; largest difference {distance(export, kept):.3g}"
                print(f"{group}: {name}: {says or 'equal'}", flush=True)
                golden[name] = record if made_on == here else record | {"machine": here}
            if not chosen.check:
                write(group, golden, made_on)
    print(f"{changed} cases differ")
    return int(chosen.check and changed > 0)


if __name__ == "__main__":
    os.chdir(ROOM.parents[1])
    sys.exit(main())
