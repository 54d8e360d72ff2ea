"""Mistakes in the values of options, in one line: the option, the typed value, the nearest valid one."""

from __future__ import annotations

import re
from contextlib import suppress
from importlib import import_module
from inspect import signature

from jsonargparse import Namespace

from lit_compress.cli import catalogue
from lit_compress.cli.words import choices_of
from lit_compress.utils.errors import UserError, nearest

# last part of an option that names a class -> module with these classes, and what they are called
CLASSES = {
    "callbacks": ("lightning.pytorch.callbacks", "callback"),
    "logger": ("lightning.pytorch.loggers", "logger"),
    "plugins": ("lightning.pytorch.plugins", "plugin"),
    "profiler": ("lightning.pytorch.profilers", "profiler"),
    "strategy": ("lightning.pytorch.strategies", "strategy"),
    "optimizer": ("torch.optim", "optimizer"),
    "lr_scheduler": ("torch.optim.lr_scheduler", "schedule"),
}
_KEY = re.compile(r'Parser key "([\w.]+)"')  # these and the others: in messages of the parser
_VALUE = re.compile(r"(?:Got|Given) value: (.*?)(?:\. Got value: .*)?$", re.MULTILINE)
_PATH = re.compile(r"class_path[ =]'([\w.]+)'")


def explained(error: Exception, method: str) -> str | None:
    """Return one line on the option whose value the parser refused; None if its message names none.

    Args:
        error: of the parser; a key in its message is inside of the key before.
        method: name or import path of the method.
    """
    text = str(error)
    if not (keys := list(dict.fromkeys(_KEY.findall(text)))):
        return None
    option = ".".join(keys[: 1 + (keys[0] == "model")])
    inner = text[text.rindex(f'"{keys[-1]}"') :] if len(keys) > 1 else text
    value = found[1] if (found := _VALUE.search(inner)) else "null"
    if option.rpartition(".")[2] in CLASSES:
        of_class = text.split(f'"{keys[keys[0] == "model"]}"', 1)[1]
        return _of_class(option, of_class, ".".join(keys[1 + (keys[0] == "model") :]), value)
    known = catalogue.of_method(method) | catalogue.shared() | catalogue.trainer()
    kind = known[option].kind if option in known else "value"
    if choices := choices_of(kind):
        return f"{option}: '{value}' is not a valid value of {', '.join(choices)}; {nearest(value, choices)}"
    return f"{option}: '{value}' is not a valid {kind.replace(' | ', ' or ').replace('None', 'null')}"


def _of_class(option: str, text: str, argument: str, value: str) -> str:
    """Return one line on a mistake in a class that an option names, or in its ``argument``."""
    module, what = CLASSES[option.rpartition(".")[2]]
    known = list(import_module(module).__all__)
    if argument:
        kinds = re.findall(r"Expected a <class '([\w.]+)'>", text)
        return f"{option}.{argument}: '{value}' is not a valid {kinds[0] if kinds else 'value'}"
    package, _, name = made[1].rpartition(".") if (made := _PATH.search(text)) else ("", "", "")
    if unknown := re.search(r"Option '(\w+)' is not accepted", text):
        with suppress(ImportError, AttributeError):
            known = list(signature(getattr(import_module(package), name)).parameters)
        return f"unknown option '{option}.{unknown[1]}'; {nearest(unknown[1], known)}"
    if missing := re.search(r"arguments are required: (\w+).*", text):
        return f"{option}: {name} needs {missing[0].partition(': ')[2]}; e.g. --{option}.{missing[1]} VALUE"
    package, _, name = value.rpartition(".")
    near = nearest(name, known) if package in ("", module) else "give the import path of one"
    return f"{option}: '{value:.80}' is no {what}, or cannot be imported here; {near}"


def refused_class(trainer: Namespace, error: ValueError) -> UserError | None:
    """Return the line for a class of the trainer that could not be made; None if something else could not.

    Args:
        trainer: the Trainer's arguments.
        error: the parser's; its first cause is what the class raised, such as that its package is not installed.
    """
    first: BaseException = error
    while first.__cause__ is not None:
        first = first.__cause__
    path = made[1] if (made := _PATH.search(str(error))) else ""
    option = next((name for name in CLASSES if path and f"'{path}'" in str(trainer.get(name))), None)
    refused = f"trainer.{option}: {path.rpartition('.')[2]} cannot be used here: {first}"
    return None if option is None else UserError(refused)
