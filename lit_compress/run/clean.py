"""Remove from a run what nothing needs any more: checkpoints of finished stages, what killed processes left."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from lit_compress.run.folder import Run

_CHECKPOINTS = ("last.ckpt", "best.ckpt", ".last.ckpt.tmp", ".best.ckpt.tmp")
_LEFT_BEHIND = re.compile(r"\.(?P<name>.+)\.(?P<pid>\d+)\.(?P<kind>tmp|old)")  # as utils/files.py calls them


def remove_checkpoints(run: Run, stage: str) -> None:
    """Remove the checkpoints of a finished stage: its net is written, and nothing continues from it."""
    for path in _checkpoints(run, stage):
        path.unlink(missing_ok=True)


def clean(run: Run) -> dict[Path, int]:
    """Remove from ``run`` what nothing needs any more; return {path: bytes} of what went.

    A resume, ``export``, ``validate`` and the next stages read none of it. It may be called at any time, also while the
    run goes on, and may be killed: each path goes by itself.
    """
    removed = {}
    for path in removable(run):
        removed[path] = _size(path)
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return removed


def removable(run: Run) -> list[Path]:
    """Return what :func:`clean` removes, in order."""
    return sorted([*(path for stage in run.finished() for path in _checkpoints(run, stage)), *_left_behind(run)])


def _checkpoints(run: Run, stage: str) -> list[Path]:
    """Return the checkpoints of a finished stage; none while the net that was made of them is not there."""
    if not (run.net(stage) / "model.safetensors").is_file():
        return []
    return [path for name in _CHECKPOINTS if (path := run.stage(stage) / name).is_file()]


def _left_behind(run: Run) -> Iterator[Path]:
    """Yield half-written files and folders of processes that are gone, and replaced ones whose successor is there."""
    for path in (*run.folder.glob(".*"), *run.folder.glob("*/.*")):
        found = _LEFT_BEHIND.fullmatch(path.name)
        if found is None or _runs(int(found["pid"])):
            continue
        if found["kind"] == "tmp" or path.with_name(found["name"]).exists():
            yield path


def _runs(pid: int) -> bool:
    """Say whether there is a process of this number here; it may write to the folder."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # of another user
    return True


def _size(path: Path) -> int:
    """Return the bytes of a file, or of all files of a folder."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)
