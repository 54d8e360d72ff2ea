"""The files of an export that are copied or uploaded: known names, no link that leads out of the folder."""

from __future__ import annotations

import fnmatch
import os
import shutil
from pathlib import Path

from lit_compress.export.modelling import MODULE
from lit_compress.models.own_code import brings_code
from lit_compress.utils.errors import UserError
from lit_compress.utils.manifest import MANIFEST, write_manifest
from lit_compress.utils.progress import note

PROGRAMS = (
    "model.onnx", "model.onnx.data", "model.pt2", "openvino_model.xml", "openvino_model.bin", "decode.*", "encode.*",
    "write.py", "writing.json",
)  # fmt: skip
_KNOWN = (
    *PROGRAMS, "config.json", "generation_config.json", "structure.json", "report.json", "README.md", "LICENSE*",
    f"{MODULE}.py", "model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json",
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt", "*.model", "chat_template.jinja", "additional_chat_templates/*.jinja",
    "modules.json", "sentence_*_config.json", "config_sentence_transformers.json", "[0-9]_*/config.json",
    "[0-9]_*/model.safetensors", "bench.json", "bench.png", "alternatives.png",
)  # fmt: skip


def export_files(what: str, folder: Path) -> dict[str, Path]:
    """Return the files of an export by their name relative to its folder, without the manifest; a note names others.

    Links of the hub's cache, from a snapshot to the blobs of the same repository, are files like any other.

    Args:
        what: option and value, the start of messages.
        folder: of the export.

    Raises:
        UserError: a link leads out of the folder, or to a folder.
    """
    known, others = (*_KNOWN, *["*.py"] * brings_code(folder)), []
    files: dict[str, Path] = {}
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (Path(parent) / name for name in sorted([*folders, *names])):
            name = path.relative_to(folder).as_posix()
            if path.is_symlink() and (path.is_dir() or not _stays(path, folder)):
                raise UserError(
                    f"{what}: '{name}' is a link to '{path.resolve()}'; only links to files in the folder are copied; "
                    "remove it"
                )
            if path.is_dir():
                continue
            if any(fnmatch.fnmatchcase(name, pattern) and name.count("/") == pattern.count("/") for pattern in known):
                files[name] = path
            elif name != MANIFEST and not path.name.startswith("."):
                others.append(name)
    if others:
        note(f"{what}: files that no export has are left out: {', '.join(sorted(others)[:5])}")
    return files


def _stays(link: Path, folder: Path) -> bool:
    """Return whether a link leads to a file in its folder, or to a blob of the same repository in the hub's cache."""
    end, top = link.resolve(), folder.resolve()
    repository = top.parent.parent
    return end.is_relative_to(top) or (top.parent.name == "snapshots" and end.parent == repository / "blobs")


def copy_export(what: str, folder: Path, to: Path) -> None:
    """Copy the files of an export into another existing folder, with a manifest of the copies.

    Raises:
        UserError: as :func:`export_files`.
    """
    for name, path in export_files(what, folder).items():
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, to / name)
    write_manifest(to)
