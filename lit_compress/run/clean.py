"""Remove unneeded files of a run: checkpoints of finished stages, leftovers of killed processes."""

from __future__ import annotations

from pathlib import Path

from lit_compress.run.folder import Run
from lit_compress.utils.files import left_behind, remove

_CHECKPOINTS = ("last.ckpt", "previous.ckpt", "best.ckpt", ".last.ckpt.tmp", ".best.ckpt.tmp")


def remove_checkpoints(run: Run, stage: str) -> None:
    """Remove the checkpoints of a finished stage: its model is written, and nothing continues from it."""
    for path in _checkpoints(run, stage):
        path.unlink(missing_ok=True)


def clean(run: Run) -> dict[Path, int]:
    """Remove unneeded files from ``run``; return {path: bytes} of the removed ones.

    A resume, ``export``, ``validate`` and the next stages read none of it. It may be called at any time, also while the
    run continues, and may be killed: each path goes by itself.
    """
    removed = {}
    for path in removable(run):
        removed[path] = _size(path)
        remove(path)
    return removed


def removable(run: Run) -> list[Path]:
    """Return the files that :func:`clean` removes, in order."""
    folders = [run.folder, *(path for path in run.folder.iterdir() if path.is_dir() and not path.is_symlink())]
    return sorted(
        [
            *(path for stage in run.finished() for path in _checkpoints(run, stage)),
            *(path for folder in folders for path in left_behind(folder)),
        ]
    )


def _checkpoints(run: Run, stage: str) -> list[Path]:
    """Return the checkpoints of a finished stage; none while the model that was made of them is not there.

    A stage's folder that is a link is not followed: it may be another run's.
    """
    if run.stage(stage).is_symlink() or not (run.net(stage) / "model.safetensors").is_file():
        return []
    return [path for name in _CHECKPOINTS if (path := run.stage(stage) / name).is_file()]


def _size(path: Path) -> int:
    """Return the bytes of a file, or of all files of a folder."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)
