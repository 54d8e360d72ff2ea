"""The checks of the fuzz test: what becomes of one damaged config, data file, export or model.

A check returns the line with which a case is refused, or None where it is read; everything else is a finding. In a
child process it has bounded time and memory, which the system enforces.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import resource
import shutil
import signal
import struct
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from benchmarks.reliability import cases

OLD = Path(__file__).resolve().parents[2] / "tests" / "old_runs"  # tiny models and exports
MOST_SECONDS, MOST_MEMORY = 30, 700 * 2**20  # of one case, next to what the process had before
LONGEST = 700  # characters of a line


class Finding(Exception):
    """What must not happen: no one-line error and no result."""


def in_child(check: Callable[[Any, Path], str | None], case: Any) -> dict[str, Any]:
    """Return what becomes of a case in a process of its own: ``line``, or ``found``; and its MiB of memory."""
    read, write = os.pipe()
    sys.stdout.flush()
    with tempfile.TemporaryDirectory() as work:
        if not (pid := os.fork()):
            answer: dict[str, Any] = {}
            before = _resident()
            try:
                os.close(read)
                signal.alarm(MOST_SECONDS)
                resource.setrlimit(resource.RLIMIT_AS, (_mapped() + 4 * MOST_MEMORY, resource.RLIM_INFINITY))
                os.chdir(work)
                answer = outcome(check, case, Path(work))
            except BaseException as error:
                answer = {"found": f"{type(error).__name__}: {error}"}
            finally:
                with contextlib.suppress(OSError):  # the process that asked is gone
                    os.write(write, json.dumps({"before": before} | answer).encode())
                os._exit(0)
        os.close(write)
        said = b""
        while block := os.read(read, 65536):
            said += block
        os.close(read)
        _, status, usage = os.wait4(pid, 0)
    if status:
        return {"found": f"the process was ended by signal {os.WTERMSIG(status)}"}
    answer = json.loads(said)
    answer["mib"] = max(0.0, usage.ru_maxrss / 1024 - answer["before"] / 2**20)
    if answer["mib"] * 2**20 > MOST_MEMORY:
        answer["found"] = f"took {answer['mib']:.0f} MiB"
    return answer


def outcome(check: Callable[[Any, Path], str | None], case: Any, work: Path) -> dict[str, Any]:
    """Return ``{"line": ...}`` of a case that is refused or read as it should be, else ``{"found": ...}``."""
    from lit_compress.utils.errors import UserError

    try:
        line = check(case, work)
    except UserError as error:
        line = str(error)
    except Finding as error:
        return {"found": str(error)}
    except BaseException as error:
        import traceback

        from lit_compress.utils.errors import user_error

        if isinstance(error, Exception) and (known := user_error(error)) is not None:
            return {"line": str(known)}
        place = traceback.extract_tb(error.__traceback__)
        own = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in place if "lit_compress" in frame.filename]
        return {"found": f"{type(error).__name__} at {own[-1] if own else '?'}: {' '.join(str(error).split())[:300]}"}
    if any(path.name == "ran" for path in work.rglob("*")):
        return {"found": "code of a file ran"}
    if line is not None and ("\n" in line or len(line) > LONGEST):
        return {"found": f"not one short line: {line[:300]!r}"}
    return {"line": line}


def _mapped() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


# ---------------------------------------------------------------- data


def check_data(case: Any, work: Path) -> str | None:
    """Read a damaged training file as a fit does, all batches of it; every row must be in one."""
    from lit_compress.data.datamodule import DataModule
    from lit_compress.tasks.records import Custom

    (task, kind, first), *_ = case
    name, content = cases.data_file(case)
    os.environ["LIT_COMPRESS_CACHE"] = str(work / "cache")
    folder = work / "data"
    folder.mkdir()
    (folder / name).write_bytes(content)
    (folder / first.replace("train", "validation")).write_bytes(cases.CORPUS[(task, kind, first)])
    with _quiet():
        custom = {"custom": Custom(kind=kind)} if kind else {}
        data = DataModule(task, str(OLD / "backbone"), str(folder), batch_size=4, **custom)  # type: ignore[arg-type]
        data.setup("fit")
        seen = {int(i) for batch in data.train_dataloader() for i in batch["index"]}
    if seen != set(range(data.train_size())):
        raise Finding(f"{data.train_size()} rows, {len(seen)} in batches")
    return None


# ---------------------------------------------------------------- configs


def check_config(case: Any, work: Path) -> str | None:
    """Parse a damaged config as ``fit`` does, and check the stages; nothing is trained."""
    from lit_compress.cli.lines import read_line
    from lit_compress.cli.options import CommandLine
    from lit_compress.run.settle import check_stages

    method, edits, more, damage = case
    config: Any = {
        "model": {"class_path": f"lit_compress.methods.{method}", "init_args": {
            "backbone": str(OLD / "backbone"), "density": 0.5, "dense": {"epochs": 1, "learning_rate": 1e-3},
            "distillation": {"alpha": 0.5}}},
        "data": {"task": "sst2", "path": str(OLD / "data"), "batch_size": 8, "max_length": 16},
        "trainer": {"accelerator": "cpu", "devices": 1, "precision": "32-true", "accumulate_grad_batches": 1,
                    "logger": False, "enable_progress_bar": False},
        "export": {"dtype": None}, "seed_everything": 1, "checkpoint_every": 10,
    }  # fmt: skip
    config = cases.edit_json(config, edits)
    config = config | more if isinstance(config, dict) else config
    text = yaml.safe_dump(config, sort_keys=False).encode()
    (work / "mine.yaml").write_bytes(text if damage is None else cases.edit_bytes(text, damage))
    with _quiet():
        check_stages(CommandLine(read_line("fit", ["--config", str(work / "mine.yaml")])).build())
    return None


# ---------------------------------------------------------------- exports and models


def check_folder(case: Any, work: Path) -> str | None:
    """Validate a damaged export, or a damaged fine-tuned model, through the command line."""
    name, kind, damage = case
    folder = work / "net"
    shutil.copytree(OLD / name / ("export" if kind == "export" else "dense/net"), folder)
    if kind == "model":
        (folder / "structure.json").unlink()
        (folder / "report.json").write_text("{}")
    _damage(folder, *damage)
    words = ["validate", str(folder), "--data.path", str(OLD / "data"), "--data.max_length", "12"]
    return _command([*words, *(["--data.task", "sst2"] if kind == "model" else [])])


def _command(words: list[str]) -> str | None:
    """Run a command; return its error line."""
    from lit_compress.__main__ import main

    with _quiet() as err:
        try:
            main(words)
        except SystemExit as stop:
            lines = err.getvalue().splitlines()
            if stop.code != 2 or not lines or not lines[-1].startswith("error: "):
                raise Finding(f"exit code {stop.code}, {err.getvalue()[-300:]}") from stop
            return lines[-1]
    return None


def _damage(folder: Path, file: str, how: str, edits: Any) -> None:
    """Damage one file of a model."""
    path = folder / file
    if how == "pickle":
        (folder / "model.safetensors").unlink()
        path.write_bytes(_hostile(edits))
        return
    if not path.exists():
        path = folder / "config.json"
        how = how if how in ("json", "bytes") else "bytes"
    content = path.read_bytes()
    if how == "json":
        path.write_text(json.dumps(cases.edit_json(json.loads(content), edits)))
    elif how == "bytes":
        path.write_bytes(cases.edit_bytes(content, edits))
    elif how == "header":
        (length,) = struct.unpack("<Q", content[:8])
        header = json.dumps(cases.edit_json(json.loads(content[8 : 8 + length]), edits)).encode()
        path.write_bytes(struct.pack("<Q", len(header)) + header + content[8 + length :])
    else:
        _damage_tensors(path, *edits)


def _damage_tensors(path: Path, how: str, which: int) -> None:
    """Write the file again with one wrong tensor."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    name = sorted(tensors)[which % len(tensors)]
    value = tensors[name]
    if how == "missing":
        del tensors[name]
    elif how == "more":
        tensors["strange.weight"] = torch.zeros(2)
    else:
        tensors[name] = {
            "shape": lambda: torch.zeros(*(size + 1 + which % 7 for size in value.shape)),
            "type": lambda: value.to(torch.int8 if which % 2 else torch.float64),
            "nan": lambda: torch.full_like(value, float("nan")) if value.is_floating_point() else value,
            "transposed": lambda: value.T.contiguous() if value.ndim == 2 else value[:-1].clone(),
        }[how]()
    save_file(tensors, path, metadata={"format": "pt"})


class _Runs:
    """Leaves the folder ``ran`` where it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


def _hostile(which: int) -> bytes:
    """Return a pickle that runs code: plain, as torch writes it, cut, or behind a valid beginning."""
    import torch

    buffer = io.BytesIO()
    torch.save({"weight": _Runs()}, buffer)
    plain = pickle.dumps({"weight": _Runs()})
    return (plain, buffer.getvalue(), plain[:-1], buffer.getvalue()[:-20])[which]


@contextlib.contextmanager
def _quiet() -> Any:
    """Keep what a command prints from the screen; yield what goes to stderr."""
    err = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
        yield err
