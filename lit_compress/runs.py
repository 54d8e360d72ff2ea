"""The folder of a run: its config, which stages are finished, where each keeps its net.

RUN/config.yaml            what was asked
RUN/stages.json            finished stages: name, metric before and after, steps, seconds
RUN/<stage>/net/           the net after the stage (a Hugging Face folder, plus structure.json)
RUN/<stage>/last.ckpt      where to continue; best.ckpt: the best epoch at budget
RUN/export/, report.json   the result
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import yaml

from lit_compress.errors import UserError

# What may differ when a run is continued: where it runs and what it shows, not what it computes.
_FREE = {
    "run_dir", "ckpt_path", "checkpoint_every", "data.path", "data.num_workers", "model.init_args.teacher",
    "trainer.accelerator", "trainer.devices", "trainer.num_nodes", "trainer.enable_progress_bar", "trainer.logger",
    "trainer.callbacks", "trainer.log_every_n_steps", "trainer.enable_model_summary", "trainer.profiler",
}  # fmt: skip


class Run:
    """A run folder.

    Args:
        folder: where.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).resolve()

    def stage(self, name: str) -> Path:
        """Return the folder of a stage."""
        return self.folder / name

    def net(self, name: str) -> Path:
        """Return the folder of the net a stage left."""
        return self.folder / name / "net"

    @property
    def started(self) -> bool:
        """Whether something is there to continue: a config and a checkpoint or a finished stage."""
        if not (self.folder / "config.yaml").is_file():
            return False
        return (self.folder / "stages.json").is_file() or any(self.folder.glob("*/*.ckpt"))

    def config(self) -> dict[str, Any]:
        """Return the config the run was started with.

        Raises:
            UserError: the folder is no run folder, or its config is unreadable.
        """
        path = self.folder / "config.yaml"
        if not path.is_file():
            raise UserError(f"run_dir: '{self.folder}' is not a run folder (no config.yaml); give one made by fit")
        try:
            return yaml.safe_load(path.read_text())
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise UserError(f"run_dir: '{path}' is not readable YAML: {error}") from error

    def finished(self) -> dict[str, dict[str, Any]]:
        """Return the records of the finished stages by name, in order."""
        path = self.folder / "stages.json"
        return {r["name"]: r for r in json.loads(path.read_text())} if path.is_file() else {}

    def finish(self, record: dict[str, Any]) -> None:
        """Add a stage to the finished ones."""
        write_json(self.folder / "stages.json", [*self.finished().values(), record])

    def begin(self, config: dict[str, Any]) -> None:
        """Create the folder with its config."""
        self.folder.mkdir(parents=True, exist_ok=True)
        _write(self.folder / "config.yaml", yaml.safe_dump(config, sort_keys=False))

    def check_same(self, config: dict[str, Any]) -> None:
        """Compare with the config the run was started with.

        Raises:
            UserError: a value that decides the result differs; names the first one.
        """
        old, new = _flatten(self.config()), _flatten(config)
        for key in sorted({*old, *new} - _FREE):
            if any(key.startswith(f"{free}.") for free in _FREE):
                continue
            if old.get(key) != new.get(key):
                name = key.replace(".init_args", "")
                raise UserError(
                    f"run_dir: '{self.folder}' belongs to another config: {name} was {old.get(key)}, "
                    f"now {new.get(key)}; give the same config to continue it, or another --run_dir"
                )


def _flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(config, dict) or not config:
        return {prefix: config}
    return {
        k: v for key, value in config.items() for k, v in _flatten(value, f"{prefix}.{key}" if prefix else key).items()
    }


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def write_json(path: Path, value: Any) -> None:
    """Write JSON under a temporary name and rename it."""
    _write(path, json.dumps(value, indent=2, default=str) + "\n")
