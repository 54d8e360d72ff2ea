"""Mistakes in the classes that options of the trainer name: callbacks, loggers, plugins, and their arguments."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from lit_compress.utils.errors import UserError, nearest

# option of the trainer -> module of Lightning with the classes that it takes, and what they are called
_MODULES = {
    "callbacks": ("lightning.pytorch.callbacks", "callback"),
    "logger": ("lightning.pytorch.loggers", "logger"),
    "plugins": ("lightning.pytorch.plugins", "plugin"),
    "profiler": ("lightning.pytorch.profilers", "profiler"),
    "strategy": ("lightning.pytorch.strategies", "strategy"),
}


def explain_class(text: str, options: Sequence[str]) -> str | None:
    """Return one line for a parser's message on a class of the trainer; None if it is about something else.

    Args:
        text: the message.
        options: of the parser that wrote it; the parser of such a class knows only its arguments.
    """
    if match := re.search(rf'Parser key "trainer\.({"|".join(_MODULES)})(?:\.\S+)?":.*Given value: (.*)$', text):
        return _unknown_class(*match.groups())
    if {"run_dir", "backbone", "task", "data", "epochs"} & {name.partition(".")[0] for name in options}:
        return None
    if match := re.search(r"Option '(\S+)' is not accepted", text):
        return f"unknown option '{match[1]}'; {nearest(match[1], [name for name in options if name != 'help'])}"
    if match := re.search(r"the following arguments are required: (.+)$", text):
        return f"trainer: a class that it names needs {match[1]}; give it as class_path and init_args, or as an option"
    return None


def made_classes(parser: Any, config: Any) -> Any:
    """Return the objects of a parsed config.

    Raises:
        UserError: a class of the trainer could not be made, such as one whose package is not installed.
    """
    try:
        return parser.instantiate_classes(config)
    except ValueError as error:
        if (line := _explain_refusal(error)) is None:
            raise
        raise UserError(line) from error


def _explain_refusal(error: ValueError) -> str | None:
    """Return one line for a class of the trainer that could not be made; None if something else could not.

    Args:
        error: the parser's; its first cause is what the class raised, such as that its package is not installed.
    """
    match = re.search(r"Subtypes: .*lightning\.pytorch\.(\w+)\..*class_path='([\w.]+)'", str(error), re.DOTALL)
    options = {module.rpartition(".")[2]: option for option, (module, _) in _MODULES.items()}
    if not match or match[1] not in options:
        return None
    first: BaseException = error
    while first.__cause__ is not None:
        first = first.__cause__
    return f"trainer.{options[match[1]]}: {match[2].rpartition('.')[2]} cannot be used here: {first}"


def _unknown_class(option: str, given: str) -> str:
    module, what = _MODULES[option]
    names = import_module(module).__all__
    path = re.search(r"class_path['\"]?[:=]\s*['\"]?([\w.]+)", given)
    given = path[1] if path else given
    package, _, name = given.rpartition(".")
    hint = nearest(name, names) if package in ("", module) else "give the import path of one"
    return f"trainer.{option}: '{given:.80}' is no {what}, or cannot be imported here; {hint}"
