"""The help of ``fit``: the options of the run, the method and the data; Lightning's Trainer options on request."""

from __future__ import annotations

import io
from contextlib import redirect_stdout, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

_TRAINER = "Customize every aspect of training via flags:"
_METHOD = "A compression method: a model, a task and a list of stages:"
_LINKS = "Linked arguments:"


def fit_help(parser: ArgumentParser, command: str, method: str | None, methods: list[str], trainer: bool) -> str:
    """Return the text of ``fit --help``.

    Args:
        parser: of the command.
        command: its name.
        method: name of the method whose options are shown; None: the names of all methods.
        methods: these names.
        trainer: also show the options of Lightning's Trainer.
    """
    groups = _groups(parser.format_help())
    lines = [f"usage: python -m lit_compress {command} [--config NAME.yaml] [--model METHOD] [--OPTION VALUE ...]", ""]
    lines += [*groups.pop("options:"), ""]
    if method is None:
        lines += ["methods:", f"  {', '.join(methods)}", "  the options of one: --help --model LPAF", ""]
    else:
        shown = _groups(_class_help(parser, method))
        lines += [line for title, rest in shown.items() for line in ("", *rest) if not title.startswith("Help for")][1:]
        lines.append("")
    ours = (group for title, group in groups.items() if title not in (_TRAINER, _METHOD, _LINKS))
    lines += [line for group in ours for line in (*group, "")]
    if trainer:
        return "\n".join([*lines, *groups[_TRAINER]])
    used = "  --device NAME is --trainer.accelerator NAME: cpu, cuda, mps, ... (default the accelerator, if any)"
    used += "\n  --trainer.OPTION, e.g. devices, strategy, precision, accumulate_grad_batches, max_steps"
    return "\n".join([*lines, "Lightning's Trainer:", used, "  all of them: --help trainer"])


def _class_help(parser: ArgumentParser, method: str) -> str:
    """Return what the parser says of a method: it prints the text and exits."""
    with redirect_stdout(io.StringIO()) as text, suppress(SystemExit):
        parser.parse_args(["--model.help", method])
    return text.getvalue()


def _groups(text: str) -> dict[str, list[str]]:
    """Split a help text into its groups, by title; the usage in front is left out."""
    groups: dict[str, list[str]] = {}
    title = None
    for line in text.splitlines():
        if line and not line.startswith((" ", "usage:")) and line.endswith((":", ".")):
            title = line
            groups[title] = []
        if title is not None:
            groups[title].append(line)
    return {title: _stripped(lines) for title, lines in groups.items()}


def _stripped(lines: list[str]) -> list[str]:
    while lines and not lines[-1]:
        lines = lines[:-1]
    return lines
