"""The command line before it is parsed: configs by name, the method, and options that follow from the data."""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import import_module
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lit_compress import methods
from lit_compress.cli.recipes import resolve_config
from lit_compress.data.sources import CUSTOM
from lit_compress.methods import Method
from lit_compress.utils.errors import UserError
from lit_compress.utils.files import LARGEST_YAML, text_of, yaml_of
from lit_compress.utils.tables import print

DEFAULT_METHOD = "SecondOrder"
FLAGS = ("--trust_remote_code",)  # options that need no value
_METHOD = ("--model", "--model.class_path")


def with_default_method(args: list[str]) -> list[str]:
    """Return ``args`` with the default method, if they name a backbone, but neither a method nor a config."""
    given = {arg.partition("=")[0] for arg in args}
    if "--model.backbone" not in given or given & {"--model", "--model.class_path", "--config", "-c"}:
        return args
    _say(f"note: model: {DEFAULT_METHOD}, the default; --model NAME takes another")
    return [f"--model={DEFAULT_METHOD}", *args]


def resolve_configs(args: list[str]) -> list[str]:
    """Put the configs first, in their order, and then the method, so that options override them wherever they are.

    The parser would apply options before ``--model`` to any method, and keep that method's defaults when it reads the
    real one. Every name after ``--config`` is replaced by its file or config; ``--data.task`` chooses the row of a
    recipe.
    """
    configs, chosen, options, task = [], [], [], named_task(args)
    if task is not None and last_value(args, "--data.task") is None:
        options.append(f"--data.task={task}")
    words = iter(args)
    for word in words:
        option, equals, name = word.partition("=")
        if word in FLAGS:  # the parser wants a value
            word = f"{word}=true"
        if option in _METHOD:
            chosen += [word] if equals else [word, *islice(words, 1)]
            continue
        if option not in ("--config", "-c"):
            options.append(word)
            continue
        if not (name := name if equals else next(words, "")):
            raise UserError("config: no file or shipped config is named after --config; e.g. --config lpaf_sst2.yaml")
        config, note = resolve_config(name, task)
        configs += ["--config", config]
        if note:
            _say(f"note: {note}")
    if task is None and inferred_task(args) and not any(map(_names_task, configs[1::2])):
        options.append(f"--data.task={CUSTOM}")
    return [*configs, *chosen, *options]


def named_task(args: list[str]) -> str | None:
    """Return the task that options name; only ``custom`` has columns and labels of the user's."""
    given = any(arg.startswith("--data.custom.") for arg in args)
    return last_value(args, "--data.task") or (CUSTOM if given else None)


def inferred_task(args: list[str]) -> str | None:
    """Return the task that options name, or the user's own where they give a file; None without either."""
    path = last_value(args, "--data.path")
    return named_task(args) or (CUSTOM if path and Path(path).expanduser().is_file() else None)


def after_configs(args: list[str], words: list[str]) -> list[str]:
    """Put ``words`` behind the configs and the method of resolved ``args``, before the options that were typed."""
    start = 0
    while start < len(args) and args[start].partition("=")[0] in ("--config", *_METHOD):
        start += 1 if "=" in args[start].partition("\n")[0] and args[start] != "--config" else 2
    return [*args[:start], *words, *args[start:]]


def _names_task(config: str) -> bool:
    """Return whether a config, given by its path or its text, names a task."""
    data = content_of(config).get("data")
    return isinstance(data, dict) and bool(data.get("task"))


def chosen_method(args: list[str]) -> type[Method] | None:
    """Return the method that options or configs name last; None if they name none that can be imported."""
    chosen = None
    for option, value in pairwise(args):
        if option == "--config":
            chosen = _method_of(value) or chosen
    chosen = last_value(args, "--model") or last_value(args, "--model.class_path") or chosen
    package, _, name = (chosen or "").rpartition(".")
    with suppress(ImportError, ValueError):
        named = getattr(import_module(package) if package else methods, name, None)
        return named if isinstance(named, type) and issubclass(named, Method) and named is not Method else None
    return None


def _method_of(config: str) -> str | None:
    """Return the method that a config, given by its path or its text, names; None if it names none."""
    model = content_of(config).get("model")
    name = model.get("class_path") if isinstance(model, dict) else model
    return name if isinstance(name, str) else None


def content_of(config: str) -> dict[str, Any]:
    """Return the values of a config that is given by its path or its text; {} if it cannot be read."""
    with suppress(OSError, ValueError, UserError):
        content = yaml_of(text_of(Path(config), LARGEST_YAML) if config.endswith((".yaml", ".yml")) else config)
        return content if isinstance(content, dict) else {}
    return {}


def last_value(args: list[str], option: str) -> str | None:
    """Return the last value of an option, given as ``option value`` or ``option=value``; None if it is not given."""
    value = None
    for i, arg in enumerate(args):
        if arg == option and i + 1 < len(args):
            value = args[i + 1]
        elif arg.startswith(f"{option}="):
            value = arg.partition("=")[2]
    return value


@rank_zero_only
def _say(line: str) -> None:
    print(line, file=sys.stderr)
