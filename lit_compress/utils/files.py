"""Writing of files and folders under a temporary name, with a rename when they are complete."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import filecmp
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import yaml

from lit_compress.utils.errors import UserError

T = TypeVar("T")
_POINTS = b"version https://git-lfs.github.com/spec/"
POINTER = "a Git LFS pointer, not the file itself; run git lfs pull in its repository"
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG, errno.EIO}
_NO_ROOM = re.compile(r"No space left on device|Read-only file system|Disk quota exceeded|File too large")


def check_folder(option: str, path: Path, file: bool = False) -> None:
    """Refuse a folder that cannot be written, or a ``file``, before the work whose result it is for.

    Raises:
        UserError: it is the other of both, or nothing can be written there; begins with ``option``.
    """
    folder = path.parent if file else path
    mend = "is a folder; give a file" if file else "is a file; give a new or empty folder"
    try:
        if path.exists() and path.is_dir() == file:
            raise UserError(f"{option}: '{path}' {mend}")
        while not folder.exists():
            folder = folder.absolute().parent
        if not folder.is_dir():
            raise UserError(f"{option}: '{folder}' is a file; nothing can be written under it")
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"{option}: cannot write to '{path}' ({error.strerror}); give another place") from error


@contextmanager
def atomic_folder(folder: Path, others: Callable[[Path], list[Path]] = lambda _: []) -> Iterator[Path]:
    """Yield a temporary folder next to ``folder``, and rename it to ``folder`` when the context ends without error.

    If the write is interrupted, an existing ``folder`` stays unchanged. Linux exchanges two names at once: one of both
    is there at every moment. A link is followed. A folder that cannot be renamed or is in use by the shell, i.e. a
    mount point or the working folder, gets other content. Processes that write the same folder have a temporary one
    each, and the last is kept whole. ``others`` returns relative paths in an earlier ``folder`` that stay as they are,
    except where there is something new.
    """
    folder = Path(os.path.realpath(folder))
    stays = folder.is_mount() or folder == Path(os.path.realpath(os.curdir))
    folder.parent.mkdir(parents=True, exist_ok=True)
    place, ours = folder if stays else folder.parent, re.compile(rf"\.{re.escape(folder.name)}(\.\d+)?\.tmp")
    for path in [path for path in place.iterdir() if ours.fullmatch(path.name) and is_left(path)]:
        remove(path)
    temporary = place / f".{folder.name}.{os.getpid()}.tmp"
    temporary.mkdir()
    handle = os.open(temporary, os.O_RDONLY)
    try:
        with suppress(OSError):  # not every file system locks folders
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield temporary
        mode = stat.S_IMODE(temporary.stat().st_mode) & 0o666  # of a new file; safetensors are their owner's alone
        for path in temporary.rglob("*"):
            if path.is_file() and not path.is_symlink():  # its file may be elsewhere
                path.chmod(mode)
        for name in [name for name in others(folder) if not ours.fullmatch(name.parts[0])]:
            _keep(folder / name, temporary / name)
        new = list(temporary.iterdir())
        for path in new if stays else [temporary]:
            _replace(path, folder / path.name if stays else folder)
        for path in folder.iterdir() if stays else ():
            if path.name not in {other.name for other in new} and not ours.fullmatch(path.name):
                remove(path)
    finally:
        remove(temporary)
        os.close(handle)


def _keep(path: Path, new: Path) -> None:
    """Copy a file, a link or an empty folder, unless something is there."""
    with suppress(FileExistsError, NotADirectoryError):
        new.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir() and not path.is_symlink():
            new.mkdir()
        elif not new.exists() and (path.is_file() or path.is_symlink()):
            shutil.copy2(path, new, follow_symlinks=False)


def is_left(temporary: Path) -> bool:
    """Return whether no process writes the folder any more that :func:`atomic_folder` made, or it is a file."""
    try:
        handle = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    finally:
        os.close(handle)
    return True


def _replace(new: Path, old: Path) -> None:
    """Put a file or a folder in the place of another one, if there is one."""
    if not (os.path.lexists(old) and _exchange(new, old)):
        remove(old)
        new.rename(old)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names at once; False if the system or the file system cannot."""
    rename, here, swap = getattr(ctypes.CDLL(None), "renameat2", None), -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return rename is not None and rename(here, os.fsencode(one), here, os.fsencode(other), swap) == 0


def remove(path: Path) -> None:
    """Remove a file or a folder; it may be gone already."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary file next to ``path``, and rename it to ``path`` when the context ends without error.

    A link is followed. A device or a pipe, e.g. /dev/null, is written itself.
    """
    if path.exists() and not path.is_file():
        yield path
        return
    path = Path(os.path.realpath(path))
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def link_if_equal(path: Path, other: Path) -> None:
    """Make a file a hard link to an equal one; it stays as it is where they differ, or where there are no links."""
    if not (path.is_file() and other.is_file()) or path.samefile(other) or not filecmp.cmp(path, other, shallow=False):
        return
    link = path.parent.with_name(f".{path.name}.{os.getpid()}.tmp")  # a later claim removes it after a kill
    with suppress(OSError):
        os.link(other, link)
        link.replace(path)


def is_pointer(path: Path) -> bool:
    """Return whether a file only points to its content, as in a repository that was cloned without Git LFS."""
    with path.open("rb") as stream:
        return stream.read(len(_POINTS)) == _POINTS


def write_text(path: Path, text: str) -> None:
    """Write text under a temporary name and rename it."""
    with atomic_file(path) as temporary:
        temporary.write_text(text)


def write_json(path: Path, value: Any) -> None:
    """Write JSON under a temporary name and rename it."""
    write_text(path, json.dumps(value, indent=2, default=str) + "\n")


def read_json(option: str, path: Path, kind: type[T]) -> T:
    """Return the content of a JSON file, which is a ``kind``: ``dict`` or ``list``.

    Raises:
        UserError: it cannot be read, is not JSON, or holds something else; begins with ``option``.
    """
    try:
        value = json_of(path)
    except OSError as error:
        raise UserError(f"{option}: cannot read '{path}' ({error.strerror})") from error
    except ValueError as error:  # also of its encoding
        raise UserError(f"{option}: '{path}' is not readable JSON ({error}); it is broken") from error
    if not isinstance(value, kind):
        raise UserError(f"{option}: '{path}' holds no JSON {kind.__name__}; it is broken")
    return value


def json_of(path: Path) -> Any:
    """Return the content of a JSON file; raises OSError if it cannot be read, ValueError if it is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError("too deep") from error


def read_yaml(option: str, path: Path) -> Any:
    """Return the content of a YAML file.

    Raises:
        UserError: it cannot be read, or is not YAML; begins with ``option``.
    """
    try:
        with path.open(encoding="utf-8") as stream:
            return yaml.load(stream, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # C is ten times as fast
    except (OSError, ValueError, yaml.YAMLError, RecursionError, TypeError) as error:  # also of a key that is a list
        raise UserError(f"{option}: '{path}' is not readable YAML: {error}") from error


def card_fields(path: Path) -> dict[str, Any]:
    """Return the fields of a card of the hub, a README.md that begins with YAML; {} without any.

    Raises OSError if it cannot be read, ValueError if they are not YAML.
    """
    from huggingface_hub import metadata_load

    try:
        return metadata_load(path) or {}
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from error


def write_failure(error: BaseException | None) -> str | None:
    """Return why a file could not be written or read, if ``error`` or its cause says so; None otherwise.

    torch, safetensors and OpenVINO raise errors of their own for a full disk, most with the system's words.
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            name = error.filename2 or error.filename  # of a copy the new one
            return f"{error.strerror}{f': {name!s}' if name else ''}"
        text = str(error)
        if match := _NO_ROOM.search(text):
            return match[0]
        if re.search(r"PytorchStreamWriter failed|inline_container.*(unexpected pos|write)", text):
            return "a checkpoint could not be written whole"
        if "iostream error" in text:  # OpenVINO
            return "a program could not be written whole"
        error = error.__cause__ or error.__context__
    return None
