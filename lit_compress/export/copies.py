"""Files of an export: copies in another folder, without links out of it; folders in the place of an earlier export."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from lit_compress.export.modelling import write_as
from lit_compress.models.files import stored_dtype
from lit_compress.models.own_code import forget_code
from lit_compress.models.sites import Model
from lit_compress.models.storage import save_form
from lit_compress.models.surgery import describe
from lit_compress.tasks.sentences import OWN
from lit_compress.utils.errors import UserError
from lit_compress.utils.files import atomic_folder, read_json
from lit_compress.utils.manifest import MANIFEST, PROSE, listed_files, write_manifest

PROGRAMS = (
    "model.onnx", "model.onnx.data", "openvino_model.xml", "openvino_model.bin",
    "model.pt2", "decode.*", "encode.*", "write.py", "writing.json",  # of earlier versions
)  # fmt: skip


def export_files(what: str, folder: Path) -> dict[str, Path]:
    """Return the files of an export by their name relative to its folder: card, licence, and all in its manifest.

    Exports of version 0.2 have no manifest: all of their files that are not hidden. Links of the hub's cache, from a
    snapshot to the blobs of the same repository, are files like any other. ``what`` is option and value, the start of
    messages.

    Raises:
        UserError: one is a link out of the folder or to a folder; the manifest is broken.
    """
    listed, files, top = listed_files(what, folder), dict[str, Path](), folder.resolve()
    own = {PROSE, *(path.name for path in folder.glob("LICENSE*"))}  # people add these
    paths = folder.rglob("*") if listed is None else (folder / name for name in {*listed, *own})
    blobs = top.parent.parent / "blobs"
    for path in sorted(paths):
        name, end = path.relative_to(folder).as_posix(), path.resolve()
        if any(part.startswith(".") for part in name.split("/")) or name == MANIFEST:
            continue
        inside = end.is_relative_to(top) or (top.parent.name == "snapshots" and end.parent == blobs)
        if not inside or (path.is_symlink() and path.is_dir()):
            raise UserError(
                f"{what}: '{name}' is a link to '{end}'; only links to files in the folder are copied; remove it"
            )
        if path.is_file():
            files[name] = path
    return files


@contextmanager
def export_folder(out: Path) -> Iterator[Path]:
    """Yield the folder of a new export, which takes the place of ``out`` as in ``atomic_folder``.

    Files of an earlier export there go; those that its manifest does not list are of others, and stay.
    """
    with atomic_folder(out, _others) as temporary:
        yield temporary


def _others(out: Path) -> list[Path]:
    """Return the relative paths of files, links and empty folders in an export's folder that are not its own."""
    try:
        listed = listed_files("export", out)
    except UserError:  # which files are of the export cannot be known
        listed = None
    if listed is None:
        return []
    own = {*listed, MANIFEST, PROSE, *(path.name for pattern in PROGRAMS for path in out.glob(pattern))}
    ends = [path for path in out.rglob("*") if path.is_symlink() or not path.is_dir() or not any(path.iterdir())]
    names = [path.relative_to(out) for path in ends]
    return [name for name in names if name.as_posix() not in own and "__pycache__" not in name.parts]


def copy_export(what: str, net: Model, folder: Path, to: Path) -> None:
    """Copy the files of an export of ``net`` into another existing folder, with this version's code and a manifest.

    No code is from the copied folder.

    Raises:
        UserError: as :func:`export_files`; ``modules.json`` names classes of other packages, which would be imported.
    """
    path = folder / "modules.json"
    types = [str(module.get("type")) for module in (read_json(what, path, list) if path.is_file() else [])]
    if strange := next((name for name in types if not name.startswith(OWN)), None):
        raise UserError(f"{what}: modules.json names '{strange}', code that no export has; export the run again")
    for name, path in export_files(what, folder).items():
        if not name.endswith(".py"):
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, to / name)
    own, net.config.dtype = net.config.dtype, getattr(torch, stored_dtype(folder))
    write_as(net, None if describe(net) else net, to, save_form)
    net.config.dtype = own
    forget_code(to)
    write_manifest(to)
