"""A command line from its words: checked against the source alone, or answered with a help text."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace

from lit_compress.cli import catalogue
from lit_compress.cli.catalogue import PACKAGE, Option
from lit_compress.cli.recipes import check_config, merged_configs, recipes
from lit_compress.cli.words import (
    READ,
    SHORT,
    WHOLE,
    Line,
    check_names,
    choices_of,
    is_read,
    own_options,
    plain,
    take_apart,
    unknown,
)
from lit_compress.run.fair import in_its_place
from lit_compress.utils.errors import UserError, nearest
from lit_compress.utils.tables import print


def read_line(command: str, args: Sequence[str]) -> Line:
    """Return a command line, checked as :func:`checked`.

    Raises:
        UserError: as there.
        SystemExit: ``--help`` was given, and was printed.
    """
    line = take_apart(command, args)
    if line.help:
        _print_help(line)
        raise SystemExit(0)
    return checked(line)


def checked(line: Line) -> Line:
    """Return a command line without mistakes that show before anything heavy is imported; `factorize` has its method.

    Raises:
        UserError: there is no such option, config or method, or the command does not read it.
    """
    if line.command == "factorize":
        usual = "SecondOrder" if line.last("model.retrain.weighting") in (None, "kfac") else "FWSVD"
        line.options.append(("model", line.own.get("method") or usual))
    if line.command not in (*READ, *WHOLE):
        if not line.options:
            return line
        if (name := plain(line.options[0][0])) in catalogue.names():
            raise UserError(f"{name}: {line.command} does not read it; leave it out")
        raise UserError(unknown(line.command, name))
    config = merged_configs(line)
    method = config["model"].get("class_path") if isinstance(config["model"], dict) else None
    package, _, last = str(method or "").rpartition(".")
    if method and package in ("", f"{PACKAGE.name}.methods") and last not in catalogue.methods():
        raise UserError(f"model.class_path: unknown method '{method}'; {nearest(last, catalogue.methods())}")
    check_names(line.command, line.options, method)
    check_config(config, method)
    return line


# ------------------------------------------------------------------------------------------ help


def print_usage(commands: Sequence[str]) -> None:
    """Print the commands and the shipped configs."""
    print("usage: python -m lit_compress COMMAND ...\n")
    for command in commands:
        print(f"  {_with_places(command)}\n      {catalogue.about(command)}")
    print("\nCOMMAND --help shows every option with its default, e.g. of")
    print("  fit --config NAME.yaml [--model.density 0.25 | --model.budget size=20MB] [--data.path DIR]")
    print("NAME.yaml is a path or a shipped config, of which lpaf_sst2.yaml is the row sst2 of the recipe lpaf.yaml:")
    for name, tasks in recipes().items():
        print(f"  {name}_{{{','.join(tasks)}}}.yaml" if tasks else f"  {name}.yaml")


def _with_places(command: str) -> str:
    """Return a command with the values that are given without a name."""
    places = [(name.upper(), option.default) for name, option in own_options(command).items() if option.position]
    return " ".join([command, *(name if default is None else f"[{name}]" for name, default in places)])


def _print_help(line: Line) -> None:
    """Print the options of a command, for the method at hand if one is named."""
    command, own, trains = line.command, own_options(line.command), line.command in (*WHOLE, "factorize")
    print(f"usage: python -m lit_compress {_with_places(command)} [--OPTION VALUE ...]")
    print(f"\n{catalogue.about(command)}\n\noptions:")
    _print_options(own)
    shared = catalogue.shared()
    if command == "factorize":
        usual = catalogue.of_method("FWSVD") | catalogue.of_method("SecondOrder") | shared
        _print_options({name: replace(usual[full], name=name) for name, full in SHORT.items()})
    if command not in (*WHOLE, *READ):
        return
    if "device" not in own:
        print("  --device NAME\n      cpu, cuda, mps, ... (default the accelerator, if any)")
    method = merged_configs(line)["model"].get("class_path")
    if method is None and trains:
        names = textwrap.fill(", ".join(catalogue.methods()), 100, initial_indent="  ", subsequent_indent="  ")
        print(f"\nmethods:\n{names}\n  the options of one: --model LPAF --help\n")
    options = (catalogue.of_method(method) if method else {}) | shared
    if command == "compare":
        options = {name: option for name, option in options.items() if in_its_place(name) is None}
    _print_options({n: o for n, o in options.items() if n not in own and is_read(command, n)})
    if trains:
        print("\nLightning's Trainer: --trainer.OPTION, e.g. devices, strategy, precision, accumulate_grad_batches")
        print("  all of them: lightning.ai/docs/pytorch/stable/common/trainer.html")


def _print_options(options: Mapping[str, Option]) -> None:
    """Print options with their meanings; a group of options has a line before them."""
    for name, option in options.items():
        kind, default = option.kind.removesuffix(" | None"), option.default or ""
        choices = choices_of(kind)
        shown = f"--{name} {'{' + ','.join(choices) + '}' if choices else kind}".removesuffix(" bool")
        if any(other.startswith(f"{name}.") for other in options) and name != "model":
            shown, default = f"{name}:", ""
        said = "" if default in ("", "None", "False", "''") or default.endswith(")") else f" (default {default})"
        text = option.help.replace("``", "`") + said.replace("'", "")
        print(f"  {name.upper() if option.position else shown}")
        print(textwrap.fill(text, 110, initial_indent=" " * 6, subsequent_indent=" " * 6).rstrip())
