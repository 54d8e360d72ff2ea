"""Targets of ``validate``, ``test`` and ``predict``: a run, an export, a model of a run, or any fine-tuned model."""

from __future__ import annotations

import filecmp
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_compress.cli.arguments import inferred_task
from lit_compress.cli.options import CommandLine
from lit_compress.cli.stored import parse_stored
from lit_compress.data.sources import CUSTOM, is_one_table
from lit_compress.export.modelling import check_own_code
from lit_compress.models.backbones import load_finetuned
from lit_compress.models.checks import check_head
from lit_compress.models.foreign import check_form
from lit_compress.models.gguf import as_folder, gguf_file
from lit_compress.models.shards import net_bytes, tensor_files
from lit_compress.models.storage import load_net
from lit_compress.run.config import checked_config
from lit_compress.run.folder import Run
from lit_compress.run.guard import check_evaluation, check_loading
from lit_compress.tasks import task_type
from lit_compress.utils.devices import current_device
from lit_compress.utils.errors import UserError
from lit_compress.utils.files import json_of, read_json
from lit_compress.utils.hub import is_name, model_snapshot
from lit_compress.utils.manifest import check_manifest
from lit_compress.utils.progress import note

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lit_compress.run.settle import Components
    from lit_compress.tasks.records import Task


@dataclass(frozen=True)
class Target:
    """A model to be evaluated.

    Attributes:
        what: command and folder as the user typed them, the start of error messages.
        folder: of the model.
        config: of the run that made it; None for a model that no run made.
        named: it is a name on the hub, or a GGUF file, and the folder is in a cache.
    """

    what: str
    folder: Path
    config: dict[str, Any] | None
    named: bool = False

    def __post_init__(self) -> None:
        """Refuse a folder that differs from its manifest."""
        check_manifest(self.what, self.folder)

    @property
    def place(self) -> Path:
        """Where files about it go: its folder; the working folder for a name."""
        return Path() if self.named else self.folder

    @property
    def trained_on(self) -> str | None:
        """Path of the data that the model was trained on, where it is known."""
        return self.config["data"].get("path") if self.config else None

    def parse(self, rest: list[str], command: str) -> CommandLine:
        """Parse the options of ``command``, on top of the stored config if there is one.

        Raises:
            UserError: an option is wrong, or the task of a model that no run made is not named.
        """
        if self.config is not None:
            return parse_stored(self.config, rest, command, self.folder, own_options(command))
        if inferred_task(rest) is None:
            raise UserError(f"{self.what} was not made by a run; name what it was fine-tuned on, e.g. --data.task sst2")
        model = ["--model", "FWSVD", f"--model.backbone={self.folder}"]  # any method; none is run
        return CommandLine([*model, *self._labels(rest), *rest], command, own_options(command), rest)

    def _labels(self, rest: list[str]) -> list[str]:
        """Return the option that gives the classes of a task of the user's own the names that the model has."""
        given = any(arg.startswith("--data.custom.labels") for arg in rest)
        if given or inferred_task(rest) != CUSTOM:
            return []
        try:
            classes = json_of(self.folder / "config.json").get("id2label") or {}
        except (OSError, ValueError):
            return []  # loading the model says what is wrong
        names = [str(classes[key]) for key in sorted(classes, key=int)]
        if len(names) < 2 or all(re.fullmatch(r"LABEL_\d+", name) for name in names):
            return []
        return [f"--data.custom.labels={json.dumps(names)}"]

    def load(self, task: Task) -> PreTrainedModel:
        """Load the model, whose head must be one for ``task``.

        Raises:
            UserError: it cannot be loaded, or answers another question.
        """
        if not (self.folder / "structure.json").is_file():
            return load_finetuned(str(self.folder), task, self.what.partition(":")[0])
        net = load_net(self.folder)
        check_own_code(self.what, net, self.folder)
        check_head(self.what, net.config, task)
        task_type(task).configure(net, task)
        trained = (self.config or {}).get("data", {}).get("task", task.name)
        if trained != task.name:
            note(f"{self.what} was trained on {trained}, not on {task.name}")
        return net


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
    if gguf_file(what, given):
        return replace(find_target(str(as_folder(what, given)), command), named=True)
    if not given.is_dir():
        check_form(what, given)
        raise UserError(f"{command}: no folder '{name}'; give a run folder, an export or a model")
    if (given / "config.yaml").is_file():
        if not (given / "export").is_dir():
            raise UserError(f"{what} has no export yet; finish it with fit --ckpt_path last")
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


def own_options(command: str) -> tuple[str, ...]:
    """Return the options that only a command has which evaluates a target."""
    bench = ("output", "baseline", "against", "batch", "length", "runtimes", "threads", "rounds", "seconds", "device")
    return {"predict": ("output",), "bench": bench}.get(command, ())


def open_run(run: Run, rest: list[str], command: str) -> Components:
    """Return method and data of a finished run, with the tokenizer and the teacher that it keeps.

    Args:
        run: finished.
        rest: the method of the user's own that made it, and consent to run the code of its models.
        command: its name.

    Raises:
        UserError: as :func:`parse_stored`.
    """
    return parse_stored(run.config(strict=True), rest, command, run.net("dense")).build()


def open_target(target: Target, rest: list[str], command: str) -> Components:
    """Return the evaluation of a target: its task and data, read with its model's tokenizer.

    Raises:
        UserError: as :meth:`Target.parse`.
    """
    parts = target.parse(rest, command).build()
    current_device()  # refuses one that is not here before anything is loaded
    parts.data.read_as(str(target.folder))
    place = parts.data.place
    parts.data.place = replace(place, whole=_is_another_table(target.trained_on, place.path))
    return parts


def load_checked(target: Target, parts: Components, command: str) -> PreTrainedModel:
    """Load the model of ``target`` for ``command``, if the memory suffices.

    Raises:
        UserError: as :meth:`Target.load`, or the machine has too little memory.
    """
    if all(path.is_file() for path in tensor_files(target.folder)):
        check_loading(net_bytes(target.folder))
    net, data = target.load(parts.data.record), parts.data
    if command == "validate":
        loaders = data.val_dataloader()
    else:
        loaders = [data.test_dataloader() if command == "test" else data.predict_dataloader()]
    check_evaluation(net, loaders)
    return net


def _is_another_table(known: str | None, given: str | None) -> bool:
    """Return whether ``given`` is one table, and not the content of the one that the model was trained on."""
    if given is None or not is_one_table(place := Path(given).expanduser()):
        return False
    trained = Path(known or "").expanduser()
    if place.is_dir() and trained.is_dir():
        files = [path.name for path in place.glob("*.arrow")]
        return any(filecmp.cmpfiles(place, trained, files, shallow=False)[1:])
    return not (place.is_file() and trained.is_file() and filecmp.cmp(place, trained, shallow=False))
