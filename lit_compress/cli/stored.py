"""The config of a run or an export, parsed again: it gives values, and the command line what may run.

The file may be somebody else's. Its method is one of the package, or the command line names it. The Trainer's arguments
count only if they change the result of an evaluation or an export.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from lit_compress import methods
from lit_compress.cli.arguments import chosen_method, last_value
from lit_compress.cli.option_names import method_names
from lit_compress.cli.options import CommandLine
from lit_compress.utils.devices import find_device
from lit_compress.utils.errors import UserError
from lit_compress.utils.files import yaml_text

_TRAINER = ("accelerator", "devices", "precision")  # the Trainer's arguments that count
_ANY = "FWSVD"  # the method when none is run
_COMMON = ("backbone", "revision", "sites", "teacher")  # arguments of every method that the data and the models need


def parse_stored(
    config: dict[str, Any], rest: list[str], command: str, net: Path, own: Sequence[str] | None = None
) -> CommandLine:
    """Parse a config of :func:`~lit_compress.run.config.checked_config` with further options.

    The folder ``net``, whose files are at hand, is in the place of the backbone that it was made from; linked options
    are computed.

    Args:
        config: plain values of known keys.
        rest: options of the command line.
        command: its name.
        net: folder of the model.
        own: options of a command that only evaluates, so that a method which the package lacks is not needed; None for
            a command that runs the method.

    Raises:
        UserError: an option is wrong; or the method is not of the package, is needed, and ``rest`` does not name it.
    """
    name, init = _method(config["model"], rest, command, needed=own is None)
    data = dict(config["data"])
    origin = init["backbone"] if init.get("revision") is None else f"{init['backbone']}@{init['revision']}"
    init |= {"backbone": str(net), "revision": None}
    if init.get("teacher"):  # of which a run has a copy
        copies = (place / "dense" / "net" for place in net.resolve().parents[:2])
        init["teacher"] = next((str(copy) for copy in copies if (copy / "config.json").is_file()), init["teacher"])
    if last_value(rest, "--data.task") or last_value(rest, "--data.path"):
        data.pop("revision", None)  # of the data that it was made with
    trainer = {name: config["trainer"][name] for name in _TRAINER if name in config["trainer"]}
    try:
        find_device(str(trainer.get("accelerator")))
    except UserError:  # it was made on another machine
        trainer["accelerator"] = "auto"
    for option, values in (("task", init), ("backbone", data), ("teacher", data), ("seed", data)):
        values.pop(option, None)
    if command == "predict":
        data.pop("validation_examples", None)  # it limited what fit and validate take; here it is given again
    model = {"class_path": name, "init_args": init}
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(yaml_text({**config, "model": model, "data": data, "trainer": trainer}))
        file.flush()
        cli = CommandLine(["--config", file.name, *rest], command, own or (), rest)
    cli.origin = origin  # whose vectors may be the labels
    return cli


def _method(model: Mapping[str, Any], rest: list[str], command: str, needed: bool) -> tuple[str, dict[str, Any]]:
    """Return the import path of a stored method, and its arguments.

    Raises:
        UserError: as :func:`parse_stored`.
    """
    path, init = model["class_path"], dict(model["init_args"])
    package, _, name = path.rpartition(".")
    if package.startswith(f"{methods.__name__}.") or package == methods.__name__:
        if name in method_names():
            return f"{methods.__name__}.{name}", init
    elif path == (last_value(rest, "--model") or last_value(rest, "--model.class_path")):
        if kind := chosen_method([f"--model={path}"]):
            _refuse_functions(_hints(kind), init, "model")
        return path, init
    if not needed:
        return f"{methods.__name__}.{_ANY}", {key: init[key] for key in _COMMON if key in init}
    raise UserError(
        f"{command}: the method '{path}' is not of this package, and is not imported; if you trust it, name it: "
        f"--model {path}"
    )


def _hints(kind: type) -> dict[str, Any]:
    """Return the types of a class's arguments by name, with the arguments of its base classes."""
    if is_dataclass(kind):
        return get_type_hints(kind)
    hints: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if issubclass(base, methods.Method) and "__init__" in vars(base):
            try:
                hints |= get_type_hints(vars(base)["__init__"])
            except NameError:  # of names that only type checkers know
                hints |= dict.fromkeys(vars(base)["__init__"].__annotations__)
    return hints


def _refuse_functions(hints: Mapping[str, Any], values: Mapping[str, Any], what: str) -> None:
    """Refuse strings for arguments that take no string: the parser would import what they name.

    Raises:
        UserError: there is one.
    """
    for name, value in values.items():
        kinds = _kinds(hints.get(name, str))
        if isinstance(value, dict):
            for settings in (kind for kind in kinds if isinstance(kind, type) and is_dataclass(kind)):
                _refuse_functions(_hints(settings), value, f"{what}.{name}")
        elif any(isinstance(one, str) for one in (value if isinstance(value, list) else [value])) and str not in kinds:
            raise UserError(f"{what}.{name}: '{value}' is no plain value; a stored config cannot name classes")


def _kinds(hint: Any) -> set[Any]:
    """Return the types in a type hint; ``str`` for words of a ``Literal``."""
    if get_origin(hint) is Literal:
        return set(map(type, get_args(hint)))
    return {hint}.union(*map(_kinds, get_args(hint))) if get_args(hint) else {hint}
