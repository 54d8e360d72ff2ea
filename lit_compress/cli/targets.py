"""Targets of ``evaluate``, ``predict`` and ``bench``: a run, an export, a model of a run, or any fine-tuned model.

The config of a run or an export gives values, and the command line says what may run: the file may be somebody else's,
and its method is not imported. The Trainer's arguments count only if they change the result of an evaluation.
"""

from __future__ import annotations

import filecmp
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from lit_compress.cli.options import CommandLine
from lit_compress.cli.recipes import inferred_task
from lit_compress.cli.words import Line
from lit_compress.data.sources import divided, is_one_table
from lit_compress.models.backbones import load_finetuned
from lit_compress.models.checks import check_head
from lit_compress.models.files import check_form, net_bytes, tensor_files
from lit_compress.models.sites import Model
from lit_compress.models.storage import load_net
from lit_compress.run.folder import Run, checked_config
from lit_compress.run.guard import check_evaluation, check_memory
from lit_compress.run.job import Job
from lit_compress.run.results import read_report
from lit_compress.tasks import task_type
from lit_compress.utils.devices import current_device, find_device
from lit_compress.utils.errors import UserError
from lit_compress.utils.files import read_json
from lit_compress.utils.hub import is_name, model_snapshot
from lit_compress.utils.manifest import check_manifest
from lit_compress.utils.progress import note

_TRAINER = ("accelerator", "devices", "precision")  # the Trainer's arguments that count
_ANY = "FWSVD"  # no method is run


@dataclass(frozen=True)
class Target:
    """A model to be evaluated.

    Attributes:
        what: command and folder as the user typed them, the start of error messages.
        folder: of the model.
        config: of the run that made it; None for a model that no run made.
        named: it is a name on the hub, and the folder is in a cache.
    """

    what: str
    folder: Path
    config: dict[str, Any] | None
    named: bool = False

    def __post_init__(self) -> None:
        """Refuse a folder that differs from its manifest."""
        check_manifest(self.what, self.folder)

    @property
    def divided(self) -> str | None:
        """Hash of the rows of which the dev split was a part, of its report, or of the run that it is a stage of."""
        facts = (read_report(self.folder) or {}).get("data")
        if facts is None and self.config is not None and self.folder.name == "net":
            facts = Run(self.folder.resolve().parents[1]).facts()
        return (facts or {}).get("divided")

    @property
    def place(self) -> Path:
        """Where files about it go: its folder; the working folder for a name."""
        return Path() if self.named else self.folder

    def parse(self, line: Line) -> CommandLine:
        """Return the options of a command, on top of the stored config; without one they name the task."""
        if self.config is not None:
            cli = parse_stored(self.config, line, self.folder)
        elif inferred_task(line) is None:
            raise UserError(f"{self.what} was not made by a run; name what it was fine-tuned on, e.g. --data.task sst2")
        else:
            cli = CommandLine(line, {"model": {"class_path": _ANY, "init_args": {"backbone": str(self.folder)}}})
        cli.follow_head(self.folder)
        return cli


def is_export(folder: Path) -> bool:
    """Return whether a folder is an export, of ``fit``, ``export`` or ``factorize``."""
    return (folder / "report.json").is_file() and (folder / "structure.json").is_file()


def find_target(name: str, command: str) -> Target:
    """Return the target that ``name`` is.

    Raises:
        UserError: it is neither a folder nor a model on the hub, a run without an export, or holds no model, or one in
            a form that cannot be read.
    """
    if is_name(name):
        return replace(find_target(str(model_snapshot(command, name).folder), command), named=True)
    given, what = Path(name).expanduser(), f"{command}: '{name}'"
    if not given.is_dir():
        check_form(what, given)
        raise UserError(f"{command}: no folder '{name}'; give a run folder, an export or a model")
    if (given / "config.yaml").is_file():
        if not (given / "export").is_dir():
            raise UserError(f"{what} has no export yet; repeat its command, with --ckpt_path last if it is fit")
        return Target(what, given / "export", Run(given).config())
    if is_export(given):
        config = read_json(command, given / "report.json", dict).get("config")
        return Target(what, given, checked_config(f"{what}: its report.json", config))
    check_form(what, given)
    if not (given / "config.json").is_file():
        raise UserError(
            f"{what} is neither a run (config.yaml) nor an export (report.json) nor a model (config.json, written by "
            "save_pretrained)"
        )
    run = given.resolve().parent.parent  # of RUN/<stage>/net
    made = (given / "structure.json").is_file() and (run / "config.yaml").is_file()
    return Target(what, given, Run(run).config() if made else None)


def open_target(target: Target, line: Line) -> Job:
    """Return the evaluation of a target: its task and data, read with its model's tokenizer."""
    job = target.parse(line).build()
    current_device()  # refuses one that is not here before anything is loaded
    job.data.read_as(str(target.folder))
    known = (target.config or {}).get("data", {}).get("path")
    was, place = target.divided, job.data.place
    now = divided(job.data.record, place) if was and line.command != "predict" else None
    moved = now is not None and now == was  # the same rows elsewhere
    job.data.place = replace(place, whole=not moved and _is_another_table(known, place.path))
    if now not in (None, was) and known and Path(known).expanduser().resolve() == place.folder.resolve():
        raise UserError(
            f"data.path: '{known}' or data.split_seed has changed since {target.what} was made, and is divided into "
            "splits by both: training rows would be scored; give both as they were, or other rows in another file"
        )
    return job


def load_checked(target: Target, job: Job, split: Literal["validation", "test", "predict"]) -> Model:
    """Load the model of ``target`` for a split, or the rows of ``predict``.

    Raises:
        UserError: its head is not for the task, or it is larger than the memory.
    """
    folder, what, data = target.folder, target.what, job.data
    if all(path.is_file() for path in tensor_files(folder)):
        check_memory("the model", net_bytes(folder), "give a smaller model, or a machine with more")
    task, report = data.record, read_report(folder) or {}
    if "metric" in (report.get("program") or {}):
        note(f"{what}: its weights in float are read; report.json has the metric of its program of integers")
    if (folder / "structure.json").is_file():
        net = load_net(folder)
        check_head(what, net.config, task)
        task_type(task).configure(net, task)
        trained = (target.config or {}).get("data", {}).get("task", task.name)
        if trained != task.name:
            note(f"{what} was trained on {trained}, not on {task.name}")
    else:
        net = load_finetuned(str(folder), task, what.partition(":")[0])
    if split == "validation":
        loaders = data.val_dataloader()
    else:
        loaders = [data.test_dataloader() if split == "test" else data.predict_dataloader()]
    check_evaluation(net, loaders)
    return net


def _is_another_table(known: str | None, given: str | None) -> bool:
    """Return whether ``given`` is one table, and not the content of the one that the model was trained on."""
    place, trained = Path(given or "/").expanduser(), Path(known or "").expanduser()
    if not is_one_table(place):
        return False
    if place.is_dir() and trained.is_dir():
        files = [path.name for path in place.glob("*.arrow")]
        return any(filecmp.cmpfiles(place, trained, files, shallow=False)[1:])
    return not (place.is_file() and trained.is_file() and filecmp.cmp(place, trained, shallow=False))


# ------------------------------------------------------------------------------------------ stored configs


def parse_stored(config: dict[str, Any], line: Line, net: Path) -> CommandLine:
    """Return the options of a command on top of a config of :func:`~lit_compress.run.folder.checked_config`.

    Args:
        config: plain values of known keys.
        line: of the command.
        net: folder of the model, in the place of the backbone that it was made from; its run may keep the teacher.

    Raises:
        UserError: an option is wrong.
    """
    known, data = config["model"]["init_args"], dict(config["data"])
    init = {"teacher": known.get("teacher"), "backbone": str(net)}
    if init.get("teacher"):  # of which a run has a copy
        copies = (place / "dense" / "net" for place in net.resolve().parents[:2])
        init["teacher"] = next((str(copy) for copy in copies if (copy / "config.json").is_file()), init["teacher"])
    if line.last("data.task") or line.last("data.path"):
        data.pop("revision", None)  # of the data that it was made with
    trainer = {name: config["trainer"][name] for name in _TRAINER if name in config["trainer"]}
    try:
        find_device(str(trainer.get("accelerator")))
    except UserError:  # it was made on another machine
        trainer["accelerator"] = "auto"
    for option in ("backbone", "teacher", "seed"):
        data.pop(option, None)
    if line.command == "predict":
        data.pop("validation_examples", None)  # it limited what fit and validate take; here it is given again
    model = {"class_path": _ANY, "init_args": init}
    cli = CommandLine(line, {**config, "model": model, "data": data, "trainer": trainer})
    cli.origin = known["backbone"]
    return cli
