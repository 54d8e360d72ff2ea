"""Where a config name is looked up: a path first, then the configs shipped with the package."""

from __future__ import annotations

from pathlib import Path

from lit_compress.errors import UserError, nearest

_HERE = Path(__file__).resolve().parent
FOLDER = _HERE / "configs" if (_HERE / "configs").is_dir() else _HERE.parent / "configs"


def shipped() -> list[str]:
    """Return the names of the shipped configs."""
    return sorted(path.name for path in FOLDER.glob("*.yaml"))


def find_config(name: str) -> Path:
    """Return the file of the config ``name``.

    Raises:
        UserError: neither a file nor a shipped config; names the nearest.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return path.resolve()
    if path.name == name and (FOLDER / name).is_file():
        return FOLDER / name
    if path.name == name and (FOLDER / f"{name}.yaml").is_file():
        return FOLDER / f"{name}.yaml"
    raise UserError(f"config: no file or shipped config '{name}'; {nearest(name, shipped())}")
