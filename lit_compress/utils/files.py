"""Writing of files and folders under a temporary name, with a rename when they are complete."""

from __future__ import annotations

import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lit_compress.utils.errors import UserError


def check_folder(option: str, path: Path) -> None:
    """Refuse a folder that cannot be written, before the work whose result it is for.

    Args:
        option: what the user named it by; the message begins with it.
        path: need not exist.

    Raises:
        UserError: it is a file, lies under one, or where nothing can be written.
    """
    with _said(option, path):
        if path.exists() and not path.is_dir():
            raise UserError(f"{option}: '{path}' is a file; give a new or empty folder")
        _try_to_write(option, path)


def check_file(option: str, path: Path) -> None:
    """Refuse a file that cannot be written, as :func:`check_folder` does a folder."""
    with _said(option, path):
        if path.is_dir():
            raise UserError(f"{option}: '{path}' is a folder; give a file")
        _try_to_write(option, path.parent)


def _try_to_write(option: str, folder: Path) -> None:
    """Write and remove a file in ``folder``, or in the folder in which it would be made."""
    while not folder.exists():
        folder = folder.absolute().parent
    if not folder.is_dir():
        raise UserError(f"{option}: '{folder}' is a file; nothing can be written under it")
    with tempfile.TemporaryFile(dir=folder):
        pass


@contextmanager
def _said(option: str, path: Path) -> Iterator[None]:
    """Turn an error of the file system into one line."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{option}: cannot write to '{path}' ({error.strerror}); give another place") from error


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder beside ``folder``, and rename it to ``folder`` when the context ends without error.

    If the write is interrupted, an existing ``folder`` stays unchanged.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        _as_umask(temporary)
        if folder.exists():
            old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
            folder.rename(old)
            temporary.rename(folder)
            shutil.rmtree(old)
        else:
            temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _as_umask(folder: Path) -> None:
    """Give all files in ``folder`` the permissions of a new file; safetensors are written for their owner alone."""
    with tempfile.TemporaryDirectory(dir=folder) as work:
        probe = Path(work) / "probe"
        probe.touch()
        mode = stat.S_IMODE(probe.stat().st_mode)
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)


def write_text(path: Path, text: str) -> None:
    """Write text under a temporary name and rename it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def write_json(path: Path, value: Any) -> None:
    """Write JSON under a temporary name and rename it."""
    write_text(path, json.dumps(value, indent=2, default=str) + "\n")
