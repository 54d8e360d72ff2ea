"""The folder of a run: its config, the records of finished stages, and their models.

RUN/config.yaml            all options of the run
RUN/data.json              what was found in the data
RUN/budget.json            with a budget: the asked value, and the density that meets it
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
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
import yaml

from lit_compress.data.datamodule import DataModule
from lit_compress.models.sites import Model
from lit_compress.models.storage import load_net, save_net
from lit_compress.tasks import task_type
from lit_compress.tasks.sentences import write_pooling
from lit_compress.utils.errors import UserError
from lit_compress.utils.files import atomic_folder, is_left, read_json, read_yaml, remove, write_json
from lit_compress.utils.manifest import MANIFEST, check_manifest, write_manifest, write_record
from lit_compress.utils.removed import without_removed

T = TypeVar("T")
CURVES = "tensorboard"  # folder of the usual logger
SETTINGS = "settings.json"  # of unfinished work of factorize
LOCK = ".lock"  # names the process that works on the folder; it stays, since another may wait with the same file open
_TEACHER = "model.init_args.teacher"  # may be elsewhere now, of a run that has one
# Options that may differ when a run is continued, because they do not change what is computed. The product of devices,
# batch_size and accumulate_grad_batches is compared by run/runner.py.
_FREE = {
    "run_dir", "ckpt_path", "allow_changed", "checkpoint_every", "max_skipped", "data.path", "data.revision",
    "data.batch_size", "trainer.accumulate_grad_batches",
    "data.num_workers", "data.custom.numbered", "data.teacher", _TEACHER, "model.init_args.recompute",
    "trainer.accelerator", "trainer.devices", "trainer.num_nodes", "trainer.enable_progress_bar", "trainer.logger",
    "trainer.callbacks", "trainer.log_every_n_steps", "trainer.enable_model_summary", "trainer.profiler",
}  # fmt: skip
_ADDED = {"data.custom.split_words": False}  # options that version 0.2 had not -> what it did
_CLASS = {"class_path", "init_args", "dict_kwargs"}  # how the parser knows a class
_ALONE = ("seed_everything", "checkpoint_every")  # options in no group
_TRAINING = ("optimizer", "lr_scheduler")  # classes that train a stage
_CHECKPOINTS = ("last.ckpt", "previous.ckpt", "best.ckpt", ".last.ckpt.tmp", ".best.ckpt.tmp")


class Run:
    """A run folder. Methods that read a record raise UserError if it is not as the run wrote it."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).resolve()
        self.at_hand = dict[Path, Model]()  # the model that this process wrote last, by its folder

    def stage(self, name: str) -> Path:
        """Return the folder of a stage."""
        return self.folder / name

    def net(self, name: str) -> Path:
        """Return the folder of the model of a finished stage."""
        return self.folder / name / "net"

    @cached_property
    def dense(self) -> Model:
        """The model of the dense stage, which nobody changes."""
        return self.load(self.net("dense"))

    def load(self, folder: Path) -> Model:
        """Load the model of a finished stage, or return the one at hand, once."""
        return self.at_hand.pop(folder, None) or load_net(folder)

    def hand_on(self, name: str, net: Model, dense: Model) -> None:
        """Keep the model of a stage that was just written, as it would be loaded; ``dense`` is the backbone."""
        recomputes = any(getattr(module, "gradient_checkpointing", False) for module in net.modules())
        trained = {key: value.requires_grad for key, value in dense.named_parameters()}
        for key, value in net.named_parameters():  # products round by strides and places in memory
            value.data = value.detach().clone(memory_format=torch.contiguous_format)
            value.requires_grad_(trained.get(key, True))
        self.at_hand = {} if recomputes else {self.net(name): net}

    @property
    def started(self) -> bool:
        """Whether there is something to continue: a config, and a checkpoint or a finished stage."""
        if not (self.folder / "config.yaml").is_file():
            return False
        return (self.folder / "stages.json").is_file() or any(self.folder.glob("*/*.ckpt"))

    def read(self, name: str, kind: type[T]) -> T | None:
        """Return the content of a JSON record; None if it is not there."""
        path = self.folder / name
        if not path.is_file():
            return None
        check_manifest(f"run_dir: '{self.folder}'", self.folder, name)
        return read_json("run_dir", path, kind)

    def keep(self, name: str, content: Any) -> None:
        """Write a record, as text or else as JSON, and list it in the manifest."""
        text = content if isinstance(content, str) else json.dumps(content, indent=2, default=str) + "\n"
        write_record(self.folder / name, text)

    def config(self) -> dict[str, Any]:
        """Return the plain values of the run's config, as :func:`checked_config`."""
        return checked_config(f"run_dir: '{self.folder / 'config.yaml'}'", self.recorded())

    def recorded(self, strict: bool = False) -> dict[str, Any]:
        """Return the whole config with which the run was started, to compare it or to show it, never to build from it.

        With ``strict`` it is refused if an option had an effect that this version lacks.
        """
        path = self.folder / "config.yaml"
        if not path.is_file():
            raise UserError(f"run_dir: '{self.folder}' is not a run folder (no config.yaml); give one made by fit")
        check_manifest(f"run_dir: '{self.folder}'", self.folder, path.name)
        stored = read_yaml("run_dir", path)
        try:
            config = checked_groups(f"run_dir: '{path}'", stored, strict)
            retrain = config["model"]["init_args"].get("retrain")
            if (removes := self._chosen().get("removes")) and isinstance(retrain, dict):
                retrain |= without_removed({"removes": removes}, strict)
        except UserError as error:
            if not strict:
                raise
            raise UserError(f"{error}; '{self.folder}' cannot go on, give another --run_dir") from error
        return config

    def finished(self) -> dict[str, dict[str, Any]]:
        """Return the records of the finished stages by name, in order."""
        path, records = self.folder / "stages.json", self.read("stages.json", list) or []
        names: list[Any] = [record.get("name") if isinstance(record, dict) else None for record in records]
        if not all(isinstance(name, str) and re.fullmatch(r"\w[\w-]*", name) for name in names):  # of their folders
            raise UserError(f"run_dir: '{path}' holds something else than the records of stages; it is broken")
        return dict(zip(names, records, strict=True))

    def finish(self, record: dict[str, Any]) -> None:
        """Add the record of a finished stage."""
        self.keep("stages.json", [*self.finished().values(), record])

    def facts(self) -> dict[str, Any] | None:
        """Return the facts of the data; None before they are known."""
        return self.read("data.json", dict)

    def density(self, asked: str) -> float | None:
        """Return the density that was found for a budget; None if it has not been yet, or was for another budget."""
        if (chosen := self._chosen()) and chosen["asked"][0] == asked:
            return float(chosen["density"])
        budget = self.read("budget.json", dict) or {}
        return budget.get("density") if budget.get("asked") == asked else None

    def _chosen(self) -> dict[str, Any]:
        """Return ``removes`` and ``density``, if an earlier version chose them for what was ``asked``; else {}."""
        return self.read("removal.json", dict) or {}

    @property
    def foreign(self) -> bool:
        """Whether the folder holds something, and is no run, not even one that was killed when it began."""
        there = {path.name for path in self.folder.iterdir()} if self.folder.exists() else set()
        ours = re.compile(rf"{re.escape(LOCK)}|{MANIFEST}|\.(config\.yaml|{MANIFEST})\.\d+\.tmp")
        return "config.yaml" not in there and not all(map(ours.fullmatch, there))

    @contextmanager
    def claim(self, option: str = "run_dir", other: str = "--run_dir") -> Iterator[None]:
        """Keep other processes from working on the folder, which is made where it is missing.

        They get a line that begins with ``option`` and asks for an ``other`` one. Leftovers of killed processes are
        removed. The claim ends with the process, however that ends.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / LOCK).open("a+") as file:
            try:  # not try_lock's flock: loader processes inherit that, and it stays taken when another machine dies
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                file.seek(0)
                raise UserError(
                    f"{option}: '{self.folder}' is being worked on by {file.read().strip() or 'another process'}; wait "
                    f"for it, or give another {other}"
                ) from error
            self._tidy()
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
            yield

    def begin(
        self, config: dict[str, Any], facts: dict[str, Any] | None = None, budget: dict[str, Any] | None = None
    ) -> None:
        """Create the folder with its config, the facts of the data, and the density that meets a budget."""
        self.folder.mkdir(parents=True, exist_ok=True)
        # first: a folder with other files alone may be of something else
        self.keep("config.yaml", yaml.safe_dump(config, sort_keys=False))
        for name, content in (("budget.json", budget), ("data.json", facts)):
            if content is not None:
                self.keep(name, content)

    def check_same(self, config: dict[str, Any]) -> None:
        """Refuse a ``config`` that differs from the one at the run's start in options that change the result."""
        import pandas as pd

        old, new = (_ADDED | pd.json_normalize([one]).to_dict("records")[0] for one in (self.recorded(True), config))
        free = _FREE if old.get(_TEACHER) else _FREE - {_TEACHER}
        for key in sorted({*old, *new} - free):
            if old.get(key) != new.get(key) and not any(key.startswith(f"{group}.") for group in free):
                raise UserError(
                    f"run_dir: '{self.folder}' belongs to another config: {key.replace('.init_args', '')} was "
                    f"{old.get(key)}, now {new.get(key)}; give the same config to continue it, or another --run_dir"
                )

    def _tidy(self) -> None:
        """Remove leftovers of killed processes; a link is not followed: it may be another run's folder."""
        own = [path for path in self.folder.iterdir() if path.is_dir() and not path.is_symlink()]
        for stage in self.finished():
            if self.stage(stage) in own and (self.net(stage) / "model.safetensors").is_file():
                self.remove_checkpoints(stage)
        for path in [path for folder in (self.folder, *own) for path in folder.glob(".*.tmp")]:
            if is_left(path):
                remove(path)

    def remove_checkpoints(self, stage: str) -> None:
        """Remove the checkpoints of a finished stage: its model is written, and nothing continues from it."""
        for name in _CHECKPOINTS:
            (self.stage(stage) / name).unlink(missing_ok=True)


@contextmanager
def begin_work(option: str, folder: Path, settings: str) -> Iterator[None]:
    """Claim the folder of unfinished work, new or to continue in it; refuse one that holds something else.

    Args:
        option: that needs the folder.
        folder: of the work; it may have the curves of finished work.
        settings: hash of everything that the work depends on.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, left = folder / SETTINGS, {other.name for other in folder.iterdir() if other.suffix != ".tmp"}
    begun = left - {SETTINGS, CURVES, LOCK}
    if begun and not path.is_file():
        raise UserError(f"{option}: '{folder}' holds something else; give another OUT")
    with Run(folder).claim(option, "OUT"):
        if not begun:
            remove(folder / CURVES)
        elif read_json(option, path, dict).get("hash") != settings:
            raise UserError(
                f"{option}: '{folder}' holds unfinished work of other settings or data; give the same, or remove it"
            )
        write_json(path, {"hash": settings})
        yield


def end_work(folder: Path) -> None:
    """Remove the folder of finished work at once, so that a kill leaves all of it or nothing; its curves stay."""
    with atomic_folder(folder) as kept:
        if (folder / CURVES).is_dir():
            shutil.copytree(folder / CURVES, kept / CURVES)
    if not any(folder.iterdir()):
        folder.rmdir()


def write_net(net: Model, data: DataModule, folder: Path) -> None:
    """Write the model of a stage with its tokenizer, and the manifest of the folder as its last file."""
    save_net(net, folder)
    data.tokenizer.save_pretrained(folder)
    if task_type(data.record).pools:
        write_pooling(folder, net.config.hidden_size, data.deployed_length, data.record.pooling)
    write_manifest(folder)


def checked_config(what: str, stored: Any) -> dict[str, Any]:
    """Return the plain values of known keys in a stored config, as this version writes it.

    The file may be somebody else's. So it names no class except the method, which nobody imports. Classes among the
    method's options are left out: its reader trains nothing.

    Args:
        what: the file, the start of error messages.
        stored: its content.

    Raises:
        UserError: as :func:`checked_groups`, or the options of the data or the export name a class.
    """
    config = checked_groups(what, stored)
    kept: dict[str, Any] = {name: config[name] for name in _ALONE if name in config}
    kept |= {name: _plain(config.get(name, {}), f"{what}: {name}") for name in ("data", "export")}
    init, trainer = (_plain(values, None) for values in (config["model"]["init_args"], config.get("trainer", {})))
    return kept | {"model": {"class_path": config["model"]["class_path"], "init_args": init}, "trainer": trainer}


def _plain(values: dict[Any, Any], what: str | None) -> dict[str, Any]:
    """Return the numbers, strings, booleans and nulls among ``values``, and lists and groups of these.

    Anything else, such as a class, is refused by ``what``; None: it is left out.
    """
    kept: dict[str, Any] = {}
    for name, value in values.items():
        if name in _TRAINING:
            continue
        group = isinstance(value, dict) and not _CLASS & value.keys()
        if isinstance(name, str) and name not in _CLASS and "." not in name and (group or _is_plain(value)):
            kept[name] = _plain(value, what and f"{what}.{name}") if group else value
        elif what:
            raise UserError(f"{what}.{name} is no plain value; a stored config cannot name classes")
    return kept


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int | float)


def checked_groups(what: str, stored: Any, strict: bool = False) -> dict[str, Any]:
    """Return a stored config as this version writes it, with all that it names.

    Raises:
        UserError: it has no method, or something else where groups of options belong; begins with ``what``. With
            ``strict`` also if an option had an effect that this version lacks.
    """
    model = stored.get("model") if isinstance(stored, dict) else None
    if not (isinstance(model, dict) and isinstance(model.get("class_path"), str) and model.get("init_args")):
        raise UserError(f"{what} names no method with its options; it is broken")
    groups = {"model.init_args": model["init_args"], **{name: stored.get(name, {}) for name in ("data", "trainer")}}
    if "export" not in stored:
        raise UserError(f"{what} is of a version before 0.2, which this one does not read; make the run again")
    prune = model["init_args"].get("prune") if isinstance(model["init_args"], dict) else None
    groups |= {"export": stored["export"], "model.prune": prune or {}}
    if broken := next((name for name, value in groups.items() if not isinstance(value, dict)), None):
        raise UserError(f"{what} has no options in {broken}; it is broken")
    if "seed_everything" in stored and "data" in stored:
        stored["data"].setdefault("split_seed", stored["seed_everything"])  # 0.2 split a single file by this seed
    try:
        stored["data"] = without_removed(groups["data"], True, "data")  # without one of them other rows are read
    except UserError as error:
        raise UserError(f"{what}: {error}") from error
    stored["model"] = without_removed(model, strict, "model")  # of a method of the user's own all options are left
    stored["export"] = without_removed(stored["export"], strict, "export")
    without_removed({"trust_remote_code": stored.pop("trust_remote_code", None)}, strict)
    return stored  # type: ignore[no-any-return]
