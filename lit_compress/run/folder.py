"""The folder of a run: its config, the records of finished stages, and their models.

RUN/config.yaml            all options of the run
RUN/data.json              what was found in the data
RUN/budget.json            with a budget: the asked value, and the density that meets it
RUN/removal.json           the kind of removal that SecondOrder chose, and its trials
RUN/changed.json           with --allow_changed: the changes, and their stages
RUN/stages.json            finished stages: name, metric before and after, steps, seconds
RUN/<stage>/net/           the model after the stage (a Hugging Face folder, plus structure.json)
RUN/<stage>/last.ckpt      where to continue; best.ckpt: the best epoch at budget; both go when the stage is finished
RUN/export/, report.json   the result
RUN/manifest.json          sizes and SHA-256 of these files (utils/manifest.py); the folder of every model has its own
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lit_compress import methods
from lit_compress.export.sentences import write_sentences
from lit_compress.models.backbones import DEFAULT
from lit_compress.models.storage import save_net
from lit_compress.run.config import checked_groups, plain_config
from lit_compress.utils.errors import UserError
from lit_compress.utils.files import left_behind, read_json, read_yaml, remove, yaml_text
from lit_compress.utils.manifest import MANIFEST, check_manifest, write_manifest, write_record
from lit_compress.utils.removed import removed_value

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lit_compress.data.datamodule import DataModule

T = TypeVar("T")
ConfigChange = dict[str, Any]  # what, was, now; in changed.json also stage
CHANGED = "changed.json"
# What no run can continue with: its models and checkpoints would not fit.
_NEVER = {"model.class_path", "model.backbone", "model.revision", "model.sites", "model.task", "data.task"}
LOCK = ".lock"  # names the process that works on the folder; it stays, since another may wait with the same file open
# Options that may differ when a run is continued, because they do not change what is computed. The product of devices,
# batch_size and accumulate_grad_batches is compared by run/changes.py.
_FREE = {
    "run_dir", "ckpt_path", "allow_changed", "checkpoint_every", "max_skipped", "data.path", "data.revision",
    "data.batch_size", "trainer.accumulate_grad_batches",
    "data.num_workers", "data.custom.numbered", "data.teacher", "model.init_args.teacher", "model.init_args.recompute",
    "trainer.accelerator", "trainer.devices", "trainer.num_nodes", "trainer.enable_progress_bar", "trainer.logger",
    "trainer.callbacks", "trainer.log_every_n_steps", "trainer.enable_model_summary", "trainer.profiler",
}  # fmt: skip
# options that earlier versions had not -> what they did
_ADDED = {"model.init_args.shape": "free", "data.custom.split_words": False, "trust_remote_code": False}


FORMER = {"bert-base-uncased": DEFAULT}  # names on the hub in earlier configs


def name_today(backbone: Any) -> Any:
    """Return a backbone by the name that it has on the hub today."""
    return FORMER.get(backbone, backbone)


def is_first_process() -> bool:
    """Return whether this is the first process of a run, also before the processes have a group."""
    return getattr(rank_zero_only, "rank", 0) == 0


class Run:
    """A run folder.

    Args:
        folder: its path.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).resolve()

    def stage(self, name: str) -> Path:
        """Return the folder of a stage."""
        return self.folder / name

    def net(self, name: str) -> Path:
        """Return the folder of the model of a finished stage."""
        return self.folder / name / "net"

    @property
    def started(self) -> bool:
        """Whether there is something to continue: a config, and a checkpoint or a finished stage."""
        if not (self.folder / "config.yaml").is_file():
            return False
        return (self.folder / "stages.json").is_file() or any(self.folder.glob("*/*.ckpt"))

    def check(self, name: str) -> None:
        """Refuse a record that is not as the run wrote it.

        Raises:
            UserError: it differs from the manifest of the run.
        """
        check_manifest(f"run_dir: '{self.folder}'", self.folder, name)

    def _read(self, name: str, kind: type[T]) -> T | None:
        """Return the content of a JSON record; None if it is not there."""
        path = self.folder / name
        if not path.is_file():
            return None
        self.check(name)
        return read_json("run_dir", path, kind)

    def keep(self, name: str, content: Any) -> None:
        """Write a record, as text or else as JSON, and list it in the manifest."""
        text = content if isinstance(content, str) else json.dumps(content, indent=2, default=str) + "\n"
        write_record(self.folder / name, text)

    def config(self, strict: bool = False) -> dict[str, Any]:
        """Return the plain values of the run's config, as :func:`~lit_compress.run.config.checked_config`.

        Args:
            strict: refuse a class among the method's arguments; otherwise it is left out.

        Raises:
            UserError: as :meth:`recorded`; or there is a class among the options of the data or the export.
        """
        return plain_config(f"run_dir: '{self.folder / 'config.yaml'}'", self.recorded(), strict)

    def recorded(self, strict: bool = False) -> dict[str, Any]:
        """Return the whole config with which the run was started, to compare it or to show it, never to build from it.

        Raises:
            UserError: the folder is not a run folder, or its config is unreadable. With ``strict`` also if an option
                had an effect that this version lacks.
        """
        path = self.folder / "config.yaml"
        if not path.is_file():
            raise UserError(f"run_dir: '{self.folder}' is not a run folder (no config.yaml); give one made by fit")
        self.check("config.yaml")
        return checked_groups(f"run_dir: '{path}'", read_yaml("run_dir", path), strict)

    def finished(self) -> dict[str, dict[str, Any]]:
        """Return the records of the finished stages by name, in order."""
        records = self._read("stages.json", list) or []
        names = [record.get("name") if isinstance(record, dict) else None for record in records]
        if not all(isinstance(name, str) and re.fullmatch(r"\w[\w-]*", name) for name in names):  # of their folders
            path = self.folder / "stages.json"
            raise UserError(f"run_dir: '{path}' holds something else than the records of stages; it is broken")
        return {r["name"]: r for r in records}

    def finish(self, record: dict[str, Any]) -> None:
        """Add the record of a finished stage, with the changes made to its config."""
        if changed := [change for change in self.changes() if change["stage"] == record["name"]]:
            record = record | {"changed": changed}
        self.keep("stages.json", [*self.finished().values(), record])

    def facts(self) -> dict[str, Any] | None:
        """Return the facts of the data; None for runs of earlier versions."""
        return self._read("data.json", dict)

    def density(self, asked: str) -> float | None:
        """Return the density that was found for a budget; None if it has not been yet, or was for another budget."""
        if (chosen := self.removal()) is not None and chosen["asked"][0] == asked:
            return float(chosen["density"])
        budget = self._read("budget.json", dict) or {}
        return budget.get("density") if budget.get("asked") == asked else None

    def removal(self, asked: list[str] | None = None) -> dict[str, Any] | None:
        """Return the chosen kind of removal: ``removes``, ``density``, ``tried``, and for what they were ``asked``.

        Args:
            asked: budget or density, and the kinds to try; None for any.

        Returns:
            None if it has not been chosen yet, or was for something else.

        Raises:
            UserError: an earlier version chose a kind that this one lacks, for a run that is ``asked`` to go on.
        """
        chosen = self._read("removal.json", dict)
        if asked and chosen and (line := removed_value("removes", str(chosen["removes"]))):
            raise UserError(f"run_dir: '{self.folder}' cannot go on: {line}")
        return None if chosen is None or asked not in (None, chosen["asked"]) else chosen

    def keep_removal(self, chosen: dict[str, Any]) -> None:
        """Write the chosen kind of removal, see :meth:`removal`."""
        self.keep("removal.json", chosen)

    @property
    def foreign(self) -> bool:
        """Whether the folder holds something, and is no run, not even one that was killed when it began."""
        there = {path.name for path in self.folder.iterdir()} if self.folder.exists() else set()
        ours = re.compile(rf"{re.escape(LOCK)}|{MANIFEST}|\.(config\.yaml|{MANIFEST})\.\d+\.tmp")
        return "config.yaml" not in there and not all(map(ours.fullmatch, there))

    @contextmanager
    def claim(self) -> Iterator[None]:
        """Keep other processes from working on the folder, which is made where it is missing.

        The claim ends with the process, however that ends.

        Raises:
            UserError: another process has it.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / LOCK).open("a+") as file:
            try:  # not try_lock's flock: loader processes inherit that, and it stays taken when another machine dies
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                file.seek(0)
                raise UserError(
                    f"run_dir: '{self.folder}' is being worked on by {file.read().strip() or 'another process'}; wait "
                    "for it, or give another --run_dir"
                ) from error
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
            yield

    def begin(
        self, config: dict[str, Any], facts: dict[str, Any] | None = None, budget: dict[str, Any] | None = None
    ) -> None:
        """Create the folder with its config, the facts of the data, and the density that meets a budget.

        The config is first, because a folder with other files alone may be of something else.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in [*left_behind(self.folder)]:
            remove(path)
        self.keep("config.yaml", yaml_text(config))
        self._keep_budget(budget)
        if facts is not None:
            self.keep("data.json", facts)

    def _keep_budget(self, budget: dict[str, Any] | None) -> None:
        if budget is not None:
            self.keep("budget.json", budget)

    def check_same(self, config: dict[str, Any], allowed: bool = False) -> list[ConfigChange]:
        """Compare ``config`` with the config at the run's start; return the differences that change the result.

        Raises:
            UserError: something does, and is not ``allowed`` or never may; the message names the first.
        """
        old, new = (_ADDED | flatten(_spelled_out(one)) for one in (self.recorded(strict=True), config))
        changed = []
        for key in sorted({*old, *new} - _FREE):
            name = key.replace(".init_args", "")
            was, now = (name_today(c.get(key)) if name.endswith(".backbone") else c.get(key) for c in (old, new))
            if any(key.startswith(f"{free}.") for free in _FREE) or was == now:
                continue
            said = f"{name} was {old.get(key)}, now {new.get(key)}"
            if not allowed:
                raise UserError(
                    f"run_dir: '{self.folder}' belongs to another config: {said}; give the same config to continue it, "
                    "another --run_dir, or --allow_changed to go on nevertheless"
                )
            if name in _NEVER:
                raise UserError(f"allow_changed: {said}; the run there cannot continue; give another --run_dir")
            changed.append({"what": name, "was": old.get(key), "now": new.get(key)})
        return changed

    def changes(self) -> list[ConfigChange]:
        """Return the run's changes with ``--allow_changed``, in order."""
        return self._read(CHANGED, list) or []

    def change(
        self, config: dict[str, Any], changed: list[ConfigChange], stage: str, budget: dict[str, Any] | None = None
    ) -> None:
        """Give the run another config with its ``budget``, and record the differences, from ``stage`` on."""
        self.keep_changes(changed, stage)
        self._keep_budget(budget)
        self.keep("config.yaml", yaml_text(config))

    def drop_checkpoints(self, stage: str) -> None:
        """Remove the checkpoints of an unfinished stage, since its model will be another: it begins again."""
        for checkpoint in self.stage(stage).glob("*.ckpt"):
            checkpoint.unlink()

    def keep_changes(self, changed: list[ConfigChange], stage: str) -> None:
        """Record the changes from a stage on; equal ones are recorded once."""
        if new := [change for change in ({"stage": stage, **f} for f in changed) if change not in self.changes()]:
            self.keep(CHANGED, [*self.changes(), *new])


def write_net(net: PreTrainedModel, data: DataModule, folder: Path) -> None:
    """Write the model of a stage with its tokenizer, and the manifest of the folder as its last file."""
    save_net(net, folder)
    data.tokenizer.save_pretrained(folder)
    write_sentences(folder, net.config, data)
    write_manifest(folder)


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return the values of a nested config by dotted path."""
    if not isinstance(config, dict) or not config:
        return {prefix: config}
    return {
        k: v for key, value in config.items() for k, v in flatten(value, f"{prefix}.{key}" if prefix else key).items()
    }


def _spelled_out(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config whose method's arguments are those of :meth:`Method.spelled_out`."""
    model = config["model"]
    kind = getattr(methods, model["class_path"].rpartition(".")[2], None)
    return config | {"model": model | {"init_args": kind.spelled_out(model["init_args"])}} if kind else config
