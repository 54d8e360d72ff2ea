"""Mistakes in the values of options, in one line: the option, the typed value, the nearest valid one.

The parser's message is not read. Every option is parsed alone, against its own type, until one fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from inspect import Parameter, signature
from typing import Any, get_type_hints

from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch.cli import LightningArgumentParser

from lit_compress.cli import catalogue
from lit_compress.cli.words import CLASSES_OF_STAGES, choices_of, plain
from lit_compress.utils.errors import UserError, nearest

# option of the trainer or of a stage -> module with the classes that it takes, and what they are called
CLASSES = {
    "callbacks": ("lightning.pytorch.callbacks", "callback"),
    "logger": ("lightning.pytorch.loggers", "logger"),
    "plugins": ("lightning.pytorch.plugins", "plugin"),
    "profiler": ("lightning.pytorch.profilers", "profiler"),
    "strategy": ("lightning.pytorch.strategies", "strategy"),
    "optimizer": ("torch.optim", "optimizer"),
    "lr_scheduler": ("torch.optim.lr_scheduler", "schedule"),
}
_MADE_LATER = ("params", "optimizer")  # first parameters of the classes of a stage


def explained(
    parser: LightningArgumentParser, method: str, config: dict[str, Any], options: list[tuple[str, str]]
) -> str | None:
    """Return one line on the first option whose value is not of its type; None: none is found.

    Args:
        parser: with the options of the method, the data, the export and the Trainer.
        method: its name or import path.
        config: values of the configs.
        options: of the command line, with the text of their values.
    """
    known = catalogue.of_method(method) | catalogue.shared() | catalogue.trainer()
    values = [(name, value, False) for name, value in _values(config)]
    for name, value, typed in [*values, *((name, text, True) for name, text in options)]:
        name = plain(name)
        if name == "print_config" or _of_class(name):
            continue
        with suppress(Exception):
            parser.parse_args([f"--{name}={value}"]) if typed else parser.parse_object(_nested(name, value))
            continue
        kind = known[name].kind if name in known else "value"
        if choices := choices_of(kind):
            return f"{name}: '{value}' is not a valid value of {', '.join(choices)}; {nearest(value, choices)}"
        return f"{name}: '{value}' is not a valid {kind.replace(' | ', ' or ').replace('None', 'null')}"
    return _of_classes([*((n, v) for n, v, _ in values), *options])


def _values(config: dict[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a config by dotted name."""
    for key, value in config.items():
        name = f"{before}{key}"
        if isinstance(value, dict) and name != "trainer" and not name.startswith("trainer.") and not _of_class(name):
            yield from _values(value, f"{name}.")
        elif name == "trainer":
            yield from ((f"trainer.{option}", inner) for option, inner in value.items())
        elif name != "model.class_path":
            yield name, value


def _nested(name: str, value: Any) -> dict[str, Any]:
    for key in reversed(name.split(".")):
        value = {key: value}
    return value


# ------------------------------------------------------------------------------------------ classes as values


def _of_class(name: str) -> tuple[str, str, str] | None:
    """Return the option that names a class, its last part, and the argument of the class behind it; None for others.

    >>> _of_class("model.retrain.optimizer.lr"), _of_class("model.retrain.epochs")
    (('model.retrain.optimizer', 'optimizer', 'lr'), None)
    """
    parts = plain(name).split(".")
    at = {"trainer": 1, "model": 2}.get(parts[0], len(parts))
    if parts[at : at + 1] and parts[at] in CLASSES and (parts[at] in CLASSES_OF_STAGES) == (parts[0] == "model"):
        return ".".join(parts[: at + 1]), parts[at], ".".join(parts[at + 1 :])
    return None


def _of_classes(options: list[tuple[str, Any]]) -> str | None:
    """Return one line on the first mistake in a class that an option names, or in its arguments."""
    classes: dict[str, tuple[type, set[str]]] = {}
    for name, value in options:
        if value is None or (place := _of_class(name)) is None:
            continue
        option, group, argument = place
        if argument and option in classes:
            kind, given = classes[option]
            if line := _argument(option, kind, argument, value):
                return line
            given.add(argument.partition(".")[0])
            continue
        for one in value if isinstance(value, list) else [value]:
            path, arguments = (
                (one.get("class_path"), one.get("init_args") or {}) if isinstance(one, dict) else (one, {})
            )
            if (named := _imported(group, str(path))) is None:
                return _unknown(option, group, str(path))
            for key, inner in arguments.items():
                if line := _argument(option, named, key, inner):
                    return line
            classes[option] = named, set(arguments)
    for option, (kind, given) in classes.items():
        parameters = list(signature(kind).parameters.values())
        lacks = [p.name for p in parameters if p.default is p.empty and p.kind is not Parameter.VAR_KEYWORD]
        if missing := [name for name in lacks if name not in {*given, *_MADE_LATER, "args"}]:
            return f"{option}: {kind.__name__} needs {', '.join(missing)}; e.g. --{option}.{missing[0]} VALUE"
    return None


def _imported(group: str, path: str) -> type | None:
    package, _, name = path.rpartition(".")
    with suppress(ImportError, ValueError):
        kind = getattr(import_module(package or CLASSES[group][0]), name, None)
        return kind if isinstance(kind, type) and name in (*_names(group), name if package else "") else None
    return None


def _names(group: str) -> list[str]:
    return list(import_module(CLASSES[group][0]).__all__)


def _unknown(option: str, group: str, path: str) -> str:
    package, _, name = path.rpartition(".")
    near = nearest(name, _names(group)) if package in ("", CLASSES[group][0]) else "give the import path of one"
    return f"{option}: '{path:.80}' is no {CLASSES[group][1]}, or cannot be imported here; {near}"


def _argument(option: str, kind: type, name: str, value: Any) -> str | None:
    """Return one line on an argument of a class that it lacks, or whose value is of another type."""
    parameters = signature(kind).parameters
    takes_all = any(p.kind is Parameter.VAR_KEYWORD for p in parameters.values())
    if name not in parameters:
        return None if takes_all else f"unknown option '{option}.{name}'; {nearest(name, parameters)}"
    hint = get_type_hints(kind.__init__).get(name, Any)  # type: ignore[misc]
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--value", type=hint)
    with suppress(Exception):
        parser.parse_args([f"--value={value}"]) if isinstance(value, str) else parser.parse_object({"value": value})
        return None
    shown = getattr(hint, "__name__", str(hint)) if isinstance(hint, type) else str(hint).replace("typing.", "")
    return f"{option}.{name}: '{value}' is not a valid {shown}"


def refused_class(trainer: Namespace, error: ValueError) -> UserError | None:
    """Return the line for a class of the trainer that could not be made; None if something else could not.

    Args:
        trainer: the Trainer's arguments.
        error: the parser's; its first cause is what the class raised, such as that its package is not installed.
    """
    first: BaseException = error
    while first.__cause__ is not None:
        first = first.__cause__
    for option in CLASSES:
        value = trainer.get(option)
        for one in value if isinstance(value, list) else [value]:
            if not isinstance(one, Namespace) or "class_path" not in one:
                continue
            kind = _imported(option, one.class_path)
            try:
                kind and kind(**_plain(one.get("init_args") or {}))
            except Exception as refusal:
                if str(refusal) == str(first):
                    name = one.class_path.rpartition(".")[2]
                    return UserError(f"trainer.{option}: {name} cannot be used here: {first}")
    return None


def _plain(values: Any) -> dict[str, Any]:
    return values.as_dict() if isinstance(values, Namespace) else dict(values)
