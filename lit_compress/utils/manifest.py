"""``manifest.json``: size and SHA-256 of the files in a folder, to notice files that are damaged or incomplete.

A model's folder gets it as the last file, when everything else is written. Unlisted files are not compared, nor is the
card, which people edit. The records of a run change one by one; while one is replaced, both versions are valid, so that
a kill at any moment leaves a valid folder. This is no signature: whoever can change a file can change its manifest.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from lit_compress.utils.errors import UserError
from lit_compress.utils.files import write_json, write_text

MANIFEST = "manifest.json"
PROSE = "README.md"  # not listed
BROKEN = f"its {MANIFEST} is broken"
_FORM = (ValueError, KeyError, TypeError, AttributeError, RecursionError)  # of a file that is not of this form
_OURS = ("structure.json", "config.yaml")  # in the folder of a model, of a run
_LARGE = 2**20  # bytes


def write_manifest(folder: Path) -> None:
    """Write ``manifest.json``: ``{"files": {relative name: {"bytes": size, "sha256": hexadecimal}}}``."""
    paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    files = {name: _entry(path) for name, path in paths.items() if name not in (MANIFEST, PROSE)}
    write_json(folder / MANIFEST, {"files": files})


def write_record(path: Path, text: str) -> None:
    """Write a text file atomically, and list it in the manifest of its folder."""
    place, data = path.with_name(MANIFEST), text.encode()
    try:
        listed = _read(place) or {"files": {}}
    except _FORM as error:
        raise UserError(f"run_dir: '{path.parent}': {BROKEN}; delete it to go on without it") from error
    new = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    before = listed.get("before", {})
    if path.is_file() and difference(path.parent, path.name) is None:
        before = before | {path.name: _entry(path)}
    write_json(place, {"files": listed["files"] | {path.name: new}, "before": before})
    write_text(path, text)


def difference(folder: Path, name: str | None = None) -> str | None:
    """Return in words how a folder differs from its manifest; None if it does not, or has none.

    ``name`` is the only file to compare; None for all. Sizes are compared before contents.
    """
    try:
        listed = _read(folder / MANIFEST)
        files, before = (listed["files"], listed.get("before", {})) if listed else ({}, {})
        valid = {key: [place[key] for place in (files, before) if key in place] for key in files | before}
        valid = valid if name is None else {key: entries for key, entries in valid.items() if key == name}
        for key, entries in valid.items():
            if not (folder / key).is_file():
                return f"'{key}' is missing"
            size = (folder / key).stat().st_size
            if all(size != entry["bytes"] for entry in entries):
                return f"'{key}' has {size:,} bytes, not {entries[0]['bytes']:,}"
        for key, entries in valid.items():
            if all(file_hash(folder / key) != entry["sha256"] for entry in entries):
                return f"'{key}' has another SHA-256"
    except OSError as error:
        return f"a file cannot be read ({error.strerror})"
    except _FORM:
        return BROKEN
    return None


def listed_files(what: str, folder: Path) -> list[str] | None:
    """Return the relative names of the files that a folder's manifest lists; None if it has none.

    Raises:
        UserError: the manifest is broken; ``what`` is its start.
    """
    try:
        listed = _read(folder / MANIFEST)
    except _FORM as error:
        raise UserError(f"{what}: {BROKEN}; copy or make the folder again") from error
    return None if listed is None else [*listed["files"]]


def check_manifest(what: str, folder: Path, name: str | None = None) -> None:
    """Refuse a folder of a model or a run that has a :func:`difference`.

    Raises:
        UserError: a listed file is missing or differs, or the manifest is broken; ``what`` is its start.
    """
    # a record of a run may be replaced between the two readings, of the manifest and of the record
    found = difference(folder, name) and difference(folder, name)
    if found == BROKEN and not any((folder / file).is_file() for file in _OURS):
        return  # of another program
    if found:
        raise UserError(
            f"{what}: {found}; it was damaged or changed since it was written; copy or make it again, or delete "
            f"{MANIFEST} if you changed it yourself"
        )


def _read(path: Path) -> Any:
    """Return the content of a manifest; None if there is none.

    Raises:
        OSError: it cannot be read; one of :data:`_FORM`: it is of another form.
    """
    if not path.is_file():
        return None
    listed = json.loads(path.read_bytes())
    for name, entry in [*listed["files"].items(), *listed.get("before", {}).items()]:
        inside = not PurePosixPath(name).is_absolute() and ".." not in PurePosixPath(name).parts
        if not (inside and isinstance(entry["bytes"], int) and isinstance(entry["sha256"], str)):
            raise ValueError(name)
    return listed


def _entry(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": file_hash(path)}


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal; a large one is read once, until its size or time changes."""
    stat = path.stat()
    read = _digest if stat.st_size >= _LARGE else _digest.__wrapped__
    return read(str(path.absolute()), stat.st_ino, stat.st_size, stat.st_mtime_ns)


@cache
def _digest(path: str, *stamp: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
